"""Routing replay: recorded experts take the place of the router's choice, its own weights stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.algorithms import AlgorithmError, prepare, resolve
from trivet.buffer import AttachmentStore
from trivet.engine.base import Sampling
from trivet.engine.torch import TorchEngine
from trivet.recipe.schema import Trainer as Config
from trivet.trainer.batch import collate
from trivet.trainer.critic import ActorCritic
from trivet.trainer.trainer import Trainer
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace
from trivet.weights.moe import FAMILIES, Recorder, Replay, RoutingError

VOCABULARY, EXPERTS, CHOSEN = 61, 8, 2
NAMES = ("Qwen3Moe", "Olmoe", "Mixtral", "Glm4Moe")


def tiny(family: str, *, close: bool = False, seed: int = 0) -> Any:
    """Two layers of eight experts, two chosen; `close`: router logits that a rounding reorders."""
    import transformers as hf

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": CHOSEN,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**shape))
    with torch.no_grad():
        for part in model.modules():
            if type(part).__name__ in FAMILIES:
                part.weight.normal_(0, 0.003 if close else 0.5)
                if hasattr(part, "e_score_correction_bias") and not close:
                    part.e_score_correction_bias.normal_(0, 0.3)  # affects the choice only
    return model.eval()


def rollout(
    ids: list[int], logprob: np.ndarray, routes: np.ndarray | None, store: Any, attempt: int
) -> Rollout:
    trace = Trace()
    node = trace.add_sampled(trace.add(-1, ids[:4]), ids[4:], logprob, 0)
    if routes is not None:
        trace.attach(node, store.put(routes, "routes", 0, len(ids) - 4))
    task = Task("t", (Message("user", "?"),))
    return Rollout(task, trace, Scored(float(attempt % 2)), Termination.FINISHED, attempt=attempt)


def batch_of(store: Any, routes: Any, n: int = 6, rollouts: int = 2) -> Any:
    rng = np.random.default_rng(0)
    made = []
    for attempt in range(rollouts):
        ids = rng.integers(2, VOCABULARY, 4 + n).tolist()
        ids[:4] = [5, 6, 7, 8]
        given = routes(rng, n) if callable(routes) else routes
        made.append(rollout(ids, np.full(n, -1.0, np.float32), given, store, attempt))
    return collate([Group("g", IssueKey("g", 1), made)], needs={"routes"}, attachments=store)


def some_routes(rng: np.random.Generator, n: int) -> np.ndarray:
    out = np.stack([[rng.choice(EXPERTS, CHOSEN, replace=False) for _ in range(2)] for _ in range(n)])
    out[-1] = np.iinfo(np.uint8).max
    return out.astype(np.uint8)


@pytest.mark.parametrize("family", NAMES)
def test_replaying_ones_own_choice_changes_nothing(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(2, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    recorder = Recorder(model)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        own = recorder.take()
        replay = Replay(model, own)
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, atol=1e-5)
        replay.routes = (own + 1) % EXPERTS
        other = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(recorder.take(), (own + 1) % EXPERTS)
        assert (other - plain).abs().max() > 1e-2
        replay.routes = torch.full_like(own, -1)
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, atol=1e-5)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("share", [True, False])
def test_the_trainer_goes_through_the_recorded_experts(family: str, share: bool, tmp_path: Path) -> None:
    """Packed log-probabilities equal the model's own padded forward under the same routes."""
    batch = batch_of(AttachmentStore(tmp_path), some_routes)
    trainer = Trainer(tiny(family), Config(replay_routes=True, share_prefix=share))
    trainer.annotate(batch, {"proximal_logp"})
    plain = tiny(family)
    replay = Replay(plain)
    for r in range(batch.rows):
        span = slice(int(batch.row_start_R[r]), int(batch.row_start_R[r] + batch.row_length_R[r]))
        ids = torch.from_numpy(batch.ids_T[span].astype(np.int64))
        replay.routes = torch.from_numpy(batch.routes_T[span].astype(np.int64))
        with torch.no_grad():
            full = torch.log_softmax(plain(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
        expected = full.gather(1, ids[1:, None])[3:, 0].numpy()
        assert np.allclose(batch.annotations["proximal_logp"][span][4:], expected, atol=1e-4)


def test_equal_answers_through_different_experts_are_not_shared(tmp_path: Path) -> None:
    """Two attempts sampled the same tokens; each keeps its own routes, the prompt alone is shared."""
    store, rng = AttachmentStore(tmp_path), np.random.default_rng(3)
    ids = [5, 6, 7, 8, *rng.integers(2, VOCABULARY, 6).tolist()]
    one, other = some_routes(rng, 6), some_routes(rng, 6)
    found = {}
    for name, both in (("apart", (one, other)), ("alike", (one, one))):
        made = [rollout(ids, np.full(6, -1.0, np.float32), r, store, i) for i, r in enumerate(both)]
        batch = collate([Group("g", IssueKey("g", 1), made)], needs={"routes"}, attachments=store)
        trainer = Trainer(tiny("Qwen3Moe"), Config(replay_routes=True))
        trainer.annotate(batch, {"proximal_logp"})
        first, second = np.split(batch.annotations["proximal_logp"], 2)
        wanted = batch.train_T > 0
        plan = trainer._plan(batch, wanted, np.arange(batch.rows))
        found[name] = (np.abs(first - second)[4:].max(), plan.saved)
    assert found["apart"][0] > 1e-2
    assert found["apart"][1] == 4  # the prompt
    assert found["alike"] == (0, 9)  # all that is fed


def test_gradients_reach_the_chosen_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sampled tokens were sent through experts 2 and 5; the prompt's tokens go where the router says."""

    def routes(rng: np.random.Generator, n: int) -> np.ndarray:
        out = np.full((n, 2, CHOSEN), 0, np.uint8)
        out[:, :, 0], out[:, :, 1] = 2, 5
        out[-1] = 255
        return out

    batch = batch_of(AttachmentStore(tmp_path), routes)
    batch.routes_T[batch.routes_T < 0] = np.tile([2, 5], int((batch.routes_T < 0).sum()) // 2)  # the rest too
    model = tiny("Qwen3Moe")
    trainer = Trainer(model, Config(replay_routes=True))
    monkeypatch.setattr(trainer, "_step", lambda *a: None)
    trainer.update(prepare(batch, resolve({"kind": "grpo", "proximal": "behaviour", "tis": None})), step=1)
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            size = weight.grad.abs().flatten(1).sum(1)
            assert (size[[2, 5]] > 0).all()
            assert (size[[0, 1, 3, 4, 6, 7]] == 0).all()
        assert layer.mlp.gate.weight.grad.abs().sum() > 0  # through the weights of the chosen


@pytest.mark.parametrize(
    ("routes", "match"),
    [
        (np.zeros((5, 2, CHOSEN), np.uint8), "its tokens are 6"),
        (np.zeros((6, 2, CHOSEN), np.uint8), "twice"),
        (np.zeros((6, 2, CHOSEN), np.float32), "not small numbers"),
        (None, r"engine\.routes"),
    ],
)
def test_routes_that_are_none(tmp_path: Path, routes: Any, match: str) -> None:
    with pytest.raises(AlgorithmError, match=match):
        batch_of(AttachmentStore(tmp_path), routes)


def test_routes_of_another_model(tmp_path: Path) -> None:
    batch = batch_of(AttachmentStore(tmp_path), some_routes)
    batch.routes_T[0, 0] = [3, EXPERTS]
    trainer = Trainer(tiny("Qwen3Moe"), Config(replay_routes=True))
    with pytest.raises(RoutingError, match="expert 8; this model has 2 layers, 2 of 8 experts"):
        trainer.annotate(batch, {"proximal_logp"})


def test_a_model_without_experts_is_refused(tools: Any) -> None:
    with pytest.raises(RoutingError, match="known families: Glm4Moe, Mixtral, Olmoe, Qwen3Moe"):
        Trainer(tools.tiny_model(dtype=torch.float32), Config(replay_routes=True))


def sampled(model: Any, dtype: str, n: int = 12) -> list[tuple[list[int], Any]]:
    """Answers of an engine that records: (prompt and answer, generation)."""
    engine = TorchEngine(model, slots=4, context=64, dtype=dtype, routes=True)

    async def play() -> list[Any]:
        prompts = [np.asarray([5, 6, 7, 8 + i], np.int32) for i in range(8)]
        asked = [
            engine.generate(p, Sampling(max_tokens=n, seed=i), session=str(i)) for i, p in enumerate(prompts)
        ]
        return [
            ([*p.tolist(), *g.ids_T.tolist()], g)
            for p, g in zip(prompts, await asyncio.gather(*asked), strict=True)
        ]

    try:
        return asyncio.run(play())
    finally:
        engine.close()


@pytest.mark.parametrize("family", NAMES)
def test_the_engine_records_what_its_forward_chose(family: str) -> None:
    """In float32: the routes of each fed token are those of a plain forward over the whole answer."""
    model = tiny(family)
    for ids, generation in sampled(model, "float32"):
        routes = generation.routes
        assert routes is not None and routes.dtype == np.uint8
        assert routes.shape == (len(generation.ids_T), 2, CHOSEN)
        assert (routes[-1] == 255).all()
        other = tiny(family)
        recorder = Recorder(other)
        with torch.no_grad():
            other(input_ids=torch.tensor([ids]), use_cache=False)
        expected = recorder.take()[4:].numpy()
        assert np.array_equal(np.sort(routes[:-1], -1), np.sort(expected[:-1], -1))


@pytest.mark.parametrize("family", NAMES)
def test_replay_closes_the_gap_of_a_half_precision_sampler(family: str, tmp_path: Path) -> None:
    """Router logits so close that bfloat16 changes choices: the gap to a float32 trainer falls. What is left
    is the rounding of everything else, and the prompt's routes, which are not recorded."""
    store, gaps = AttachmentStore(tmp_path), {}
    made = [
        rollout(ids, g.logprob_T, g.routes, store, i)
        for i, (ids, g) in enumerate(sampled(tiny(family, close=True), "bfloat16"))
    ]
    for replay in (False, True):
        needs = {"routes"} if replay else set()
        batch = collate([Group("g", IssueKey("g", 1), made)], needs=needs, attachments=store)
        trainer = Trainer(tiny(family, close=True), Config(replay_routes=replay))
        trainer.annotate(batch, {"proximal_logp"})
        known = batch.sampled_T
        gaps[replay] = float(np.abs(batch.annotations["proximal_logp"] - batch.logprob_T)[known].mean())
    assert gaps[True] < 0.9 * gaps[False], gaps


def test_a_copy_of_the_model_chooses_itself(tmp_path: Path) -> None:
    """The reference is a copy of the policy: nothing of the policy's routing reaches it, nor an engine's."""
    batch = batch_of(AttachmentStore(tmp_path), some_routes)
    model = tiny("Qwen3Moe")
    expected = Trainer(tiny("Qwen3Moe"), Config())
    expected.annotate(batch, {"ref_logp"})
    plain = batch.annotations["ref_logp"]
    trainer = Trainer(model, Config(replay_routes=True))
    trainer.annotate(batch, {"proximal_logp"})  # routes are laid out when the copy is made
    trainer.annotate(batch, {"ref_logp"})
    assert np.allclose(batch.annotations["ref_logp"], plain, atol=1e-5, equal_nan=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(-1)
    trainer.annotate(batch, {"ref_logp"})
    assert np.allclose(batch.annotations["ref_logp"], plain, atol=1e-5, equal_nan=True)


def test_a_critic_chooses_its_own_experts() -> None:
    assert ActorCritic(tiny("Qwen3Moe"), Config(replay_routes=True)).critic.replay is None


@pytest.mark.parametrize("family", NAMES)
def test_a_rounding_that_changes_experts_is_no_fault_of_packing(family: str) -> None:
    """In bfloat16 a packed forward may choose other experts than the model's own; such models are trained."""
    for seed in range(4):
        Trainer(tiny(family, close=True, seed=seed), Config(dtype="bfloat16"))
