"""Tokenizers for the renderer's tests: bytes, a small merged vocabulary, and templates with their habits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trivet.recipe.schema import TinyModel
from trivet.render import load_tokenizer
from trivet.render.tiny import make_tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nI am Bo.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
STRIPPED = CHATML.replace("m['content']", "m['content'] | trim")
DATED = DEFAULT_SYSTEM.replace("system\nI am Bo.", "system\n' + (day or strftime_now('%d')) + '")
# Offers tools in the system turn, writes calls, groups results: the Hermes habits.
HERMES = """
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else 'Default.' -%}
{%- set ns = namespace(rest=messages[1:] if messages[0]['role'] == 'system' else messages) -%}
{{- '<|im_start|>system\n' + first -}}
{%- if tools -%}
  {{- '\n\nTools:' -}}{%- for t in tools -%}{{- '\n' -}}{{- t | tojson -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for m in ns.rest -%}
  {%- if m['role'] == 'tool' -%}
    {%- if loop.first or ns.rest[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m['content'] + '\n</tool_response>' -}}
    {%- if loop.last or ns.rest[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m['role'] + '\n' + m['content'] -}}
    {%- for c in m['tool_calls'] or [] -%}
      {%- if not loop.first or m['content'] -%}{{- '\n' -}}{%- endif -%}
      {{- '<tool_call>\n{"name": "' + c['function']['name'] + '", "arguments": ' -}}
      {{- c['function']['arguments'] | tojson -}}{{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# Thinks in the last turn only: an empty block where there is no reasoning, nothing in earlier turns.
THINKING = """
{%- for m in messages -%}
  {%- set body = m['content'] -%}
  {%- if m['role'] == 'assistant' and loop.last -%}
    {%- set body = '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' + body -%}
  {%- endif -%}
  {{- '<|im_start|>' + m['role'] + '\n' + body + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "default": DEFAULT_SYSTEM,
    "stripped": STRIPPED,
    "dated": DATED,
    "hermes": HERMES,
    "thinking": THINKING,
    "start": "<|end|>" + CHATML,
}
TEXT = "the cat said hello to the other cat.\n\n  and then\n\nthe end: 12 + 7 = 19\n" * 20


def _fast(merges: bool, more: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merges else len(special) + 256,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens(more)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|end|>")


@pytest.fixture(scope="session")
def fast() -> Callable[..., Any]:
    """fast(template, merges=True, more=()): a byte-level tokenizer; the template by name or as text."""
    made: dict[tuple[bool, tuple[str, ...]], Any] = {}

    def make(template: str | None, merges: bool = True, more: tuple[str, ...] = ()) -> Any:
        key = (merges, more)
        if key not in made:
            made[key] = _fast(merges, list(more))
        tokenizer = copy.deepcopy(made[key])
        tokenizer.chat_template = TEMPLATES.get(template, template) if template else None
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(TinyModel(), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return dict(TEMPLATES)
