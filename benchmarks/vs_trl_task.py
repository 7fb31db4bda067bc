"""Prompts and rewards of the comparison with TRL: plain Python, for both sides and for reward workers."""

from __future__ import annotations

from typing import Any

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three kinds of fruit.",
    "How do birds fly?",
    "What is a good way to learn to cook?",
    "Tell me about the moon.",
    "What do bees make, and how?",
    "Who wrote the play Romeo and Juliet?",
]


def lower(text: str) -> float:
    """Share of letters that are lower case; 0 for a text without letters."""
    letters = [c for c in text if c.isalpha()]
    return sum(c.islower() for c in letters) / len(letters) if letters else 0.0


def brief(text: str) -> float:
    """Brevity: halves with every 6 words; 0 for a text without a word."""
    words = sum(any(c.isalnum() for c in word) for word in text.split())
    return 0.5 ** (words / 6) if words else 0.0


REWARDS = {"lower": lower, "brief": brief}
REQUESTS = {"lower": "", "brief": " Answer in one short sentence."}
"""What a question ends with: some answers must be what the reward asks for before that can be learnt."""


def prompts(reward: str, count: int) -> list[str]:
    """The first `count` questions, each with what the reward asks for."""
    return [question + REQUESTS[reward] for question in QUESTIONS[:count]]


def lower_of(task: Any, text: str) -> float:
    """`lower` as trivet's `callable` environment calls it."""
    return lower(text)


def brief_of(task: Any, text: str) -> float:
    """`brief` as trivet's `callable` environment calls it."""
    return brief(text)
