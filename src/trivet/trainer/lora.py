"""Low-rank adapters (Hu et al. 2021, "LoRA: low-rank adaptation of large language models", section 4.1).

A linear layer computes x W^T + (alpha / r) x A^T B^T with W frozen, A (r, in) drawn and B (out, r) zero at
first. What samples and what is exported is the merged W + (alpha / r) B A; with the adapters off the model is
the one the stage started from, so that it is its own reference.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trivet.recipe.schema import Lora as Config
from trivet.trainer.optim import PatternError


class _Switch:
    """What all adapted layers of one model look at."""

    def __init__(self, scale: float) -> None:
        self.scale, self.on = scale, True


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    out, switch = nn.functional.linear(x, self.weight, self.bias), self.trivet_lora
    if not switch.on:
        return out
    low = nn.functional.linear(x, self.lora_A)
    return out + nn.functional.linear(low, self.lora_B) * switch.scale


class Adapters:
    """The adapters of one model; its own parameters are frozen, theirs are trained.

    `config.targets`: glob patterns over the names of linear layers, each matched whole or by its last part
    (`q_proj`); none given: every linear layer but the head. Raises PatternError.
    """

    def __init__(self, module: nn.Module, config: Config, *, seed: int = 0) -> None:
        self.config = config
        self.layers = _targets(module, config.targets)
        self._switch = _Switch(config.alpha / config.rank)
        module.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers.values():
            bound = 1 / math.sqrt(layer.in_features)  # as linear layers start
            drawn = torch.empty(config.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            layer.lora_A = nn.Parameter(drawn.to(layer.weight))  # type: ignore[assignment]
            zero = layer.weight.new_zeros(layer.out_features, config.rank)
            layer.lora_B = nn.Parameter(zero)  # type: ignore[assignment]
            layer.trivet_lora = self._switch  # type: ignore[assignment]
            layer.forward = types.MethodType(_forward, layer)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before its adapters."""
        self._switch.on = False
        try:
            yield
        finally:
            self._switch.on = True

    @torch.no_grad()
    def merged(self, layer: Any) -> torch.Tensor:
        """W + (alpha / r) B A, a new tensor."""
        return torch.addmm(layer.weight, layer.lora_B, layer.lora_A, alpha=self._switch.scale)

    def published(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named parameters as a model without adapters has them."""
        out = {n: t for n, t in tensors.items() if not n.endswith((".lora_A", ".lora_B"))}
        return out | {f"{name}.weight": self.merged(layer) for name, layer in self.layers.items()}

    @contextmanager
    def folded(self) -> Iterator[None]:
        """The model without adapters and with merged weights, to be written; then as before, exactly."""
        kept = {}
        for name, layer in self.layers.items():
            merged = nn.Parameter(self.merged(layer), requires_grad=False)
            kept[name] = (layer.weight, layer.lora_A, layer.lora_B)
            del layer.lora_A, layer.lora_B
            layer.weight = merged
        try:
            with self.off():
                yield
        finally:
            for name, layer in self.layers.items():
                layer.weight, layer.lora_A, layer.lora_B = kept[name]  # type: ignore[assignment]

    def write(self, directory: Path, base: str) -> None:
        """The adapters alone, in the layout of the PEFT library."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, layer in self.layers.items():
            for part in ("lora_A", "lora_B"):
                weight = getattr(layer, part).detach().cpu().contiguous()
                tensors[f"base_model.model.{name}.{part}.weight"] = weight
        save_file(tensors, directory / "adapter_model.safetensors")
        facts = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(self.layers),
        }
        (directory / "adapter_config.json").write_text(json.dumps(facts, indent=1))


def _targets(module: nn.Module, patterns: list[str]) -> dict[str, Any]:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    linear = {n: m for n, m in module.named_modules() if type(m) is nn.Linear and m is not head}
    found: dict[str, Any] = {}
    for pattern in patterns or ["*"]:
        hit = {n: m for n, m in linear.items() if fnmatchcase(n, pattern) or n.split(".")[-1] == pattern}
        if not hit:
            names = sorted({n.split(".")[-1] for n in linear})
            raise PatternError(
                f"trainer.lora.targets: {pattern!r} matches no linear layer; their names end in "
                f"{', '.join(names) or '(this model has none)'}"
            )
        found |= hit
    return {n: m for n, m in linear.items() if n in found}
