"""Whole builds of small sources: what comes out, whatever workers and kills do, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from trivet.data.build import BuildError, build, output_of
from trivet.data.inspect import find, rows_of, spans, stripped
from trivet.data.prepare import record_of
from trivet.data.shards import PackedData, ShardError, read_manifest
from trivet.recipe import RecipeError, load_recipe
from trivet.recipe.data import Data
from trivet.recipe.schema import TinyModel
from trivet.render import get_renderer, load_tokenizer, supervised_trace
from trivet.render.tiny import make_tiny

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, alphabet=ALPHABET)
    return str(make_tiny(tiny, tmp_path_factory.mktemp("tokenizer") / "m"))


def turns(question: Any, answer: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": question}, {"role": "assistant", "content": answer}]


def chat(n: int, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"What is {n} and {n}?"},
        {"role": "assistant", "content": str(2 * n)},
    ]
    return {"messages": messages} | more


def agent(n: int) -> dict[str, Any]:
    """Two rounds with reasoning: two examples, the first round's thought stripped from the second."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"n": n})}}
    return {
        "messages": [
            {"role": "user", "content": f"Add to {n}."},
            {"role": "assistant", "content": "", "reasoning_content": f"Use it {n}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": str(n + 1)},
            {"role": "assistant", "content": f"It is {n + 1}.", "reasoning_content": "Got it."},
            {"role": "user", "content": "Thanks. Again?"},
            {"role": "assistant", "content": f"Still {n + 1}.", "reasoning_content": "Same as before."},
        ],
        "tools": [
            {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        ],
    }


def write(path: Path, rows: list[Any]) -> str:
    if not path.exists():  # a file that is written again is another input
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def recipe(folder: Path, model: str, *overrides: str, **data: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    if "sources" not in data:
        chats = write(folder / "chats.jsonl", [chat(n % 70) for n in range(90)])
        agents = write(folder / "agents.jsonl", [agent(n) for n in range(30)])
        data["sources"] = [
            {"source": chats, "name": "chats", "category": "maths"},
            {"source": agents, "name": "agents", "category": "tools"},
        ]
    data = {"output": str(folder / "out"), "pack": {"length": 512}, "workers": 1} | data
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "mix", "policy": {"model": model}, "data": data}))
    return load_recipe(path, overrides)


def digest(folder: Path) -> dict[str, str]:
    """Every file of a build but the figures and the note of inputs' times, by content."""
    files = (
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "figures" not in p.parts and p.name != ".inputs"
    )
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_from_rows_to_packs(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    manifest = build(made)
    out = output_of(made)
    sources = manifest["sources"]
    assert {label: (one["rows"], one["examples"]) for label, one in sources.items()} == {
        "chats": (90, 90),
        "agents": (30, 60),
    }
    assert manifest["copies"]["exact"]["by_source"] == {"chats": 20, "agents": 0}
    rows = list(rows_of(out))
    assert len(rows) == manifest["examples"]["rows"] == 130
    first, second = (row for row in rows if row["place"].endswith("agents.jsonl:1"))
    assert (first["part"], second["part"]) == (0, 1)
    assert [m.reasoning for m in record_of(second).messages if m.role == "assistant"] == [
        *(None, None),
        "Same as before.",
    ]
    assert "split_round" in second["done"]
    assert not (out / "work").exists()
    assert (out / "report.html").exists()


def test_packs_hold_every_example_once_with_its_own_tokens(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    manifest = build(made)
    packed = PackedData(output_of(made))
    examples = {row["id"]: row for row in rows_of(output_of(made))}
    renderer = get_renderer(load_tokenizer(model))
    seen = []
    for pack in packed:
        assert len(pack.ids_T) <= 512
        assert len(pack.ids_T) == pack.lengths_D.sum()
        position_T = pack.position_T()
        starts = np.cumsum(pack.lengths_D) - pack.lengths_D
        assert (position_T[starts] == 0).all()
        assert (pack.train_T[starts] == 0).all()
        for start, length, name in zip(starts, pack.lengths_D, pack.examples, strict=True):
            row = examples[name]
            record = record_of(row)
            trace = supervised_trace(renderer, record.messages, tools=record.tools)
            assert pack.ids_T[start : start + length].tolist() == trace.column("id").tolist()
            assert pack.train_T[start : start + length].tolist() == trace.column("train").tolist()
            seen.append(name)
    assert sorted(seen) == sorted(examples)
    assert packed.tokens == sum(row["tokens"] for row in examples.values())
    assert packed.trained == sum(row["trained"] for row in examples.values())
    assert manifest["packs"]["fill"] == pytest.approx(packed.tokens / (512 * len(packed)))


def test_workers_and_pieces_change_no_byte(tmp_path: Path, model: str) -> None:
    """Several processes, and a second build into another folder: equal but for the folder's own name."""
    one, two = (recipe(tmp_path / name, model) for name in ("a", "b"))
    sources = [s.model_dump() for s in one.data.sources]
    two.data.sources = one.data.model_validate({"sources": sources}).sources
    two.data.workers = 2
    build(one)
    build(two)
    assert digest(output_of(one)) == digest(output_of(two))


def test_a_second_build_does_nothing_and_a_new_mix_only_mixes(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    build(made)
    before = digest(output_of(made))
    said: list[str] = []
    build(made, say=said.append)
    assert said == [f"the examples of {output_of(made)} are built already"]
    assert digest(output_of(made)) == before
    build(recipe(tmp_path, model, compose={"by": "samples", "categories": {"maths": 0.5, "tools": 0.5}}))
    after = digest(output_of(made))
    examples = {name for name in before if name.startswith("examples")}
    assert all(after[name] == before[name] for name in examples)
    assert after["packed/part-00000.parquet"] != before["packed/part-00000.parquet"]
    table = read_manifest(output_of(made))["composition"]["table"]
    assert {row["category"]: row["share_samples"] for row in table["categories"]} == {
        "maths": 0.5,
        "tools": 0.5,
    }
    build(made)
    assert digest(output_of(made)) == before


_KILLED = """
import sys
from pathlib import Path
from trivet.recipe import load_recipe
from trivet.data import build as b, pack, prepare, shards
stop = int(sys.argv[2])
count = 0
real = Path.rename
def rename(self, target):
    global count
    count += 1
    if count > stop:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)
Path.rename = rename
b.build(load_recipe(sys.argv[1]))
"""


def test_a_build_killed_anywhere_goes_on_to_the_same_bytes(tmp_path: Path, model: str) -> None:
    """Killed before one rename after the other, in one folder: every start goes on where the last ended."""
    whole = recipe(tmp_path / "whole", model, deduplicate={"exact": "whole"})
    build(whole)
    cut = recipe(tmp_path / "whole", model, deduplicate={"exact": "whole"}, output=str(tmp_path / "cut"))
    path = tmp_path / "whole" / "recipe.yaml"
    kills = 0
    for stop in (0, 1, 2, 2, 100):
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(path), str(stop)],
            capture_output=True,
            timeout=120,
            check=False,
        )
        kills += done.returncode == -signal.SIGKILL
        if done.returncode == 0:
            break
    assert kills >= 3
    assert digest(output_of(whole)) == digest(output_of(cut))


def test_too_many_bad_rows_stop_the_build_and_name_the_first(tmp_path: Path, model: str) -> None:
    rows = [chat(n) for n in range(95)] + ["{broken", '{"x": 1}'] * 4
    source = write(tmp_path / "bad.jsonl", rows)
    made = recipe(tmp_path, model, sources=[{"source": source}])
    with pytest.raises(
        BuildError, match=r"8 of 103 rows cannot be read \(broken_json 4, unknown_format 4\)"
    ) as e:
        build(made)
    assert "bad.jsonl:96" in str(e.value)
    made.data.max_bad = 0.1
    manifest = build(made)
    one = manifest["sources"]["bad"]
    assert (one["examples"], one["bad"]) == (95, {"broken_json": 4, "unknown_format": 4})
    assert one["seen"]["unknown_format"][0][0].endswith("bad.jsonl:97")


def test_what_cannot_be_trained_is_counted_by_cause(tmp_path: Path, model: str) -> None:
    rows: list[Any] = [chat(n) for n in range(60)]
    rows += [{"messages": []}, {"messages": [{"role": "user", "content": "alone"}]}]
    rows += [chat(1, messages=turns("a", "x" * 2000))]
    rows += [chat(1, messages=turns("a", "b", "wizard"))]
    image = [{"type": "image_url", "image_url": {"url": "x.png"}}]
    rows += [chat(1, messages=turns(image, "b"))]
    made = recipe(tmp_path, model, sources=[{"source": write(tmp_path / "a.jsonl", rows)}], max_length=1000)
    one = build(made)["sources"]["a"]
    assert one["examples"] == 60
    assert sum(one["dropped"].values()) + sum(one["bad"].values()) == 5
    assert one["dropped"]["too_long"] == 1
    assert one["dropped"]["non_text_content"] == 1


def test_what_a_person_should_look_at_is_said(tmp_path: Path, model: str) -> None:
    """A source that gives nothing, and a file that breaks off: the build goes on, and not in silence."""
    import gzip

    whole = gzip.compress("".join(json.dumps(chat(n)) + "\n" for n in range(2000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    alone = write(tmp_path / "alone.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 3)
    sources = [{"source": str(tmp_path / "cut.jsonl.gz")}, {"source": alone}]
    said: list[str] = []
    build(recipe(tmp_path, model, sources=sources), say=said.append)
    assert any("source 'alone' gave nothing: 3 rows, " in text for text in said)
    assert any("cut.jsonl.gz" in text and "breaks off" in text for text in said)


def test_nothing_left_says_why(tmp_path: Path, model: str) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "alone"}]}] * 3)
    with pytest.raises(BuildError, match="no example is left: "):
        build(recipe(tmp_path, model, sources=[{"source": source}]))


def test_contaminated_rows_are_dropped_and_reported(tmp_path: Path, model: str) -> None:
    item = "A ferry leaves the port with eighty four people and nineteen of them get off at the first island."
    rows = [chat(n) for n in range(50)]
    rows.append(
        chat(
            0, messages=[{"role": "user", "content": f"Help: {item}"}, {"role": "assistant", "content": "65"}]
        )
    )
    test = write(tmp_path / "test.jsonl", [{"question": item, "answer": "65"}])
    screen = {"benchmarks": [{"name": "ferries", "source": test, "fields": ["question"]}]}
    source = {"source": write(tmp_path / "a.jsonl", rows)}
    manifest = build(recipe(tmp_path, model, sources=[source], decontaminate=screen))
    assert manifest["sources"]["a"]["dropped"] == {"contaminated": 1}
    assert "ferries" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ValueError, match="did you mean 'sampled_8gram'"):
        build(
            recipe(tmp_path, model, sources=[source], decontaminate=screen | {"passes": ["sampled_8grams"]})
        )


def test_sources_may_have_templates_of_their_own(tmp_path: Path, model: str) -> None:
    own = load_tokenizer(model).chat_template
    system = "{% if messages[0].role != 'system' %}<|im_start|>systemOther<|im_end|>{% endif %}"
    (tmp_path / "other.jinja").write_text(system + own)
    rows = [chat(n) for n in range(5)]
    sources = [
        {"source": write(tmp_path / "a.jsonl", rows)},
        {"source": write(tmp_path / "b.jsonl", rows), "chat_template": str(tmp_path / "other.jinja")},
    ]
    made = recipe(tmp_path, model, sources=sources, deduplicate=None)
    build(made)
    decode = load_tokenizer(model).decode
    texts = {row["source"]: decode(row["ids"]) for row in rows_of(output_of(made))}
    assert "Other" in texts["b"]
    assert "Other" not in texts["a"]


def test_without_tokens(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model, render=False, pack=None)
    manifest = build(made)
    assert manifest["packs"] is None
    row = next(rows_of(output_of(made)))
    assert (row["ids"], row["tokens"]) == (None, -1)
    with pytest.raises(ShardError, match="holds no packs"):
        PackedData(output_of(made))


def test_weights_of_sources_reach_the_tokens(tmp_path: Path, model: str) -> None:
    source = {"source": write(tmp_path / "a.jsonl", [chat(1)]), "weight": 0.5}
    made = recipe(tmp_path, model, sources=[source])
    build(made)
    assert set(next(rows_of(output_of(made)))["train"]) == {0.0, 0.5}


def test_what_a_person_sees_of_an_example(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    build(made)
    row = find(output_of(made), "1", "agents")
    tokenizer = load_tokenizer(model)
    shown = spans(np.asarray(row["ids"]), np.asarray(row["train"], np.float32), tokenizer.decode)
    assert [s.kind for s in shown] == ["context", "trained"]
    assert "Same as before." in shown[1].text
    assert sum(len(s.ids) for s in shown) == row["tokens"]
    data = Data.model_validate(read_manifest(output_of(made))["configuration"])
    assert stripped(row, data) == {1: "Use it 0.", 3: "Got it."}
    assert find(output_of(made), row["id"])["id"] == row["id"]
    with pytest.raises(ShardError, match="it has 130 examples"):
        find(output_of(made), "1000")


def test_a_folder_of_other_things_is_not_touched(tmp_path: Path, model: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years")
    with pytest.raises(BuildError, match="holds other things"):
        build(recipe(tmp_path, model))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years"


def test_damaged_packs_are_noticed(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    build(made)
    path = output_of(made) / "packed" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ShardError, match="missing or not as it was written"):
        PackedData(output_of(made))


def test_sections_that_do_not_fit_are_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(RecipeError, match=r"names \['math'\]; there are \['maths', 'tools'\]"):
        recipe(tmp_path, model, compose={"categories": {"math": 1.0}})
    with pytest.raises(RecipeError, match=r"add up to 0\.9"):
        recipe(tmp_path, model, compose={"categories": {"maths": 0.9}})
    with pytest.raises(ValueError, match="'wizard' is not a field of ours"):
        build(recipe(tmp_path, model, sources=[{"source": "x", "fields": {"wizard": "messages"}}]))
    with pytest.raises(RecipeError, match="pack needs tokens"):
        recipe(tmp_path, model, render=False)
    made = recipe(tmp_path, model)
    made.policy.model = TinyModel()
    with pytest.raises(BuildError, match="the recipe names none"):
        build(made)


def test_a_stalled_or_dying_worker_is_no_hang(tmp_path: Path) -> None:
    from trivet.data.work import WorkError, run_jobs

    with pytest.raises(WorkError, match="nothing finished for 1 s; 2 jobs are left"):
        list(run_jobs([1, 2], _sleep, dict, (), workers=2, what="test", stall_s=1.0))
    with pytest.raises(WorkError, match="a worker process ended"):
        list(run_jobs([1, 2], _die, dict, (), workers=2, what="test"))


def _sleep(_state: Any, _job: int) -> None:
    time.sleep(5)


def _die(_state: Any, _job: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_shards_are_parquet_that_others_read(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    manifest = build(made)
    table = pq.read_table(output_of(made) / manifest["examples"]["files"][0]["name"])
    assert {"messages", "ids", "train", "place", "done"} <= set(table.column_names)
