"""The environment: paths are filled in, secrets are only named."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivet.recipe import RecipeError, dump_recipe, load_recipe, redact, resolve_secrets
from trivet.recipe.secret import expand, refuse_password

STAGE = (
    "stages: [{name: rl, steps: 1, tasks: [{source: '${DATA_DIR}/x.jsonl', template: '${x}$ {prompt}'}]}]\n"
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_paths_are_filled_in_and_other_texts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", "/data")
    recipe = load_recipe(write(tmp_path, STAGE))
    assert recipe.stages[0].tasks[0].source == "/data/x.jsonl"
    assert recipe.stages[0].tasks[0].template == "${x}$ {prompt}"  # a formula, not a variable


def test_unset_and_secret_variables_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_DIR", raising=False)
    with pytest.raises(RecipeError, match="source the environment has no variable DATA_DIR"):
        load_recipe(write(tmp_path, STAGE))
    monkeypatch.setenv("HUB_TOKEN", "s3cret-value")
    with pytest.raises(RecipeError, match="sounds like a secret") as caught:
        load_recipe(write(tmp_path, "output: 'runs/${HUB_TOKEN}'\nstages: [{name: a, steps: 1}]\n"))
    assert "s3cret" not in str(caught.value)


def test_the_buffers_password_is_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "s3cret-value")
    text = "buffer: {url: 'postgresql://me:%s@host/db'}\nstages: [{name: a, steps: 1}]\n"
    recipe = load_recipe(write(tmp_path, text % "${DB_PASSWORD}"))
    assert recipe.buffer.url == "postgresql://me:${DB_PASSWORD}@host/db"
    assert "s3cret" not in dump_recipe(recipe)
    assert resolve_secrets(recipe.buffer.url) == "postgresql://me:s3cret-value@host/db"
    with pytest.raises(RecipeError, match="holds a password") as caught:
        load_recipe(write(tmp_path, text % "hunter2"))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["api_key", "password", "hf_token", "client_secret", "apiKey"])
def test_secrets_in_free_sections_are_refused(tmp_path: Path, key: str) -> None:
    text = "stages: [{name: a, steps: 1, tasks: [{source: x, env_args: {judge: {%s: abcdef}}}]}]\n"
    with pytest.raises(RecipeError, match=r"looks like a secret.*environment variable") as caught:
        load_recipe(write(tmp_path, text % key))
    assert "abcdef" not in str(caught.value)
    assert load_recipe(write(tmp_path, text % f"{key}_env"))


def test_redaction() -> None:
    environment = {"MY_API_KEY": "abcdef123", "HOME": "/home/me", "SHORT_TOKEN": "ab"}
    text = "postgresql://me:hunter2@host/db with abcdef123 in /home/me, about"
    assert redact(text, environment) == "postgresql://me:***@host/db with *** in /home/me, about"
    assert redact("sqlite:///runs/x.db at 10:30", {}) == "sqlite:///runs/x.db at 10:30"


def test_secrets_are_found_whatever_their_shape(tmp_path: Path) -> None:
    for args in ("{api_key: 123456}", "{a: [[{password: x}]]}", "{a: {b: [{secret: y}]}}"):
        path = tmp_path / "r.yaml"
        path.write_text(f"stages: [{{name: rl, steps: 1, tasks: [{{source: a.jsonl, env_args: {args}}}]}}]")
        with pytest.raises(RecipeError, match="looks like a secret"):
            load_recipe(path)
    assert redact("at postgresql://me:pa/ss@host/db") == "at postgresql://me:***@host/db"
    with pytest.raises(ValueError, match="holds a password"):
        refuse_password("postgresql://me:pa/ss@host/db")


def test_a_tokenizer_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_DIR", "/data/t")
    assert expand("${TOKENIZER_DIR}/x") == "/data/t/x"
    assert redact("in /data/t", {"TOKENIZERS_DIR": "/data/t"}) == "in /data/t"
