"""The E2B backend: sandboxes of E2B's cloud, or of any server that speaks its protocol.

The unmodified `e2b` package does the talking. What is added here: limits inside, output caps, a kill of
everything that a program started, deadlines on every call, and this package's errors. The machine inside
belongs to the program, so everything that comes back is bounded and distrusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
import shlex
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

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
from trivet.sandbox.client import owner_name
from trivet.sandbox.remote import alive, finished, kill_script, new_mark, program_script, verdict

_CAPABILITIES = Capabilities(
    network=True,
    snapshots=True,
    background=True,
    memory_limit="none",
    walls=frozenset({"virtual machine or container of the server"}),
)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """The package's many exceptions as PathError (no such file) and SandboxError (everything else)."""
    e2b = _sdk()
    import httpx

    try:
        yield
    except (e2b.FileNotFoundException, e2b.NotEnoughSpaceException) as error:
        raise PathError(f"{what}: {_first_line(error)}") from error
    except e2b.AuthenticationException as error:
        hint = "set E2B_API_KEY, or give api_key"
        raise SandboxError(
            f"{what}: the E2B server refuses the key ({hint}): {_first_line(error)}"
        ) from error
    except (e2b.SandboxException, httpx.HTTPError, OSError, TimeoutError) as error:
        text = f"{what}: {type(error).__name__}: {_first_line(error)}"
        raise SandboxError(text) from error
    except Exception as error:
        # The package raises bare `Exception` and errors of its transports; none of them is a verdict.
        if isinstance(error, SandboxError):
            raise
        raise SandboxError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _sdk() -> Any:
    try:
        import e2b  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SandboxError("the e2b backend needs the package e2b: pip install 'e2b>=2.60,<3'") from error
    return e2b


class _Capped:
    """One output stream: kept up to a limit; `full` is set when there is more."""

    def __init__(self, limit: int, full: asyncio.Event) -> None:
        self._limit, self._full, self.data = limit, full, bytearray()

    def __call__(self, text: str) -> None:
        self.data += text.encode()[: self._limit + 1 - len(self.data)]
        if len(self.data) > self._limit:
            self._full.set()

    def result(self) -> bytes:
        return bytes(self.data[: self._limit])


class E2BSandbox:
    """One sandbox of an E2B server; made by `E2B.start`.

    Output that is not UTF-8 arrives with U+FFFD in it.
    """

    def __init__(self, backend: E2B, remote: Any, limits: Limits, env: dict[str, str]) -> None:
        self._backend = backend
        self._remote = remote
        self._limits = limits
        self._env = env
        self._closed = False

    @property
    def workdir(self) -> str:
        return self._backend.workdir

    @property
    def id(self) -> str:
        return self._remote.sandbox_id

    def _inside(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(f"{path!r} is no path")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _check(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed")

    # -- programs ----------------------------------------------------------------------------------

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
        """Run a program; see `Sandbox.exec`. Raises SandboxError when the server fails."""
        self._check()
        if not argv:
            raise ValueError("exec needs at least the program's name")
        limits = limits or self._limits
        wall = limits.wall_s if timeout is None else timeout
        mark = new_mark()
        source = await self._stdin(stdin)
        script = program_script(argv, limits, source)
        full = asyncio.Event()
        out, err = _Capped(limits.output_bytes, full), _Capped(limits.output_bytes, full)
        settings = {**self._env, **(env or {}), mark[0]: mark[1]}
        begin = time.perf_counter()
        handle = None
        try:
            with _translated(f"starting {argv[0]} in sandbox {self.id}"):
                handle = await self._remote.commands.run(
                    script,
                    background=True,
                    envs=settings,
                    cwd=self._inside(cwd or "."),
                    on_stdout=out,
                    on_stderr=err,
                    timeout=wall + self._backend.request_timeout_s,
                    request_timeout=self._backend.request_timeout_s,
                    retain_output=False,
                )
            cause, code = await self._wait(handle, full, wall)
        except BaseException:  # cancelled, or the server failed: no program may be left
            await asyncio.shield(self._kill_marked(mark, handle))
            raise
        if cause in ("timeout", "output"):
            await self._kill_marked(mark, handle)
        self._backend.counters.count(cause)
        return ExecResult(out.result(), err.result(), code, cause, time.perf_counter() - begin)

    async def _stdin(self, stdin: bytes) -> str:
        """The file that a program reads; a fresh one that it removes itself."""
        if not stdin:
            return "/dev/null"
        path = f"/tmp/.trivet-{secrets.token_hex(8)}"
        with _translated(f"handing over stdin to sandbox {self.id}"):
            await self._put(path, stdin)
        return path

    async def _wait(self, handle: Any, full: asyncio.Event, wall: float) -> tuple[Cause, int]:
        ended, flooded = asyncio.ensure_future(handle.wait()), asyncio.ensure_future(full.wait())
        try:
            await asyncio.wait({ended, flooded}, timeout=wall, return_when=asyncio.FIRST_COMPLETED)
            if full.is_set():
                return "output", 137
            if not ended.done():
                return "timeout", 137
            return verdict(await _exit_code(ended, f"a program in sandbox {self.id}"))
        finally:
            for task in (ended, flooded):
                task.cancel()
                with contextlib.suppress(BaseException):  # cancelled, or its failure is known already
                    await task

    async def _kill_marked(self, mark: tuple[str, str], handle: Any) -> None:
        """End what carries the mark; see `kill_script`."""
        if self._closed:
            return
        script = kill_script(mark)
        limit = self._backend.request_timeout_s
        with contextlib.suppress(SandboxError), _translated("killing a program"):
            await self._remote.commands.run(script, timeout=limit, request_timeout=limit)
        if handle is not None:
            with contextlib.suppress(SandboxError), _translated("leaving a program"):
                await handle.disconnect()

    # -- files -------------------------------------------------------------------------------------

    async def read(self, path: str, limit_bytes: int = 16 << 20) -> bytes:
        """A file's contents. Raises PathError when absent or larger than `limit_bytes`."""
        out = bytearray()
        async for chunk in self._stream(path):
            out += chunk
            if len(out) > limit_bytes:
                raise PathError(f"{path} has more than the limit of {limit_bytes} bytes")
        return bytes(out)

    async def _stream(self, path: str) -> AsyncIterator[bytes]:
        self._check()
        inside, limit = self._inside(path), self._backend.request_timeout_s
        with _translated(f"reading {path} in sandbox {self.id}"):
            reader = await self._remote.files.read(
                inside, format="stream", request_timeout=limit, stream_idle_timeout=limit
            )
        try:
            with _translated(f"reading {path} in sandbox {self.id}"):
                async for chunk in reader:
                    yield chunk
        finally:
            await reader.aclose()

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it. Raises PathError."""
        self._check()
        inside = self._inside(path)
        with _translated(f"writing {path} in sandbox {self.id}"):
            await self._put(inside, data)

    async def _put(self, path: str, data: bytes) -> None:
        limit = self._backend.request_timeout_s
        await self._remote.files.write(path, data, request_timeout=limit, use_octet_stream=True)

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder of this machine into the sandbox. Raises PathError."""
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(archive.pack, Path(source), file)
            file.seek(0)
            data = await asyncio.to_thread(file.read)
        name = f"/tmp/.trivet-{secrets.token_hex(8)}.tar"
        await self.write(name, data)
        inside = shlex.quote(self._inside(target))
        await self._shell(
            f"mkdir -p {inside} && tar -xf {name} -C {inside} --no-same-owner; e=$?; rm -f {name}; exit $e"
        )

    async def download_dir(self, source: str, target: Path, limit_bytes: int = 256 << 20) -> None:
        """Copy a folder of the sandbox to this machine; see `archive.unpack`. Raises PathError."""
        name = f"/tmp/.trivet-{secrets.token_hex(8)}.tar"
        await self._shell(f"tar -cf {name} -C {shlex.quote(self._inside(source))} .")
        try:
            with tempfile.TemporaryFile() as file:
                await self._spool(name, file, 2 * limit_bytes + (1 << 20))
                file.seek(0)
                await asyncio.to_thread(archive.unpack, file, Path(target), limit_bytes)
        finally:
            await self._shell(f"rm -f {name}")

    async def _spool(self, name: str, file: BinaryIO, limit_bytes: int) -> None:
        size = 0
        async for chunk in self._stream(name):
            size += len(chunk)
            if size > limit_bytes:
                raise PathError(f"the folder is larger than {limit_bytes} bytes")
            file.write(chunk)

    async def _shell(self, script: str) -> None:
        limits = Limits(wall_s=self._backend.request_timeout_s, file_mb=1024)
        result = await self.exec(["/bin/sh", "-c", script], limits=limits, cwd="/")
        if not result.ok:
            raise PathError(f"sandbox {self.id}: {result.stderr.decode(errors='replace').strip()[:300]}")

    # -- life --------------------------------------------------------------------------------------

    async def snapshot(self) -> str:
        """Keep the sandbox's state on the server; the id can be given as `Template.snapshot`."""
        self._check()
        with _translated(f"taking a snapshot of sandbox {self.id}"):
            info = await self._remote.create_snapshot(request_timeout=self._backend.request_timeout_s)
        return info.snapshot_id

    async def close(self) -> None:
        """Kill the sandbox. Raises SandboxError if the server does not say that it did."""
        if self._closed:
            return
        self._closed = True
        self._backend.forget(self)
        with _translated(f"closing sandbox {self.id}"):
            await self._remote.kill(request_timeout=self._backend.request_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.shield(self.close())


async def _exit_code(ended: asyncio.Future[Any], what: str) -> int:
    e2b = _sdk()
    with _translated(what):
        try:
            return int((await ended).exit_code)
        except e2b.CommandExitException as error:
            return int(error.exit_code)


class E2B:
    """Sandboxes of an E2B server. Use as an async context manager, or call `close`.

    `template` is the server's name of an image (`Template.image` goes before it). `domain` leads to the
    lasting addresses; `api_url` and `sandbox_url` to self-hosted servers. Unset ones come from the variables
    E2B_API_KEY, E2B_DOMAIN, E2B_API_URL and E2B_SANDBOX_URL. `request_timeout_s` bounds every call.
    """

    def __init__(
        self,
        template: str = "base",
        *,
        api_key: str = "",
        domain: str = "",
        api_url: str = "",
        sandbox_url: str = "",
        http_version: Literal["", "1.1", "2"] = "",
        request_timeout_s: float = 60.0,
        workdir: str = posixpath.join("/", "home", "user"),
        tag: Tag | None = None,
    ) -> None:
        if not request_timeout_s > 0:
            raise ValueError(f"request_timeout_s is {request_timeout_s}: give seconds above 0")
        self.template = template
        self.request_timeout_s = request_timeout_s
        self.workdir = workdir
        self.tag = tag or Tag()
        self.counters = Counters()
        given = {
            "api_key": api_key,
            "domain": domain,
            "api_url": api_url,
            "sandbox_url": sandbox_url,
            "http_version": http_version,
        }
        self._options: dict[str, Any] = {key: value for key, value in given.items() if value}
        self._options["request_timeout"] = request_timeout_s
        self._live: set[E2BSandbox] = set()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def start(
        self,
        template: Template | None = None,
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "none",
    ) -> E2BSandbox:
        """Start a sandbox. `limits.disk_mb` is the server's matter. Raises SandboxError."""
        template = template or Template()
        if template.packages or template.mounts:
            raise SandboxError(
                "the e2b backend cannot mount folders of this machine: use upload_dir, or build a template"
            )
        if not (self._options.get("api_key") or os.environ.get("E2B_API_KEY")):
            raise SandboxError("the e2b backend needs a key: set E2B_API_KEY, or give api_key")
        name = template.snapshot or template.image or self.template
        remote = await finished(self._create(name, network), self._undo)
        sandbox = E2BSandbox(self, remote, limits or Limits(), dict(env or {}))
        self._live.add(sandbox)
        return sandbox

    async def _create(self, name: str, network: Literal["none", "host"]) -> Any:
        metadata = {
            "trivet": self.tag.label,
            "trivet_host": socket.gethostname(),
            "trivet_owner": owner_name(os.getpid()),
        }
        with _translated(f"starting an E2B sandbox from {name}"):
            # The server's own default lifetime may be as short as 15 s: it is always given.
            return await _sdk().AsyncSandbox.create(
                template=name,
                timeout=max(1, int(self.tag.lifetime_s)),
                metadata=metadata,
                allow_internet_access=network == "host",
                **self._options,
            )

    async def _undo(self, remote: Any) -> None:
        with _translated("ending a sandbox that nobody waits for"):
            await remote.kill(request_timeout=self.request_timeout_s)

    def forget(self, sandbox: E2BSandbox) -> None:
        self._live.discard(sandbox)

    async def reap(self) -> int:
        """Kill what owners that are gone from this machine left under this label; how many there were."""
        e2b, killed = _sdk(), 0
        query = e2b.SandboxQuery(metadata={"trivet": self.tag.label, "trivet_host": socket.gethostname()})
        with _translated("looking for sandboxes that were left"):
            pages = e2b.AsyncSandbox.list(query=query, **self._options)
            while pages.has_next:
                for info in await pages.next_items():
                    if not alive(info.metadata.get("trivet_owner", "")):
                        killed += await e2b.AsyncSandbox.kill(info.sandbox_id, **self._options)
        return killed

    async def close(self) -> None:
        """Kill all sandboxes of this backend. Raises the first SandboxError after having tried all."""
        results = await asyncio.gather(*(s.close() for s in list(self._live)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.shield(self.close())
