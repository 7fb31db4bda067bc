"""trivet without a recipe: sample from a model, score the answers, look at the tokens.

python examples/from_python.py            # a tiny model from random weights
python examples/from_python.py models/smollm2
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from trivet.agents import Attempt, Policy
from trivet.engine.torch import TorchEngine
from trivet.envs import make_env
from trivet.recipe.schema import Sampling, Tasks, TinyModel
from trivet.render import get_renderer, load_tokenizer
from trivet.render.tiny import make_tiny
from trivet.tasks import load_tasks
from trivet.types import IssueKey, Rollout

CONTEXT, ANSWERS = 128, 4


async def play(directory: Path) -> list[Rollout]:
    """Four answers to each of two sums, with their rewards."""
    tasks = load_tasks(Tasks(source="generated:addition", limit=2)).tasks
    renderer = get_renderer(load_tokenizer(directory))
    engine = TorchEngine(str(directory), slots=8, context=CONTEXT, deterministic=False)
    try:
        policy = Policy(engine, renderer, Sampling(max_tokens=16), context=CONTEXT)
        async with make_env("math", fallback="number") as env:
            attempts = [
                (task, Attempt("example", IssueKey(task.id, 0), task.id, index))
                for task in tasks
                for index in range(ANSWERS)
            ]
            played = await asyncio.gather(*(env.rollout(task, policy, attempt) for task, attempt in attempts))
    finally:
        engine.close()
    return [rollout for rollouts in played for rollout in rollouts]


def main(directory: Path) -> list[Rollout]:
    rollouts = asyncio.run(play(directory))
    for rollout in rollouts:
        (row,) = rollout.trace.rows()
        logprob = row.logprob_T[row.sampled_T].sum()
        print(f"{rollout.task.messages[0].text} {rollout.messages[-1].text!r}")
        print(
            f"    {rollout.reward}, {rollout.termination}: {rollout.sampled_tokens} of {len(row)} tokens "
            f"sampled, log-probability {logprob:.1f}"
        )
    return rollouts


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(make_tiny(TinyModel(), Path(folder) / "tiny"))
