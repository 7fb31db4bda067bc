"""DPO, IPO, KTO, ORPO and SFT: TRL's own losses and ours on the same tokens and weights, with gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trivet.algorithms import Algorithm, Batch, make_part, prepare, register_credit, resolve, stream_loss
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Task, Termination, Trace, Unscored

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

VOCABULARY = 32


def tiny_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
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
        pad_token_id=0,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def words(rng: np.random.Generator, n: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(3, VOCABULARY, n))


def settings(folder: Any, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }


def rollout(ids: list[int], mask: list[int], attempt: int, side: Any) -> Rollout:
    """One row of TRL's batch; the tokens its mask trains are one node."""
    n = mask.index(1)
    trace = Trace()
    trace.add(trace.add(-1, ids[:n]), ids[n:], train=1.0)
    task = Task("t", (Message("user", "?"),))
    made = Rollout(task, trace, Unscored("data"), Termination.FINISHED, attempt=attempt, source="expert")
    made.preference = side
    return made


def rows(inputs: Any, mask: Any) -> list[tuple[list[int], list[int]]]:
    out = []
    for ids, seen, marked in zip(inputs["input_ids"], inputs["attention_mask"], mask, strict=True):
        kept = seen.bool()
        out.append((ids[kept].tolist(), marked[kept].tolist()))
    return out


def annotate(batch: Any, name: str, model: Any) -> None:
    column = np.full(batch.tokens, np.nan)
    with torch.no_grad():
        for r in range(batch.rows):
            start, n = int(batch.row_start_R[r]), int(batch.row_length_R[r])
            column[start + 1 : start + n] = row_logp(model, batch.ids_T[start : start + n]).numpy()
    batch.annotations[name] = column


def row_logp(model: Any, ids: np.ndarray) -> Any:
    given = torch.from_numpy(ids.astype(np.int64))
    full = torch.log_softmax(model(input_ids=given[None]).logits[0, :-1].float(), -1)
    return full.gather(1, given[1:, None])[:, 0]


def ours(model: Any, batch: Any, spec: Any) -> tuple[float, dict[str, Any]]:
    prepared = prepare(batch, spec if isinstance(spec, Algorithm) else resolve(spec))
    (stream,) = prepared.streams
    parts = []
    for r in range(batch.rows):
        start, n = int(batch.row_start_R[r]), int(batch.row_length_R[r])
        parts.append(torch.cat([torch.zeros(1), row_logp(model, batch.ids_T[start : start + n])]))
    index = np.flatnonzero(stream.active_T)
    model.zero_grad()
    loss, _ = stream_loss(prepared, stream, index, torch.cat(parts)[torch.from_numpy(index)])
    loss.backward()
    return float(loss.detach()), gradients(model)


def gradients(model: Any) -> dict[str, Any]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(model: Any, trl_loss: Any, loss: float, grads: dict[str, Any]) -> None:
    model.zero_grad()
    trl_loss.backward()
    assert loss == pytest.approx(float(trl_loss.detach()), abs=1e-5)
    theirs = gradients(model)
    scale = max(float(g.abs().max()) for g in theirs.values())
    assert scale > 1e-3
    for name, grad in theirs.items():
        if "embed_tokens" in name:  # nn.Embedding(padding_idx) keeps the padding's row untrained
            grad, grads[name] = grad[1:], grads[name][1:]
        assert torch.allclose(grads[name], grad, atol=1e-5 * scale), name


@pytest.mark.parametrize(
    ("loss_type", "spec"),
    [("sigmoid", {"kind": "dpo", "beta": 0.3}), ("ipo", {"kind": "ipo", "beta": 0.3})],
)
def test_pairs_equal_trl(tmp_path: Any, loss_type: str, spec: Any) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rng = np.random.default_rng(0)
    sizes = [(3, 4, 2), (2, 1, 6), (5, 3, 3)]
    records = [
        {"prompt": words(rng, p), "chosen": words(rng, c), "rejected": words(rng, r)} for p, c, r in sizes
    ]
    trainer = DPOTrainer(
        model=tiny_model(0),
        ref_model=tiny_model(1),
        args=DPOConfig(**settings(tmp_path, loss_type=loss_type, beta=0.3)),
        train_dataset=Dataset.from_list(records),
        processing_class=tiny_tokenizer(),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    trl_loss = trainer.compute_loss(trainer.model, inputs)
    made = rows(inputs, inputs["completion_mask"])  # the chosen ones, then the rejected ones
    half = len(made) // 2
    groups = [
        Group(
            f"g{i}",
            IssueKey(f"g{i}", 1),
            [rollout(*made[i], 0, "chosen"), rollout(*made[half + i], 1, "rejected")],
            "preference",
        )
        for i in range(half)
    ]
    batch = collate(groups)
    annotate(batch, "ref_logp", trainer.ref_model)
    loss, grads = ours(trainer.model, batch, spec)
    same(trainer.model, trl_loss, loss, grads)


@register_credit("trl_reference", columns=("reference_kl",))
def trl_reference(batch: Batch, *, kl: float) -> dict[str, np.ndarray]:
    """KTO's two columns with a reference point that is given."""
    return {"advantage": batch.preference_N.astype(float), "reference_kl": np.full(batch.rollouts, kl)}


def test_kto_equals_trl(tmp_path: Any) -> None:
    """TRL measures its reference point on mismatched pairs: ours is given TRL's, all else is compared."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rng = np.random.default_rng(2)
    sides = [("chosen", 4), ("rejected", 2), ("chosen", 1), ("rejected", 5)]
    records = [
        {"prompt": words(rng, 3), "completion": words(rng, n), "label": side == "chosen"} for side, n in sides
    ]
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    trainer = KTOTrainer(
        model=tiny_model(0),
        ref_model=tiny_model(1),
        args=KTOConfig(**settings(tmp_path, per_device_train_batch_size=4, beta=0.3, **weights)),
        train_dataset=Dataset.from_list(records),
        processing_class=tiny_tokenizer(),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    trl_loss = trainer.compute_loss(trainer.model, inputs)
    (kl,) = trainer._metrics["eval"]["kl"]
    assert kl > 0.01, kl  # else the reference point would not be tested
    labels = ["chosen" if label else "rejected" for label in inputs["label"]]
    made = [
        rollout(*one, 0, side)
        for one, side in zip(rows(inputs, inputs["completion_mask"]), labels, strict=True)
    ]
    by_side = [[r for r in made if r.preference == side] for side in ("chosen", "rejected")]
    groups = []
    for i, (chosen, rejected) in enumerate(zip(*by_side, strict=True)):
        rejected.attempt = 1
        groups.append(Group(f"g{i}", IssueKey(f"g{i}", 1), [chosen, rejected], "preference"))
    batch = collate(groups)
    annotate(batch, "ref_logp", trainer.ref_model)
    algorithm = resolve({"kind": "kto", "beta": 0.3, "desirable": 1.5, "undesirable": 0.5})
    algorithm = replace(algorithm, credit=make_part("credit", {"kind": "trl_reference", "kl": float(kl)}))
    loss, grads = ours(trainer.model, batch, algorithm)
    same(trainer.model, trl_loss, loss, grads)


def test_orpo_equals_trl() -> None:
    """The preference term alone: TRL's first term imitates the prompt too, the paper's only the answer."""
    from types import SimpleNamespace

    trl = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    mean = torch.tensor([[-0.7, -1.4, -0.05], [-1.1, -0.4, -2.0]])  # per pair, of the chosen and the rejected
    at = mean.clone().requires_grad_()
    stub = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device=torch.device("cpu")))
    theirs = -trl.ORPOTrainer.odds_ratio_loss(stub, at[0], at[1])[0].mean()
    theirs.backward()

    groups = []
    for i in range(3):
        sides = [
            rollout([1, 2, 3, 4], [0, 0, 1, 1], a, side) for a, side in enumerate(("chosen", "rejected"))
        ]
        groups.append(Group(f"g{i}", IssueKey(f"g{i}", 1), sides, "preference"))
    prepared = prepare(collate(groups), resolve({"kind": "orpo", "beta": 0.3}))
    (stream,) = prepared.streams
    own = mean.clone().requires_grad_()
    index = np.flatnonzero(stream.active_T)
    loss, _ = stream_loss(prepared, stream, index, own.T.reshape(-1).repeat_interleave(2))
    (loss + own[0].mean()).backward()
    assert float((loss + own[0].mean()).detach()) == pytest.approx(float(theirs.detach()), abs=1e-5)
    assert torch.allclose(own.grad, at.grad, atol=1e-5)


def test_examples_equal_trl(tmp_path: Any) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rng = np.random.default_rng(1)
    records = [
        {"prompt": words(rng, p) + " ", "completion": words(rng, c)} for p, c in ((3, 4), (2, 1), (5, 6))
    ]
    trainer = SFTTrainer(
        model=tiny_model(0),
        args=SFTConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list(records),
        processing_class=tiny_tokenizer(),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    trl_loss = trainer.compute_loss(trainer.model, inputs)
    made = rows(inputs, (inputs["labels"] != -100).long())
    groups = [
        Group(f"g{i}", IssueKey(f"g{i}", 1), [rollout(*one, 0, None)], "sft") for i, one in enumerate(made)
    ]
    loss, grads = ours(trainer.model, collate(groups), "sft")
    same(trainer.model, trl_loss, loss, grads)
