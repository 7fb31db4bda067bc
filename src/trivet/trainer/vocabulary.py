"""Whether token ids mean to another model what they mean to the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trivet.render import RenderError, load_tokenizer
from trivet.trainer.model import ModelError


def check_vocabulary(
    name: str, other: str | Path | nn.Module, policy: str | Path | nn.Module, rows: int
) -> None:
    """Every symbol of the policy's tokenizer must have the same id in `other`'s, the model called `name`.

    Sizes may differ (families pad the projection of their larger models), but the other model must have a row
    for each of the policy's `rows` ids. Where a tokenizer is missing only equal sizes are let through. Raises
    ModelError.
    """
    own, its, have = _symbols(policy), _symbols(other), _rows(other)
    if own is None or its is None:
        if have != rows:
            raise ModelError(
                f"the {name} knows {have} symbols, the policy {rows}, and there are no two tokenizers to "
                f"compare: token ids would mean other things to it; take a {name} with the policy's tokenizer"
            )
        return
    strange = [symbol for symbol, number in own.items() if its.get(symbol) != number]
    if strange:
        first = min(strange, key=own.__getitem__)
        means = f"id {its[first]}" if first in its else "no symbol"
        raise ModelError(
            f"the {name} has another tokenizer: {len(strange)} of the policy's {len(own)} symbols differ, "
            f"the first {first!r}, id {own[first]} to the policy and {means} to it; take a {name} with the "
            "policy's tokenizer"
        )
    if have < rows:
        raise ModelError(
            f"the {name} has rows for {have} ids, the policy for {rows}: it could not read all that the "
            f"policy may say; take a {name} with at least as many"
        )


def _symbols(model: str | Path | nn.Module) -> dict[str, int] | None:
    """The tokenizer's ids, None where the model comes without one."""
    path = getattr(model, "name_or_path", "") if isinstance(model, nn.Module) else model
    if not str(path):
        return None
    try:
        return load_tokenizer(path).get_vocab()
    except RenderError:
        return None


def _rows(model: str | Path | nn.Module) -> int:
    """Ids the model can read."""
    if isinstance(model, nn.Module):
        embeddings: Any = model
        return len(embeddings.get_input_embeddings().weight)
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(str(model)).get_text_config().vocab_size)
