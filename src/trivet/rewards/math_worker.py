"""What the math verifier's worker processes run: math-verify, with its own timers off.

Its timers use signals, which fail off the main thread and then score everything as wrong; here the
pool's owner holds the clock and kills. Only imported in workers.
"""

from __future__ import annotations

import logging
from typing import Any

_WARM = (
    (r"\frac{1}{2}", "0.5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"[0,\infty)", r"(1,2)\cup[3,4]"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\{1,2,3\}", "x=3"),
)


def parse(text: str) -> list[Any]:
    """The readings math-verify has of one answer; [] when it has none."""
    import math_verify

    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # type: ignore[arg-type]


def equal(gold: str, answer: str) -> dict[str, bool]:
    """Whether two answers are equal, and whether each could be read at all."""
    import math_verify

    left, right = parse(gold), parse(answer)
    same, error = False, False
    if left and right:
        try:
            same = bool(
                math_verify.verify(left, right, timeout_seconds=None, raise_on_error=True)  # type: ignore[arg-type]
            )
        except MemoryError:
            raise
        except Exception:  # sympy raises many kinds on odd answers; the caller counts it
            error = True
    return {"equal": same, "gold": bool(left), "answer": bool(right), "error": error}


def warm() -> None:
    """Fill the caches that all workers share, and silence the libraries."""
    logging.disable(logging.CRITICAL)
    for gold, answer in _WARM:
        equal(gold, answer)
