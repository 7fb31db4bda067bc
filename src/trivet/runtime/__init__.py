"""Who runs where: the loop of a stage, the pipeline of stages, stopping and going on."""

from trivet.runtime.build import SetupError
from trivet.runtime.folder import RunFolderError
from trivet.runtime.pipeline import RunResult, run_recipe
from trivet.runtime.reader import NothingToRead
from trivet.runtime.stage import NothingTrained
from trivet.runtime.stop import Stopped, StopRequest
from trivet.runtime.watchdog import StepTimeout

__all__ = [
    "NothingToRead",
    "NothingTrained",
    "RunFolderError",
    "RunResult",
    "SetupError",
    "StepTimeout",
    "StopRequest",
    "Stopped",
    "run_recipe",
]
