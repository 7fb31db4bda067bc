"""Loading new weights in place, all or nothing as far as can be checked, and reading them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trivet.engine.base import EngineError
from trivet.engine.torch.model import Model
from trivet.weights import checksum


def check(model: Model, tensors: Mapping[str, Any]) -> None:
    """Names and shapes must be the model's. Raises EngineError listing what does not fit."""
    problems: list[str] = []
    known = {**model.tensors, **{alias: model.tensors[name] for alias, name in model.aliases.items()}}
    unknown = sorted(set(tensors) - set(known))
    if unknown:
        problems.append(f"unknown: {_some(unknown)}")
    given = {model.aliases.get(name, name) for name in tensors}
    missing = sorted(set(model.tensors) - given)
    if missing:
        problems.append(f"missing: {_some(missing)}")
    shapes = [
        f"{name} {list(tensors[name].shape)} instead of {list(known[name].shape)}"
        for name in tensors
        if name in known and tuple(tensors[name].shape) != tuple(known[name].shape)
    ]
    if shapes:
        problems.append(f"wrong shape: {_some(shapes)}")
    if problems:
        raise EngineError(
            f"the published weights do not fit the engine's model; {'; '.join(problems)}. "
            "Trainer and engine must hold the same model"
        )


def load_in_place(model: Model, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Copy every tensor into the model's storage; checksums of what is there afterwards, by given name.

    A second name of a tied tensor must carry the same values. Raises EngineError.
    """
    sums: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: name in model.aliases):  # aliases last
        new = torch.as_tensor(tensors[name])
        first = model.aliases.get(name)
        if first is None or first not in tensors:
            model.tensors[first or name].copy_(new)
        elif not _equal(model.tensors[first], new):
            raise EngineError(
                f"{name} and {first} are one tensor in the engine's model but differ in what was published: "
                "the trainer has untied them; set tie_word_embeddings alike in both"
            )
    model.refresh()
    for name in tensors:
        first = model.aliases.get(name, name)
        if first not in sums:
            sums[first] = checksum(model.tensors[first])
        sums[name] = sums[first]
    return {name: sums[name] for name in tensors}


def _equal(held: Tensor, new: Tensor) -> bool:
    return torch.equal(held, new.to(device=held.device, dtype=held.dtype))


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
