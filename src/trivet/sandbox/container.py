"""The container backend: sandboxes of a Docker or Podman engine, through its command line.

Nothing of the engine's defaults is relied on: capabilities are dropped, privileges cannot be gained, the
root is read-only, the work folder and /tmp are bounded memory, and the container's only process of ours is a
`sleep` as long as its lifetime, so that it ends and is removed by itself when its owner is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Literal, Self

from trivet.sandbox import archive
from trivet.sandbox.base import (
    Capabilities,
    Cause,
    Counters,
    ExecResult,
    Limits,
    PathError,
    SandboxError,
    Tag,
    Template,
)
from trivet.sandbox.client import ONE_THREAD, owner_name
from trivet.sandbox.remote import alive, finished, kill_script, limits_script, new_mark, verdict

WORK = "/work"
ENGINES = ("docker", "podman")
_CHUNK = 1 << 16
_DRAIN_S = 1.0
_CAPABILITIES = Capabilities(
    network=True,
    memory_limit="group",
    walls=frozenset({"mount", "pid", "ipc", "net", "uts", "capabilities", "seccomp", "cgroup"}),
)
_FIXED = ("--rm", "--detach", "--init", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def find_engine(limit_s: float = 10.0) -> str | None:
    """The first engine whose command line is installed and answers; blocking."""
    for name in ENGINES:
        path = shutil.which(name)
        if path is None:
            continue
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [path, "info"], check=False, capture_output=True, timeout=limit_s, stdin=subprocess.DEVNULL
            )
            if done.returncode == 0:
                return path
    return None


async def _communicate(
    argv: list[str], stdin: bytes | BinaryIO, cap: int, wall_s: float, out: BinaryIO | None = None
) -> tuple[bytes, bytes, int, Cause | None]:
    """Run the engine's command line: (stdout, stderr, exit code, why it was ended or None).

    At most `cap` bytes of each stream are kept; stdout goes to `out` where given. The process is gone when
    this returns. The pipes are made here, since asyncio's own are waited for as long as anyone holds them.
    """
    full, kept = asyncio.Event(), (bytearray(), bytearray())
    with contextlib.ExitStack() as stack:
        if isinstance(stdin, bytes):
            file: BinaryIO = stack.enter_context(tempfile.TemporaryFile())  # type: ignore[assignment]
            file.write(stdin)
            file.seek(0)
            stdin = file
        readers, ends = [], []
        for _ in kept:
            read_end, write_end = os.pipe()
            ends.append(stack.enter_context(open(write_end, "wb", 0)))
            readers.append(await _reader(stack, read_end))
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=stdin, stdout=ends[0], stderr=ends[1], start_new_session=True
        )
        for end in ends:
            end.close()
        tasks = [
            asyncio.ensure_future(_collect(readers[0], kept[0], cap, full, out)),
            asyncio.ensure_future(_collect(readers[1], kept[1], cap, full, None)),
            asyncio.ensure_future(process.wait()),
            asyncio.ensure_future(full.wait()),
        ]
        try:
            await asyncio.wait(tasks[2:], timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            if tasks[2].done():  # what still holds the pipes is not awaited
                await asyncio.wait(tasks[:2], timeout=_DRAIN_S)
            why: Cause | None = "output" if full.is_set() else None if tasks[2].done() else "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await process.wait()
    return bytes(kept[0]), bytes(kept[1]), process.returncode or 0, why


async def _reader(stack: contextlib.ExitStack, read_end: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader),
        open(read_end, "rb", 0),  # noqa: SIM115  (the transport closes it)
    )
    stack.callback(transport.close)
    return reader


async def _collect(
    stream: asyncio.StreamReader, kept: bytearray, cap: int, full: asyncio.Event, out: BinaryIO | None
) -> None:
    seen = 0
    while data := await stream.read(_CHUNK):
        part = data[: cap - seen]
        seen += len(data)
        if out is None:
            kept += part
        else:
            out.write(part)
        if seen > cap:
            full.set()
            return


class ContainerSandbox:
    """One container; made by `Container.start`."""

    workdir = WORK

    def __init__(self, backend: Container, name: str, limits: Limits, env: dict[str, str]) -> None:
        self._backend = backend
        self._name = name
        self._limits = limits
        self._env = env
        self._closed = False

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
        """Run a program; see `Sandbox.exec`."""
        if not argv:
            raise ValueError("exec needs at least the program's name")
        limits = limits or self._limits
        wall = limits.wall_s if timeout is None else timeout
        begin = time.perf_counter()
        out, err, code, cause = await self._run(argv, stdin, limits, wall, env, cwd)
        if cause is None:
            cause, code = verdict(code)
            if code == 137 and await self._backend.out_of_memory(self._name):
                cause = "memory"
        else:
            code = 137
        self._backend.counters.count(cause)
        return ExecResult(out, err, code, cause, time.perf_counter() - begin)

    async def _run(
        self,
        argv: list[str],
        stdin: bytes | BinaryIO,
        limits: Limits,
        wall_s: float,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        out: BinaryIO | None = None,
    ) -> tuple[bytes, bytes, int, Cause | None]:
        if self._closed:
            raise SandboxError(f"container {self._name} is closed")
        mark = new_mark()
        settings = {**self._env, **(env or {}), mark[0]: mark[1]}
        options = [f"--env={key}={value}" for key, value in settings.items()]
        script = f'{limits_script(limits, processes=False)}\nexec "$@"'
        command = [*self._backend.engine(), "exec", "-i", f"--workdir={self._inside(cwd or '.')}", *options]
        command += [self._name, "/bin/sh", "-c", script, "sh", *argv]
        try:
            result = await _communicate(command, stdin, limits.output_bytes, wall_s, out)
        except BaseException:  # cancelled, or the engine failed: no program may be left
            await asyncio.shield(self._kill(mark))
            raise
        if result[3] is not None:
            await self._kill(mark)
        elif result[2] in (125, 126, 127) and not await self._backend.running(self._name):
            text = result[1].decode(errors="replace").strip()[-300:]
            raise SandboxError(f"container {self._name} is gone: {text}")
        return result

    async def _kill(self, mark: tuple[str, str]) -> None:
        if not self._closed:
            with contextlib.suppress(SandboxError):  # it is gone, and with it the program
                await self._backend.call("exec", self._name, "/bin/sh", "-c", kill_script(mark))

    def _inside(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(f"{path!r} is no path")
        return posixpath.normpath(posixpath.join(WORK, path))

    # -- files: through programs inside, so that a link can only lead inside -----------------------

    async def read(self, path: str, limit_bytes: int = 16 << 20) -> bytes:
        """A file's contents. Raises PathError when absent, no file, or larger than `limit_bytes`."""
        inside = shlex.quote(self._inside(path))
        script = f"test -f {inside} || {{ echo 'no such file' >&2; exit 1; }}; exec cat {inside}"
        return await self._file(script, b"", limit_bytes, f"read {path}")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it. Raises PathError."""
        inside = self._inside(path)
        folder, file = shlex.quote(posixpath.dirname(inside)), shlex.quote(inside)
        script = f"mkdir -p {folder} && {{ test ! -e {file} || test -f {file}; }} && exec cat > {file}"
        await self._file(script, data, 1 << 16, f"write {path}")

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder of this machine into the sandbox. Raises PathError."""
        inside = shlex.quote(self._inside(target))
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(archive.pack, Path(source), file)
            file.seek(0)
            script = f"mkdir -p {inside} && exec tar -x -C {inside} -f - -o"
            await self._file(script, file, 1 << 16, f"upload to {target}")

    async def download_dir(self, source: str, target: Path, limit_bytes: int = 256 << 20) -> None:
        """Copy a folder of the sandbox to this machine; see `archive.unpack`. Raises PathError."""
        with tempfile.TemporaryFile() as file:
            await self._pack(source, file, 2 * limit_bytes + (1 << 20))
            file.seek(0)
            await asyncio.to_thread(archive.unpack, file, Path(target), limit_bytes)

    async def _pack(self, source: str, file: BinaryIO, limit_bytes: int) -> None:
        script = f"exec tar -c -C {shlex.quote(self._inside(source))} -f - ."
        await self._file(script, b"", limit_bytes, f"download {source}", file)

    async def _file(
        self, script: str, stdin: bytes | BinaryIO, cap: int, what: str, out: BinaryIO | None = None
    ) -> bytes:
        limits = Limits(wall_s=self._backend.request_timeout_s, file_mb=1 << 20, output_bytes=max(1, cap))
        argv = ["/bin/sh", "-c", script]
        data, err, code, why = await self._run(argv, stdin, limits, limits.wall_s, cwd="/", out=out)
        if why == "output":
            raise PathError(f"cannot {what}: more than the limit of {cap} bytes")
        if why is not None or code:
            text = err.decode(errors="replace").strip()[-300:] or why or f"exit code {code}"
            raise PathError(f"cannot {what}: {text}")
        return data

    # -- life --------------------------------------------------------------------------------------

    async def snapshot(self) -> str:
        """Keep the work folder as it is now; the id can be given as `Template.snapshot` to this backend."""
        name = f"{secrets.token_hex(8)}.tar"
        with open(self._backend.folder() / name, "wb") as file:
            await self._pack(WORK, file, 1 << 30)
        return name

    async def restore(self, snapshot: str) -> None:
        path = self._backend.folder() / snapshot
        if Path(snapshot).name != snapshot or not path.is_file():
            raise SandboxError(f"no snapshot {snapshot!r} of this backend")
        with open(path, "rb") as file:
            await self._file(f"exec tar -x -C {WORK} -f - -o", file, 1 << 16, "restore a snapshot")

    async def close(self) -> None:
        """Remove the container with everything in it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        await self._backend.remove(self._name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.shield(self.close())


class Container:
    """Sandboxes of Docker or Podman; call `close` at the end.

    `image` needs a shell with `cat`, `tar`, `tr` and `grep`.

    `engine` is the command line to use (default: the first of docker, podman that answers). Images are not
    pulled: `pull` them beforehand. `request_timeout_s` bounds every call of the engine.
    """

    capabilities = _CAPABILITIES

    def __init__(
        self,
        image: str,
        *,
        engine: str = "",
        request_timeout_s: float = 60.0,
        tag: Tag | None = None,
    ) -> None:
        if not request_timeout_s > 0:
            raise ValueError(f"request_timeout_s is {request_timeout_s}: give seconds above 0")
        self.image = image
        self.request_timeout_s = request_timeout_s
        self.tag = tag or Tag()
        self.counters = Counters()
        self._engine = shlex.split(engine)
        self._live: set[ContainerSandbox] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def engine(self) -> list[str]:
        """The engine's command. Raises SandboxError when none answers."""
        if not self._engine:
            found = find_engine()
            if found is None:
                raise SandboxError(
                    "no container engine answers: install and start docker or podman, or use bubblewrap"
                )
            self._engine = [found]
        return self._engine

    def folder(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="trivet-snapshots-")
        return Path(self._folder.name)

    async def start(
        self,
        template: Template | None = None,
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "none",
    ) -> ContainerSandbox:
        """Start a container; `network="host"` is the engine's default network. Raises SandboxError."""
        template, limits = template or Template(), limits or Limits()
        await asyncio.to_thread(self.engine)
        name = f"trivet-{secrets.token_hex(8)}"
        sandbox = ContainerSandbox(self, name, limits, {"HOME": WORK, **ONE_THREAD, **(env or {})})
        self._live.add(sandbox)
        try:
            await finished(
                self.call("run", *self._options(name, template, limits, network)), lambda _: sandbox.close()
            )
            if template.snapshot:
                await sandbox.restore(template.snapshot)
        except BaseException:  # also when cancelled: the engine may have started it all the same
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    def _options(
        self, name: str, template: Template, limits: Limits, network: Literal["none", "host"]
    ) -> list[str]:
        size = f"size={limits.disk_mb}m,mode=1777,nosuid,nodev,exec"
        labels = {
            "trivet.label": self.tag.label,
            "trivet.host": socket.gethostname(),
            "trivet.owner": owner_name(os.getpid()),
        }
        mounts = [(folder, f"/run/packages/{n}") for n, folder in enumerate(template.packages)]
        options = [*_FIXED, f"--name={name}", "--hostname=sandbox", "--user=1000:1000", f"--workdir={WORK}"]
        options += ["--pull=never", *([] if network == "host" else ["--network=none"])]
        options += [f"--tmpfs={path}:{size}" for path in ("/tmp", WORK)]
        options += [f"--memory={limits.memory_mb}m", f"--memory-swap={limits.memory_mb}m"]
        options += [f"--pids-limit={limits.processes + 2}"]  # the engine's init and our sleep
        options += [f"--label={key}={value}" for key, value in labels.items()]
        options += [
            f"--volume={folder.resolve()}:{target}:ro" for folder, target in (*mounts, *template.mounts)
        ]
        options += ["--entrypoint=/bin/sh", template.image or self.image]
        return [*options, "-c", f"exec sleep {max(1, int(self.tag.lifetime_s))}"]

    async def call(self, *arguments: str, limit_bytes: int = 1 << 20) -> str:
        """One command of the engine; its stdout. Raises SandboxError when it fails or does not end."""
        limit = self.request_timeout_s
        out, err, code, why = await _communicate([*self.engine(), *arguments], b"", limit_bytes, limit)
        if why is not None or code:
            text = err.decode(errors="replace").strip()[-300:] or why or f"exit code {code}"
            raise SandboxError(f"{self.engine()[0]} {arguments[0]}: {text}")
        return out.decode(errors="replace")

    async def running(self, name: str) -> bool:
        with contextlib.suppress(SandboxError):
            return (await self.call("inspect", "--format={{.State.Running}}", name)).strip() == "true"
        return False

    async def out_of_memory(self, name: str) -> bool:
        """Whether the kernel has killed something in the container for want of memory."""
        with contextlib.suppress(SandboxError):
            return (await self.call("inspect", "--format={{.State.OOMKilled}}", name)).strip() == "true"
        return False

    async def remove(self, name: str) -> None:
        try:
            await self.call("rm", "--force", name)
        except SandboxError as error:
            if "no such container" not in str(error).lower() and "already in progress" not in str(error):
                raise

    def forget(self, sandbox: ContainerSandbox) -> None:
        self._live.discard(sandbox)

    async def reap(self) -> int:
        """Remove what owners that are gone from this machine left under this label; how many there were."""
        wanted = {"trivet.label": self.tag.label, "trivet.host": socket.gethostname()}
        filters = [f"--filter=label={key}={value}" for key, value in wanted.items()]
        removed = 0
        for name in (await self.call("ps", "--all", "--quiet", *filters)).split():
            form = '--format={{index .Config.Labels "trivet.owner"}}'
            owner = (await self.call("inspect", form, name)).strip()
            if not alive(owner):
                await self.remove(name)
                removed += 1
        return removed

    async def close(self) -> None:
        """Remove all containers of this backend. Raises the first SandboxError after having tried all."""
        results = await asyncio.gather(*(s.close() for s in list(self._live)), return_exceptions=True)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        for result in results:
            if isinstance(result, BaseException):
                raise result
