"""Includes, defaults of stages, overrides, errors with lines."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from trivet.recipe import RecipeError, load_recipe, load_section, packaged_recipes, plan
from trivet.recipe.schema import Tasks, TinyModel

Write = Callable[..., Path]
STAGE = "stages:\n  - {name: rl, steps: 3}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file beside the others; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)

    def writer(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return writer


def messages(source: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    return [str(problem) for problem in caught.value.problems]


# -- where recipes come from ---------------------------------------------------------------------


def test_packaged_recipes_load_by_name() -> None:
    names = packaged_recipes()
    assert "quickstart" in names
    for name, description in names.items():
        assert description, f"{name} begins without a comment that says what it is"
        assert load_recipe(name).stages


def test_a_miss_lists_the_packaged_names() -> None:
    [message] = messages("quikstart")
    assert "did you mean `quickstart`?" in message
    assert "trivet's own: " in message
    assert "no file" in messages("nope/x.yaml")[0]
    [outside] = messages("../recipe/schema")
    assert "neither a file nor" in outside


def test_a_run_folder_is_a_recipe(write: Write) -> None:
    path = write(STAGE, "runs/x/recipe.yaml")
    assert load_recipe(path.parent).stages[0].steps == 3
    assert load_recipe("runs/x").stages[0].steps == 3


def test_unreadable_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in messages("b.yaml")[0]
    (tmp_path / "d.yaml").mkdir()
    assert "no file" in messages("d.yaml")[0]
    write("", "e.yaml")
    assert "is empty" in messages("e.yaml")[0]
    write("- a", "l.yaml")
    assert "keys and values" in messages("l.yaml")[0]
    if os.geteuid() != 0:
        write(STAGE, "p.yaml").chmod(0)
        assert "Permission denied" in messages("p.yaml")[0]


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" + STAGE.encode())
    assert load_recipe(tmp_path / "r.yaml").stages[0].name == "rl"


# -- includes ------------------------------------------------------------------------------------


def test_later_includes_win_and_the_file_wins_over_all(write: Write) -> None:
    write("trainer: {lr: 1e-3, weight_decay: 0.1, eps: 1e-6}\n" + STAGE, "parts/a.yaml")
    write("trainer: {lr: 2e-3, weight_decay: 0.2}\n", "parts/b.yaml")
    path = write("include: [parts/a.yaml, parts/b.yaml]\ntrainer: {lr: 3e-3}\n")
    trainer = load_recipe(path).stages[0].trainer
    assert (trainer.lr, trainer.weight_decay, trainer.eps) == (3e-3, 0.2, 1e-6)


def test_includes_start_at_the_including_file_and_may_name_packaged_recipes(write: Write) -> None:
    write("include: b.yaml\n", "parts/a.yaml")
    write("include: [quickstart]\nseed: 7\n", "parts/b.yaml")
    recipe = load_recipe(write("include: [parts/a.yaml]\n"))
    assert recipe.seed == 7
    assert [stage.name for stage in recipe.stages] == [s.name for s in load_recipe("quickstart").stages]


def test_lists_are_replaced_not_joined(write: Write) -> None:
    write("stages: [{name: a, steps: 1}, {name: b, steps: 1}]\n", "base.yaml")
    path = write("include: base.yaml\nstages: [{name: c, steps: 2}]\n")
    assert [stage.name for stage in load_recipe(path).stages] == ["c"]


def test_a_circle_of_includes_is_refused(write: Write) -> None:
    write("include: b.yaml\n", "a.yaml")
    write("include: c.yaml\n", "b.yaml")
    write("seed: 1\ninclude: [b.yaml]\n", "c.yaml")
    [message] = messages("a.yaml")
    assert message == "c.yaml:2: include goes round in a circle: b.yaml -> c.yaml -> b.yaml"
    write("include: self.yaml\n", "self.yaml")
    assert "circle" in messages("self.yaml")[0]


def test_the_same_file_may_be_included_twice(write: Write) -> None:
    write("seed: 3\n" + STAGE, "base.yaml")
    write("include: base.yaml\n", "a.yaml")
    write("include: base.yaml\n", "b.yaml")
    assert load_recipe(write("include: [a.yaml, b.yaml]\n")).seed == 3


def test_errors_of_includes_name_their_file(write: Write) -> None:
    write("trainer:\n  lerning_rate: 1\n", "base.yaml")
    assert messages(write("include: base.yaml\n" + STAGE)) == [
        "base.yaml:2: trainer.lerning_rate is not a key; did you mean `lr`?"
    ]
    [missing] = messages(write("seed: 1\ninclude: [gone.yaml]\n" + STAGE))
    assert missing.startswith("recipe.yaml:2: there is no file gone.yaml")
    assert "must list file names" in messages(write("include: [3]\n" + STAGE))[0]


# -- defaults of stages --------------------------------------------------------------------------


def test_top_level_sections_are_defaults_and_stages_win(write: Write) -> None:
    path = write(
        """
trainer: {lr: 1e-3, betas: [0.8, 0.9]}
batch: {prompts: 4}
tasks: [{source: "generated:addition"}]
algorithm: {kind: grpo, clip: 0.1}
stages:
  - {name: a, steps: 1, trainer: {lr: 5e-4}}
  - {name: b, steps: 1, tasks: [], algorithm: {credit: mean_only}}
  - {name: c, steps: 1, mode: train, algorithm: sft, batch:}
"""
    )
    a, b, c = load_recipe(path).stages
    assert (a.trainer.lr, a.trainer.betas, a.batch.prompts) == (5e-4, (0.8, 0.9), 4)
    assert [tasks.label for tasks in a.tasks] == ["addition"]
    assert (b.tasks, b.trainer.lr) == ([], 1e-3)
    assert b.algorithm == {"kind": "grpo", "clip": 0.1, "credit": "mean_only"}
    assert (c.algorithm, c.kind) == ("sft", "sft")  # another kind replaces the whole
    assert c.batch.prompts == 4  # an empty section takes nothing away
    assert c.batch.group == 1  # an example is a group of one


def test_stages_do_not_share_what_they_inherit(write: Write) -> None:
    path = write(
        "eval: {tasks: [{source: x.jsonl, name: x}]}\nstages: [{name: a, steps: 1}, {name: b, steps: 1}]\n"
    )
    a, b = load_recipe(path, ["stages.a.eval.tasks.x.limit=3"]).stages
    assert (a.eval.tasks[0].limit, b.eval.tasks[0].limit) == (3, None)


def test_defaults_of_the_wrong_shape(write: Write) -> None:
    [message] = messages(write("trainer: 5\n" + STAGE))
    assert message == "recipe.yaml:1: trainer must be a section of keys and values, not 5"
    assert "tasks must be a list of tasksets" in messages(write("tasks: {source: x}\n" + STAGE))[0]


# -- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("stages.rl.trainer.lr=1e-4", lambda r: r.stages[1].trainer.lr == 1e-4),
        ("stages.1.trainer.lr=1e-4", lambda r: r.stages[1].trainer.lr == 1e-4),
        ("stages.rl.algorithm.clip=[0.1, 0.3]", lambda r: r.stages[1].algorithm["clip"] == [0.1, 0.3]),
        ("stages.rl.explorer.window.above=0.25", lambda r: r.stages[1].explorer.window.above == 0.25),
        ("stages.rl.tasks.0.args.digits=3", lambda r: r.stages[1].tasks[0].args["digits"] == 3),
        ("stages.rl.eval.tasks.addition.limit=5", lambda r: r.stages[1].eval.tasks[0].limit == 5),
        ("eval.samples=7", lambda r: {s.eval.samples for s in r.stages} == {7}),
        ("name=a.b=c".replace("=c", "-c"), lambda r: r.name == "a.b-c"),
        ("policy.template_args={thinking: true}", lambda r: r.policy.template_args == {"thinking": True}),
        ("buffer.url=null", lambda r: r.buffer.url is None),
        ("stages.rl.sampling.stop=['=']", lambda r: r.stages[1].sampling.stop == ["="]),
    ],
)
def test_overrides(text: str, read: Callable[..., bool]) -> None:
    assert read(load_recipe("quickstart", [text]))


def test_the_last_override_wins() -> None:
    assert load_recipe("quickstart", ["seed=1", "seed=2"]).seed == 2


def test_an_override_that_no_stage_would_notice_is_refused(write: Write) -> None:
    path = write("stages: [{name: a, steps: 1, trainer: {lr: 1e-3}}, {name: b, steps: 1}]\n")
    [message] = messages(path, "trainer.lr=1e-4")
    assert message.startswith("override 'trainer.lr=1e-4': is only a default")
    assert message.endswith("write stages.a.trainer.lr=...")
    a, b = load_recipe(path, ["trainer.eps=1e-5"]).stages
    assert a.trainer.eps == b.trainer.eps == 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "is written key=value"),
        ("=3", "not a dotted path"),
        ("a..b=3", "not a dotted path"),
        ("stages.sl.steps=3", "stages has no item 'sl'; it has sft, rl, bench"),
        ("stages.9.steps=3", "stages has no item '9'"),
        ("seed.x=3", "seed is 2, a single value"),
        ("stages.rl.steps=[", "not YAML"),
        ("stages.rl.trainer.lerning_rate=3", "did you mean `lr`?"),
        ("stages.rl.steps=many", "must be a whole number, not 'many'"),
        ("include=[x]", "include cannot be overridden"),
    ],
)
def test_bad_overrides(text: str, message: str) -> None:
    [found] = messages("quickstart", text)
    assert found.startswith(f"override {text!r}: ")
    assert message in found


# -- errors --------------------------------------------------------------------------------------


def test_all_errors_at_once_each_with_its_line(write: Write) -> None:
    path = write(
        """name: x
polcy: {}
steps: 3
trainer:
  lerning_rate: 3
  weight_decay: lots
policy:
  model: {hiden: 3, layers: two}
stages:
  - name: a
    steps: 1e3
    algorithm: 3
    batch:
      group_size: 8
      prompts: 0
      size: 1
    lr: 3
    sampling: 4
    tasks: {source: x}
    eval: {tasks: [{sorce: x}]}
    mode: bath
  - steps: true
    name: B b
  - name: c
    mode: train
"""
    )
    found = messages(path, "stages.a.engine.slots=x", "oops")
    expected = [
        "override 'oops': an override is written key=value",
        "override 'stages.a.engine.slots=x': stages.0.engine.slots must be a whole number, not 'x'",
        "recipe.yaml:2: polcy is not a key; did you mean `policy`?",
        "recipe.yaml:3: steps is not a key; `steps` is a key of a stage",
        "recipe.yaml:5: trainer.lerning_rate is not a key; did you mean `lr`?",
        "recipe.yaml:6: trainer.weight_decay must be a number, not 'lots'",
        "recipe.yaml:8: policy.model.hiden is not a key; did you mean `hidden`?",
        "recipe.yaml:8: policy.model.layers must be a whole number, not 'two'",
        "recipe.yaml:11: stages.0.steps must be a whole number, not 1000.0",
        "recipe.yaml:12: stages.0.algorithm must be a text, not 3; put it in quotes",
        "recipe.yaml:14: stages.0.batch.group_size is not a key; did you mean `group`?",
        "recipe.yaml:15: stages.0.batch.prompts must be greater than 0, not 0",
        "recipe.yaml:16: stages.0.batch.size is not a key. Known here: prompts, group",
        "recipe.yaml:17: stages.0.lr is not a key; there is `trainer.lr`",
        "recipe.yaml:18: stages.0.sampling must be a section of keys and values, not 4",
        "recipe.yaml:19: stages.0.tasks must be a list, not a section; put `- ` before each item",
        "recipe.yaml:20: stages.0.eval.tasks.0.sorce is not a key; did you mean `source`?",
        "recipe.yaml:20: stages.0.eval.tasks.0.source is missing",
        "recipe.yaml:21: stages.0.mode must be one of both, train or bench, not 'bath'; did you mean `both`?",
        "recipe.yaml:22: stages.1.steps must be a whole number, not true",
        "recipe.yaml:23: stages.1.name must be made of letters",
    ]
    for text in expected:
        assert [f for f in found if f.startswith(text)], text
    assert len([f for f in found if "lerning_rate" in f]) == 1  # once, though three stages inherit it
    assert len(found) == len(expected)


def test_a_stage_says_when_it_ends(write: Write) -> None:
    [message] = messages(write("stages:\n  - name: a\n    steps: 1\n  - name: c\n    mode: train\n"))
    assert message.startswith("recipe.yaml:4: stage 'c': say when it ends")


def test_the_message_lists_the_problems(write: Write) -> None:
    path = write("sed: 1\nnam: x\n" + STAGE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("recipe.yaml: 2 problems")
    assert len(lines) == 3
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rate", "there is `trainer.lr`|did you mean `trainer.lr`"),
        ("batch_size", "did you mean `batch.prompts`"),
        ("max_new_tokens", "did you mean `sampling.max_tokens`"),
        ("num_generations", "did you mean `batch.group`"),
    ],
)
def test_words_of_other_frameworks(write: Write, key: str, hint: str) -> None:
    path = write(f"stages:\n  - {{name: a, steps: 1, {key}: 3}}\n")
    with pytest.raises(RecipeError, match=hint):
        load_recipe(path)


def test_stage_names_must_differ(write: Write) -> None:
    path = write("stages: [{name: a, steps: 1}, {name: a, steps: 1}]\n")
    assert "stage names must differ; ['a']" in messages(path)[0]


def test_no_stages(write: Write) -> None:
    for text in ("seed: 1\n", "stages: []\n"):
        assert "list at least one stage (or a data section)" in messages(write(text))[0]
    only_data = load_recipe(write("data: {sources: [{source: a.jsonl}]}\n"))
    assert "no stage to run" in plan(only_data).problems[0]


def test_numbers_must_be_finite(write: Write) -> None:
    path = write("trainer: {lr: .inf}\n" + STAGE)
    assert "trainer.lr must be a finite number" in messages(path)[0]


def test_output_takes_the_name_only(write: Write) -> None:
    assert "only {name}" in messages(write("output: runs/{nme}\n" + STAGE))[0]
    recipe = load_recipe(write("name: x\noutput: out/{name}/1\n" + STAGE))
    assert recipe.run_dir == "out/x/1"
    assert "letters" in messages(write("name: ../x\n" + STAGE))[0]


@pytest.mark.parametrize("name", ["a/b", "a@b", "", " "])
def test_taskset_names_are_parts_of_metric_names(write: Write, name: str) -> None:
    text = f"stages: [{{name: rl, steps: 1, tasks: [{{source: a.jsonl, name: '{name}'}}]}}]"
    with pytest.raises(RecipeError, match=r"stages.0.tasks.0.name must be text without / and @"):
        load_recipe(write(text))


def test_a_bench_stage_takes_no_default_tasks(write: Write) -> None:
    text = """
    tasks: [{source: a.jsonl}]
    stages:
      - {name: rl, steps: 1}
      - {name: compare, mode: bench, eval: {tasks: [{source: b.jsonl}]}}
    """
    recipe = load_recipe(write(text))
    assert [len(stage.tasks) for stage in recipe.stages] == [1, 0]


def test_numbers_of_thousands_of_digits(write: Write) -> None:
    with pytest.raises(RecipeError, match="Exceeds the limit"):
        load_recipe(write(f"seed: {'9' * 5000}\nstages: [{{name: rl, steps: 1}}]"))
    with pytest.raises(RecipeError, match="has no item '²'"):
        load_recipe(write("stages: [{name: rl, steps: 1}]"), ["stages.².steps=2"])


def test_a_home_folder_is_filled_in(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = "output: ~/runs\npolicy: {model: ~/models/m}\nstages: [{name: rl, steps: 1}]"
    recipe = load_recipe(write(text))
    assert (recipe.output, recipe.policy.model) == ("/home/me/runs", "/home/me/models/m")


def test_sections_by_themselves() -> None:
    assert load_section(TinyModel, {"hidden": 8}, ["layers=3"]).layers == 3
    with pytest.raises(RecipeError, match="did you mean `hidden`"):
        load_section(TinyModel, {}, ["hiden=3"])
    with pytest.raises(RecipeError, match="source is missing"):
        load_section(Tasks, {}, [])


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("generated:addition", "addition"),
        ("data/x.jsonl", "x"),
        ("data/x.jsonl.gz", "x"),
        ("a/b.c.parquet", "b.c"),
        ("openai/gsm8k", "gsm8k"),
        ("data/*.jsonl", "tasks"),
        ("my data.json", "my_data"),
    ],
)
def test_labels(source: str, label: str) -> None:
    assert Tasks(source=source).label == label
    assert Tasks(source=source, name="own").label == "own"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.lr", "1e30", "less than or equal to 1"),
        ("trainer.critic_lr", "1e30", "less than or equal to 1"),
        ("trainer.weight_decay", "1e30", "less than or equal to"),
        ("explorer.window", "{above: 0.8, upto: 0.2}", "above 0.8 must lie below upto 0.2"),
    ],
)
def test_numbers_that_would_break_the_weights_or_keep_nothing(
    write: Write, key: str, value: str, message: str
) -> None:
    """AdamW moves a weight by about lr: an lr of 1e308 leaves weights that are not numbers, silently."""
    [found] = messages(write(STAGE), f"stages.rl.{key}={value}")
    assert message in found
