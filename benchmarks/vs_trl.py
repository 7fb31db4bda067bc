"""GRPO on the same model, prompts, reward and hyper-parameters: trivet against TRL.

    python benchmarks/vs_trl.py --model DIR [--steps 2] [--prompts 8] [--group 8] [--tokens 64]

`DIR` is a Hugging Face directory; TRL must be installed in the same environment. The arms run one after the
other, each in a process of its own, so that peak memory is its own: TRL, trivet with every row forwarded
alone (share_prefix: false), trivet with the group's prompt shared. Generation and training are timed apart:
generation is everything from prompts to sampled answers, training everything from rewards to the optimiser's
step. Answers end where the model ends them, so sampled tokens are reported, and training is also given per
1,000 tokens of prompt and answer. The first step warms up and is left out. All use float32, AdamW, one update
a step, the same learning rate, clip 0.2, no KL term, temperature 1 over the whole vocabulary.
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
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS[: args.prompts]]
    )
    trainer = Timed(
        model=str(args.model), reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()]
    )
    trainer.train()
    steps = [s - g for s, g in zip(times["step"], times["generate"], strict=True)]
    return {
        "generate_s": times["generate"][1:],
        "train_s": steps[1:],
        "sampled": tokens[1:],
        "reward": rewards[1:],
        "rss_gb": rss_gb(),
    }


# -- trivet ------------------------------------------------------------------------------------------


def run_trivet(args: argparse.Namespace) -> dict[str, Any]:
    from trivet.monitor import read_metrics
    from trivet.recipe import load_recipe
    from trivet.runtime import run_recipe

    folder = Path(tempfile.mkdtemp())
    tasks = folder / "questions.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS[: args.prompts]))
    (folder / "recipe.yaml").write_text(
        f"""
name: versus
output: {folder / "run"}
policy: {{model: "{args.model}"}}
engine: {{slots: {args.prompts * args.group}, deterministic: false}}
monitor: {{plots: false, samples_every: 0}}
stages:
  - name: rl
    mode: both
    algorithm: {{kind: grpo, clip: 0.2, tis: null, proximal: recompute}}
    tasks:
      - source: {tasks}
        env: callable
        env_args: {{function: "{Path(__file__).resolve()}:lower_share_of"}}
    batch: {{prompts: {args.prompts}, group: {args.group}, micro_tokens: {args.micro_tokens}}}
    sampling: {{max_tokens: {args.tokens}}}
    trainer: {{lr: {args.lr}, betas: [0.9, 0.999], share_prefix: {str(args.side == "shared").lower()}}}
    checkpoints: {{every: 0}}
    steps: {args.steps + 1}
"""
    )
    run_recipe(load_recipe(folder / "recipe.yaml"), quiet=True)
    lines = [line for line in read_metrics(folder / "run") if line["step"] > 1]
    return {
        "generate_s": [line["time/sample_s"] for line in lines],
        "train_s": [line["time/step_s"] - line["time/sample_s"] for line in lines],
        "sampled": [line["rollout/tokens"] for line in lines],
        "reward": [line["reward/mean"] for line in lines],
        "rss_gb": rss_gb(),
    }


def lower_share_of(task: Any, text: str) -> float:
    return lower_share(text)


# -- both --------------------------------------------------------------------------------------------


def arm(args: argparse.Namespace, side: str, prompt_tokens: int) -> dict[str, float]:
    """One arm in a process of its own; medians over its steps."""
    options = ["--steps", "--prompts", "--group", "--tokens", "--lr", "--threads", "--micro-tokens"]
    values = [args.steps, args.prompts, args.group, args.tokens, args.lr, args.threads, args.micro_tokens]
    command = [sys.executable, __file__, "--model", str(args.model), "--side", side]
    command += [str(x) for pair in zip(options, values, strict=True) for x in pair]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        subprocess.run([*command, "--out", out.name], check=True, stdout=subprocess.DEVNULL)
        result = json.load(out)
    sampled = statistics.median(result["sampled"])
    train = statistics.median(result["train_s"])
    return {
        "generate_s": statistics.median(result["generate_s"]),
        "train_s": train,
        "sampled": sampled,
        "tokens_per_s": sampled / statistics.median(result["generate_s"]),
        "train_s_per_1000": 1000 * train / (sampled + prompt_tokens),
        "reward": statistics.mean(result["reward"]),
        "rss_gb": result["rss_gb"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2, help="timed steps after the first")
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--micro-tokens", type=int, default=1024, help="tokens in one forward pass of trivet")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=["trl", "rows", "shared"], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        import torch

        torch.set_num_threads(args.threads)
        result = run_trl(args) if args.side == "trl" else run_trivet(args)
        Path(args.out).write_text(json.dumps(result))
        return
    from trivet.render import get_renderer, load_tokenizer
    from trivet.types import Message

    renderer = get_renderer(load_tokenizer(args.model))
    prompts = [
        len(renderer.render([Message("user", q)], generate=True).ids_T) for q in QUESTIONS[: args.prompts]
    ]
    arms = {side: arm(args, side, args.group * sum(prompts)) for side in ("trl", "rows", "shared")}
    names = list(arms["trl"])
    print("".join(f"{name:>18}" for name in ("", *names)))
    for side, numbers in arms.items():
        print(f"{side:>18}" + "".join(f"{numbers[name]:18.3f}" for name in names))
    base = arms["trl"]
    for side in ("rows", "shared"):
        mine = arms[side]
        print(
            f"{side}: generation {mine['tokens_per_s'] / base['tokens_per_s']:.2f}x TRL's tokens a second, "
            f"training {base['train_s_per_1000'] / mine['train_s_per_1000']:.2f}x as fast per token, "
            f"peak memory {mine['rss_gb'] / base['rss_gb']:.2f} of TRL's"
        )


if __name__ == "__main__":
    main()
