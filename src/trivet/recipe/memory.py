"""What a stage keeps in memory, estimated from a model's shape alone: no torch, no weights read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trivet.recipe.schema import Lora, Recipe, Stage, TinyModel

BYTES = {"float32": 4, "bfloat16": 2}
_PROMPT = 256  # tokens assumed for a prompt whose length is not known
_TINY_SPECIAL = 8  # tokens of the tiny model's tokenizer besides its alphabet


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a dense decoder with grouped-query attention and a gated MLP (Llama, Qwen, ...)."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    context: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False

    @property
    def parameters(self) -> int:
        """Embedding (and head, unless tied), per layer q, k, v, o, gate, up, down and the norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        attention += 2 * self.head_dim if self.qk_norm else 0
        attention += queries + 2 * keys if self.attention_bias else 0
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def adapters(self, lora: Lora) -> int:
        """Numbers in the adapters: rank * (in + out) per adapted layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = {"q_proj": queries, "o_proj": queries, "k_proj": keys, "v_proj": keys}
        wide |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.mlp)
        hit = [
            size
            for name, size in wide.items()
            if not lora.targets or any(name == t or fnmatchcase(f"model.{name}", t) for t in lora.targets)
        ]
        return self.layers * lora.rank * sum(size + self.hidden for size in hit)

    @property
    def cached_per_token(self) -> int:
        """Numbers the engine caches per token: a key and a value per layer and key-value head."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From a Hugging Face `config.json`; None for what this estimate does not cover (experts, others)."""
        config = config.get("text_config") or config
        if any("expert" in key for key in config):
            return None
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            kind = str(config.get("model_type", ""))
            return cls(
                vocabulary=int(config["vocab_size"]),
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                mlp=int(config["intermediate_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                context=config.get("max_position_embeddings"),
                qk_norm=kind.startswith("qwen3"),
                attention_bias=bool(config.get("attention_bias", kind.startswith("qwen2"))),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @classmethod
    def from_tiny(cls, tiny: TinyModel) -> ModelShape:
        return cls(
            vocabulary=len(set(tiny.alphabet)) + _TINY_SPECIAL,
            hidden=tiny.hidden,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            head_dim=tiny.hidden // tiny.heads,
            mlp=tiny.mlp,
            tied=True,
            context=tiny.context,
            qk_norm=True,
        )


def model_type(recipe: Recipe) -> str | None:
    """What the policy's own configuration calls its family, where it is a local directory."""
    try:
        config = json.loads((Path(str(recipe.policy.model)) / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def policy_shape(recipe: Recipe) -> ModelShape | None:
    """The policy's shape where it can be known without a download: a tiny model, or a local directory."""
    model = recipe.policy.model
    if isinstance(model, TinyModel):
        return ModelShape.from_tiny(model)
    try:
        return ModelShape.from_config(json.loads((Path(model) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return None


def memory_parts(
    recipe: Recipe, stage: Stage, shape: ModelShape, reference: bool = False, critic: bool = False
) -> dict[str, int]:
    """Bytes by what they are for; activations come on top and depend on `batch.micro_tokens`.

    `reference`: the trainer keeps a frozen copy of the policy. `critic`: it trains one of the policy's size.
    """
    parts: dict[str, int] = {}
    if stage.mode != "bench":
        trained = BYTES[stage.trainer.dtype]
        parts["trainer: weights"] = shape.parameters * trained
        moving = shape.parameters
        if stage.trainer.lora is not None:
            moving = shape.adapters(stage.trainer.lora)
            parts["trainer: adapters"] = moving * trained
            parts["trainer: merged weights, when they are published"] = shape.parameters * trained
            reference = reference and "reference" in recipe.models  # else: the adapters off
        parts["trainer: gradients"] = moving * trained
        parts["trainer: optimiser (two moments)"] = moving * 8
        if reference:
            parts["trainer: reference policy"] = shape.parameters * trained
        if critic:
            parts["trainer: critic, its gradients and moments"] = shape.parameters * (2 * trained + 8)
        head = 2 * 4 * stage.trainer.head_chunk * shape.vocabulary
        parts["trainer: one chunk of logits and its gradient"] = head
    if stage.mode != "train" or stage.eval.tasks:
        sampled = BYTES[recipe.policy.dtype]
        context = engine_context(stage, shape)
        parts["engine: weights"] = shape.parameters * sampled
        cache = stage.engine.slots * context * shape.cached_per_token * sampled
        parts[f"engine: key-value cache ({stage.engine.slots} slots x {context} tokens)"] = cache
    return parts


def engine_context(stage: Stage, shape: ModelShape | None) -> int:
    """Tokens per slot: what is asked for, else the longest answer and an assumed prompt."""
    answer = max(s.max_tokens for s in (stage.sampling, stage.eval.sampling) if s is not None)
    wanted = stage.engine.context or answer + _PROMPT
    return min(wanted, shape.context) if shape and shape.context else wanted


def human_bytes(count: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
