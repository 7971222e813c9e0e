"""What a user sees of a run: its events, a live display, a status that can be asked for, and its result."""

from fedtrain.observe.display import Display
from fedtrain.observe.events import Events, Report, quiet
from fedtrain.observe.result import write_result
from fedtrain.observe.status import Status

__all__ = ["Display", "Events", "Report", "Status", "quiet", "write_result"]
