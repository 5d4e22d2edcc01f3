"""The trainer behind ``tersegrad train`` and ``tersegrad demo``: real workers, real gradients, compressed exchanges."""

from tersegrad.train.compare import comparison_table, demonstration, result_table
from tersegrad.train.data import Images
from tersegrad.train.jobs import Job, Progress, Result
from tersegrad.train.loop import load, run
from tersegrad.train.text import Text

__all__ = ["Images", "Job", "Progress", "Result", "Text", "comparison_table", "demonstration", "load", "result_table", "run"]
