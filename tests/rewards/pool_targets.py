"""What the pool tests run in workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def answer(kind: str, argument: object = None) -> object:
    match kind:
        case "hang":
            while True:
                time.sleep(60)
        case "spin":
            while True:
                pass
        case "deaf":  # a verifier that swallows what would stop it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    continue
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit(4)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise ValueError("no such luck")
        case "memory":
            return len(bytearray(1 << 34))
        case "object":
            return object()
        case "child":  # starts a process of its own, then hangs
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(str(argument), "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "facts":
            return {
                "nice": os.getpriority(os.PRIO_PROCESS, 0),
                "threads": os.environ["OMP_NUM_THREADS"],
                "pid": os.getpid(),
            }
        case _:
            return argument
    return None


class Maker:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, number: int) -> int:
        return self.offset + number


async def later(number: int) -> int:
    return number * 2
