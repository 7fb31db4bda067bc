"""Programs of one line, judged by what they print: a first language for models that learn to program."""

from __future__ import annotations

import random
from collections.abc import Iterator

from trivet.tasks.base import TasksetError
from trivet.tasks.generated.base import Item, register_generator

_WORDS = {"sum": "+", "difference": "-", "product": "*"}


@register_generator("programs")
def programs(rng: random.Random, *, digits: int = 2) -> Iterator[Item]:
    """`sum 12 7`, `difference 12 7` or `product 12 7` of whole numbers of up to `digits` digits; wanted is a
    program that prints the value, in a ```python block. For the environment `code`, with `prompts: false`.
    """
    if not isinstance(digits, int) or isinstance(digits, bool) or not 1 <= digits <= 6:
        raise TasksetError(f"args.digits: {digits!r} is not a whole number from 1 to 6")
    top = 10**digits
    while True:
        word, (a, b) = rng.choice(list(_WORDS)), (rng.randrange(top), rng.randrange(top))
        sign = _WORDS[word]
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        yield Item(
            key=f"{digits}/{a}{sign}{b}",
            prompt=f"{word} {a} {b}",
            answer=str(value),
            response=f"```python\nprint({a}{sign}{b})\n```",
            tags=(word,),
            payload={"tests": {"kind": "stdio", "cases": [{"input": "", "output": f"{value}\n"}]}},
        )
