"""From a model's name to its tokenizer and renderer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet.render.base import Renderer, RenderError


def load_tokenizer(path: str | Path, revision: str | None = None) -> Any:
    """The fast tokenizer of a model directory or hub name; no code of a model is run. Raises RenderError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RenderError(
            f"no tokenizer can be loaded from {path}: {first}. Give a directory with tokenizer.json, or a "
            "hub name that is reachable or cached"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise RenderError(f"the tokenizer of {path} has no fast version (tokenizer.json), which trivet needs")
    return tokenizer


def get_renderer(
    tokenizer: Any,
    kind: str = "auto",
    template_args: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> Renderer:
    """The renderer for a tokenizer.

    `kind`: `chatml` (ours), a family of the renderers library (`qwen3`, `llama-3`, `glm-4.5`, ...),
    `template` (any chat template, for examples only: it cannot sample), or `auto`: ours where its ids equal
    the official template's, else the family that the model's name belongs to. `template_args` go to the chat
    template (`enable_thinking`, `date_string`). `system_prompt` is put before conversations without a system
    message. Raises RenderError that says what does not fit.
    """
    from trivet.render.chatml import ChatML

    if kind == "chatml":
        return ChatML(tokenizer, template_args, system_prompt)
    if kind == "template":
        from trivet.render.spans import TemplateSpans

        return TemplateSpans(tokenizer, template_args, system_prompt)
    from trivet.render import families

    if kind != "auto":
        return families.Family(tokenizer, kind, template_args, system_prompt)
    if not getattr(tokenizer, "chat_template", None) and families.family_of(tokenizer) is None:
        return ChatML(tokenizer, template_args, system_prompt)  # says what is missing
    try:
        return ChatML(tokenizer, template_args, system_prompt)
    except RenderError as error:
        family = families.family_of(tokenizer)
        if family is None:
            raise RenderError(f"{error}. Families: {', '.join(families.known())}") from error
    return families.Family(tokenizer, family, template_args, system_prompt)
