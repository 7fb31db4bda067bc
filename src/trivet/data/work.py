"""Jobs over several processes: each writes its own file, and what is there is not done again."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

_Job = TypeVar("_Job")
_LOOK_S = 1.0


class WorkError(RuntimeError):
    """Workers died or stand still; says what they were doing and what to do."""


_state: Any = None  # of this process, made once by its initialiser


def _start(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _state
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    _state = make(*args)


def _end_with(parent: Any) -> None:
    """A worker whose parent was killed would wait for jobs for ever, and write beside the next build."""
    parent.join()
    os._exit(1)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder, made where it is not there, for this process alone. Raises WorkError."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise WorkError(f"{folder} is to be a folder, and is a file: choose another name") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
    except BlockingIOError as error:
        os.close(handle)
        raise WorkError(f"{folder}: another process is building there; wait for it, or end it") from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def _do(function: Callable[[Any, Any], Any], job: Any) -> Any:
    return function(_state, job)


def run_jobs(
    jobs: Sequence[_Job],
    function: Callable[[Any, _Job], Any],
    make: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    workers: int,
    what: str,
    stall_s: float = 3600.0,
) -> Iterator[tuple[_Job, Any]]:
    """(job, `function(state, job)`) as they finish, in `workers` processes; `state = make(*args)` in each.

    With one worker everything happens in this process. A job's exception is raised here. Raises WorkError
    when a process dies or when nothing finishes for `stall_s` seconds.
    """
    if workers <= 1 or len(jobs) <= 1:
        state = make(*args) if jobs else None
        for job in jobs:
            yield job, function(state, job)
        return
    context = multiprocessing.get_context("spawn")  # threads of numpy and tokenizers do not survive a fork
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _start, (make, args))
    todo: dict[Future[Any], _Job] = {}
    try:
        todo |= {pool.submit(_do, function, job): job for job in jobs}
        last = time.monotonic()
        while todo:
            done, _ = wait(todo, _LOOK_S, FIRST_COMPLETED)
            if done:
                last = time.monotonic()
            elif time.monotonic() - last > stall_s:
                raise WorkError(
                    f"{what}: nothing finished for {stall_s:.0f} s; {len(todo)} jobs are left, the first is "
                    f"{next(iter(todo.values()))}. Run the command again: what is done stays done"
                )
            for future in done:
                job = todo.pop(future)
                yield job, future.result()
    except BrokenProcessPool as error:
        raise WorkError(
            f"{what}: a worker process ended (out of memory? what it said stands above). Run the command "
            "again: what is done stays done; fewer workers (data.workers) or smaller pieces (data.piece_mb) "
            "need less memory"
        ) from error
    finally:
        for future in todo:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
