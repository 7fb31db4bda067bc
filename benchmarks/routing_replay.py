"""Routing replay: how far a float32 trainer is from a bfloat16 engine, with and without the engine's routes.

    python benchmarks/routing_replay.py [--answers 32] [--tokens 32] [--spread 0.003 0.02 0.5]

Tiny random models of four families (two layers, eight experts, two chosen). `--spread`: standard deviation of
the routers' weights; the smaller, the closer the experts' scores, and the more choices a rounding changes.
Printed: the mean |delta log p| over sampled tokens without and with replay, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from typing import Any

import numpy as np
import torch
import transformers as hf

from trivet.buffer import AttachmentStore
from trivet.engine.base import Sampling
from trivet.engine.torch import TorchEngine
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace
from trivet.weights.moe import routers

FAMILIES = ("Qwen3Moe", "Olmoe", "Mixtral", "Glm4Moe")
VOCABULARY = 61


def tiny(family: str, spread: float) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**shape))
    with torch.no_grad():
        for router in routers(model):
            router.weight.normal_(0, spread)
    return model.eval()


def answers(model: Any, count: int, tokens: int, store: AttachmentStore) -> Group:
    """Sampled in bfloat16, with their routes."""
    engine = TorchEngine(model, slots=16, context=128, dtype="bfloat16", routes=True)
    prompts = [np.asarray([5, 6, 7, 8 + i % 16], np.int32) for i in range(count)]

    async def play() -> list[Any]:
        asked = [
            engine.generate(p, Sampling(max_tokens=tokens, seed=i), session=str(i))
            for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*asked)

    made = []
    for attempt, (prompt, given) in enumerate(zip(prompts, asyncio.run(play()), strict=True)):
        trace = Trace()
        node = trace.add_sampled(trace.add(-1, prompt), given.ids_T, given.logprob_T, 0)
        trace.attach(node, store.put(given.routes, "routes", 0, len(given.ids_T)))
        task = Task("bench", (Message("user", "?"),))
        made.append(Rollout(task, trace, Scored(0.0), Termination.FINISHED, attempt=attempt))
    engine.close()
    return Group("g", IssueKey("t", 0), made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--spread", type=float, nargs="*", default=[0.003, 0.02, 0.5])
    args = parser.parse_args()
    print("| family | spread | gap without | gap with replay | ratio |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        store = AttachmentStore(folder)
        for family in FAMILIES:
            for spread in args.spread:
                group = answers(tiny(family, spread), args.answers, args.tokens, store)
                gaps = []
                for replay in (False, True):
                    needs = {"routes"} if replay else set()
                    batch = collate([group], needs=needs, attachments=store)
                    trainer = Trainer(tiny(family, spread), Config(replay_routes=replay))
                    trainer.annotate(batch, {"proximal_logp"})
                    gap = np.abs(batch.annotations["proximal_logp"] - batch.logprob_T)[batch.sampled_T]
                    gaps.append(float(gap.mean()))
                print(f"| {family} | {spread:g} | {gaps[0]:.4f} | {gaps[1]:.4f} | {gaps[1] / gaps[0]:.2f} |")


if __name__ == "__main__":
    main()
