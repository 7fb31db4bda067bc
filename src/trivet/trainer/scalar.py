"""One number per token: a linear head over a causal language model's body, and the trainer of such a model.

The body is packed, shared and proved as the policy's is (`PackedModel`); only what stands on it differs. The
head is `score`, a row of weights without a bias, 0 at first: that is what Hugging Face's sequence
classification with one label has, so a trained directory can be loaded by it where the architecture has such
a class.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trivet.algorithms.base import Model
from trivet.rewards.reward_model import CARD, stored_score
from trivet.trainer.fast import gradient_of
from trivet.trainer.head import Gradient, Positions, Read
from trivet.trainer.model import PackedModel, load
from trivet.trainer.trainer import Trainer


@dataclass
class ScalarHead:
    """v = w h for the asked-for positions; the interface of `Head`, with v in place of log p."""

    weight: torch.Tensor  # (1, hidden)
    dtype: torch.dtype
    bias: None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def set_chunk(self, positions: int) -> None:
        """A number per position needs no chunks."""

    def release(self) -> None:
        """There are no buffers."""

    @torch.no_grad()
    def logprobs(self, hidden_P: torch.Tensor, at: Positions, *, entropy: bool = False) -> Read:
        """v (_N,) in place of log p; there is no entropy."""
        return Read(self._rows(hidden_P, at) @ self.weight.detach()[0].to(self.wide))

    @torch.no_grad()
    def backward(
        self,
        hidden_P: torch.Tensor,
        at: Positions,
        gradient: Gradient,
        *,
        entropy: bool = False,
        keep: bool = False,
    ) -> torch.Tensor:
        """Adds to the weight's gradient; returns d loss / d hidden. `gradient` is called once, with all v."""
        rows, weight = self._rows(hidden_P, at), self.weight.detach()[0].to(self.wide)
        g = gradient(slice(0, len(at)), Read(rows @ weight)).logp.to(self.wide)
        if self.weight.requires_grad:
            gradient_of(self.weight).add_((g @ rows)[None].to(self.weight.dtype))
        d_hidden = torch.zeros(hidden_P.shape, dtype=self.wide, device=hidden_P.device)
        return d_hidden.index_add_(0, at.source_N, g[:, None] * weight)

    def _rows(self, hidden_P: torch.Tensor, at: Positions) -> torch.Tensor:
        return hidden_P.index_select(0, at.source_N).to(self.wide)


def load_scalar(model: str | Path | nn.Module, device: torch.device) -> tuple[Any, Path | None]:
    """`load`, with a `score` on the module: the one its directory holds (a reward model's), else zeros."""
    module, source = load(model, device)
    if getattr(module, "score", None) is None:
        weight = module.get_input_embeddings().weight
        module.score = nn.Linear(module.config.get_text_config().hidden_size, 1, bias=False)
        module.score.to(weight.device, weight.dtype)
        stored = None if source is None else stored_score(source)
        with torch.no_grad():
            if stored is None:
                module.score.weight.zero_()
            else:
                module.score.weight.copy_(stored)
    return module, source


class ScalarModel(PackedModel):
    """Hidden states of packed tokens as `PackedModel` gives them, and `ScalarHead` over them.

    The vocabulary projection serves the proof and is dropped then (tied to the embeddings it stays there).
    """

    head: ScalarHead  # type: ignore[assignment]

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        wide = module.score.weight.dtype == torch.float64
        self.head = ScalarHead(module.score.weight, torch.float64 if wide else self.compute)
        module.set_output_embeddings(nn.Identity())

    def _describe(self, directory: Path) -> None:
        """As sequence classification with one label, where the architecture has it; and the card."""
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
        )

        path = directory / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        name = CLASSES.get(config.get("model_type", ""))
        if name is not None:
            config["architectures"] = [name]
        config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
        if config.get("pad_token_id") is None:  # that class finds a row's end by it
            end = config.get("eos_token_id") or 0
            config["pad_token_id"] = end[0] if isinstance(end, list) else end
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        card = {"format": 1, "class": name, "reads": "the token that ends the last assistant message"}
        (directory / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


class ScalarTrainer(Trainer):
    """Trains the streams of model "critic" on a body with a scalar head."""

    trains: ClassVar[Model] = "critic"
    packed: ClassVar[type[PackedModel]] = ScalarModel
    outputs: ClassVar[str] = "values"

    def _load(self, model: str | Path | nn.Module) -> tuple[Any, Path | None]:
        return load_scalar(model, self.device)


class RewardTrainer(ScalarTrainer):
    """Trains a reward model: its score is read after the token that ends the answer.

    `export` writes a directory in the format of Hugging Face's AutoModelForSequenceClassification with one
    label where the architecture has that class (Llama, Qwen, Mistral, Gemma, ...); else the same safetensors
    under the causal model's configuration, with `score.weight` among them. `reward_model.json` beside them
    says where the score is read: both are loaded by `trivet.rewards.RewardModel`.
    """

    ahead: ClassVar[int] = 0
