"""Tiny random models of several families, and engines that are closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trivet.engine.torch import TorchEngine

VOCAB = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _make(kind: str) -> Any:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SHAPE))
    if kind == "llama-biased-tied-scaled":
        extra = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, **extra, rope_parameters=_LLAMA3_ROPE))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**_SHAPE))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16))
    if kind == "qwen3-tied":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True))
    if kind == "mistral-window":
        return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=21))
    if kind == "qwen2-window":
        window = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
        return Qwen2ForCausalLM(Qwen2Config(**_SHAPE, **window))
    if kind == "gemma3-window":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=21, layer_types=layers)
        return Gemma3ForCausalLM(config)
    small = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**small, n_embd=32, n_layer=2, n_head=4, n_positions=1024))
    if kind == "gpt-neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**_SHAPE))
    if kind == "bloom":
        return BloomForCausalLM(BloomConfig(**small, hidden_size=32, n_layer=2, n_head=4))
    raise KeyError(kind)


def make_model(kind: str, seed: int = 0) -> Any:
    """A random model in evaluation mode with weights large enough for distributions worth sampling."""
    torch.manual_seed(seed)
    model = _make(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def full_logprobs(model: Any, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """(_T - 1,) log-probabilities of ids[1:] by the model's own full forward."""
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        logits = model(input_ids=row[None], use_cache=False).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0].numpy()


@pytest.fixture(scope="session")
def models() -> Callable[..., Any]:
    """models(kind, seed=0): one instance each, shared; do not change it."""
    made: dict[tuple[str, int], Any] = {}

    def get(kind: str, seed: int = 0) -> Any:
        if (kind, seed) not in made:
            made[kind, seed] = make_model(kind, seed)
        return made[kind, seed]

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    return full_logprobs


@pytest.fixture
def engines() -> Iterator[Callable[..., TorchEngine]]:
    """engines(model, **settings): closed at the end of the test."""
    made: list[TorchEngine] = []

    def make(model: Any, **settings: Any) -> TorchEngine:
        settings = {"slots": 4, "context": 128, "device": "cpu", "request_timeout_s": 60.0, **settings}
        made.append(TorchEngine(model, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def prompt() -> Callable[..., np.ndarray]:
    """prompt(length, seed=0): random ids."""

    def make(length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)

    return make
