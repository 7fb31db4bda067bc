"""Every attack is contained, by a sandbox of its own (cold) and by a warm interpreter (zygote)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.sandbox.attacks import ESCAPED, PRELUDE, Attack
from tests.sandbox.attacks_on_walls import ATTACKS

from trivet.sandbox import Bubblewrap, ExecResult, Limits, PathError
from trivet.sandbox.bubblewrap import interpreter
from trivet.sandbox.zygotes import ZygotePool

pytestmark = pytest.mark.usefixtures("walls")
_PYTHON = str(interpreter()[0])
_MARKER = f"trivet-test-marker-{os.getpid()}"
_SLACK_S = 6.0  # how long after its limit a program may take to be gone, on a busy machine
_CANARY = "import sys; print(sum(range(10)), len(sys.stdin.read()))"


@dataclass(slots=True)
class Owner:
    """This side: what attacks aim at."""

    secret: Path
    listener: socket.socket
    context: dict[str, Any]


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """A secret in a file, in the environment and behind a descriptor; two listeners; a marked process."""
    value = f"secret-{os.urandom(8).hex()}"
    secret = tmp_path_factory.mktemp("owner") / "secret.txt"
    secret.write_text(value)
    os.environ["TRIVET_TEST_SECRET"] = value
    leaked = os.open(secret, os.O_RDONLY)
    os.set_inheritable(leaked, True)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{_MARKER}")
    abstract.listen()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)", _MARKER])
    context = {
        "secret": str(secret),
        "value": value,
        "owner": os.getpid(),
        "pids": [os.getpid(), os.getppid(), sleeper.pid, *range(300, 340)],
        "port": listener.getsockname()[1],
        "abstract": _MARKER,
        "marker": _MARKER,
        "left": f"left-{_MARKER}",
        "machine": platform.machine(),
    }
    yield Owner(secret, listener, context)
    sleeper.kill()
    sleeper.wait()
    abstract.close()
    listener.close()
    os.close(leaked)
    del os.environ["TRIVET_TEST_SECRET"]


@pytest.fixture(scope="module")
def pool(walls: None, owner: Owner) -> Iterator[ZygotePool]:
    made = ZygotePool(size=1)
    yield made
    asyncio.run(made.close())


def _source(attack: Attack, owner: Owner) -> str:
    return f"{PRELUDE}\nCTX = {owner.context!r}\n{attack.code}\n"


async def _cold(source: str, limits: Limits) -> tuple[ExecResult, ExecResult]:
    """The program, then a harmless one in a new sandbox."""
    backend = Bubblewrap()
    async with await backend.start(limits=limits) as box:
        result = await box.exec([_PYTHON, "-I", "-S", "-c", source])
    async with await backend.start() as box:
        after = await box.exec([_PYTHON, "-c", _CANARY], stdin=b"12345")
    return result, after


async def _warm(pool: ZygotePool, source: str, limits: Limits) -> tuple[ExecResult, ExecResult]:
    """The program, then a harmless one in the same warm interpreter."""
    result = await pool.run(source, b"", limits)
    return result, await pool.run(_CANARY, b"12345")


def _contained(attack: Attack, result: ExecResult, after: ExecResult, owner: Owner) -> None:
    assert ESCAPED not in result.stdout + result.stderr, result
    assert result.cause in attack.causes, result
    assert result.seconds < attack.limits.wall_s + _SLACK_S, result
    assert len(result.stdout) <= attack.limits.output_bytes
    assert len(result.stderr) <= attack.limits.output_bytes
    assert (after.stdout, after.cause) == (b"45 5\n", "ok"), after
    assert owner.secret.read_text() == owner.context["value"]
    with pytest.raises(BlockingIOError):  # nobody has connected
        owner.listener.accept()
    assert _left(owner) == []


def _left(owner: Owner) -> list[str]:
    """Processes of attacks that live on; one that is being torn down gets a moment."""
    found: list[str] = []
    for _ in range(100):
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    argv = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                    if owner.context["left"].encode() in argv:
                        found.append(entry.name)
        if not found:
            break
        time.sleep(0.05)
    return found


_TABLE = [pytest.param(a, id=a.name, marks=[pytest.mark.slow] if a.slow else []) for a in ATTACKS]


@pytest.mark.parametrize("attack", _TABLE)
def test_contained_cold(attack: Attack, owner: Owner) -> None:
    result, after = asyncio.run(_cold(_source(attack, owner), attack.limits))
    _contained(attack, result, after, owner)


@pytest.mark.parametrize("attack", _TABLE)
def test_contained_in_a_warm_interpreter(attack: Attack, owner: Owner, pool: ZygotePool) -> None:
    result, after = asyncio.run(_warm(pool, _source(attack, owner), attack.limits))
    _contained(attack, result, after, owner)


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.plain], ids=lambda a: a.name)
def test_without_walls_it_succeeds(attack: Attack, owner: Owner, tmp_path: Path) -> None:
    """The harmless attacks, in a plain process that inherits everything: the table can tell."""
    done = subprocess.run(
        [sys.executable, "-c", _source(attack, owner)],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        close_fds=False,
        timeout=60,
    )
    assert ESCAPED in done.stdout, done
    with contextlib.suppress(BlockingIOError):
        owner.listener.accept()[0].close()


def test_there_are_enough_and_they_differ() -> None:
    assert len(ATTACKS) >= 40
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


# -- the side doors: files that the owner reads and writes for a program -----------------------------


def _boxed(body: Any, limits: Limits | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), await Bubblewrap().start(limits=limits) as box:
            await body(box)

    asyncio.run(main())


async def _sh(box: Any, script: str) -> ExecResult:
    return await box.exec(["/bin/sh", "-c", script])


def test_reading_follows_links_only_inside(owner: Owner) -> None:
    async def body(box: Any) -> None:
        await _sh(box, f"ln -s {owner.secret} a; ln -s /proc/1/root{owner.secret} b; ln -s a c; ln -s .. d")
        for path in (
            "a",
            "b",
            "c",
            f"d/../..{owner.secret}",
            str(owner.secret),
            f"/proc/self/root{owner.secret}",
        ):
            with pytest.raises(PathError):
                await box.read(path)
        await _sh(box, "ln -s /etc/passwd e")
        assert b"root" in await box.read("e") and b"sandbox" in await box.read("e")

    _boxed(body)


@pytest.mark.parametrize(
    "make", ["mkfifo x", "ln -s /dev/zero x", "ln -s /dev/random x", "mkdir x", "ln -s x x"]
)
def test_reading_what_never_ends_or_is_no_file(make: str) -> None:
    async def body(box: Any) -> None:
        await _sh(box, make)
        begin = time.monotonic()
        with pytest.raises(PathError):
            await box.read("x", limit_bytes=1 << 20)
        assert time.monotonic() - begin < 30

    _boxed(body)


def test_reading_a_file_that_grows_or_is_too_large() -> None:
    async def body(box: Any) -> None:
        await _sh(box, "head -c 2000000 /dev/zero > x; truncate -s 10M y")
        for name in ("x", "y"):
            with pytest.raises(PathError, match="limit"):
                await box.read(name, limit_bytes=1 << 20)

    _boxed(body)


def test_writing_goes_nowhere_else(owner: Owner) -> None:
    async def body(box: Any) -> None:
        await _sh(
            box, f"ln -s {owner.secret} a; ln -s {owner.secret.parent} b; ln -s /usr c; mkfifo d; mkdir e"
        )
        for path in (
            "a",
            "b/secret.txt",
            "c/x",
            "d",
            "e",
            "/usr/bin/x",
            "/etc/passwd",
            f"../..{owner.secret}",
        ):
            with contextlib.suppress(
                PathError
            ):  # or it is written inside, where a program could have as well
                await box.write(path, b"overwritten")
        assert owner.secret.read_text() == owner.context["value"]
        assert not Path("/usr/x").exists() and not Path("/usr/bin/x").exists()
        assert b"overwritten" not in Path("/etc/passwd").read_bytes()

    _boxed(body)


def test_writing_more_than_there_is_room_for() -> None:
    async def body(box: Any) -> None:
        with pytest.raises(PathError):
            await box.write("x", bytes(40 << 20))
        await _sh(box, "rm -f x")
        await box.write("y", b"fits")
        assert await box.read("y") == b"fits"

    _boxed(body, Limits(disk_mb=16))


def test_uploading_into_a_link(owner: Owner, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("overwritten")

    async def body(box: Any) -> None:
        await _sh(
            box,
            f"ln -s {owner.secret.parent} a; ln -s /usr/lib b; mkdir c; ln -s {owner.secret} c/secret.txt",
        )
        for target in ("a", "b", "c", "/usr/lib", f"../..{owner.secret.parent}"):
            with contextlib.suppress(PathError):
                await box.upload_dir(tmp_path, target)
        assert owner.secret.read_text() == owner.context["value"]
        assert not Path("/usr/lib/secret.txt").exists()

    _boxed(body)


def test_downloading_links_pipes_and_giants(owner: Owner, tmp_path: Path) -> None:
    async def body(box: Any) -> None:
        script = f"mkdir -p d/e; cd d; echo in > f; ln -s {owner.secret} a; ln -s {owner.secret.parent} b"
        await _sh(box, f"{script}; mkfifo p; ln -s e/../../.. g; ln -s f ok; ln f hard; chmod 4777 f")
        await box.download_dir("d", tmp_path / "down")
        assert (tmp_path / "down" / "ok").read_text() == "in\n"
        assert (tmp_path / "down" / "f").stat().st_mode & 0o7000 == 0
        for name in ("a", "b", "g", "p"):
            assert not os.path.lexists(tmp_path / "down" / name), name
        await _sh(box, "mkdir big; for n in 1 2 3 4; do truncate -s 8M big/$n; done")
        with pytest.raises(PathError):
            await box.download_dir("big", tmp_path / "big", limit_bytes=4 << 20)
        assert sum(file.stat().st_size for file in (tmp_path / "big").glob("*")) <= 4 << 20

    _boxed(body)


def test_one_program_leaves_nothing_to_the_next(pool: ZygotePool) -> None:
    first = (
        "import builtins, os, sys, json, random\n"
        "for f in ('/tmp', '/dev/shm', '.'):\n    open(f + '/left', 'w').write('x')\n"
        "open('sitecustomize.py', 'w').write('print(1)'); open('json.py', 'w').write('print(2)')\n"
        "builtins.len = lambda x: 0; json.dumps = None; os.environ['LEFT'] = 'x'; sys.modules['left'] = sys\n"
        "random.seed(1); os.chdir('/'); os.umask(0); print('done')\n"
    )
    second = (
        "import os, sys, json\n"
        "print([os.listdir(f) for f in ('/tmp', '/dev/shm', '.')], os.getcwd(), 'LEFT' in os.environ,\n"
        "      'left' in sys.modules, len([1]), json.dumps(1), oct(os.umask(0)))\n"
    )

    async def main() -> tuple[ExecResult, ExecResult, ExecResult]:
        return await pool.run(second), await pool.run(first), await pool.run(second)

    before, made, after = asyncio.run(main())
    assert before.ok and made.ok, (before, made)
    assert after.stdout == before.stdout and after.stdout.startswith(b"[[], [], ")
