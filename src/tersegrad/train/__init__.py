"""The trainer behind ``tersegrad train`` and ``tersegrad demo``: real workers, real gradients, compressed exchanges."""

from tersegrad.train.compare import comparison_table, demonstration, result_table
from tersegrad.train.data import Images
from tersegrad.train.loop import Job, Progress, Result, load, run

__all__ = ["Images", "Job", "Progress", "Result", "comparison_table", "demonstration", "load", "result_table", "run"]
