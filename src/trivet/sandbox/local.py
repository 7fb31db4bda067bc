"""No sandbox at all: programs run as this user, on this machine. For programs that are trusted anyway.

Limits hold as far as rlimits and process groups go, which a program can leave. There are no walls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, Self

from trivet.sandbox.base import (
    Capabilities,
    Cause,
    ExecResult,
    Limits,
    PathError,
    SandboxError,
    Tag,
    Template,
)
from trivet.sandbox.client import ONE_THREAD, client

_CHUNK = 1 << 16
_SETUP = "import resource as r, os, sys; exec(sys.argv[1]); os.nice(19); os.execvp(sys.argv[2], sys.argv[2:])"


class Local:
    """The backend without walls. Refuses unless `i_trust_this_code` is said."""

    capabilities = Capabilities(network=True, memory_limit="none")

    def __init__(self, *, i_trust_this_code: bool = False, tag: Tag | None = None) -> None:
        if not i_trust_this_code:
            raise SandboxError(
                "the local backend runs programs without any walls, with your rights and your files: "
                "use bubblewrap, or say i_trust_this_code: true"
            )
        self.tag = tag or Tag()
        self._live: set[LocalSandbox] = set()

    async def start(
        self,
        template: Template | None = None,
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "host",
    ) -> LocalSandbox:
        """A new folder. `network="none"` is refused: it could not be kept."""
        if network == "none":
            raise SandboxError("the local backend cannot keep programs off the network: say network='host'")
        template = template or Template()
        if template.mounts:
            raise SandboxError("the local backend mounts nothing")
        folder = Path(tempfile.mkdtemp(prefix="local-", dir=client().folder))
        sandbox = LocalSandbox(self, folder, limits or Limits(), env or {}, template)
        if template.snapshot:
            source = client().folder / Path(template.snapshot).name
            if not source.is_dir():
                shutil.rmtree(folder)
                raise SandboxError(f"no snapshot {template.snapshot!r} of this process")
            await asyncio.to_thread(shutil.copytree, source, folder, symlinks=True, dirs_exist_ok=True)
        self._live.add(sandbox)
        return sandbox

    def forget(self, sandbox: LocalSandbox) -> None:
        self._live.discard(sandbox)

    async def close(self) -> None:
        for sandbox in list(self._live):
            await sandbox.close()


class LocalSandbox:
    """A folder, and the process groups started in it; see `Sandbox`."""

    def __init__(
        self, backend: Local, folder: Path, limits: Limits, env: dict[str, str], template: Template
    ) -> None:
        self._backend, self._folder, self._limits = backend, folder, limits
        self._env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LANG": "C.UTF-8"}
        self._env |= {"TMPDIR": str(folder), "PYTHONHASHSEED": "0", **ONE_THREAD}
        if template.packages:
            self._env["PYTHONPATH"] = os.pathsep.join(map(str, template.packages))
        self._env |= env
        self._groups: set[int] = set()
        self._closed = False

    @property
    def workdir(self) -> str:
        return str(self._folder)

    def _path(self, path: str) -> Path:
        return self._folder / path

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
        """Run a program; see `Sandbox.exec`. Only its process group is killed."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if not argv:
            raise ValueError("a sandbox needs the name of a program to run")
        limits = limits or self._limits
        begin = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _SETUP, _rlimits(limits), *argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self._env, **(env or {})},
            cwd=self._path(cwd or "."),
            start_new_session=True,
        )
        self._groups.add(process.pid)
        flooded = asyncio.Event()
        out, err = bytearray(), bytearray()
        tasks = [
            asyncio.ensure_future(_feed(process, stdin)),
            asyncio.ensure_future(_collect(process.stdout, out, limits.output_bytes, flooded)),
            asyncio.ensure_future(_collect(process.stderr, err, limits.output_bytes, flooded)),
        ]
        ended, flood = asyncio.ensure_future(process.wait()), asyncio.ensure_future(flooded.wait())
        cause: Cause | None = None
        try:
            wall = limits.wall_s if timeout is None else timeout
            await asyncio.wait({ended, flood}, timeout=wall, return_when=asyncio.FIRST_COMPLETED)
            if flooded.is_set() or not ended.done():
                cause = "output" if flooded.is_set() else "timeout"
                _kill(process.pid)
            code = await ended
            await asyncio.wait(tasks, timeout=0.5)  # others may hold the pipes
            cause = "output" if flooded.is_set() else cause
        except asyncio.CancelledError:
            _kill(process.pid)
            await process.wait()
            raise
        finally:
            for task in (*tasks, ended, flood):
                task.cancel()
        code = code if code >= 0 else 128 - code
        return ExecResult(bytes(out), bytes(err), code, cause or _cause(code, err), time.monotonic() - begin)

    async def read(self, path: str, limit_bytes: int = 16 << 20) -> bytes:
        try:
            size = self._path(path).stat().st_size
            if size > limit_bytes:
                raise PathError(f"{path} has {size} bytes, more than the limit of {limit_bytes}")
            return await asyncio.to_thread(self._path(path).read_bytes)
        except OSError as error:
            raise PathError(f"cannot read {path!r}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        try:
            self._path(path).parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(self._path(path).write_bytes, data)
        except OSError as error:
            raise PathError(f"cannot write {path!r}: {error}") from error

    async def upload_dir(self, source: Path, target: str) -> None:
        await self._copy(source, self._path(target))

    async def download_dir(self, source: str, target: Path, limit_bytes: int = 256 << 20) -> None:
        total = sum(p.lstat().st_size for p in self._path(source).rglob("*"))
        if total > limit_bytes:
            raise PathError(f"{source} holds {total} bytes, more than the limit of {limit_bytes}")
        await self._copy(self._path(source), target)

    async def _copy(self, source: Path, target: Path) -> None:
        try:
            await asyncio.to_thread(shutil.copytree, source, target, symlinks=True, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise PathError(f"cannot copy {source} to {target}: {error}") from error

    async def snapshot(self) -> str:
        target = Path(tempfile.mkdtemp(prefix="snapshot-", dir=client().folder))
        await self._copy(self._folder, target)
        return target.name

    async def close(self) -> None:
        """Kill the process groups that were started, and remove the folder."""
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        for group in self._groups:
            _kill(group)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _rlimits(limits: Limits) -> str:
    """Statements that set what can be set without walls; a process count would be the user's."""
    pairs = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_CORE, 0),
    ]
    return "; ".join(f"r.setrlimit({int(kind)}, ({value}, {value}))" for kind, value in pairs)


def _cause(code: int, stderr: bytearray) -> Cause:
    if code == 0:
        return "ok"
    if code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
        return "timeout" if code == 128 + signal.SIGXCPU else "killed"
    if code == 1 and bytes(stderr).rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return "memory"
    return "killed" if 128 < code < 193 else "exit"


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):  # the program closed its stdin
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()


async def _collect(
    stream: asyncio.StreamReader | None, into: bytearray, limit: int, flooded: asyncio.Event
) -> None:
    while stream is not None and (data := await stream.read(_CHUNK)):
        room = limit - len(into)
        into += data[:room]
        if len(data) > room:
            flooded.set()
            return
