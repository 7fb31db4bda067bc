"""Which parameters move, how far, and when: patterns, AdamW, schedules, gradient norm."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from trivet.recipe.schema import Trainer as Config

_LARGE = 1 << 23  # elements


class PatternError(ValueError):
    """A `trainable` or `frozen` pattern names no parameter, or nothing is left to train."""


def aliases(module: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> all its names (tied ones have several)."""
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        out.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return out


def select(module: nn.Module, trainable: Iterable[str], frozen: Iterable[str]) -> None:
    """Set `requires_grad`: what a `trainable` pattern matches (none given: all) less `frozen` ones.

    A tied parameter is matched by any of its names. Raises PatternError.
    """
    names = aliases(module)
    every = [alias for group in names.values() for alias in group]
    wanted, kept = list(trainable), list(frozen)
    for kind, patterns in (("trainable", wanted), ("frozen", kept)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                near = difflib.get_close_matches(pattern, every, 5, 0.0)
                raise PatternError(
                    f"trainer.{kind}: {pattern!r} matches no parameter; the nearest of {len(every)} names "
                    f"are {', '.join(near)}"
                )
    moving: set[str] = set()
    for name, group in names.items():
        on = not wanted or any(fnmatchcase(alias, p) for alias in group for p in wanted)
        off = any(fnmatchcase(alias, p) for alias in group for p in kept)
        if on and not off:
            moving.add(name)
    if not moving:
        raise PatternError(f"trainer.trainable {wanted} and trainer.frozen {kept} leave nothing to train")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in moving)
        if name not in moving:
            parameter.grad = None


def adamw(module: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over all parameters; norms, biases and other 1-d ones do not decay.

    Frozen parameters have no gradient and are passed over, so patterns may change while the state stays.
    """
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "decays": True}, {"params": others, "decays": False}]
    fused = all(p.device.type in ("cpu", "cuda") for p in module.parameters())
    optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, fused=fused)
    configure(optimiser, config)
    return optimiser


def configure(optimiser: torch.optim.AdamW, config: Config) -> None:
    """Take over betas, eps and weight decay; the learning rate comes with each update."""
    for group in optimiser.param_groups:
        group["betas"], group["eps"] = tuple(config.betas), config.eps
        group["weight_decay"] = config.weight_decay if group["decays"] else 0.0


def learning_rate(config: Config, update: int, total: int | None) -> float:
    """Of update u = 0, 1 ...: warm-up (u + 1) / warmup_steps, then down to min_lr_ratio at `total`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if total is None:
        raise ValueError(
            f"trainer.schedule {config.schedule!r} ends with the stage: give the stage `steps` or `epochs`, "
            f"or use constant"
        )
    span = max(total - config.warmup_steps, 1)
    done = min((update - config.warmup_steps) / span, 1.0)
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def clear_gradients(module: nn.Module) -> None:
    """Drop gradients, so that the next is taken over and not added; large ones are zeroed in place, since
    fresh memory of that size costs more than writing zeros."""
    for p in module.parameters():
        if p.grad is not None and p.numel() >= _LARGE:
            p.grad.zero_()
        else:
            p.grad = None


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """Euclidean norm of all gradients: rows in their own precision, the rest in float64.

    (A float32 sum over a whole embedding matrix is wrong in the third digit.)
    """
    squares = [
        torch.linalg.vector_norm(p.grad.reshape(len(p.grad), -1) if p.ndim > 1 else p.grad[None], dim=-1)
        .double()
        .square()
        .sum()
        for p in parameters
        if p.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def state_of(optimiser: torch.optim.AdamW, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """`{quantity/name: tensor}`; `names`: id of a parameter -> its name."""
    return {
        f"{key}/{names[id(p)]}": value
        for p, state in optimiser.state.items()
        for key, value in state.items()
        if torch.is_tensor(value)
    }


def load_state(
    optimiser: torch.optim.AdamW, named: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `state_of`; what was not saved starts anew. Raises ValueError for an unknown name."""
    split = [(key.partition("/"), value) for key, value in saved.items()]
    unknown = sorted({name for (_, _, name), _ in split if name not in named})
    if unknown:
        raise ValueError(f"the optimiser's state names {unknown[0]!r}, which this model does not have")
    optimiser.state.clear()
    for (quantity, _, name), value in split:
        p = named[name]
        device = torch.device("cpu") if quantity == "step" and not p.is_cuda else p.device
        optimiser.state[p][quantity] = value.to(device).clone()
