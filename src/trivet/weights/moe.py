"""What is known of mixture-of-experts families: where they choose experts, and how the choice is weighed.

A router turns hidden states (_P, hidden) into (logits (_P, _E), weights (_P, _K), experts (_P, _K)). Engine
and trainer find the same routers in the same order, so that a choice recorded by the one can be replayed in
the other: rollout routing replay, R3 (Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning
training and inference routers").
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class RoutingError(ValueError):
    """Routes cannot be recorded or replayed here; says why."""


def _softmax(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """softmax over all experts, gathered; normalised to 1 where the family does (Mixtral always)."""
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _sigmoid(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """A sigmoid for each expert, gathered, normalised and scaled; the bias affects only the choice."""
    weights = logits.sigmoid().gather(-1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


FAMILIES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _softmax,
    "Glm4MoeTopkRouter": _sigmoid,
}
"""Router class of transformers -> weights of chosen experts from (router, logits, experts)."""


def known(module: nn.Module) -> bool:
    """It has routers of a known family."""
    return any(type(part).__name__ in FAMILIES for part in module.modules())


def routers(module: nn.Module) -> list[Any]:
    """The model's routers, layer after layer. Raises RoutingError where none of a known family is found."""
    found = [part for part in module.modules() if type(part).__name__ in FAMILIES]
    if not found:
        names = ", ".join(sorted(name.partition("Top")[0] for name in FAMILIES))
        raise RoutingError(
            f"{type(module).__name__} has no router whose routes can be recorded and replayed; known "
            f"families: {names}"
        )
    return found


class Recorder:
    """Keeps what every router chose in the last forward: `take` gives (_P, layers, _K) int64."""

    def __init__(self, module: nn.Module) -> None:
        self._chosen: dict[int, torch.Tensor] = {}
        self.routers = routers(module)
        self._hooks = [
            router.register_forward_hook(lambda _m, _i, out, layer=layer: self._keep(layer, out[2]))
            for layer, router in enumerate(self.routers)
        ]

    def _keep(self, layer: int, experts: torch.Tensor) -> None:
        self._chosen[layer] = experts.detach()

    def take(self) -> torch.Tensor:
        return torch.stack([self._chosen[layer] for layer in range(len(self.routers))], 1)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@dataclass
class _Laid:
    """Routes laid out for the next forward of one model. A copy of the model starts with none."""

    routes: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Laid:
        return _Laid()


def _replayed(router: Any, hidden: torch.Tensor) -> Any:
    """The router's own forward with recorded experts in the place of its choice. Nothing of the model is held
    in a closure: in a copy of the model it reads the copy's weights."""
    logits, weights, experts = type(router).forward(router, hidden)
    laid, layer = router.trivet_routes
    if laid.routes is None:
        return logits, weights, experts
    recorded = laid.routes[:, layer]
    chosen = torch.where(recorded[:, :1] >= 0, recorded, experts)
    return logits, FAMILIES[type(router).__name__](router, logits, chosen).to(weights.dtype), chosen


class Replay:
    """Puts recorded choices in the place of the routers' own; the weights stay the routers' own.

    `routes`: (_P, layers, _K) int64 for the next forward, -1 where nothing was recorded (the router then
    chooses itself); None: all choose themselves.
    """

    def __init__(self, module: nn.Module, routes: torch.Tensor | None = None) -> None:
        self.found, self._laid = routers(module), _Laid(routes)
        self._before = [dict(vars(router)) for router in self.found]
        for layer, router in enumerate(self.found):
            self._check(router)
            router.trivet_routes = (self._laid, layer)
            router.forward = types.MethodType(_replayed, router)

    @property
    def routes(self) -> torch.Tensor | None:
        return self._laid.routes

    @routes.setter
    def routes(self, routes: torch.Tensor | None) -> None:
        self._laid.routes = routes

    def remove(self) -> None:
        """The routers as they were."""
        for router, before in zip(self.found, self._before, strict=True):
            for name in ("forward", "trivet_routes"):
                vars(router).pop(name, None)
                if name in before:
                    vars(router)[name] = before[name]

    @torch.no_grad()
    def _check(self, router: Any) -> None:
        """The family's rule gives the weights that the router gives for its own choice."""
        hidden = torch.randn(3, router.hidden_dim, generator=torch.Generator().manual_seed(0))
        logits, weights, experts = router(hidden.to(router.weight))
        again = FAMILIES[type(router).__name__](router, logits, experts)
        if not torch.allclose(again.to(weights.dtype), weights, rtol=1e-3, atol=1e-4):
            raise RoutingError(f"{type(router).__name__} weighs its experts in a way that is not known here")

    def fits(self, layers: int, width: int, largest: int) -> None:
        """Raises RoutingError when recorded routes are of another model."""
        own = (len(self.found), int(self.found[0].top_k), int(self.found[0].num_experts))
        if (layers, width) != own[:2] or largest >= own[2]:
            raise RoutingError(
                f"recorded routes have {layers} layers, {width} experts a token and expert {largest}; this "
                f"model has {own[0]} layers, {own[1]} of {own[2]} experts"
            )
