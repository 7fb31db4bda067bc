"""Warm interpreters: what programs get, what they come to, and talking to them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.sandbox import ChannelClosed, ExecResult, Limits, Program, SandboxError, ZygotePool

pytestmark = pytest.mark.usefixtures("walls")
ECHO = "import channel\nwhile True:\n    channel.send(channel.recv())\n"


@pytest.fixture(scope="module")
def pool(walls: None) -> Iterator[ZygotePool]:
    pool = ZygotePool(2, limits=Limits(wall_s=5.0))
    yield pool
    asyncio.run(pool.close())


def run(pool: ZygotePool, source: str, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
    return asyncio.run(pool.run(source, stdin, limits))


def test_a_program_reads_and_writes(pool: ZygotePool) -> None:
    result = run(pool, "print(sum(map(int, input().split())))", b"3 4\n")
    assert (result.stdout, result.stderr, result.exit_code, result.cause) == (b"7\n", b"", 0, "ok")


@pytest.mark.parametrize(
    ("code", "limits", "cause", "exit_code"),
    [
        ("raise SystemExit(3)", Limits(), "exit", 3),
        ("raise SystemExit('no')", Limits(), "exit", 1),
        ("def f(:", Limits(), "exit", 1),
        ("1 / 0", Limits(), "exit", 1),
        ("while True: pass", Limits(wall_s=0.3), "timeout", 137),
        ("while True: pass", Limits(cpu_s=1), "timeout", 137),
        ("import time; time.sleep(100)", Limits(wall_s=0.3), "timeout", 137),
        ("x = bytearray(1 << 30)", Limits(memory_mb=256), "memory", 1),
        ("while True: print('x' * 1000)", Limits(output_bytes=5000), "output", 137),
        ("import os; os.abort()", Limits(), "killed", 139),
        ("import os; os._exit(0)", Limits(), "ok", 0),
    ],
)
def test_causes(pool: ZygotePool, code: str, limits: Limits, cause: str, exit_code: int) -> None:
    result = run(pool, code, limits=limits)
    assert (result.cause, result.exit_code) == (cause, exit_code), result
    assert len(result.stdout) <= limits.output_bytes


def test_memory_is_counted_over_processes(pool: ZygotePool) -> None:
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x' * (60 << 20)); time.sleep(20)\n"
        "time.sleep(20)\n"
    )
    assert run(pool, code, limits=Limits(memory_mb=200)).cause == "memory"


def test_it_is_like_an_interpreter(pool: ZygotePool) -> None:
    code = """
import atexit, sys, threading
from dataclasses import dataclass
atexit.register(lambda: print("last"))
@dataclass
class Point:
    x: int
import pickle
print(pickle.loads(pickle.dumps(Point(3))), __name__, sys.argv, len(sys.stdin.read()))
def late():
    import time
    time.sleep(0.05); print("thread")
threading.Thread(target=late).start()
raise KeyError("gone")
"""
    result = run(pool, code, "zwölf".encode())
    assert result.stdout.decode() == "Point(x=3) __main__ ['main.py'] 5\nthread\nlast\n"
    text = result.stderr.decode()
    assert text.startswith("Traceback") and text.endswith("KeyError: 'gone'\n")
    assert "main.py" in text and 'raise KeyError("gone")' in text and "zygote" not in text


def test_nothing_passes_from_program_to_program(pool: ZygotePool) -> None:
    write = "open('/tmp/a', 'w').write('x'); open('b', 'w').write('x'); import math; math.pi = 3"
    read = "import os, math; print(os.listdir('/tmp'), os.listdir('/work'), round(math.pi, 2))"
    for _ in range(3):
        assert run(pool, write).ok
        assert run(pool, read).stdout == b"[] ['main.py'] 3.14\n"


def test_hashes_are_fixed_and_random_numbers_are_not(pool: ZygotePool) -> None:
    code = "import random; print(hash('a'), random.random())"
    first, second = (run(pool, code).stdout.split() for _ in range(2))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_large_input_and_output(pool: ZygotePool) -> None:
    data = os.urandom(3 << 20)
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    assert run(pool, code, data, Limits(output_bytes=4 << 20)).stdout == data[::-1]
    assert run(pool, "print(1)", data).stdout == b"1\n"  # unread input does no harm


def test_cancelling_kills(pool: ZygotePool) -> None:
    async def work() -> ExecResult:
        task = asyncio.create_task(pool.run("while True: pass", limits=Limits(wall_s=60.0, cpu_s=60)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.run("print(1)")

    assert asyncio.run(work()).ok


def test_more_callers_than_interpreters(pool: ZygotePool) -> None:
    async def work() -> list[ExecResult]:
        return await asyncio.gather(*(pool.run(f"print({n})") for n in range(20)))

    assert [int(result.stdout) for result in asyncio.run(work())] == list(range(20))


def test_threads_and_loops_share_a_pool(pool: ZygotePool) -> None:
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(run(pool, "print(1)").stdout)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [b"1\n"] * 5


def test_a_dead_interpreter_is_replaced(walls: None) -> None:
    async def work() -> None:
        async with ZygotePool(1) as pool:
            await pool.run("print(1)")
            zygote = pool._slots.queue[0]  # pyright: ignore
            os.kill(zygote.init, signal.SIGKILL)
            await asyncio.sleep(0.3)
            assert (await pool.run("print(1)")).ok
            assert pool.counters.restarts == 1

    asyncio.run(work())


def test_an_interpreter_that_dies_at_work_is_nobodys_verdict(walls: None) -> None:
    async def work() -> None:
        async with ZygotePool(1) as pool:
            await pool.warm()
            zygote = pool._slots.queue[0]  # pyright: ignore
            task = asyncio.create_task(pool.run("import time; time.sleep(20)"))
            await asyncio.sleep(0.3)
            os.kill(zygote.init, signal.SIGKILL)
            with pytest.raises(SandboxError):
                await task
            assert (await pool.run("print(1)")).ok

    asyncio.run(work())


def test_a_program_cannot_have_more_than_its_pool(pool: ZygotePool) -> None:
    with pytest.raises(ValueError, match="memory_mb 4096, its pool has 512"):
        run(pool, "pass", limits=Limits(memory_mb=4096))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ZygotePool(0)
    with pytest.raises(ValueError, match="wall_s"):
        Limits(wall_s=float("nan"))
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=0)

    async def work() -> None:
        async with ZygotePool(1, preload=["no_such_module"]) as pool:
            await pool.run("print(1)")

    with pytest.raises(SandboxError, match="no_such_module"):
        asyncio.run(work())


# -- talking ---------------------------------------------------------------------------------------


def talk(
    pool: ZygotePool, source: str, handler: Callable[[Program], Any], limits: Limits | None = None
) -> Any:
    return asyncio.run(pool.talk(source, handler, limits))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=15)
@given(st.lists(JSON, min_size=1, max_size=5))
def test_messages_arrive_as_they_are(pool: ZygotePool, values: list[Any]) -> None:
    def handler(program: Program) -> list[Any]:
        out = []
        for value in values:
            program.send(value)
            out.append(program.recv())
        return out

    got, result = talk(pool, ECHO, handler)
    assert got == values
    assert result.exit_code == 1 and b"EOFError" in result.stderr  # it was hung up on


def test_large_messages_cross(pool: ZygotePool) -> None:
    """Both sides send megabytes before they read."""
    source = "import channel\nchannel.send('y' * 3_000_000)\nprint(len(channel.recv()))"

    def handler(program: Program) -> int:
        program.send("x" * 3_000_000)
        return len(program.recv())

    got, result = talk(pool, source, handler)
    assert (got, result.stdout) == (3_000_000, b"3000000\n")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("pass", "ok"),
        ("while True: pass", "timeout"),
        ("import os; os.write(3, b'\\0\\0\\0\\2{]')", "killed"),
        ("import os; os.write(3, b'\\xff\\xff\\xff\\xff')\nwhile True: pass", "output"),
        ("import os; os.write(3, b'\\0\\0\\1\\0' + b'[' * 256)", "killed"),
        ("import os; os.close(3)", "ok"),
        ("raise ValueError", "exit"),
        ("while True: print('x' * 10000)", "output"),
    ],
)
def test_a_program_that_does_not_answer(pool: ZygotePool, source: str, cause: str) -> None:
    with pytest.raises(ChannelClosed) as raised:
        talk(pool, source, lambda program: program.recv(), Limits(wall_s=0.5))
    assert raised.value.result is not None
    assert raised.value.result.cause in (cause, "ok" if cause == "killed" else cause)
    assert run(pool, "print(1)").ok


def test_a_program_that_does_not_listen(pool: ZygotePool) -> None:
    with pytest.raises(ChannelClosed):
        talk(pool, "while True: pass", lambda program: program.send("x" * (8 << 20)), Limits(wall_s=0.5))


def test_an_answer_may_be_due_earlier(pool: ZygotePool) -> None:
    source = "import channel, time\nchannel.send(1)\ntime.sleep(60)"

    def handler(program: Program) -> None:
        assert program.recv(within_s=5.0) == 1
        program.recv(within_s=0.2)

    with pytest.raises(ChannelClosed, match="timeout") as raised:
        talk(pool, source, handler, Limits(wall_s=60.0))
    assert raised.value.result is not None and raised.value.result.cause == "timeout"


def test_the_handlers_own_failure_ends_the_program(pool: ZygotePool) -> None:
    def handler(program: Program) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        talk(pool, "while True: pass", handler)
    assert run(pool, "print(1)").ok
