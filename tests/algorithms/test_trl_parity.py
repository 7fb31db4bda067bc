"""The same tokens, weights, advantages and old log-probabilities through TRL's own loss and through ours.

A tiny random Llama; TRL's `GRPOTrainer._compute_loss` on prepared, padded inputs, and `stream_loss` on
log-probabilities of the same model, row by row. Old log-probabilities differ from the present ones, so that
ratios are not 1 and clips take effect.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trivet.algorithms import finalise, merge, prepare, resolve, stream_loss
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

VOCABULARY, LONGEST, GROUPS, SIZE = 32, 12, 2, 4


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Any:
    """TRL's trainer, one batch in its padded form and in ours, and the old log-probabilities."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=LONGEST,
        steps_per_generation=1,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * GROUPS),
        processing_class=tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # what its training loop sets
    trainer.model.train()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 3 + g).tolist() for g in range(GROUPS)]
    answers = [rng.integers(3, VOCABULARY, n).tolist() for n in (3, 12, 7, 1, 9, 5, 2, 12)]
    rewards = rng.normal(size=len(answers))
    longest = max(map(len, prompts))
    shape = (len(answers), LONGEST)
    ids, mask, asked, seen = _padded(prompts, answers, longest)
    given = {
        "prompt_ids": asked,
        "prompt_mask": seen,
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        now = torch.zeros(shape)
        for r, answer in enumerate(answers):
            now[r, : len(answer)] = logp_of(trainer.model, prompts[r // SIZE], answer)
    noise = torch.from_numpy(rng.normal(0, 0.4, shape)).float()
    given["old_per_token_logps"] = (now + noise).clamp(max=-1e-3) * mask
    far = torch.from_numpy(rng.normal(0, 0.4, shape)).float()
    given["ref_per_token_logps"] = (now + far).clamp(max=-1e-3) * mask
    batch = _batch(prompts, answers, rewards, given)
    return SimpleNamespace(trainer=trainer, given=given, batch=batch, prompts=prompts, answers=answers)


def _padded(prompts: list[list[int]], answers: list[list[int]], longest: int) -> tuple[Any, ...]:
    """(completion ids, mask, prompt ids, mask): prompts padded on the left, completions on the right."""
    ids, mask = (torch.zeros((len(answers), LONGEST), dtype=torch.int64) for _ in range(2))
    asked, seen = (torch.zeros((len(answers), longest), dtype=torch.int64) for _ in range(2))
    for r, answer in enumerate(answers):
        prompt = prompts[r // SIZE]
        ids[r, : len(answer)], mask[r, : len(answer)] = torch.tensor(answer), 1
        asked[r, -len(prompt) :], seen[r, -len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask, asked, seen


def _batch(prompts: list[list[int]], answers: list[list[int]], rewards: Any, given: Any) -> Any:
    """The same rollouts as groups of ours; old log-probabilities as the sampler's and as proximal."""
    groups = []
    for g, prompt in enumerate(prompts):
        rollouts = []
        for a in range(SIZE):
            r, trace = g * SIZE + a, Trace()
            old = given["old_per_token_logps"][r, : len(answers[r])].tolist()
            trace.add_sampled(trace.add(-1, prompt), answers[r], old, 0)
            task = Task("parity", (Message("user", "?"),))
            rollouts.append(Rollout(task, trace, Scored(rewards[r]), Termination.FINISHED, attempt=a))
        groups.append(Group(f"g{g}", IssueKey(f"g{g}", 0), rollouts))
    batch = collate(groups)
    for ours, theirs in (("proximal_logp", "old_per_token_logps"), ("ref_logp", "ref_per_token_logps")):
        column = np.zeros(batch.tokens)
        for r, answer in enumerate(answers):
            column[(batch.rollout_T == r) & batch.sampled_T] = (
                given[theirs][r, : len(answer)].double().numpy()
            )
        batch.annotations[ours] = column
    return batch


def logp_of(model: Any, prompt: list[int], answer: list[int]) -> Any:
    """Log-probabilities of an answer's tokens, forwarded alone."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def gradients(model: Any) -> dict[str, Any]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "grpo"}, {"loss_type": "grpo"}),
    ({"kind": "grpo", "objective": {"dual": 1.3}}, {"loss_type": "grpo", "delta": 1.3}),
    ({"kind": "grpo", "kl": "k3", "kl_weight": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    (
        {"kind": "grpo", "kl": {"estimator": "k3", "weigh": True}, "kl_weight": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "weigh": True},
    ),
    ({"kind": "dr_grpo", "length": LONGEST}, {"loss_type": "dr_grpo"}),
    ({"kind": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ({"kind": "cispo", "bounds": [0.0, 1.3]}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    (
        {"kind": "gspo", "clip": [0.05, 0.08]},
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    ),
    ({"kind": "sapo"}, {"loss_type": "sapo"}),
]


@pytest.mark.parametrize(("spec", "theirs"), CASES, ids=[str(spec) for spec, _ in CASES])
def test_losses_and_gradients_equal_trl(world, spec, theirs):
    trainer, model = world.trainer, world.trainer.model
    prepared = prepare(world.batch, resolve({**spec, "tis": None}))
    column = prepared.columns["advantage"]
    advantage = [float(column[(world.batch.rollout_T == r) & world.batch.sampled_T][0]) for r in range(8)]
    _configure(trainer, theirs)
    model.zero_grad()
    given = {**world.given, "advantages": torch.tensor(advantage)}
    expected = trainer._compute_loss(model, given)
    expected.backward()
    their_gradients = gradients(model)

    model.zero_grad()
    index = np.flatnonzero(prepared.trained_T)
    by_rollout = [logp_of(model, world.prompts[r // SIZE], answer) for r, answer in enumerate(world.answers)]
    assert len(index) == sum(map(len, world.answers))
    logp, stats = torch.cat(by_rollout), {}
    loss = torch.zeros(())
    for stream in prepared.streams:
        part, more = stream_loss(prepared, stream, index, logp)
        loss, stats = loss + part, merge(stats, more)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    mine = gradients(model)
    assert mine.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(
            mine[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert max(g.abs().max() for g in mine.values()) > 0.01
    if spec["kind"] != "sapo":  # it has no clip
        assert finalise(stats)["pg/clipped"] > 0.1


def _configure(trainer: Any, theirs: dict[str, Any]) -> None:
    trainer.loss_type = theirs["loss_type"]
    trainer.importance_sampling_level = theirs.get("level", "token")
    trainer.epsilon_low, trainer.epsilon_high = (
        theirs.get("epsilon_low", 0.2),
        theirs.get("epsilon_high", 0.2),
    )
    trainer.beta = theirs.get("beta", 0.0)
    trainer.args.delta = theirs.get("delta")
    trainer.args.use_bias_correction_kl = theirs.get("weigh", False)
