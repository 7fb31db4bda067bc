"""The named algorithms, a file each."""

from trivet.algorithms.kinds import (  # noqa: F401  (importing registers)
    asymre,
    dr_grpo,
    gigpo,
    grpo,
    maxrl,
    multi_step_grpo,
    opmd,
    policy_gradient,
    ppo,
    reinforce,
    reinforce_plus_plus,
    remax,
    reward_model,
    rloo,
    score_centering,
    sft,
    success_offset,
)
