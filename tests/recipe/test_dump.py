"""Resolved recipes: read back equal; the configuration hash."""

from __future__ import annotations

import tempfile
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from trivet.recipe import Recipe, config_hash, dump_recipe, load_recipe, packaged_recipes

_words = st.text(max_size=12)
_names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,6}", fullmatch=True)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=4,
)
_free = st.dictionaries(_names.filter(lambda name: not name.endswith(("secret", "key"))), _plain, max_size=3)
_positive = st.integers(1, 10**6)
_share = st.sampled_from([1e-7, 0.25, 0.5])
_number = st.floats(1e-9, 1e3)


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_sampling = _some(
    temperature=_number, max_tokens=_positive, top_k=_positive, stop=st.lists(_words, max_size=2)
)
_tasks = st.builds(
    lambda source, rest: {"source": source, **rest},
    st.sampled_from(["generated:addition", "data/x.jsonl", "on", "1e-4", "a: b"]),
    _some(
        name=_names,
        template=_words,
        args=_free,
        env_args=_free,
        limit=_positive,
        fields=st.just({"id": "no"}),
    ),
)
_stage = st.builds(
    lambda rest: {"steps": 3, **rest},
    _some(
        mode=st.sampled_from(["both", "train", "bench"]),
        algorithm=st.sampled_from(["grpo", "sft", {"kind": "grpo", "clip": [0.1, 0.2]}]),
        tasks=st.lists(_tasks, max_size=2),
        batch=_some(prompts=_positive, group=_positive),
        sampling=_sampling,
        trainer=_some(lr=_share, betas=st.just([0.5, 0.9]), frozen=st.lists(_words, max_size=2)),
        eval=_some(tasks=st.lists(_tasks, max_size=2), sampling=_sampling, k=st.lists(_positive, max_size=2)),
        until=st.just({"metric": "eval/x/pass@1", "below": 0.5}),
        explorer=_some(window=_some(above=_share)),
        phases=st.just([{"from": 2, "set": {"trainer.lr": 0.5}}]),
    ),
)
_recipe = st.builds(
    lambda stages, rest: {"stages": [{"name": f"s{i}", **s} for i, s in enumerate(stages)], **rest},
    st.lists(_stage, min_size=1, max_size=3),
    _some(
        seed=st.integers(),
        policy=_some(
            model=st.sampled_from(["some/model", {"hidden": 8}]), system_prompt=_words, template_args=_free
        ),
        models=st.dictionaries(_names, st.just({"model": "judge"}), max_size=2),
        monitor=_some(show=st.lists(_words, max_size=2)),
    ),
)


def reload(recipe: Recipe) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        return load_recipe(path)


@settings(max_examples=60)
@given(_recipe)
def test_a_dumped_recipe_is_read_back_equal(data: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(data)
    again = reload(recipe)
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_packaged_recipes_are_read_back_equal(name: str) -> None:
    recipe = load_recipe(name)
    assert reload(recipe) == recipe


def test_what_is_left_out_is_none_by_default() -> None:
    """`dump_recipe` leaves None out, so None must be the default wherever it is allowed."""

    sections = [c for s in [BaseModel, *BaseModel.__subclasses__()] for c in s.__subclasses__()]
    ours = [c for c in sections if c.__module__ == "trivet.recipe.schema"]
    assert len(ours) > 15
    for section in ours:
        for name, field in section.model_fields.items():
            if type(None) in typing.get_args(field.annotation):
                assert field.default is None, f"{section.__name__}.{name}"


def test_the_hash_follows_what_decides_behaviour() -> None:
    base = load_recipe("quickstart")
    same = ["name=x", "seed=5", "stages.rl.trainer.lr=1.0", "stages.rl.steps=3", "runtime.threads=1"]
    other = [
        "policy.system_prompt=hello",
        "policy.template_args={a: 1}",
        "policy.model.hidden=32",
        "stages.rl.sampling.temperature=0.5",
        "stages.rl.sampling.max_tokens=99",
        "stages.rl.tasks.0.env_args={strict: true}",
        "stages.rl.tasks.0.template='{prompt}!'",
    ]
    assert {config_hash(load_recipe("quickstart", [text]), "rl") for text in same} == {
        config_hash(base, "rl")
    }
    hashes = [config_hash(load_recipe("quickstart", [text]), "rl") for text in other]
    assert len({*hashes, config_hash(base, "rl")}) == len(other) + 1
    assert config_hash(base, base.stage("rl")) == config_hash(base, "rl")
    with pytest.raises(KeyError, match="no stage 'x'"):
        config_hash(base, "x")
