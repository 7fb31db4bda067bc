"""One arm of `vs_trl.py` in the process it is called in; every step goes to `metrics.jsonl` as it ends.

TRL's steps are written with the names trivet gives its own, so that one reader serves both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from vs_trl_task import REWARDS, prompts


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def trl_config(args: argparse.Namespace, folder: Path) -> Any:
    """What both sides have in common, in TRL's words; the optimiser is its default, AdamW."""
    import torch
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.tokens,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
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
        seed=args.seed,
    )


def run_trl(args: argparse.Namespace, folder: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    line: dict[str, float] = {}

    def reward(completions: list[Any], **_: Any) -> list[float]:
        scores = [REWARDS[args.reward](completion[0]["content"]) for completion in completions]
        line["reward/mean"] = statistics.mean(scores)
        return scores

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            out = super()._generate_single_turn(*given, **named)
            line["time/sample_s"] = time.perf_counter() - begin
            line["rollout/tokens"] = sum(len(ids) for ids in out[0])
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            line["time/step_s"] = time.perf_counter() - self.begin
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, "time": time.time(), **line}) + "\n")

    data = Dataset.from_list([{"prompt": chat(text)} for text in prompts(args.reward, args.prompts)])
    trainer = Timed(
        model=str(args.model),
        reward_funcs=reward,
        args=trl_config(args, folder),
        train_dataset=data,
        callbacks=[Clock()],
    )
    trainer.train()


def recipe(args: argparse.Namespace, folder: Path, share: bool) -> dict[str, Any]:
    """The same settings as trivet's recipe, its run in `folder`/run."""
    function = f"{Path(__file__).resolve().with_name('vs_trl_task.py')}:{args.reward}_of"
    tasks = {"source": str(folder / "questions.jsonl"), "env": "callable", "env_args": {"function": function}}
    stage = {
        "name": "rl",
        "mode": "both",
        "algorithm": {"kind": "grpo", "clip": 0.2, "tis": None, "proximal": "recompute"},
        "tasks": [tasks],
        "batch": {"prompts": args.prompts, "group": args.group, "micro_tokens": args.micro_tokens},
        "sampling": {"max_tokens": args.tokens},
        "trainer": {"lr": args.lr, "betas": [0.9, 0.999], "clip_grad_norm": 1.0, "share_prefix": share},
        "checkpoints": {"every": 0},
        "steps": args.steps,
    }
    return {
        "name": "versus",
        "seed": args.seed,
        "output": str(folder / "run"),
        "policy": {"model": str(args.model.resolve())},
        "engine": {"slots": args.prompts * args.group, "deterministic": False},
        "monitor": {"plots": False, "samples_every": 0},
        "stages": [stage],
    }


def run_trivet(args: argparse.Namespace, folder: Path, share: bool) -> None:
    import yaml

    from trivet.recipe import load_recipe
    from trivet.runtime import run_recipe

    lines = [json.dumps({"prompt": text}) + "\n" for text in prompts(args.reward, args.prompts)]
    (folder / "questions.jsonl").write_text("".join(lines))
    path = folder / "versus.yaml"
    path.write_text(yaml.safe_dump(recipe(args, folder, share)))
    run_recipe(load_recipe(path), quiet=True)


def run_side(args: argparse.Namespace) -> None:
    """`args.side` in `args.folder`; the peak resident size, GB, goes to `peak.json`."""
    import torch

    torch.set_num_threads(args.threads)
    folder = Path(args.folder)
    if args.side == "trl":
        run_trl(args, folder)
    else:
        run_trivet(args, folder, args.side == "shared")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (folder / "peak.json").write_text(json.dumps(peak))


def read_steps(side: str, folder: Path) -> list[dict[str, float]]:
    """The steps an arm has finished so far; a line still being written is left for the next call."""
    path = folder / "metrics.jsonl" if side == "trl" else folder / "run" / "metrics.jsonl"
    if not path.is_file():
        return []
    whole = path.read_text().rpartition("\n")[0]
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if "time/step_s" in line and line["step"] > 0]
