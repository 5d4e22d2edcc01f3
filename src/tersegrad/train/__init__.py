"""The trainer behind ``tersegrad train`` and ``tersegrad demo``: real workers, real gradients, compressed exchanges."""

from tersegrad.train.compare import SETTINGS, comparison_table, result_table
from tersegrad.train.data import Images
from tersegrad.train.loop import Job, Progress, Result, run

__all__ = ["SETTINGS", "Images", "Job", "Progress", "Result", "comparison_table", "result_table", "run"]
