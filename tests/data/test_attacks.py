"""What is done to a build by hostile inputs, folders and moments: nothing is lost, nothing hangs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.data.build import BuildError, build
from trivet.data.read import BadRow, Row, SourceError, read_rows
from trivet.data.work import WorkError
from trivet.recipe import load_recipe
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, alphabet=ALPHABET)
    return str(make_tiny(tiny, tmp_path_factory.mktemp("tokenizer") / "m"))


def chat(n: int, **more: Any) -> dict[str, Any]:
    texts = [("user", f"What is {n} and {n}?"), ("assistant", str(2 * n))]
    return {"messages": [{"role": role, "content": text} for role, text in texts]} | more


def lines(rows: list[Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def recipe(folder: Path, model: str, **data: Any) -> Any:
    data = {"output": str(folder / "out"), "workers": 1, "pack": {"length": 256}} | data
    if "sources" not in data:
        if not (folder / "chats.jsonl").exists():  # a file that is written again is another input
            (folder / "chats.jsonl").write_text(lines([chat(n) for n in range(20)]))
        data["sources"] = [{"source": str(folder / "chats.jsonl"), "name": "chats"}]
    (folder / "mix.yaml").write_text(yaml.safe_dump({"name": "x", "policy": {"model": model}, "data": data}))
    return load_recipe(folder / "mix.yaml")


# -- files ---------------------------------------------------------------------------------------------


def rows_of(path: Path) -> tuple[int, list[str]]:
    found = list(read_rows(str(path)))
    return sum(isinstance(row, Row) for row in found), [r.cause for r in found if isinstance(r, BadRow)]


ROWS = [chat(n) for n in range(20)]


@pytest.mark.parametrize(
    ("name", "data", "rows", "causes"),
    [
        ("odd.jsonl", lines(ROWS).encode("utf-16")[:-1], 19, ["bad_encoding"]),
        ("a.jsonl.gz", gzip.compress(lines(ROWS).encode("utf-16")), 20, []),
        ("a.json", json.dumps(ROWS).encode("utf-16"), 20, []),
        ("odd.json", json.dumps(ROWS).encode("utf-16")[:-1], 19, ["bad_encoding"]),
        ("first.json", b'[{"a": "\xe9"}, {"a": "b"}]', 1, ["bad_encoding"]),
        ("one.json", b'{\n"a": "\xe9"}', 0, ["bad_encoding"]),
        ("two.json", b'[{"a": 1},\n{"a": 2}]\n[{"a": 3}]', 2, ["broken_json"]),
    ],
)
def test_wrong_encodings_lose_only_their_rows(
    tmp_path: Path, name: str, data: bytes, rows: int, causes: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    assert rows_of(tmp_path / name) == (rows, causes)


def test_half_a_letter_in_utf_16_leaves_the_other_rows(tmp_path: Path) -> None:
    data = lines(ROWS).encode("utf-16")
    (tmp_path / "a.jsonl").write_bytes(data[:100] + b"\x00\xd8\x41\x00" + data[104:])
    count, causes = rows_of(tmp_path / "a.jsonl")
    assert count + len(causes) == len(ROWS) and count >= len(ROWS) - 1


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_text(lines(ROWS))
    with pytest.raises(SourceError, match="not UTF-8"):
        list(read_rows(str(tmp_path)))


# -- rows ----------------------------------------------------------------------------------------------


def test_half_letters_anywhere_in_a_row_drop_the_row(tmp_path: Path, model: str) -> None:
    half = "a\ud800"
    call = {"id": half, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    named, called = chat(3), chat(4)
    named["messages"][0]["name"] = half
    called["messages"][1]["tool_calls"] = [call]
    called["messages"] += [{"role": "tool", "tool_call_id": half, "content": "x"}, chat(5)["messages"][1]]
    rows = [chat(1), chat(2, id=half), named, called, {half: "x"}, {"messages": [{"role": half}]}]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    sources = [{"source": str(tmp_path / "a.jsonl"), "name": "a"}]
    about = build(recipe(tmp_path, model, sources=sources, max_bad=1.0))["sources"]["a"]
    assert about["rows"] == len(rows)
    assert about["examples"] + sum(about["bad"].values()) + sum(about["dropped"].values()) == len(rows)
    assert about["dropped"]["broken_unicode"] >= 2


# -- folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["work/thesis.txt", "manifest.json"])
def test_a_folder_of_another_kind_is_left_alone(tmp_path: Path, model: str, mark: str) -> None:
    own = tmp_path / "out" / "examples" / "mine.py"
    for path in (own, tmp_path / "out" / mark):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"name": "an app"}')
    with pytest.raises(BuildError, match="other things"):
        build(recipe(tmp_path, model))
    assert own.exists() and (tmp_path / "out" / mark).exists()


def test_what_a_build_reads_may_not_lie_in_its_folder(tmp_path: Path, model: str) -> None:
    """A source that holds the output, and a file of decisions that the next build would remove."""
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text(lines([chat(n) for n in range(20)]))
    sources = [{"source": str(raw), "name": "raw"}]
    build(recipe(tmp_path, model, sources=sources, output=str(raw / "mix")))
    before = sorted((raw / "mix").rglob("*"))
    with pytest.raises(BuildError, match="own folder"):
        build(recipe(tmp_path, model, sources=sources, output=str(raw / "mix")))
    assert sorted((raw / "mix").rglob("*")) == before

    (tmp_path / "bench.jsonl").write_text(lines([{"question": "x " * 40}]))
    decisions = tmp_path / "out" / "review" / "contamination.jsonl"
    screen = {"benchmarks": [{"name": "b", "source": str(tmp_path / "bench.jsonl"), "fields": ["question"]}]}
    build(recipe(tmp_path, model, decontaminate=screen))
    decisions.parent.mkdir(exist_ok=True)
    decisions.write_text("")
    with pytest.raises(BuildError, match="copy it elsewhere"):
        build(recipe(tmp_path, model, decontaminate=screen | {"decisions": str(decisions)}))
    assert decisions.exists()


@pytest.mark.parametrize("lost", ["packed/part-00000.parquet", "examples/part-00000.parquet"])
def test_a_file_that_went_missing_is_made_again(tmp_path: Path, model: str, lost: str) -> None:
    made = recipe(tmp_path, model)
    manifest = build(made)
    content = (tmp_path / "out" / lost).read_bytes()
    (tmp_path / "out" / lost).unlink()
    assert build(made) == manifest
    assert (tmp_path / "out" / lost).read_bytes() == content
    (tmp_path / "out" / lost).write_bytes(content[:-9])
    assert build(made) == manifest
    assert (tmp_path / "out" / lost).read_bytes() == content


def test_a_mix_that_cannot_be_leaves_the_packs(tmp_path: Path, model: str) -> None:
    made = recipe(tmp_path, model)
    manifest = build(made)
    with pytest.raises(BuildError, match=r"the shortest has [1-9]"):
        build(recipe(tmp_path, model, pack={"length": 1}))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert (tmp_path / "out" / "packed" / "part-00000.parquet").exists()


# -- moments -------------------------------------------------------------------------------------------


def started(folder: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from trivet.data.build import build; from trivet.recipe import load_recipe\n"
        "if __name__ == '__main__': build(load_recipe(sys.argv[1]))"
    )
    script = folder / "run.py"
    script.write_text(code)
    return subprocess.Popen([sys.executable, str(script), str(folder / "mix.yaml")])


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return set(map(int, found.read_text().split())) if found.exists() else set()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_workers_end_with_a_build_that_is_killed_and_a_second_build_is_refused(
    tmp_path: Path, model: str
) -> None:
    text = lines([chat(n, pad="x" * 2000) for n in range(4000)])
    (tmp_path / "a.jsonl").write_text(text)
    sources = [{"source": str(tmp_path / "a.jsonl"), "name": "a"}]
    made = recipe(tmp_path, model, sources=sources, workers=2, piece_mb=1)
    process = started(tmp_path)
    workers: set[int] = set()
    deadline = time.monotonic() + 120
    while len(workers) < 3 and process.poll() is None and time.monotonic() < deadline:
        workers |= children(process.pid)
        time.sleep(0.01)
    assert len(workers) >= 3, "two workers and the tracker of the library"
    with pytest.raises(WorkError, match="another process"):
        build(made)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, workers))
    build(made)


# -- recipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"), [({"format": "klingon"}, "no format"), ({"repairs": {"klingon": True}}, "no repair")]
)
def test_names_that_do_not_exist_are_said(
    tmp_path: Path, model: str, wrong: dict[str, Any], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    sources = [{"source": str(tmp_path / "a.jsonl"), "name": "a"} | wrong]
    with pytest.raises(BuildError, match=f"'a': {said}"):
        build(recipe(tmp_path, model, sources=sources))


def test_a_mistyped_column_stops_a_build_of_several_sources(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    (tmp_path / "b.jsonl").write_text(lines([{"q": str(n), "a": "b"} for n in range(20)]))
    fields = {"prompt": "q", "response": "answer"}
    sources = [
        {"source": str(tmp_path / "a.jsonl"), "name": "a"},
        {"source": str(tmp_path / "b.jsonl"), "name": "b", "fields": fields},
    ]
    with pytest.raises(BuildError, match="source 'b': 20 of 20 rows"):
        build(recipe(tmp_path, model, sources=sources))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
def test_a_full_disk_says_where_and_the_next_run_goes_on(tmp_path: Path, model: str) -> None:
    import resource

    # Too random to compress below the limit.
    rows = [chat(n, id=os.urandom(600).hex()) for n in range(600)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    made = recipe(tmp_path, model, sources=[{"source": str(tmp_path / "a.jsonl"), "name": "a"}])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        with pytest.raises(OSError, match=r"part-00000\.parquet"):
            build(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert build(made)["examples"]["rows"] == len(rows)
