"""Checkpoints that are there whole or not at all.

A checkpoint is a folder `step_000120` of a stage's checkpoint directory: `model.safetensors` (the weights as
the trainer holds them), `optimizer.safetensors`, `random.safetensors`, `state.json` (the trainer's counters
and the caller's own state), and `manifest.json` with every file's size and SHA-256. It is written under
another name, synced to disk and renamed; the manifest comes last. Whatever happens in between leaves the
former ones untouched, and a folder that fails its manifest is passed over.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

if TYPE_CHECKING:
    from trivet.trainer.trainer import Trainer

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_BLOCK = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says which file, why, and what to do."""


def write(directory: Path, step: int, trainer: Trainer, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` and return its folder. `state` is the caller's, JSON-able.

    An older folder of the same step is replaced. Raises CheckpointError (a full disk, say): what was there
    before is then still there.
    """
    trainer.check_finite()
    tensors = {
        "model.safetensors": trainer.state_tensors(),
        "optimizer.safetensors": trainer.optimiser_tensors(),
        "random.safetensors": _random_state(),
    }
    return _write_folder(directory, step, tensors, {"trainer": trainer.counters(), "state": dict(state)})


def write_weights(directory: Path, step: int, trainer: Trainer) -> Path:
    """Write the weights after `step` alone, whole or not at all, for `read_weights`; their folder."""
    trainer.check_finite()
    return _write_folder(directory, step, {"model.safetensors": trainer.state_tensors()}, {})


def _write_folder(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    facts: Mapping[str, Any],
) -> Path:
    directory = Path(directory)
    final, partial = directory / f"step_{step:06d}", directory / f".partial_step_{step:06d}"
    old = directory / f".replaced_step_{step:06d}"
    text = json.dumps({"format": FORMAT, "step": step, **facts}, indent=1, allow_nan=False)
    try:
        _clear(partial)
        partial.mkdir(parents=True)
        files = {name: _write(partial / name, _saver(group)) for name, group in tensors.items()}
        files["state.json"] = _write(partial / "state.json", lambda p: p.write_text(text))
        manifest = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)
        _write(partial / "manifest.json", lambda p: p.write_text(manifest))
        _sync_folder(partial)
        _clear(old)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _sync_folder(directory)
        _clear(old)
    except (OSError, SafetensorError) as error:
        _clear(partial)
        full = getattr(error, "errno", None) == errno.ENOSPC or f"(os error {errno.ENOSPC})" in str(error)
        hint = "the disk is full: free space there, then resume" if full else str(error)
        raise CheckpointError(
            f"checkpoint of step {step} in {directory} was not written: {hint}. Earlier checkpoints are "
            f"untouched"
        ) from error
    return final


def latest(directory: Path) -> Path | None:
    """The newest folder that is whole (sizes and checksums as its manifest says), or None."""
    for path in reversed(_folders(Path(directory))):
        if not faults(path):
            return path
    return None


def faults(path: Path) -> list[str]:
    """What is wrong with a checkpoint folder; empty when it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"manifest.json: {error}"]
    if manifest.get("format") != FORMAT:
        return [f"manifest.json: format {manifest.get('format')!r}, this trivet reads {FORMAT}"]
    out = []
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                out.append(f"{name}: {size} bytes, written were {entry['bytes']}")
            elif _digest(path / name) != entry["sha256"]:
                out.append(f"{name}: its checksum differs")
        except OSError as error:
            out.append(f"{name}: {error}")
    return out


def read(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a checkpoint into `trainer`, and the random state into this process; the caller's own state.

    The folder is taken as verified (`latest` did). Raises CheckpointError for a model of other shape.
    """
    from safetensors.torch import load_file

    path = Path(path)
    try:
        facts = json.loads((path / "state.json").read_text())
        trainer.load_state(
            load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), facts["trainer"]
        )
        _set_random_state(load_file(path / "random.safetensors"))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be used: {error}") from error
    return dict(facts["state"])


def read_weights(directory: Path, step: int, trainer: Trainer) -> None:
    """Put the weights of `write_weights` into `trainer`. Raises CheckpointError where they are not whole."""
    from safetensors.torch import load_file

    path = Path(directory) / f"step_{step:06d}"
    if wrong := faults(path):
        raise CheckpointError(f"the weights in {path} cannot be used: {'; '.join(wrong)}")
    try:
        trainer.load_weights(load_file(path / "model.safetensors"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"the weights in {path} cannot be used: {error}") from error


def keep_only(directory: Path, step: int) -> None:
    """Remove all folders but that of `step`, and leftovers."""
    directory = Path(directory)
    for path in [*_folders(directory), *directory.glob(".*_step_*")]:
        if path.name != f"step_{step:06d}":
            _clear(path)


def retain(directory: Path, keep_last: int) -> int:
    """Remove all but the newest `keep_last` whole checkpoints, and leftovers; the oldest kept step, or 0."""
    directory = Path(directory)
    whole = [
        path for path in _folders(directory) if not (path / "manifest.json").is_symlink() and _complete(path)
    ]
    kept = whole[-keep_last:]
    for path in _folders(directory):
        if path not in kept:
            gone = path.with_name(f".removed_{path.name}")
            path.rename(gone)  # not a checkpoint any more from here on, however the removal ends
            _clear(gone)
    for leftover in directory.glob(".*_step_*"):
        _clear(leftover)
    return _step(kept[0]) if kept else 0


def _complete(path: Path) -> bool:
    """All files there at their sizes: enough to decide what to remove, without reading gigabytes."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _folders(directory: Path) -> list[Path]:
    """Checkpoint folders by step; `write` replaced one half-way: the replaced one counts."""
    if not directory.is_dir():
        return []
    for path in directory.glob(".replaced_step_*"):
        final = directory / path.name.removeprefix(".replaced_")
        if not final.exists():
            path.rename(final)
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=_step)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _clear(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _saver(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path], Any]:
    from safetensors.torch import save_file

    return lambda path: save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def _write(path: Path, save: Callable[[Path], Any]) -> dict[str, Any]:
    """Write one file, sync it to disk; its entry in the manifest."""
    save(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_state() -> dict[str, torch.Tensor]:
    """The generators of torch, numpy (the global one) and Python, as tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    out = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor(
            [float("nan") if gauss_next is None else gauss_next], dtype=torch.float64
        ),
    }
    assert kind == "MT19937"
    for i in range(torch.cuda.device_count()):
        out[f"cuda_{i}"] = torch.cuda.get_rng_state(i)
    return out


def _set_random_state(saved: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    position, has_gauss = saved["numpy_rest"].tolist()
    keys = saved["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(saved["numpy_gauss"])))
    version, *internal = saved["python"].tolist()
    gauss = float(saved["python_gauss"])
    random.setstate((version, tuple(internal), None if gauss != gauss else gauss))
    for i in range(torch.cuda.device_count()):
        if f"cuda_{i}" in saved:
            torch.cuda.set_rng_state(saved[f"cuda_{i}"], i)
