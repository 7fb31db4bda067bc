"""No sandbox at all: programs run as this user, on this machine. For programs that are trusted anyway.

Limits hold (but the number of processes), and what a program starts is found and ended. There are no walls.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self

from trivet.sandbox.base import (
    Capabilities,
    ExecResult,
    Limits,
    PathError,
    SandboxError,
    Tag,
    Template,
)
from trivet.sandbox.bubblewrap import run_order
from trivet.sandbox.client import ONE_THREAD, client


class Local:
    """The backend without walls. Refuses unless `i_trust_this_code` is said."""

    capabilities = Capabilities(network=True, background=False, memory_limit="watch")

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
    """A folder that programs start in; see `Sandbox`."""

    def __init__(
        self, backend: Local, folder: Path, limits: Limits, env: dict[str, str], template: Template
    ) -> None:
        self._backend, self._folder, self._limits = backend, folder, limits
        self._env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LANG": "C.UTF-8"}
        self._env |= {"TMPDIR": str(folder), "PYTHONHASHSEED": "0", **ONE_THREAD}
        if template.packages:
            self._env["PYTHONPATH"] = os.pathsep.join(map(str, template.packages))
        self._env |= env
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
        """Run a program; see `Sandbox.exec`. What it leaves behind ends with it."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if not argv:
            raise ValueError("a sandbox needs the name of a program to run")
        limits = limits or self._limits
        wall_s = limits.wall_s if timeout is None else timeout
        bounds = asdict(limits) | {"processes": 0}
        order = {"op": "bare", "init": 0, "limits": bounds, "lifetime_s": wall_s + 1.0}
        order |= {"argv": argv, "env": {**self._env, **(env or {})}, "cwd": str(self._path(cwd or "."))}
        order["memory"] = limits.memory_mb << 20
        return await run_order(client(), order, stdin, limits, wall_s)

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
        """Remove the folder."""
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
