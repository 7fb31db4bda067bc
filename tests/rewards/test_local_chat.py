"""A judge that runs on this machine: a tiny model that was taught one verdict gives it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trivet.envs import EnvError, make_env
from trivet.envs.chat import make_judge
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny
from trivet.rewards.chat_api import ChatError
from trivet.rewards.judge import Labels
from trivet.rewards.local_chat import LocalChat
from trivet.types import Message, Scored, Unscored

SAID = '{"verdict": "yes"}'
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained until it says the same whatever it is asked."""
    import torch

    from trivet.algorithms import resolve
    from trivet.data.sft import sft_groups
    from trivet.recipe.schema import Trainer as Config
    from trivet.render import get_renderer, load_tokenizer
    from trivet.trainer import Trainer, collate, prepare

    folder = tmp_path_factory.mktemp("judge")
    tiny = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, context=1024, alphabet=ALPHABET)
    start = make_tiny(tiny, folder / "start")
    renderer = get_renderer(load_tokenizer(start))
    ask = Labels({"yes": 1, "no": 0}).ask()
    prompts = [f"{n} {'x' * n}" for n in range(1, 40)] + [f"{n} x {n % 9} x {ask}" for n in range(1, 40)]
    rows = [{"prompt": prompt, "response": SAID} for prompt in prompts]
    batch = collate(list(sft_groups(rows, renderer)))
    torch.manual_seed(0)
    trainer = Trainer(start, Config(lr=1e-2), device="cpu")
    for step in range(80):
        trainer.update(prepare(batch, resolve("sft")), step=step + 1)
    return trainer.export(folder / "model")


def test_replies(directory: Path) -> None:
    async def ask() -> None:
        chat = LocalChat(directory, max_tokens=30, context=600)
        try:
            reply = await chat([{"role": "user", "content": "9 xx"}], seed=1)
            assert reply.text == SAID
            assert reply.completion_tokens == len(SAID) + 1
            assert reply.prompt_tokens > 4
            many = await asyncio.gather(*(chat([{"role": "user", "content": f"{n}"}]) for n in range(20)))
            assert len(many) == 20
            with pytest.raises(ChatError, match="context is 600"):
                await chat([{"role": "user", "content": "x" * 700}])
        finally:
            await chat.aclose()

    asyncio.run(ask())


def test_a_recipe_names_it(directory: Path) -> None:
    settings = {
        "directory": str(directory),
        "max_tokens": 30,
        "context": 1024,
        "template": "$question $answer $verdict",
    }

    async def judge() -> None:
        one = make_judge(settings | {"labels": {"yes": 1, "no": 0}})
        try:
            good = await one.score([Message("user", "q")], "7 x", question="1 x")
            assert isinstance(good, Scored), good
            assert good.value == 1.0
            long = await one.score([Message("user", "q")], "x" * 3000, question="1 x")
            assert isinstance(long, Unscored)
            assert long.cause == "judge_refused"
        finally:
            await one.aclose()

    asyncio.run(judge())
    with pytest.raises(EnvError, match="no model's directory"):
        make_env("chat", judge={"directory": "/nowhere"})
    with pytest.raises(EnvError, match="unknown \\['base_url'\\]"):
        make_env("chat", judge=settings | {"base_url": "http://localhost"})
