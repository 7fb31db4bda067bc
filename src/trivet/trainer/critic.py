"""A policy and the critic that is trained beside it, as one trainer."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivet.algorithms.base import Batch, PreparedBatch
from trivet.recipe.schema import Trainer as Config
from trivet.trainer.labels import Observe
from trivet.trainer.scalar import ScalarTrainer
from trivet.trainer.trainer import Trainer

_SHOWN = ("loss", "grad_norm", "lr", "updates", "bad_updates", "skipped")
_PREFIX = "critic."  # of the critic's tensors in the optimiser's file of a checkpoint


class Critic(ScalarTrainer):
    """value_T: at token t the estimate of the state before it, a linear read-out of its last hidden state."""

    def value(self, batch: Batch, only_T: np.ndarray | None = None) -> np.ndarray:
        """float32 (_T,) at trained tokens (of `only_T`), NaN elsewhere, under the current weights."""
        return self._logprobs(self.model, batch, only_T)


def critic_config(config: Config) -> Config:
    """The trainer's settings as the critic takes them: its own learning rate, all of it trained; the routes
    are the policy's and not its own."""
    own: dict[str, Any] = {"lr": config.critic_lr or config.lr, "trainable": [], "frozen": []}
    own |= {"lora": None, "replay_routes": False}
    return config.model_copy(update=own)


class ActorCritic(Trainer):
    """A `Trainer` of the policy with a `Critic` beside it: annotates "value", updates both.

    `critic`: what the critic starts from, by default a copy of `model`; a reward model's directory brings its
    own score. Its body is as large as the policy's and its optimiser is its own, with the trainer's settings
    and `trainer.critic_lr`. Both are updated from one prepared batch, each by its streams; a bad gradient of
    one does not stop the other. In checkpoints its weights and moments stand in `optimizer.safetensors`
    under `critic.`: `model.safetensors` is the policy's alone.
    """

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        config: Config,
        *,
        critic: str | Path | torch.nn.Module | None = None,
        seed: int = 0,
        device: str = "auto",
        micro_tokens: int = 4096,
        total_steps: int | None = None,
        reference: str | Path | torch.nn.Module | None = None,
        teacher: str | Path | torch.nn.Module | None = None,
    ) -> None:
        start = critic if critic is not None else model
        start = copy.deepcopy(start) if isinstance(start, torch.nn.Module) else start
        shared: dict[str, Any] = {"device": device, "seed": seed, "total_steps": total_steps}
        shared["micro_tokens"] = micro_tokens
        super().__init__(model, config, reference=reference, teacher=teacher, **shared)
        self.critic = Critic(start, critic_config(config), **shared)
        if self.critic.context_limit < self.context_limit:
            raise ValueError(
                f"the critic knows {self.critic.context_limit} positions, the policy {self.context_limit}: "
                "name a critic with at least as many"
            )

    def set(self, config: Config) -> None:
        super().set(config)
        self.critic.set(critic_config(config))

    def close(self) -> None:
        super().close()
        self.critic.close()

    def annotate(
        self, batch: Batch, needs: Iterable[str], *, only_T: np.ndarray | None = None
    ) -> dict[str, float]:
        """As `Trainer.annotate`, and `value`: the critic's estimate of the state before a trained token."""
        begin = time.perf_counter()
        needs = set(needs)
        out = super().annotate(batch, needs - {"value"}, only_T=only_T)
        if "value" in needs:
            batch.annotations["value"] = self.critic.value(batch, only_T)
            out["train/annotate_s"] = time.perf_counter() - begin
        return out

    def update(
        self, prepared: PreparedBatch, *, step: int, observe: Observe | None = None
    ) -> dict[str, float]:
        """One optimiser update of each; the critic's own metrics are train/critic/..."""
        out = super().update(prepared, step=step, observe=observe)
        own = self.critic.update(prepared, step=step)
        if "train/skipped" not in own:
            out.pop("train/skipped", None)
        for name, value in own.items():
            head, _, rest = name.partition("/")
            if head == "time" or rest in _SHOWN:
                out[f"{head}/critic/{rest}"] = value
            elif rest.startswith(tuple(f"{stream.name}/" for stream in prepared.streams)):
                out[name] = value
        return out | _explained(prepared)

    def check_finite(self) -> None:
        super().check_finite()
        self.critic.check_finite()

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        own = {f"weights/{name}": t for name, t in self.critic.state_tensors().items()}
        own |= {f"optimiser/{name}": t for name, t in self.critic.optimiser_tensors().items()}
        return super().optimiser_tensors() | {f"{_PREFIX}{name}": t for name, t in own.items()}

    def counters(self) -> dict[str, int]:
        own = {f"{_PREFIX}{name}": value for name, value in self.critic.counters().items()}
        return super().counters() | own

    def load_state(
        self,
        weights: dict[str, torch.Tensor],
        optimiser: dict[str, torch.Tensor],
        counters: dict[str, int],
    ) -> None:
        policy, own = _parted(optimiser)
        mine, theirs = _parted(counters)
        if not theirs:
            raise ValueError("the saved state has no critic: it is of a stage that trained none")
        parts: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "optimiser": {}}
        for name, tensor in own.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = tensor
        self.critic.load_state(parts["weights"], parts["optimiser"], theirs)
        super().load_state(weights, policy, mine)


def _parted(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the policy's, the critic's without their prefix)."""
    critic = {n.removeprefix(_PREFIX): v for n, v in named.items() if n.startswith(_PREFIX)}
    return {n: v for n, v in named.items() if not n.startswith(_PREFIX)}, critic


def _explained(prepared: PreparedBatch) -> dict[str, float]:
    """Share of the returns' variance that the values of before the update explain: 1 - var(R - V) / var R."""
    returns, values = prepared.columns.get("return"), prepared.batch.annotations.get("value")
    if returns is None or values is None:
        return {}
    known = np.isfinite(returns) & np.isfinite(values)
    if not known.any() or (spread := float(returns[known].var())) == 0:
        return {}
    return {"train/critic/explained_variance": 1.0 - float((returns - values)[known].var()) / spread}
