"""The named algorithms, a file each."""

from trivet.algorithms.kinds import grpo, policy_gradient, sft  # noqa: F401  (importing registers)
