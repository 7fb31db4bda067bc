"""Jobs over several processes: each writes its own file, and what is there is not done again."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

_Job = TypeVar("_Job")
_LOOK_S = 1.0


class WorkError(RuntimeError):
    """Workers died or stand still; says what they were doing and what to do."""


_state: Any = None  # of this process, made once by its initialiser


def _start(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _state
    _state = make(*args)


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
            f"{what}: a worker process was killed (out of memory?). Run the command again: what is done "
            "stays done; fewer workers (data.workers) or smaller pieces (data.piece_mb) need less memory"
        ) from error
    finally:
        for future in todo:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
