"""The sandbox protocol: where programs written by a policy run, what bounds them, what they may come to.

A program's own failure is a result (`ExecResult`); a sandbox that cannot do its work is a `SandboxError`,
which a verifier turns into an unscored reward, never into a verdict about the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

Cause = Literal["ok", "exit", "timeout", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """The sandbox itself failed (it did not start, its backend is missing, it is gone): nobody's verdict."""


class PathError(SandboxError):
    """A path in the sandbox could not be read or written: absent, a directory, too large, no space."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Times in seconds, `_mb` in MiB, `output_bytes` of stdout and stderr each.

    `cpu_s` and `memory_mb` bound each process by its rlimits, and `memory_mb` all of a program's processes
    together. `processes` counts the threads and processes of a sandbox, `files` open files of a process;
    `file_mb` bounds one file, `disk_mb` the temporary folder, and the work folder.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 512
    processes: int = 32
    files: int = 128
    file_mb: int = 64
    disk_mb: int = 64
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value < 1 << 53:  # also refuses NaN and infinity
                raise ValueError(f"sandbox limit {name} is {value!r}: give a positive number")
            if name != "wall_s" and not isinstance(value, int):
                raise ValueError(f"sandbox limit {name} is {value!r}: give a whole number")
        if self.memory_mb < 32:
            raise ValueError(f"sandbox limit memory_mb is {self.memory_mb}: a program needs at least 32")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What became of one program.

    `cause`: `ok` (exit code 0), `exit` (another one), `timeout` (wall clock or processor time), `memory`,
    `output` (more than `output_bytes`), `killed` (by a signal that was not the sandbox's). `exit_code` is as
    a shell gives it: 128 + the signal's number for a process that a signal ended.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int
    cause: Cause
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.cause == "ok"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. `walls` names what separates programs from this machine."""

    network: bool = False
    snapshots: bool = True
    background: bool = True
    memory_limit: Literal["group", "watch", "none"] = "watch"
    walls: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Template:
    """What a sandbox starts from.

    `packages`: folders of this machine that Python programs may import from, mounted read-only. `mounts`:
    further read-only (folder of this machine, path inside). `image`: for the container backend. `snapshot`:
    an id that `snapshot()` gave; the work folder starts with its contents.
    """

    packages: tuple[Path, ...] = ()
    mounts: tuple[tuple[Path, str], ...] = ()
    image: str = ""
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Tag:
    """Every sandbox carries one: the run it belongs to, and how long it may live at most."""

    label: str = "trivet"
    lifetime_s: float = 3600.0


class Sandbox(Protocol):
    """One running sandbox. Paths are inside it; relative ones start in its work folder."""

    @property
    def workdir(self) -> str: ...

    async def exec(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        timeout: float | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run a program. Processes that it leaves in the background live on until `close`.

        Cancelling, or running into `timeout` (default: the limits' `wall_s`), kills its whole tree.
        """
        ...

    async def read(self, path: str, limit_bytes: int = 16 << 20) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def upload_dir(self, source: Path, target: str) -> None: ...
    async def download_dir(self, source: str, target: Path, limit_bytes: int = 256 << 20) -> None: ...
    async def snapshot(self) -> str: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...


class Backend(Protocol):
    """Makes sandboxes. `start` raises SandboxError when it cannot."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(
        self,
        template: Template | None = None,
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "none",
    ) -> Sandbox: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Counters:
    """How often what happened, for metrics."""

    programs: int = 0
    restarts: int = 0
    causes: dict[str, int] = field(default_factory=dict)

    def count(self, cause: Cause) -> None:
        self.programs += 1
        self.causes[cause] = self.causes.get(cause, 0) + 1
