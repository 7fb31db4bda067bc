"""What a person sees of a run: metrics, samples, progress, plots, report. A leaf: all rooms may import it."""

from trivet.monitor.files import DamagedLine, MonitorError, read_metrics
from trivet.monitor.monitor import Monitor, StageHandle
from trivet.monitor.page import report
from trivet.monitor.progress import Bar

__all__ = ["Bar", "DamagedLine", "Monitor", "MonitorError", "StageHandle", "read_metrics", "report"]
