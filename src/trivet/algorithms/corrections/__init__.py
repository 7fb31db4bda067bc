"""Corrections: factors for tokens that another policy sampled. Detached; the denominator never changes."""

from trivet.algorithms.corrections.sampling import TokenTIS

__all__ = ["TokenTIS"]
