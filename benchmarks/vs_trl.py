"""GRPO on the same model, prompts, reward and hyper-parameters: trivet against TRL.

    python benchmarks/vs_trl.py --model DIR [--rounds 3] [--steps 2]      # how long a step takes
    python benchmarks/vs_trl.py --model DIR --parity --prompts 2 --group 4 --tokens 24   # the same gradients?
    python benchmarks/vs_trl.py --model DIR --until-reward R --tokens 48 [--rounds 3]    # time to a reward

`DIR` is a Hugging Face directory; TRL must be installed in the same environment. Both sides use float32 on
the CPU, AdamW (betas 0.9 and 0.999, no decay), a constant learning rate, one update a step on the whole
batch, gradients clipped at norm 1, GRPO's loss (mean of the rows' means, clip 0.2, no KL term, advantages
over the group's standard deviation), temperature 1 over the whole vocabulary, the model's own chat template.
Every step asks the same `--prompts` questions `--group` times for at most `--tokens` tokens; answers end
where the model ends them. `--out FILE` writes all numbers, steps included, as JSON.

Step times: every arm is a process of its own, so that peak memory is its own. The arms take turns, `--rounds`
times: TRL, trivet with every row forwarded alone (share_prefix: false), trivet with the group's prompt shared
(its default). The first step of a process warms up and is left out; all other figures are medians over the
steps of all rounds, peak memory the largest. Generation is everything from prompts to sampled answers,
training everything from rewards to the optimiser's step. Since answers differ in length between the arms,
training is also given per 1,000 tokens of prompt and answer, and the step ratio a second time at equal
tokens: each arm's seconds a sampled token and seconds a trained token, times TRL's numbers of them.

`--parity`: see `vs_trl_parity.py`.

`--until-reward R`: wall-clock seconds from the start of the process (imports and loading included) to the
end of the first step whose batch's mean reward, averaged with those of the two steps before it, is at least
R; TRL and trivet with shared prompts in turns, round r with seed `--seed` + r, capped at `--cap-steps` and
`--cap-minutes` a process. The reward is brevity, 0.5 ^ (words / 6), 0 without a word, and every
question ends with "Answer in one short sentence.": quickly learnt, which is all it is for; it says nothing
about the answers' worth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vs_trl_arms import read_steps, run_side
from vs_trl_task import QUESTIONS, REWARDS, prompts

PASSED = ("model", "prompts", "group", "tokens", "lr", "micro_tokens", "threads", "reward")
WINDOW = 3
"""Steps the reward is averaged over before it is held against the one wanted."""


def start(args: argparse.Namespace, side: str, folder: Path, *, steps: int, seed: int) -> Any:
    """One arm as a process; its steps and its peak memory are written to `folder`."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    command += ["--steps", str(steps), "--seed", str(seed)]
    for name in PASSED:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def explain(side: str, folder: Path, process: subprocess.Popen[bytes]) -> RuntimeError:
    tail = "".join((folder / "log.txt").read_text().splitlines(True)[-15:])
    return RuntimeError(f"the arm {side!r} ended with status {process.returncode}; its last lines:\n{tail}")


# -- step times --------------------------------------------------------------------------------------


def timed(args: argparse.Namespace, side: str, seed: int) -> tuple[list[dict[str, float]], float]:
    """The timed steps of one process, and its peak memory in GB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(args, side, folder, steps=args.steps + 1, seed=seed)
        process.wait()
        if process.returncode:
            raise explain(side, folder, process)
        return read_steps(side, folder)[1:], json.loads((folder / "peak.json").read_text())


def summary(lines: list[dict[str, float]], peak_gb: float, prompt_tokens: int) -> dict[str, float]:
    """Medians over steps. `prompt_tokens` of a batch, counted once for every row."""

    def median(of: Any) -> float:
        return statistics.median(of(line) for line in lines)

    return {
        "generate_s": median(lambda x: x["time/sample_s"]),
        "train_s": median(lambda x: x["time/step_s"] - x["time/sample_s"]),
        "step_s": median(lambda x: x["time/step_s"]),
        "sampled": median(lambda x: x["rollout/tokens"]),
        "tokens_per_s": median(lambda x: x["rollout/tokens"] / x["time/sample_s"]),
        "train_s_per_1000": median(
            lambda x: 1000 * (x["time/step_s"] - x["time/sample_s"]) / (x["rollout/tokens"] + prompt_tokens)
        ),
        "peak_gb": peak_gb,
        "reward": statistics.mean(line["reward/mean"] for line in lines),
    }


def ratios(arm: dict[str, float], base: dict[str, float], prompt_tokens: int) -> dict[str, float]:
    """TRL's time over the arm's: as measured, and with as many tokens as TRL sampled."""

    def equal(a: dict[str, float]) -> float:
        tokens = base["sampled"]
        return tokens / a["tokens_per_s"] + (tokens + prompt_tokens) / 1000 * a["train_s_per_1000"]

    return {
        "step": base["step_s"] / arm["step_s"],
        "step_at_equal_tokens": equal(base) / equal(arm),
        "generation_per_token": arm["tokens_per_s"] / base["tokens_per_s"],
        "training_per_token": base["train_s_per_1000"] / arm["train_s_per_1000"],
        "memory": arm["peak_gb"] / base["peak_gb"],
    }


def run_steps(args: argparse.Namespace) -> dict[str, Any]:
    from trivet.render import get_renderer, load_tokenizer
    from trivet.types import Message

    renderer = get_renderer(load_tokenizer(args.model))
    texts = prompts(args.reward, args.prompts)
    lengths = [len(renderer.render([Message("user", text)], generate=True).ids_T) for text in texts]
    prompt_tokens = args.group * sum(lengths)
    sides = ("trl", "rows", "shared")
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    peak_gb = dict.fromkeys(sides, 0.0)
    for turn in range(args.rounds):
        for side in sides:
            lines, peak = timed(args, side, args.seed + turn)
            steps[side] += lines
            peak_gb[side] = max(peak_gb[side], peak)
            seconds = ", ".join(f"{line['time/step_s']:.1f}" for line in lines)
            print(f"round {turn + 1}/{args.rounds} {side}: steps of {seconds} s", flush=True)
    arms = {side: summary(steps[side], peak_gb[side], prompt_tokens) for side in sides}
    compared = {side: ratios(arms[side], arms["trl"], prompt_tokens) for side in ("rows", "shared")}
    return {"prompt_tokens": prompt_tokens, "arms": arms, "ratios": compared, "steps": steps}


def show_steps(report: dict[str, Any]) -> None:
    names = list(report["arms"]["trl"])
    print("".join(f"{name:>18}" for name in ("", *names)))
    for side, numbers in report["arms"].items():
        print(f"{side:>18}" + "".join(f"{numbers[name]:18.3f}" for name in names))
    for side, r in report["ratios"].items():
        print(
            f"{side}: TRL's step takes {r['step']:.2f}x as long, at equal tokens "
            f"{r['step_at_equal_tokens']:.2f}x; per token generation {r['generation_per_token']:.2f}x and "
            f"training {r['training_per_token']:.2f}x as fast; peak memory {r['memory']:.2f} of TRL's"
        )


# -- time to a reward --------------------------------------------------------------------------------


def reached(lines: list[dict[str, float]], reward: float) -> int | None:
    """Index of the first step whose mean over the window is at least `reward`."""
    rewards = [line["reward/mean"] for line in lines]
    for i in range(WINDOW - 1, len(rewards)):
        if statistics.mean(rewards[i - WINDOW + 1 : i + 1]) >= reward:
            return i
    return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the arm and its reward workers; the first signal asks, the last does not."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


def race(args: argparse.Namespace, side: str, seed: int) -> dict[str, Any]:
    """One process until the reward is there or a cap is met; `seconds` is None for the latter."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, begin = Path(name), time.time()
        process = start(args, side, folder, steps=args.cap_steps, seed=seed)
        ended = False
        try:
            while not ended and time.time() - begin < 60 * args.cap_minutes:
                time.sleep(0.5)
                ended = process.poll() is not None
                if reached(read_steps(side, folder), args.until_reward) is not None:
                    break
        finally:
            stop(process)
        if ended and process.returncode:
            raise explain(side, folder, process)
        lines = read_steps(side, folder)
    at = reached(lines, args.until_reward)
    curve = [[line["time"] - begin, line["reward/mean"], line["rollout/tokens"]] for line in lines]
    seconds = None if at is None else curve[at][0]
    return {"seed": seed, "seconds": seconds, "steps": None if at is None else at + 1, "curve": curve}


def run_race(args: argparse.Namespace) -> dict[str, Any]:
    races: dict[str, list[dict[str, Any]]] = {"trl": [], "shared": []}
    for turn in range(args.rounds):
        for side, done in races.items():
            done.append(race(args, side, args.seed + turn))
            show_race(args, side, done[-1])
    out: dict[str, Any] = {"reward": args.until_reward, "races": races, "ratio": None}
    for side, done in races.items():
        times = [one["seconds"] for one in done]
        out[f"{side}_seconds"] = None if None in times else statistics.median(times)
    if out["trl_seconds"] and out["shared_seconds"]:
        out["ratio"] = out["trl_seconds"] / out["shared_seconds"]
    return out


def show_race(args: argparse.Namespace, side: str, done: dict[str, Any]) -> None:
    print(f"{side}, seed {done['seed']}: step, seconds, reward, sampled tokens")
    for step, (seconds, reward, tokens) in enumerate(done["curve"], 1):
        print(f"  {step:4d} {seconds:8.1f} {reward:7.3f} {tokens:7.0f}")
    when = f"{done['seconds']:.1f} s, {done['steps']} steps" if done["seconds"] else "not within the caps"
    print(f"{side}, seed {done['seed']}: reward {args.until_reward} after {when}", flush=True)


def show_ratio(report: dict[str, Any]) -> None:
    for side in ("trl", "shared"):
        seconds = report[f"{side}_seconds"]
        print(f"{side}: " + (f"{seconds:.1f} s (median)" if seconds else "a run did not get there"))
    if report["ratio"]:
        print(f"TRL takes {report['ratio']:.2f}x as long to a mean reward of {report['reward']}")


# -- command line ------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parity", action="store_true", help="compare losses and gradients")
    parser.add_argument("--until-reward", type=float, metavar="R", help="time both sides to this mean reward")
    parser.add_argument("--rounds", type=int, default=1, help="turns every arm takes")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a process after its first")
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--reward", choices=list(REWARDS), help="default: lower; brief with --until-reward")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="tokens in one forward pass of trivet")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap-steps", type=int, default=60)
    parser.add_argument("--cap-minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--side", choices=["trl", "rows", "shared"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parity and args.until_reward is not None:
        parser.error("--parity and --until-reward are two measurements: ask for one")
    args.reward = args.reward or ("lower" if args.until_reward is None else "brief")
    return args


def main() -> None:
    args = arguments()
    if args.side:
        run_side(args)
        return
    if args.parity:
        from vs_trl_parity import run_parity, show_parity

        report, show = run_parity(args), show_parity
    elif args.until_reward is not None:
        report, show = run_race(args), show_ratio
    else:
        report, show = run_steps(args), show_steps
    show(report)
    if args.out:
        packages = {name: version(name) for name in ("trivet", "trl", "torch", "transformers")}
        asked = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
        where = {"machine": platform.machine(), "cpus": os.cpu_count(), **packages}
        args.out.write_text(json.dumps({"asked": asked, "where": where, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
