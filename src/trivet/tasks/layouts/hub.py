"""Which subset and split of well-known hub data sets are meant where a recipe names none."""

from __future__ import annotations

# name: (the subset the hub asks for, the split of those that have no "train")
_DEFAULTS: dict[str, tuple[str | None, str]] = {
    "openai/gsm8k": ("main", "train"),
    "openai/openai_humaneval": (None, "test"),
    "evalplus/humanevalplus": (None, "test"),
    "evalplus/mbppplus": (None, "test"),
    "google-research-datasets/mbpp": ("full", "train"),
    "HuggingFaceH4/MATH-500": (None, "test"),
    "livecodebench/code_generation_lite": ("release_latest", "test"),
    "codeparrot/apps": ("all", "train"),
    "open-r1/codeforces": ("default", "train"),
    "cais/mmlu": ("all", "test"),
    "allenai/ai2_arc": ("ARC-Challenge", "train"),
}


def hub_defaults(name: str, subset: str | None, split: str) -> tuple[str | None, str]:
    """(subset, split) to ask the hub for. A subset that is given stays, and so does a split other than train
    (what a recipe has that names none)."""
    known_subset, known_split = _DEFAULTS.get(name, (None, split))
    return (known_subset if subset is None else subset), (known_split if split == "train" else split)
