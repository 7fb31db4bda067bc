"""Corrections: factors for tokens that another policy sampled. Detached; the denominator never changes."""

from trivet.algorithms.corrections.sampling import IcePop, TokenTIS
from trivet.algorithms.corrections.sequence import GeometricMask, SequenceMIS, SequenceTIS

__all__ = ["GeometricMask", "IcePop", "SequenceMIS", "SequenceTIS", "TokenTIS"]
