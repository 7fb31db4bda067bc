"""What is put right in a conversation, each pass by name.

Every pass can be switched off; what it changed stands in `Record.done`, under names of its own, and is
counted from there. `REPAIRS` lists them in the order they run in.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from trivet.data.formats.chat import Chat
from trivet.data.repair.answers import answer_suffixes, calculator_marks
from trivet.data.repair.calls import arguments, call_ids, call_turns
from trivet.data.repair.reasoning import reasoning_tags
from trivet.data.repair.system import system_prompts
from trivet.data.repair.turns import final_turn

Repair = Callable[[Chat], None]
"""Changes the conversation in place and marks what it did; raises RecordDropped where nothing can be done."""

REPAIRS: dict[str, Repair] = {
    "system_prompts": system_prompts,
    "calculator_marks": calculator_marks,
    "reasoning_tags": reasoning_tags,
    "arguments": arguments,
    "call_turns": call_turns,
    "final_turn": final_turn,
    "answer_suffixes": answer_suffixes,
    "call_ids": call_ids,
}


def switched_off(repairs: Mapping[str, bool] | None) -> frozenset[str]:
    """The names of the passes not to run. Raises KeyError naming the nearest pass."""
    for name in repairs or ():
        if name not in REPAIRS:
            near = difflib.get_close_matches(name, REPAIRS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"no repair is called {name!r}{hint} (there are: {', '.join(REPAIRS)})")
    return frozenset(name for name, on in (repairs or {}).items() if not on)
