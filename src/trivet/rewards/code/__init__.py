"""Programs in answers, judged by tests that they cannot reach."""

from trivet.rewards.code.verifier import CodeVerifier

__all__ = ["CodeVerifier"]
