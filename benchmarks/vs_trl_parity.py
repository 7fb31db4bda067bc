"""The same completions, rewards and weights through TRL's GRPO loss and through trivet's trainer: float32.

TRL's own `_generate_and_score_completions` samples completions (cut to ragged lengths here), pads them and
computes advantages from rewards that are drawn uniformly; its own `_compute_loss` then gives loss and
gradients. trivet gets the same token ids and rewards as groups, through `collate`, `prepare` and
`Trainer.update`. TRL divides by std + 1e-4, trivet by std: that difference is reported by itself, and both
losses are then given trivet's advantages.

on-policy   the ratio's denominator is the policy itself: every ratio is 1, nothing is clipped
off-policy  the denominator is the policy's log-probability plus normal noise of 0.3 a token (at most 0), so
            that ratios differ from 1 and many are clipped

`rows` forwards every row alone, `shared` the group's prompt once.

transformers gives the padding token's embedding row no gradient as an input (`padding_idx`), also where that
token is one that conversations use, as SmolLM2's <|im_end|> is; trivet trains it. Here TRL's model is made to
train it too, so that the rest is compared; what it changes is reported apart: TRL's gradients of the first
case with and without it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vs_trl_arms import chat, trl_config
from vs_trl_task import prompts

from trivet.algorithms import resolve
from trivet.algorithms.base import PreparedBatch
from trivet.algorithms.prepare import prepare
from trivet.recipe.schema import Trainer as Config
from trivet.render import get_renderer, load_tokenizer
from trivet.trainer import Trainer, collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

Gradients = dict[str, torch.Tensor]

NOISE = 0.3
TRL_EPSILON = 1e-4
LEAVES_WEIGHTS = 1e-30
"""A learning rate that rounds to nothing in float32: `update` leaves its gradients, and the weights."""


def aggregations(tokens: int) -> dict[str, Any]:
    """TRL's loss type -> trivet's aggregation: mean of the rows' means, mean of all tokens (twice: bnpo's is
    of the forward pass, dapo's of the batch; here one pass holds the batch), tokens over a constant.
    """
    fixed = {"kind": "fixed", "length": tokens}
    return {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": fixed}


# -- inputs ------------------------------------------------------------------------------------------


def trl_trainer(args: argparse.Namespace, folder: Path, rewards: list[float]) -> Any:
    """A GRPOTrainer that scores its completions with `rewards`, and cuts each somewhere: ragged lengths."""
    from datasets import Dataset
    from trl import GRPOTrainer

    cut = random.Random(args.seed)

    class Ragged(GRPOTrainer):
        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            rows, logprobs = super()._generate_single_turn(*given, **named)
            return [ids[: cut.randint(max(args.tokens // 4, 1), args.tokens)] for ids in rows], logprobs

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return rewards

    data = Dataset.from_list([{"prompt": chat(text)} for text in prompts(args.reward, args.prompts)])
    trainer = Ragged(
        model=str(args.model), reward_funcs=reward, args=trl_config(args, folder), train_dataset=data
    )
    trainer.current_gradient_accumulation_steps = 1  # what its training loop sets
    trainer.model.train()
    return trainer


def unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def groups_of(
    args: argparse.Namespace, given: dict[str, Any], rewards: list[float], old: torch.Tensor
) -> list[Group]:
    """TRL's batch as trivet's groups; `old` (_R, longest completion) are the behaviour log-probabilities.

    Raises ValueError when the two sides put a question into different prompt tokens.
    """
    renderer = get_renderer(load_tokenizer(args.model))
    asked = unpadded(given["prompt_ids"], given["prompt_mask"])
    answers = unpadded(given["completion_ids"], given["completion_mask"])
    groups = []
    for g, question in enumerate(prompts(args.reward, args.prompts)):
        message, rollouts = Message("user", question), []
        ids = renderer.render([message], generate=True).ids_T.tolist()
        for attempt in range(args.group):
            row = g * args.group + attempt
            if asked[row] != ids:
                raise ValueError(f"prompt tokens differ for {question!r}: TRL {asked[row]}, trivet {ids}")
            trace, answer = Trace(), answers[row]
            trace.add_sampled(trace.add(-1, ids), answer, old[row, : len(answer)].tolist(), 0)
            score, end = Scored(rewards[row]), Termination.FINISHED
            rollouts.append(Rollout(Task("parity", (message,)), trace, score, end, attempt=attempt))
        groups.append(Group(f"g{g}", IssueKey(f"t{g}", 0), rollouts))
    return groups


# -- the two sides -----------------------------------------------------------------------------------


def trl_side(trainer: Any, inputs: dict[str, Any]) -> tuple[float, float, Gradients]:
    """(loss, clipped share of tokens, gradients by parameter)."""
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    clipped = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    grads = {n: p.grad.detach().clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), clipped, grads


def padding_row(trainer: Any, inputs: dict[str, Any]) -> float:
    """Have the padding row trained from here on; how much TRL's own gradient changes by that, relative."""
    _, _, without = trl_side(trainer, inputs)
    trainer.model.get_input_embeddings().padding_idx = None
    return compare(trl_side(trainer, inputs)[2], without)["gradient_difference"]


def trivet_side(
    trainer: Trainer, prepared: PreparedBatch, share: bool
) -> tuple[float, float, Gradients, float]:
    """(loss, clipped share, gradients by parameter, the gradient norm trivet reports)."""
    trainer.set(Config(lr=LEAVES_WEIGHTS, clip_grad_norm=1e30, share_prefix=share))
    metrics = trainer.update(prepared, step=1)
    grads = {n: p.grad for n, p in trainer.model.module.named_parameters() if p.grad is not None}
    return metrics["train/loss"], metrics["train/pg/clipped"], grads, metrics["train/grad_norm"]


def norm(tensors: list[torch.Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5


def compare(theirs: Gradients, ours: Gradients) -> dict[str, Any]:
    """Differences relative to TRL's norm: of all gradients together, and of the worst parameter's."""
    if theirs.keys() != ours.keys():
        raise ValueError(f"parameters with a gradient differ: {sorted(theirs.keys() ^ ours.keys())[:5]}")
    apart = {n: norm([g - ours[n]]) / max(norm([g]), 1e-30) for n, g in theirs.items()}
    worst = max(apart, key=apart.__getitem__)
    total = norm([g - ours[n] for n, g in theirs.items()]) / norm(list(theirs.values()))
    return {"gradient_difference": total, "worst_gradient_difference": apart[worst], "worst": worst}


# -- the comparison ----------------------------------------------------------------------------------


def advantages(prepared: PreparedBatch) -> np.ndarray:
    """(_N,), from the sampled tokens' column."""
    batch = prepared.batch
    out = np.zeros(batch.rollouts)
    out[batch.rollout_T] = prepared.columns["advantage"]
    return out


def compare_advantages(given: dict[str, Any], ours_N: np.ndarray, rewards: list[float], group: int) -> Any:
    """Largest difference to TRL's, as they are and with TRL's + 1e-4 allowed for."""
    theirs_N = given["advantages"].double().numpy()
    std_N = np.repeat(np.reshape(rewards, (-1, group)).std(1, ddof=1), group)
    allowed_N = ours_N * std_N / (std_N + TRL_EPSILON)
    return {
        "advantage_difference": float(np.abs(theirs_N - ours_N).max()),
        "advantage_difference_with_epsilon": float(np.abs(theirs_N - allowed_N).max()),
    }


def run_parity(args: argparse.Namespace) -> dict[str, Any]:
    """All loss types, on- and off-policy, each printed as it is done."""
    torch.set_num_threads(args.threads)
    draw = random.Random(args.seed)
    rewards = [draw.random() for _ in range(args.prompts * args.group)]
    with tempfile.TemporaryDirectory() as folder:
        theirs = trl_trainer(args, Path(folder), rewards)
    batch = [{"prompt": chat(t)} for t in prompts(args.reward, args.prompts) for _ in range(args.group)]
    given = theirs._generate_and_score_completions(batch)
    mask = given["completion_mask"]
    with torch.no_grad():
        ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
        seen = torch.cat([given["prompt_mask"], mask], 1)
        now, _, _ = theirs._get_per_token_logps_and_entropies(theirs.model, ids, seen, mask.shape[1])
    noise = NOISE * torch.randn(now.shape, generator=torch.Generator().manual_seed(args.seed))
    old = (now + noise).clamp(max=0.0) * mask
    data = collate(groups_of(args, given, rewards, old))
    ours = Trainer(
        args.model, Config(lr=LEAVES_WEIGHTS), device="cpu", micro_tokens=args.micro_tokens, seed=args.seed
    )
    cases: list[dict[str, Any]] = []
    report: dict[str, Any] = {"cases": cases, "completion_tokens": mask.sum(1).tolist()}
    report["padding_row"] = padding_row(theirs, given)
    show_inputs(report)
    for kind, aggregation in aggregations(args.tokens).items():
        for policy, proximal in (("on", "recompute"), ("off", "behaviour")):
            options = {"aggregation": aggregation, "clip": 0.2, "tis": None, "proximal": proximal}
            prepared = prepare(data, resolve({"kind": "grpo", **options}))
            mine_N = advantages(prepared)
            report |= compare_advantages(given, mine_N, rewards, args.group)
            inputs = given | {"advantages": torch.from_numpy(mine_N).float()}
            if policy == "off":
                inputs["old_per_token_logps"] = old
            cases += _case(theirs, ours, inputs, prepared, {"loss_type": kind, "policy": policy})
            show_cases(cases[-2:])
    return report


def _case(
    theirs: Any, ours: Trainer, inputs: dict[str, Any], prepared: PreparedBatch, name: dict[str, Any]
) -> list[dict[str, Any]]:
    theirs.loss_type = name["loss_type"]
    loss, clipped, grads = trl_side(theirs, inputs)
    out = []
    for side in ("rows", "shared"):
        mine, mine_clipped, mine_grads, mine_norm = trivet_side(ours, prepared, side == "shared")
        case = {"trl_loss": loss, "loss": mine, "loss_difference": abs(loss - mine)}
        case |= {"trl_clipped": clipped, "clipped": mine_clipped}
        case |= {"trl_gradient_norm": norm(list(grads.values())), "gradient_norm": mine_norm}
        out.append({**name, "side": side, **case, **compare(grads, mine_grads)})
    return out


HEADS = (
    *("loss type", "policy", "trivet", "TRL loss", "loss", "rel. diff", "TRL clip", "clip"),
    *("TRL |grad|", "|grad|", "rel. diff", "worst tensor"),
)


def show_inputs(report: dict[str, Any]) -> None:
    lengths = report["completion_tokens"]
    print(f"{len(lengths)} completions of {min(lengths)}..{max(lengths)} tokens, {sum(lengths)} in all")
    print(f"the padding token's row as an input: {report['padding_row']:.1e} of the gradient; TRL drops it")
    print("".join(f"{head:>13}" for head in HEADS), flush=True)


def show_cases(cases: list[dict[str, Any]]) -> None:
    for c in cases:
        # A loss that is 0 by construction has no relative difference.
        scale = max(abs(c["trl_loss"]), abs(c["loss"]))
        relative = f"{c['loss_difference'] / scale:.1e}" if scale > 1e-6 else "-"
        cells = [c["loss_type"], c["policy"], c["side"], f"{c['trl_loss']:.7f}", f"{c['loss']:.7f}", relative]
        cells += [f"{c[k]:.4f}" for k in ("trl_clipped", "clipped")]
        cells += [f"{c[k]:.6f}" for k in ("trl_gradient_norm", "gradient_norm")]
        cells += [f"{c[k]:.1e}" for k in ("gradient_difference", "worst_gradient_difference")]
        print("".join(f"{cell:>13}" for cell in cells), flush=True)


def show_parity(report: dict[str, Any]) -> None:
    """What is left to say when all cases have been printed."""
    print(
        f"advantages: largest difference {report['advantage_difference']:.1e} (TRL adds {TRL_EPSILON} to the "
        f"standard deviation); with that allowed for {report['advantage_difference_with_epsilon']:.1e}"
    )
    for name in ("gradient_difference", "worst_gradient_difference"):
        print(f"largest {name.replace('_', ' ')}: {max(c[name] for c in report['cases']):.1e}")
