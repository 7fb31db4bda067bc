"""Credit, masks, aggregation, objectives, corrections: pure functions and their registry.

An algorithm is one file: a builder under `@register_algorithm` whose keyword-only parameters are the recipe's
options, put together from parts. Importing this package registers the built-in ones; torch is not imported.
"""

from trivet.algorithms import (  # noqa: F401  (importing registers)
    aggregate,
    controls,
    corrections,
    credit,
    experts,
    kinds,
    masks,
    objectives,
    shaping,
)
from trivet.algorithms.base import (
    Algorithm,
    AlgorithmError,
    Batch,
    NothingToTrain,
    ObjectiveInputs,
    Part,
    PreparedBatch,
    Stream,
    StreamSpec,
)
from trivet.algorithms.evaluate import finalise, merge, stream_loss
from trivet.algorithms.prepare import prepare
from trivet.algorithms.registry import (
    make_part,
    register_aggregation,
    register_algorithm,
    register_control,
    register_correction,
    register_credit,
    register_mask,
    register_objective,
    register_shaping,
    registered,
    resolve,
    resolve_all,
)

__all__ = [
    "Algorithm",
    "AlgorithmError",
    "Batch",
    "NothingToTrain",
    "ObjectiveInputs",
    "Part",
    "PreparedBatch",
    "Stream",
    "StreamSpec",
    "finalise",
    "make_part",
    "merge",
    "prepare",
    "register_aggregation",
    "register_algorithm",
    "register_control",
    "register_correction",
    "register_credit",
    "register_mask",
    "register_objective",
    "register_shaping",
    "registered",
    "resolve",
    "resolve_all",
    "stream_loss",
]
