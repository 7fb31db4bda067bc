"""A Hugging Face causal model made ready for packed training, and proof that packing does not change it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trivet.render.files import quiet
from trivet.trainer import attention, fast
from trivet.trainer.attention import AttentionPlan
from trivet.trainer.head import Head
from trivet.trainer.packing import MicroBatch, plan
from trivet.weights import moe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_MODEL_FILES = {"config.json", "generation_config.json"}


class ModelError(ValueError):
    """This model cannot be trained here; says what it does that packed training does not."""


def load(model: str | Path | nn.Module, device: torch.device) -> tuple[Any, Path | None]:
    """(the model in float32, or as handed over; its directory, where it has one).

    Master weights are float32 (a float64 model stays): a bfloat16 weight swallows most small updates.
    """
    import transformers

    source: Path | None = None
    if isinstance(model, str | Path):
        source = Path(model) if Path(model).is_dir() else None
        if source is None and isinstance(model, Path):
            raise ModelError(f"{model} is not a directory")
        with quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    elif Path(str(getattr(model, "name_or_path", ""))).is_dir() and getattr(model, "name_or_path", ""):
        source = Path(str(model.name_or_path))
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model = model.float()
    return cast(Any, model).to(device), source


class PackedModel:
    """Hidden states of packed tokens, and the head over them.

    `dtype` "bfloat16" computes under autocast with float32 master weights. The module stays in evaluation
    mode: dropout would make the first ratio differ from 1.
    """

    def __init__(
        self, module: Any, *, dtype: str = "float32", chunk: int = 1024, gradient_checkpointing: bool = False
    ) -> None:
        self.module = module
        self.device = next(module.parameters()).device
        self.compute = _DTYPES[dtype]
        self.eager = getattr(module.config, "_attn_implementation", None) or "eager"
        attention.register()
        module.eval()
        self.body = module.get_decoder()
        projection = module.get_output_embeddings()
        if self.body is module or not isinstance(projection, nn.Linear):
            raise ModelError(
                f"{type(module).__name__} is not a causal language model with a linear output projection"
            )
        wide = projection.weight.dtype == torch.float64
        self.head = Head(projection.weight, projection.bias, chunk, torch.float64 if wide else self.compute)
        fast.replace_norms(module)
        fast.replace_mlps(module)
        self._prove()
        self._checkpoint_layers(gradient_checkpointing)

    @property
    def context(self) -> int:
        """Positions the model knows."""
        config = self.module.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 31)

    @property
    def half(self) -> bool:
        """Layers are computed in half precision."""
        return self.compute != torch.float32 and self.head.dtype != torch.float64

    def forward(
        self,
        ids_P: torch.Tensor,
        position_P: torch.Tensor,
        layout: AttentionPlan,
        *,
        half: bool | None = None,
    ) -> torch.Tensor:
        """Last hidden states (_P, hidden), after the final norm. `half`: default as the model is set."""
        half = self.half if half is None else half
        with torch.autocast(self.device.type, self.compute) if half else nullcontext():
            rows = fast.embed(self.module.get_input_embeddings(), ids_P)
            out = self.body(
                inputs_embeds=rows[None],
                position_ids=position_P[None],
                use_cache=False,
                trivet_plan=layout,
            )
        return out.last_hidden_state[0]

    def tokens(
        self, micro: MicroBatch, ids_T: np.ndarray, position_T: np.ndarray
    ) -> tuple[Any, Any, AttentionPlan]:
        """What `forward` takes, for one micro-batch."""
        ids = torch.from_numpy(ids_T[micro.token_P].astype(np.int64)).to(self.device)
        position = torch.from_numpy(position_T[micro.token_P].astype(np.int64)).to(self.device)
        return ids, position, AttentionPlan(micro, self.device)

    def _checkpoint_layers(self, on: bool) -> None:
        """transformers recomputes a layer only in training mode: the flag is set on the layers alone."""
        if not on:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        name = "activation_checkpointing_enable"  # its name from transformers 5.20 on
        enable = getattr(self.module, name, None) or self.module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        layers = [m for m in self.module.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(f"{type(self.module).__name__} has no layers that transformers can recompute")
        for layer in layers:
            cast(Any, layer)._gradient_checkpointing_func = _Again(layer)
            layer.training = True

    def _prove(self) -> None:
        """Packed rows that share and rows side by side give the logits of the model's own forward.

        In float32 first, whatever the training's precision: bfloat16's bound is too wide to tell. A mixture
        of experts goes in bfloat16 through those of its own forward: another choice is a rounding's work.
        """
        vocabulary = len(self.head.weight)
        ids = np.random.default_rng(0).integers(0, vocabulary, 24)
        rows = [ids[:9], np.r_[ids[:5], ids[9:14]], np.r_[ids[:7], ids[14:17]], ids[17:24]]
        own, routes = self._own_logits(rows)
        self.module.set_attn_implementation(attention.NAME)
        start = np.cumsum([0, *map(len, rows)])
        flat, position = np.concatenate(rows), np.concatenate([np.arange(len(r)) for r in rows])
        expected = torch.cat([logits_T[:-1] for logits_T in own])
        for half in (False, True) if self.half else (False,):
            for share in (True, False):
                logits = self._packed_logits(flat, position, start, half, share, routes if half else None)
                gap = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
                if not gap < (0.1 if half else 1e-3):
                    raise self._differs(gap)

    def _differs(self, gap: float) -> ModelError:
        return ModelError(
            f"{type(self.module).__name__}: packed logits differ from the model's own by {gap:.1e} "
            f"(relative): its layers or its head do more than packed training computes (soft-capped or "
            f"scaled logits, position biases, attention sinks, recurrent layers); train a model without "
            f"them"
        )

    @torch.no_grad()
    def _packed_logits(
        self,
        flat: np.ndarray,
        position: np.ndarray,
        start: np.ndarray,
        half: bool,
        share: bool,
        routes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits (_N, _V) float64 that predict tokens 1.. of each row; rows begin at `start` (_R + 1,).
        `routes`: experts to go through, as in `moe.Replay`."""
        grid = plan(
            ids_T=flat,
            position_T=position,
            row_start_R=start[:-1],
            row_length_R=np.diff(start),
            unit_R=np.zeros(len(start) - 1, np.int64),
            wanted_T=position > 0,
            micro_tokens=len(flat),
            share_prefix=share,
        )
        (micro,) = grid.micro
        at = torch.from_numpy(micro.token_P).to(self.device)
        replay = None if routes is None else moe.Replay(self.module, routes[at])
        hidden = self.forward(*self.tokens(micro, flat, position), half=half)
        if replay is not None:
            replay.remove()
        picked = hidden[torch.from_numpy(micro.source_N).to(self.device)]
        weight, bias = self.head.weight, self.head.bias
        return nn.functional.linear(picked.to(weight.dtype), weight, bias).double().cpu()

    @torch.no_grad()
    def _own_logits(self, rows: list[np.ndarray]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Logits of the model's own forward, row by row, and the experts it chose where it is known to."""
        own = self.eager if self.eager != attention.NAME else "sdpa"
        self.module.set_attn_implementation(own)
        recorder = moe.Recorder(self.module) if moe.known(self.module) else None
        logits, routes = [], []
        for row in rows:
            ids = torch.from_numpy(row)[None].to(self.device)
            logits.append(self.module(input_ids=ids, use_cache=False).logits[0].double().cpu())
            if recorder is not None:
                routes.append(recorder.take())
        if recorder is None:
            return logits, None
        recorder.remove()
        return logits, torch.cat(routes)

    def export(self, directory: Path, source: Path | None) -> None:
        """Write a Hugging Face directory: weights, configuration, and the tokenizer's files from `source`.

        It appears whole or not at all; one that is there is replaced.
        """
        partial = directory.with_name(f".partial_{directory.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.module.set_attn_implementation("sdpa" if self.eager == attention.NAME else self.eager)
        try:
            with quiet():
                self.module.save_pretrained(str(partial), safe_serialization=True)
            self._describe(partial)
        finally:
            self.module.set_attn_implementation(attention.NAME)
        for file in sorted(source.iterdir()) if source is not None else []:
            other = file.suffix in _WEIGHTS or file.name in _MODEL_FILES or file.name.endswith(".index.json")
            if file.is_file() and not other:
                shutil.copy2(file, partial / file.name)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)

    def _describe(self, directory: Path) -> None:
        """What a model of another kind has to say in the directory's configuration."""


class _Again:
    """Computes a layer now and again in the backward pass, with its dropout off both times."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(self._plain, function, *args, use_reentrant=False)

    def _plain(self, function: Callable[..., Any], *args: Any) -> Any:
        self.layer.training = False
        try:
            return function(*args)
        finally:
            self.layer.training = True
