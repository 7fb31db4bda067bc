"""Instructions that a program can check, by the ids of IFEval and IFBench.

    instructions = from_row({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})
    score(instructions, "No commas here.")

Your own kind is a function: `@kind("mine:ends_loudly", marks="count")` over `def f(text, *, marks): ...`.
"""

from trivet.rewards.instructions import ifbench_custom, ifbench_form, ifbench_words, ifeval
from trivet.rewards.instructions.base import (
    KINDS,
    TYPES,
    UNSUPPORTED,
    Instruction,
    InstructionError,
    kind,
    make,
)
from trivet.rewards.instructions.score import (
    from_constraint,
    from_row,
    held,
    instruction_ids,
    loose_variants,
    score,
    score_row,
)

__all__ = [
    "KINDS",
    "TYPES",
    "UNSUPPORTED",
    "Instruction",
    "InstructionError",
    "from_constraint",
    "from_row",
    "held",
    "ifbench_custom",
    "ifbench_form",
    "ifbench_words",
    "ifeval",
    "instruction_ids",
    "kind",
    "loose_variants",
    "make",
    "score",
    "score_row",
]
