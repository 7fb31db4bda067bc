"""One optimiser update from a prepared batch. Knows streams, objectives and weights; no algorithm by name."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from trivet.algorithms.base import Batch, Model, PreparedBatch, Stream
from trivet.algorithms.evaluate import merge
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import optim
from trivet.trainer.head import Positions
from trivet.trainer.labels import Observe
from trivet.trainer.lora import Adapters
from trivet.trainer.model import PackedModel, load
from trivet.trainer.packing import MicroBatch, Plan, plan
from trivet.trainer.terms import Terms, cut, metrics, units_of
from trivet.trainer.vocabulary import check_vocabulary
from trivet.weights.moe import Replay

ANNOTATIONS = frozenset({"proximal_logp", "ref_logp", "teacher_logp"})


@contextmanager
def _subnormals_flushed() -> Iterator[None]:
    """Numbers below 1e-38 count as 0 on this thread: a sharp softmax is full of them, and a CPU is thirty
    times slower with them. The caller's own arithmetic is left as it was."""
    before = bool(np.float32(1e-38) * np.float32(0.5) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class TrainingDiverged(RuntimeError):
    """Loss or gradient was not finite several updates in a row; says what, where, and what to try."""


class Trainer:
    """Trains one causal language model on packed rows.

    `model`: Hugging Face directory or name, or a loaded model (which is then trained in place). `reference`:
    the frozen copy `ref_logp` is computed with (default: `model` as it was handed over), `teacher`: the one
    of `teacher_logp`; ModelError where token ids would mean other things to them. `total_steps`: updates of
    the stage, for schedules that end. It trains the streams whose model is `trains`.
    """

    trains: ClassVar[Model] = "policy"
    ahead: ClassVar[int] = 1  # a position's output is the state before its token (0: the one after it)
    packed: ClassVar[type[PackedModel]] = PackedModel
    outputs: ClassVar[str] = "log-probabilities"

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        config: Config,
        *,
        device: str = "auto",
        seed: int = 0,
        micro_tokens: int = 4096,
        total_steps: int | None = None,
        reference: str | Path | torch.nn.Module | None = None,
        teacher: str | Path | torch.nn.Module | None = None,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)  # weights a directory lacks are drawn; nothing else here is random
        self.config, self.micro_tokens, self.total_steps = config, micro_tokens, total_steps
        self.device = torch.device(device)
        module, self.source = self._load(model)
        optim.select(module, config.trainable, config.frozen)
        self.adapters = Adapters(module, config.lora, seed=seed) if config.lora is not None else None
        optim.learning_rate(config, config.warmup_steps, total_steps)
        self.model = self.packed(
            module,
            dtype=config.dtype,
            chunk=config.head_chunk,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        self.replay = Replay(module) if config.replay_routes else None
        self.optimiser = optim.adamw(module, config)
        self.updates = 0  # optimiser updates that took place
        self.bad_updates = 0  # in a row
        for name, other in (("reference", reference), ("teacher", teacher)):
            if other is not None and other != model:
                check_vocabulary(name, other, model, len(module.get_input_embeddings().weight))
        # The model as it was handed over; with adapters off, this one is it.
        self.start = model
        own = reference is None or reference is model or (isinstance(model, str) and reference == model)
        self._sources = {"ref_logp": model if own else reference, "teacher_logp": teacher}
        self._frozen: dict[str, PackedModel] = {}

    def _load(self, model: str | Path | torch.nn.Module) -> tuple[Any, Path | None]:
        return load(model, self.device)

    # -- configuration ---------------------------------------------------------------------------

    def set(self, config: Config) -> None:
        """Go on under another configuration (a phase). What shapes the computation itself cannot change."""
        fixed = [
            k for k in ("dtype", "gradient_checkpointing") if getattr(config, k) != getattr(self.config, k)
        ]
        if fixed:
            raise ValueError(f"trainer.{fixed[0]} cannot change within a stage: start another stage")
        optim.learning_rate(config, config.warmup_steps, self.total_steps)
        moved = (config.trainable, config.frozen) != (self.config.trainable, self.config.frozen)
        if moved and self.adapters is None:
            optim.select(self.model.module, config.trainable, config.frozen)
        optim.configure(self.optimiser, config)
        self.model.head.set_chunk(config.head_chunk)
        self.config = config

    @property
    def context_limit(self) -> int:
        """Positions the model knows; no row may be longer."""
        return self.model.context

    def close(self) -> None:
        """Give back buffers and the frozen models. The trainer can go on afterwards."""
        self.model.head.release()
        self._frozen = {}

    # -- annotations -----------------------------------------------------------------------------

    @_subnormals_flushed()
    def annotate(
        self, batch: Batch, needs: Iterable[str], *, only_T: np.ndarray | None = None
    ) -> dict[str, float]:
        """Add the asked-for columns to `batch.annotations`; float32 (_T,), NaN where nothing is trained.

        `proximal_logp`: log-probabilities under the current weights, `ref_logp`: under the reference,
        `teacher_logp`: under the teacher; the frozen models' are left as they are where they are stored
        already. `only_T`, bool: the tokens that matter; rows that have none are not forwarded.
        """
        wanted = sorted(needs)
        unknown = sorted(set(wanted) - ANNOTATIONS)
        if unknown:
            raise ValueError(f"the trainer cannot compute {unknown}; it computes {sorted(ANNOTATIONS)}")
        begin = time.perf_counter()
        for name in wanted:
            if name == "proximal_logp":
                batch.annotations[name] = self._logprobs(self.model, batch, only_T)
            elif name not in batch.annotations:
                batch.annotations[name] = self._frozen_logprobs(name, batch, only_T)
        return {"train/annotate_s": time.perf_counter() - begin} if wanted else {}

    def _frozen_logprobs(self, name: str, batch: Batch, only_T: np.ndarray | None) -> np.ndarray:
        if self.adapters is not None and self._sources[name] is self.start:
            with self.adapters.off():
                return self._logprobs(self.model, batch, only_T)
        return self._logprobs(self._frozen_model(name), batch, only_T)

    def _frozen_model(self, name: str) -> PackedModel:
        """The model of an annotation, loaded when it is first asked for. ValueError when there is none."""
        if name not in self._frozen:
            source = self._sources[name]
            if source is None:
                raise ValueError(f"{name} is asked for, but the trainer was handed no teacher")
            if isinstance(source, torch.nn.Module):
                if source is self.model.module and self.updates:
                    raise RuntimeError(
                        "the reference would be a copy of weights that were already trained: hand Trainer "
                        "the `reference` it shall use"
                    )
                source = copy.deepcopy(source)
            module, _ = load(source, self.device)
            module.requires_grad_(False)
            for parameter in module.parameters():
                parameter.grad = None  # copied along
            options: dict[str, Any] = {"dtype": self.config.dtype, "chunk": self.config.head_chunk}
            self._frozen[name] = PackedModel(module, **options)
        return self._frozen[name]

    def _logprobs(self, model: PackedModel, batch: Batch, only_T: np.ndarray | None = None) -> np.ndarray:
        wanted = (batch.train_T > 0) & (batch.position_T > 0)
        wanted = wanted if only_T is None else wanted & only_T
        grid = self._plan(batch, wanted, np.arange(batch.rows))
        out = np.full(batch.tokens, np.nan, np.float32)
        with torch.no_grad():
            for micro in grid.micro:
                if model is self.model:
                    self._route(batch, micro)
                hidden = model.forward(*model.tokens(micro, batch.ids_T, batch.position_T))
                logp = model.head.logprobs(hidden, self._positions(batch, micro)).logp
                out[micro.target_N] = logp.float().cpu().numpy()
        if np.isnan(out[wanted]).any():
            raise TrainingDiverged(
                f"{self.outputs} of {int(np.isnan(out[wanted]).sum())} trained tokens are not a number: "
                f"the weights are broken; go back to the last checkpoint and lower trainer.lr"
            )
        return out

    def _route(self, batch: Batch, micro: MicroBatch) -> None:
        """Lay out the recorded routes for the next forward (and for what its backward computes again)."""
        if self.replay is None:
            return
        self.replay.routes = None
        if batch.routes_T is not None:
            layers, width = batch.routes_T.shape[1:]
            self.replay.fits(layers, width, int(batch.routes_T.max(initial=-1)))
            routes = batch.routes_T[micro.token_P].astype(np.int64)
            self.replay.routes = torch.from_numpy(routes).to(self.device)

    def _plan(self, batch: Batch, wanted_T: np.ndarray, unit_R: np.ndarray) -> Plan:
        return plan(
            ids_T=batch.ids_T if self.replay is None else routed_ids(batch),
            position_T=batch.position_T,
            row_start_R=batch.row_start_R,
            row_length_R=batch.row_length_R,
            unit_R=unit_R,
            wanted_T=wanted_T,
            micro_tokens=self.micro_tokens,
            share_prefix=self.config.share_prefix,
            ahead=self.ahead,
        )

    def _positions(self, batch: Batch, micro: MicroBatch, *, top: bool = False) -> Positions:
        def put(array: np.ndarray, dtype: Any) -> torch.Tensor:
            return torch.from_numpy(array.astype(dtype)).to(self.device)

        return Positions(
            put(micro.source_N, np.int64),
            put(batch.ids_T[micro.target_N], np.int64),
            put(batch.temperature_T[micro.target_N], np.float64).to(self.model.head.wide),
            self._entries(batch, micro) if top else None,
        )

    def _entries(self, batch: Batch, micro: MicroBatch) -> tuple[np.ndarray, torch.Tensor] | None:
        """The sampler's most probable tokens at the trained positions."""
        if batch.top is None:
            return None
        count_N = np.diff(batch.top.offset_T1)[micro.target_N]
        offset_N1 = np.concatenate([[0], np.cumsum(count_N)])
        index_E = np.repeat(batch.top.offset_T1[micro.target_N] - offset_N1[:-1], count_N)
        ids = batch.top.id_E[index_E + np.arange(int(offset_N1[-1]))].astype(np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.model.head.weight):
            raise ValueError(
                f"the sampler's top entries name token {ids.max() if ids.min() >= 0 else ids.min()}, and the "
                f"policy knows {len(self.model.head.weight)}: they were stored by another model's engine"
            )
        return offset_N1, torch.from_numpy(ids).to(self.device)

    # -- update ----------------------------------------------------------------------------------

    @_subnormals_flushed()
    def update(
        self, prepared: PreparedBatch, *, step: int, observe: Observe | None = None
    ) -> dict[str, float]:
        """One optimiser update; its metrics. An empty batch or a bad gradient leaves all as it was.

        `observe` is handed every trained token's log-probability under the weights before the update.

        Raises PlanError for a unit that does not fit `micro_tokens`, TrainingDiverged after
        `max_bad_updates` updates in a row whose loss or gradient norm was not finite.
        """
        streams = [stream for stream in prepared.streams if stream.spec.model == self.trains]
        wanted_T = np.any([np.zeros(prepared.batch.tokens, bool), *(s.active_T for s in streams)], axis=0)
        if not wanted_T.any():
            return {"train/skipped": 1.0, "train/loss": 0.0, "train/grad_norm": 0.0}
        begin = time.perf_counter()
        grid = self._plan(prepared.batch, wanted_T, units_of(prepared.batch, streams))
        clock = {"plan": time.perf_counter() - begin, "forward": 0.0, "backward": 0.0, "optim": 0.0}
        optim.clear_gradients(self.model.module)
        loss, stats, broken = 0.0, {}, None
        for micro in grid.micro:
            part, more = self._accumulate(prepared, streams, micro, clock, observe)
            loss += part
            if broken is None and not math.isfinite(part):
                broken = f"the loss of rows {int(micro.row_R[0])}..{int(micro.row_R[-1])} is {part}"
            merge(stats, more)
        start = time.perf_counter()
        parameters = [p for p in self.model.module.parameters() if p.requires_grad]
        norm = optim.gradient_norm(parameters)
        if broken is None and not math.isfinite(norm):
            broken = f"the gradient norm is {norm}"
        rate = optim.learning_rate(self.config, self.updates, self.total_steps)
        if broken is not None:
            self._refuse(step, broken)
        else:
            self._step(parameters, norm, rate)
        clock["optim"] = time.perf_counter() - start
        seconds = time.perf_counter() - begin
        return metrics(streams, stats) | {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/updates": float(self.updates),
            "train/bad_updates": float(self.bad_updates),
            "train/micro_batches": float(len(grid.micro)),
            "train/tokens_trained": float(grid.trained),
            "train/tokens_forwarded": float(grid.forwarded),
            "train/tokens_shared": float(grid.saved),
            "train/tokens_per_s": (grid.forwarded + grid.saved) / seconds,
            **{f"time/train_{name}_s": value for name, value in clock.items()},
        }

    def _accumulate(
        self,
        prepared: PreparedBatch,
        streams: list[Stream],
        micro: MicroBatch,
        clock: dict[str, float],
        observe: Observe | None,
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Forward and backward of one micro-batch; gradients are added up. (loss, statistics)."""
        begin = time.perf_counter()
        batch, head = prepared.batch, self.model.head
        self._route(batch, micro)
        hidden = self.model.forward(*self.model.tokens(micro, batch.ids_T, batch.position_T))
        top = any(stream.spec.top for stream in streams)
        at, start = self._positions(batch, micro, top=top), time.perf_counter()
        clock["forward"] += start - begin
        terms = Terms(prepared, streams, micro.target_N, observe)
        entropy = prepared.algorithm.entropy or "rollout" in prepared.algorithm.consumes
        states = hidden.detach()
        if any(stream.level == "unit" for stream in streams):
            whole = terms(slice(0, len(at)), head.logprobs(states, at, entropy=entropy))
            by_entropy = whole.entropy is not None
            d_hidden = head.backward(
                states, at, lambda part, _: cut(whole, at, part), entropy=by_entropy, keep=by_entropy
            )
        else:
            keep = prepared.algorithm.entropy
            d_hidden = head.backward(states, at, terms, entropy=entropy, keep=keep)
        if hidden.requires_grad:
            hidden.backward(d_hidden.to(hidden.dtype))
        clock["backward"] += time.perf_counter() - start
        return terms.loss, terms.stats

    def _step(self, parameters: list[torch.Tensor], norm: float, rate: float) -> None:
        if norm > self.config.clip_grad_norm:
            optim.scale_gradients(parameters, self.config.clip_grad_norm / norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.updates += 1
        self.bad_updates = 0

    def _refuse(self, step: int, what: str) -> None:
        """Leave weights and optimiser as they were; give up when it goes on."""
        self.bad_updates += 1
        bad = [
            n
            for n, p in self.model.module.named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        optim.clear_gradients(self.model.module)
        if self.bad_updates >= self.config.max_bad_updates:
            where = (
                f"; gradients that are not finite: {', '.join(bad[:4])} ({len(bad)} in all)" if bad else ""
            )
            raise TrainingDiverged(
                f"step {step}: {what}{where}. That was bad update {self.bad_updates} in a row "
                f"(trainer.max_bad_updates); the weights are those before them. Lower trainer.lr or "
                f"trainer.clip_grad_norm, or look at the samples of this step"
            )

    # -- weights ---------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All parameters by Hugging Face name (adapters too), by reference, tied ones once."""
        return {name: p.detach() for name, p in self.model.module.named_parameters()}

    def published_tensors(self) -> dict[str, torch.Tensor]:
        """The weights the policy computes with, by the names a model without adapters has."""
        own = self.state_tensors()
        return own if self.adapters is None else self.adapters.published(own)

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """The optimiser's state as `quantity/parameter`, by reference."""
        names = {id(p): name for name, p in self.model.module.named_parameters()}
        return optim.state_of(self.optimiser, names)

    def counters(self) -> dict[str, int]:
        """What else an exact continuation needs; JSON-able."""
        return {"updates": self.updates, "bad_updates": self.bad_updates}

    def load_state(
        self,
        weights: dict[str, torch.Tensor],
        optimiser: dict[str, torch.Tensor],
        counters: dict[str, int],
    ) -> None:
        """The inverse of `state_tensors`, `optimiser_tensors` and `counters`; weights are copied in place.

        Raises ValueError when names or shapes are another model's; the trainer is then as it was.
        """
        own = self._own(weights)
        optim.load_state(self.optimiser, own, optimiser)
        self.load_weights(weights)
        self.updates, self.bad_updates = int(counters["updates"]), int(counters["bad_updates"])

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """The inverse of `state_tensors`. Raises ValueError when names or shapes are another model's."""
        own = self._own(weights)
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(weights[name])

    def _own(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """This model's parameters, when `weights` have their names and shapes."""
        own = dict(self.model.module.named_parameters())
        if own.keys() != weights.keys():
            other = sorted(own.keys() ^ weights.keys())
            raise ValueError(f"the saved weights are another model's: {len(other)} names differ, {other[:3]}")
        for name, p in own.items():
            if p.shape != weights[name].shape:
                raise ValueError(f"{name} has shape {tuple(p.shape)}, saved is {tuple(weights[name].shape)}")
        return own

    def logprobs_of(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities (_T - 1,) of ids[1:] at temperature 1: the probe of a weight sync."""
        ids_T = np.asarray(ids)
        n = len(ids_T)
        if n < 2:
            raise ValueError(f"a probe needs at least 2 ids, got {n}: nothing predicts the first one")
        grid = plan(
            ids_T=ids_T,
            position_T=np.arange(n),
            row_start_R=np.zeros(1, np.int64),
            row_length_R=np.asarray([n]),
            unit_R=np.zeros(1, np.int64),
            wanted_T=np.arange(n) > 0,
            micro_tokens=n,
        )
        ids_N = torch.from_numpy(ids_T[1:].astype(np.int64)).to(self.device)
        if self.replay is not None:
            self.replay.routes = None
        with torch.no_grad():
            hidden = self.model.forward(*self.model.tokens(grid.micro[0], ids_T, np.arange(n)))
            source = torch.arange(n - 1, device=self.device)
            at = Positions(source, ids_N, torch.ones(n - 1, dtype=self.model.head.wide, device=self.device))
            logp = self.model.head.logprobs(hidden, at).logp
        return logp.cpu().numpy()

    def check_finite(self) -> None:
        """Raises TrainingDiverged where a weight is NaN or infinite: it must not reach a file."""
        bad = [name for name, tensor in self.state_tensors().items() if not tensor.isfinite().all()]
        if bad:
            raise TrainingDiverged(
                f"after {self.updates} updates weights are not finite: {', '.join(bad[:4])} "
                f"({len(bad)} in all); nothing is written, earlier checkpoints stand. Lower trainer.lr or "
                "trainer.weight_decay"
            )

    def export(self, directory: Path) -> Path:
        """Write a Hugging Face directory: weights, configuration, generation settings, tokenizer files.

        Adapters are merged into the weights; alone they stand in its folder `adapter`, as PEFT reads them.
        Raises TrainingDiverged for weights that are not finite.
        """
        self.check_finite()
        if self.adapters is None:
            self.model.export(Path(directory), self.source)
            return Path(directory)
        with self.adapters.folded():
            self.model.export(Path(directory), self.source)
        self.adapters.write(Path(directory) / "adapter", str(self.source or ""))
        return Path(directory)


def routed_ids(batch: Batch) -> np.ndarray:
    """int32 (_T,): a number for each (token, its routes). Rows that begin with the same tokens share their
    computation only as far as these went through the same experts."""
    if batch.routes_T is None:
        return batch.ids_T
    key_T = np.concatenate([batch.ids_T[:, None], batch.routes_T.reshape(batch.tokens, -1)], 1)
    return np.unique(key_T, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
