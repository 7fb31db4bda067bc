"""Tiny models and hand-made batches for the trainer's tests, and a slow, padded, plain reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trivet.algorithms import resolve
from trivet.algorithms.prepare import prepare
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

VOCABULARY = 61


class PlainNorm(torch.nn.Module):
    """RMS norm in the dtype of its input. transformers' own rounds to float32 inside, also in a float64
    model: two ways of computing one number then differ by a float32 step now and then."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight.clone()), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def tiny_model(
    family: str = "qwen3", *, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any
) -> Any:
    """A random causal model of two layers; weights large enough that positions differ clearly."""
    import transformers as hf

    names = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = getattr(hf, f"{names[family]}Config")(**{**shape, **more})
    torch.manual_seed(seed)
    model = getattr(hf, f"{names[family]}ForCausalLM")(config).to(dtype)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    norm = PlainNorm(torch.rand_like(child.weight) + 0.5, child.variance_epsilon)
                    setattr(parent, name, norm)
    return model


def rl_group(
    index: int,
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    rewards: Sequence[float],
    *,
    temperature: float = 1.0,
    logprobs: Sequence[Sequence[float]] | None = None,
) -> Group:
    """One prompt, sampled answers (behaviour log-probability -1 each unless given), rewards."""
    task, rollouts = Task("test", (Message("user", "?"),)), []
    for attempt, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
        trace = Trace()
        root = trace.add(-1, list(prompt))
        behaviour = logprobs[attempt] if logprobs is not None else [-1.0] * len(answer)
        trace.add_sampled(root, list(answer), behaviour, 0, temperature=temperature)
        rollouts.append(Rollout(task, trace, Scored(reward), Termination.FINISHED, attempt=attempt))
    return Group(f"g{index}", IssueKey(f"t{index}", 0), rollouts)


def random_groups(
    groups: int = 4, size: int = 4, *, seed: int = 0, longest: int = 14, temperature: float = 1.0
) -> list[Group]:
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        prompt = rng.integers(2, VOCABULARY, rng.integers(3, 11)).tolist()
        answers = [rng.integers(2, VOCABULARY, rng.integers(1, longest)).tolist() for _ in range(size)]
        rewards = rng.integers(0, 2, size).astype(float)
        rewards[0], rewards[-1] = 0.0, 1.0
        behaviour = [(-rng.uniform(3.0, 5.0, len(a))).tolist() for a in answers]
        out.append(
            rl_group(g, prompt, answers, rewards.tolist(), temperature=temperature, logprobs=behaviour)
        )
    return out


def sft_groups(examples: int = 6, *, seed: int = 0, longest: int = 20) -> list[Group]:
    """Prompts and answers of random length; some tokens weigh less, some answers carry two turns."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(examples):
        trace = Trace()
        node = trace.add(-1, rng.integers(2, VOCABULARY, rng.integers(1, 9)).tolist())
        for _ in range(int(rng.integers(1, 3))):
            n = int(rng.integers(1, longest))
            node = trace.add(node, rng.integers(2, VOCABULARY, n).tolist(), train=rng.choice([0.5, 1.0], n))
            node = trace.add(node, rng.integers(2, VOCABULARY, 2).tolist())
        rollout = Rollout(
            Task("test", (Message("user", "?"),)), trace, Scored(0.0), Termination.FINISHED, source="expert"
        )
        out.append(Group(f"e{i}", IssueKey(f"e{i}", 0), [rollout], "sft"))
    return out


def make_prepared(groups: list[Group], algorithm: Any = "grpo") -> Any:
    return prepare(collate(groups), resolve(algorithm))


def padded_logprobs(model: Any, prepared: Any) -> torch.Tensor:
    """log p (_T,) of every token: one padded batch, the model's own forward, full log-softmax, autograd."""
    batch = prepared.batch
    width = int(batch.row_length_R.max())
    ids = torch.zeros(batch.rows, width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for r, (start, n) in enumerate(zip(batch.row_start_R, batch.row_length_R, strict=True)):
        ids[r, :n] = torch.from_numpy(batch.ids_T[start : start + n].astype(np.int64))
        mask[r, :n] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    out = []
    for r, (start, n) in enumerate(zip(batch.row_start_R, batch.row_length_R, strict=True)):
        temperature = torch.from_numpy(batch.temperature_T[start + 1 : start + n]).to(logits.dtype)
        logp = torch.log_softmax(logits[r, : n - 1] / temperature[:, None], -1)
        out += [logits.new_zeros(1), logp.gather(1, ids[r, 1:n, None])[:, 0]]
    return torch.cat(out)


def padded_loss(model: Any, prepared: Any, formula: Callable[..., torch.Tensor]) -> float:
    """Loss of `formula(logp_T, prepared)` with its gradient left in the parameters."""
    for p in model.parameters():
        p.grad = None
    loss = formula(padded_logprobs(model, prepared), prepared)
    loss.backward()
    return float(loss.detach())


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors, relative to the largest entry of `b`."""
    assert a.keys() == b.keys()
    scale = max(float(t.abs().max()) for t in b.values())
    return max(float((a[n] - b[n]).abs().max()) for n in b) / scale


@pytest.fixture
def tools() -> Any:
    """The helpers above, as one namespace (test modules are not importable from each other)."""
    import types

    names = (
        tiny_model,
        padded_logprobs,
        rl_group,
        random_groups,
        sft_groups,
        make_prepared,
        padded_loss,
        gradients,
        worst_gap,
    )
    return types.SimpleNamespace(**{f.__name__: f for f in names}, vocabulary=VOCABULARY)
