"""What may stand in the data although a benchmark has it, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from trivet.data.screen.words import normalise

KINDS = ("item", "phrase", "document")


@dataclass(frozen=True, slots=True)
class Allow:
    """Allowed items ("gsm8k/12"), phrases (normalised text) and documents (their place or key), each with its
    reason."""

    items: dict[str, str] = field(default_factory=dict)
    phrases: dict[str, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)

    def item(self, name: str) -> str | None:
        """The reason why an item is allowed, None where it is not."""
        return self.items.get(name)

    def __len__(self) -> int:
        return len(self.items) + len(self.phrases) + len(self.documents)


def load_allow(path: Path) -> Allow:
    """A JSONL file of objects: `reason` and one of `item`, `phrase`, `document`. Raises ValueError with the
    line for anything else: an entry that allows nothing, or without a reason, is a mistake."""
    allow = Allow()
    tables = {"item": allow.items, "phrase": allow.phrases, "document": allow.documents}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON: {error.msg}") from error
        kinds = [kind for kind in KINDS if isinstance(entry, dict) and kind in entry]
        if len(kinds) != 1 or set(entry) - {*KINDS, "reason"}:
            raise ValueError(f"{place}: give exactly one of {', '.join(KINDS)}, and a reason")
        value, reason = entry[kinds[0]], entry.get("reason")
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{place}: {kinds[0]} must be text")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"{place}: no reason given; say why {value!r} may stand in the data")
        tables[kinds[0]][normalise(value) if kinds[0] == "phrase" else value] = reason
    return allow
