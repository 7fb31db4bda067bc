"""The named algorithms, a file each."""

from trivet.algorithms.kinds import grpo, policy_gradient, ppo, reward_model, sft  # noqa: F401  (importing registers)
