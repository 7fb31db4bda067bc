"""Reading the last box out of an answer."""

from __future__ import annotations

import pytest

from trivet.rewards.answers import last_boxed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{1}, \boxed{2}}", "2"),
        (r"\boxed{\boxed{1} + 2}", "1"),
        (r"\boxed{5} then \boxed{\frac{1}{2}", "5"),
        (r"\boxed 5 apples", "5"),
        (r"\\boxed{7}", "7"),
        (r"{\boxed{3}}}} \boxed{\{1\}}", r"\{1\}"),
        (r"\fbox{4}", "4"),
        ("nothing", None),
        (r"\boxed{cut", None),
    ],
)
def test_the_last_complete_box(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize("closed", [True, False])
def test_no_depth_is_too_deep(closed: bool) -> None:
    """What a policy in a loop writes: it is an answer (or none), not an error."""
    depth = 20_000
    text = r"\boxed{" * depth + "1" + "}" * (depth if closed else 0)
    assert last_boxed(text) == ("1" if closed else None)
