"""Scalar heads: values against the padded forward, gradients by hand, checkpoints, export, preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.algorithms import resolve
from trivet.algorithms.kinds.reward_model import last_trained
from trivet.algorithms.prepare import prepare
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import checkpoint, split
from trivet.trainer.batch import collate
from trivet.trainer.critic import ActorCritic, Critic
from trivet.trainer.scalar import RewardTrainer
from trivet.types import Group, IssueKey, Message, Rollout, Task, Termination, Trace, Unscored

STILL = Config(lr=1e-30, clip_grad_norm=1e30)
PPO = {"kind": "ppo", "credit": {"lam": 0.9, "gamma": 0.9}}


def scored(model: Any, *, seed: int = 5) -> Any:
    """The model with a score that is not 0: everything after the head then matters."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False, dtype=dtype)
    return model


def padded_values(model: Any, batch: Any, ahead: int) -> torch.Tensor:
    """(_T,) w h of the state before (`ahead` 1) or after (0) each token: one padded forward of the body."""
    width = int(batch.row_length_R.max())
    ids, mask = (torch.zeros(batch.rows, width, dtype=torch.long) for _ in range(2))
    for r, (start, n) in enumerate(zip(batch.row_start_R, batch.row_length_R, strict=True)):
        ids[r, :n] = torch.from_numpy(batch.ids_T[start : start + n].astype(np.int64))
        mask[r, :n] = 1
    hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    value = model.score(hidden)[..., 0]
    rows = []
    for r, n in enumerate(batch.row_length_R):
        rows.append(torch.cat([value.new_zeros(ahead), value[r, : n - ahead]]))
    return torch.cat(rows)


def pairs(count: int, *, seed: int, planted: bool = False) -> list[Group]:
    """Preferences over random answers; planted: the one with more tokens below 31 is chosen."""
    rng, out = np.random.default_rng(seed), []
    while len(out) < count:
        prompt = rng.integers(2, 61, 5).tolist()
        answers = [rng.integers(2, 61, rng.integers(4, 9) if not planted else 8) for _ in range(2)]
        low = [int((answer < 31).sum()) for answer in answers]
        if planted and low[0] == low[1]:
            continue
        if planted and low[0] < low[1]:
            answers.reverse()
        rollouts = []
        for attempt, (side, answer) in enumerate(zip(("chosen", "rejected"), answers, strict=True)):
            trace = Trace()
            node = trace.add(-1, prompt)
            node = trace.add(node, answer.tolist(), train=1.0)
            trace.add(node, [1])  # what the template puts behind a turn: not trained, not read
            rollouts.append(
                Rollout(
                    Task("t", (Message("user", "?"),)),
                    trace,
                    Unscored("not_scored"),
                    Termination.FINISHED,
                    attempt=attempt,
                    preference=side,
                )
            )
        out.append(Group(f"p{len(out)}", IssueKey(f"p{len(out)}", 0), rollouts, "preference"))
    return out


def ppo_batch(tools: Any, trainer: ActorCritic, seed: int = 0) -> Any:
    algorithm = resolve(PPO)
    batch = collate(tools.random_groups(3, seed=seed))
    trainer.annotate(batch, algorithm.annotations(2))
    return prepare(batch, algorithm)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("share", [True, False])
def test_values_are_those_of_the_state_before_the_token(tools: Any, family: str, share: bool) -> None:
    model = scored(tools.tiny_model(family))
    batch = collate(tools.random_groups())
    with torch.no_grad():
        expected = padded_values(model, batch, 1).numpy()
    config = STILL.model_copy(update={"share_prefix": share})
    value = Critic(model, config, device="cpu", micro_tokens=64).value(batch)
    trained = batch.train_T > 0
    assert value[trained] == pytest.approx(expected[trained], abs=1e-6)
    assert np.isnan(value[~trained]).all()


def test_a_new_critic_says_zero(tools: Any) -> None:
    batch = collate(tools.random_groups())
    value = Critic(tools.tiny_model(), STILL, device="cpu").value(batch)
    assert set(value[batch.train_T > 0]) == {0.0}


@pytest.mark.parametrize("micro_tokens", [50, 4096])
def test_the_value_loss_equals_its_padded_reference(tools: Any, micro_tokens: int) -> None:
    trainer = ActorCritic(
        tools.tiny_model(),
        STILL,
        critic=scored(tools.tiny_model(seed=1)),
        device="cpu",
        micro_tokens=micro_tokens,
    )
    prepared = ppo_batch(tools, trainer)
    batch, model = prepared.batch, trainer.critic.model.module
    # As if an earlier update had moved the critic: some values are outside the clip, on either side.
    batch.annotations["value"] += np.linspace(-0.6, 0.6, batch.tokens, dtype=np.float32)
    reference = scored(tools.tiny_model(seed=1))
    at = np.flatnonzero(batch.train_T > 0)
    v = padded_values(reference, batch, 1)[torch.from_numpy(at)]
    old = torch.from_numpy(batch.annotations["value"][at].astype(np.float64))
    target = torch.from_numpy(prepared.columns["return"][at])
    bounded = old + (v - old).clamp(-0.2, 0.2)
    loss = 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2).mean()
    loss.backward()
    expected = {n: g for n, g in tools.gradients(reference).items() if n != "lm_head.weight"}
    metrics = trainer.update(prepared, step=1)
    assert metrics["train/critic/loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert 0 < metrics["train/value/clipped"] < 1
    assert tools.worst_gap(tools.gradients(model), expected) < 1e-9


def test_the_policy_is_trained_as_without_a_critic(tools: Any) -> None:
    """The streams of one model do not reach into the other."""
    trainer = ActorCritic(tools.tiny_model(), STILL, device="cpu")
    prepared = ppo_batch(tools, trainer)
    metrics = trainer.update(prepared, step=1)
    with_critic = tools.gradients(trainer.model.module)
    assert metrics["train/critic/loss"] > 0
    at = np.flatnonzero(prepared.batch.train_T > 0)
    plain = tools.tiny_model()
    logp = tools.padded_logprobs(plain, prepared)[torch.from_numpy(at)]
    mu = torch.from_numpy(prepared.batch.logprob_T[at].astype(np.float64))
    factor = torch.exp(logp.detach() - mu).clamp(0.5, 2.0)
    advantage = torch.from_numpy(prepared.columns["advantage"][at])
    (-(factor * advantage * torch.exp(logp - logp.detach())).mean()).backward()
    assert tools.worst_gap(with_critic, tools.gradients(plain)) < 1e-6  # proximal_logp is float32


def make(tools: Any, seed: int = 0) -> ActorCritic:
    model = tools.tiny_model(dtype=torch.float32, seed=seed)
    config = Config(lr=0.01, critic_lr=0.02, schedule="cosine", warmup_steps=2)
    return ActorCritic(model, config, device="cpu", micro_tokens=64, total_steps=12)


def train(tools: Any, trainer: ActorCritic, steps: range) -> list[tuple[float, float]]:
    out = []
    for step in steps:
        for part in split(ppo_batch(tools, trainer, step), 2):
            metrics = trainer.update(part, step=step)
            out.append((metrics["train/loss"], metrics["train/critic/loss"]))
    return out


def test_resumed_run_is_bit_identical(tools: Any, tmp_path: Path) -> None:
    straight = make(tools)
    losses = train(tools, straight, range(5))
    first = make(tools)
    assert train(tools, first, range(2)) == losses[:4]
    checkpoint.write(tmp_path, 2, first, {"step": 2})
    second = make(tools, seed=9)  # other weights: all must come from the checkpoint
    found = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.read(found, second)
    assert train(tools, second, range(2, 5)) == losses[4:]
    for mine, theirs in ((second, straight), (second.critic, straight.critic)):
        one, other = mine.state_tensors(), theirs.state_tensors()
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_checkpoint_without_a_critic_is_refused(tools: Any) -> None:
    trainer = make(tools)
    policy = {n: v for n, v in trainer.counters().items() if not n.startswith("critic.")}
    with pytest.raises(ValueError, match="has no critic"):
        trainer.load_state(trainer.state_tensors(), {}, policy)


def test_the_critic_has_its_own_learning_rate_and_trains_all_of_itself(tools: Any) -> None:
    config = Config(lr=0.01, critic_lr=0.02, frozen=["*norm*"])
    trainer = ActorCritic(tools.tiny_model(dtype=torch.float32), config, device="cpu")
    metrics = trainer.update(ppo_batch(tools, trainer), step=1)
    assert (metrics["train/lr"], metrics["train/critic/lr"]) == (0.01, 0.02)
    assert all(p.requires_grad for p in trainer.critic.model.module.parameters())
    assert not all(p.requires_grad for p in trainer.model.module.parameters())
    trainer.set(config.model_copy(update={"critic_lr": None}))
    assert trainer.update(ppo_batch(tools, trainer), step=2)["train/critic/lr"] == 0.01


def test_a_bad_gradient_of_the_critic_leaves_the_critic_as_it_was(tools: Any) -> None:
    trainer = make(tools)
    prepared = ppo_batch(tools, trainer)
    prepared.streams[1].columns["return"][:] = np.inf
    before = {n: t.clone() for n, t in trainer.critic.state_tensors().items()}
    metrics = trainer.update(prepared, step=1)
    assert (metrics["train/bad_updates"], metrics["train/critic/bad_updates"]) == (0.0, 1.0)
    assert all(torch.equal(before[n], t) for n, t in trainer.critic.state_tensors().items())
    assert trainer.updates == 1


def test_a_critic_learns_what_is_to_come(tools: Any) -> None:
    """The same batch again and again: the values come to explain its returns."""
    trainer = make(tools)
    trainer.set(Config(lr=1e-9, critic_lr=0.01))
    explained = []
    for step in range(25):
        metrics = trainer.update(ppo_batch(tools, trainer), step=step)
        explained.append(metrics["train/critic/explained_variance"])
    assert explained[0] == pytest.approx(0.0)  # all values are 0
    assert explained[-1] > 0.9


# -- reward models -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
def test_preferences_equal_their_padded_reference(tools: Any, share: bool) -> None:
    model, reference = (scored(tools.tiny_model()) for _ in range(2))
    prepared = prepare(
        collate(pairs(5, seed=0)), resolve({"kind": "reward_model", "objective": {"margin": 0.3}})
    )
    batch = prepared.batch
    scores = padded_values(reference, batch, 0)[torch.from_numpy(np.flatnonzero(last_trained(batch)))]
    gap = scores[0::2] - scores[1::2]  # chosen, rejected, chosen, rejected ...
    loss = -torch.log(torch.sigmoid(gap - 0.3)).mean()
    loss.backward()
    expected = {n: g for n, g in tools.gradients(reference).items() if n != "lm_head.weight"}
    config = STILL.model_copy(update={"share_prefix": share})
    metrics = RewardTrainer(model, config, device="cpu", micro_tokens=64).update(prepared, step=1)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert metrics["train/accuracy"] == pytest.approx(float((gap > 0).double().mean()))
    assert metrics["train/margin"] == pytest.approx(float(gap.detach().mean()), rel=1e-9)
    assert tools.worst_gap(tools.gradients(model), expected) < 1e-9


def scores_of(trainer: RewardTrainer, groups: list[Group]) -> np.ndarray:
    batch = collate(groups)
    batch.train_T[:] = last_trained(batch)
    return trainer._logprobs(trainer.model, batch)[batch.train_T > 0]


def test_planted_preferences_are_learned(tools: Any) -> None:
    config = Config(lr=1e-2, warmup_steps=5, schedule="cosine")
    trainer = RewardTrainer(tools.tiny_model(dtype=torch.float32), config, device="cpu", total_steps=120)
    algorithm = resolve("reward_model")
    for step in range(120):
        trainer.update(prepare(collate(pairs(64, seed=step, planted=True)), algorithm), step=step)
    held = scores_of(trainer, pairs(300, seed=1000, planted=True))
    assert (held[0::2] > held[1::2]).mean() > 0.95


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_export_is_a_sequence_classifier(tools: Any, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = scored(tools.tiny_model(family, dtype=torch.float32, tie_word_embeddings=False))
    trainer = RewardTrainer(model, STILL, device="cpu")
    assert not any("lm_head" in name for name in trainer.state_tensors())
    groups = pairs(3, seed=0)
    expected = scores_of(trainer, groups)
    found, info = AutoModelForSequenceClassification.from_pretrained(
        trainer.export(tmp_path / "rm"), output_loading_info=True
    )
    assert not any(info.values())
    rows = [rollout.trace.rows()[0] for group in groups for rollout in group.rollouts]
    got = [found(input_ids=torch.from_numpy(row.ids_T[None, :-1].astype(np.int64))).logits for row in rows]
    assert torch.cat(got)[:, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    again = RewardTrainer(tmp_path / "rm", STILL, device="cpu")  # to train on, or as a critic's start
    assert scores_of(again, groups) == pytest.approx(expected, abs=1e-6)


def test_export_of_an_architecture_without_a_classifier(tools: Any, tmp_path: Path) -> None:
    import transformers as hf

    config = hf.OlmoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    trainer = RewardTrainer(scored(hf.OlmoeForCausalLM(config)), STILL, device="cpu")
    groups = pairs(3, seed=0)
    expected = scores_of(trainer, groups)
    directory = trainer.export(tmp_path / "rm")
    assert json.loads((directory / "reward_model.json").read_text())["class"] is None
    assert scores_of(RewardTrainer(directory, STILL, device="cpu"), groups) == pytest.approx(
        expected, abs=1e-6
    )
