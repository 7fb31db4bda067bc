"""GRPO on the same model, prompts, reward and hyper-parameters: trivet against TRL.

    python benchmarks/vs_trl.py --model DIR [--steps 3] [--prompts 8] [--group 8] [--tokens 64]

Both sides run on this machine in processes of their own, one after the other (interleave them with --rounds), so
that peak memory is each one's own. Generation and training are timed apart: generation is everything from prompt
ids to sampled ids; training is everything else of a step (rewards, log-probabilities, loss, backward, optimiser).
Sampled tokens are reported, since answers end where the model ends them; training is also given per 1,000 tokens of
prompt + completion. Step 1 warms up and is left out. The loss is compared on equal inputs (`--parity`): TRL's own
batch, with perturbed old log-probabilities so that ratios differ from 1, through both losses.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three kinds of fruit.",
    "How do birds fly?",
    "What is a good way to learn to cook?",
    "Tell me about the moon.",
    "What do bees make, and how?",
    "Who wrote the play Romeo and Juliet?",
]


def lower_share(text: str) -> float:
    """Share of letters that are lower case; 0 for a text without letters."""
    letters = [c for c in text if c.isalpha()]
    return sum(c.islower() for c in letters) / len(letters) if letters else 0.0


def rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- TRL ---------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = args.prompts * args.group
    times: dict[str, list[float]] = {"step": [], "generate": []}
    tokens: list[int] = []
    rewards: list[float] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        scores = [lower_share(text) for text in texts]
        rewards.append(statistics.mean(scores))
        return scores

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = super()._generate_single_turn(prompt_ids, *rest, **kwargs)
            times["generate"].append(time.perf_counter() - begin)
            tokens.append(sum(len(ids) for ids in out[0]))
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times["step"].append(time.perf_counter() - self.begin)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        num_generations=args.group,
        max_completion_length=args.tokens,
        max_steps=args.steps + 1,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": torch.float32},
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS[: args.prompts]])
    trainer = Timed(
        model=str(args.model), reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()]
    )
    trainer.train()
    return {
        "generate_s": times["generate"][1:],
        "train_s": [s - g for s, g in zip(times["step"], times["generate"], strict=True)][1:],
        "sampled": tokens[1:],
        "reward": rewards[1:],
        "rss_gb": rss_gb(),
    }
