"""Measurements of compressors: what they cost, what they lose, how fast they are. Nothing here prints."""

from tersegrad.bench.check import Checked, Refused, check
from tersegrad.bench.clock import Timing, memmove_speed, race, thread_count
from tersegrad.bench.machine import describe
from tersegrad.bench.rate import SOURCES, Rate, draw, limit_at, load
from tersegrad.bench.rate import measure as measure_rate
from tersegrad.bench.speed import Speed
from tersegrad.bench.speed import measure as measure_speed

__all__ = [
    "SOURCES",
    "Checked",
    "Rate",
    "Refused",
    "Speed",
    "Timing",
    "check",
    "describe",
    "draw",
    "limit_at",
    "load",
    "measure_rate",
    "measure_speed",
    "memmove_speed",
    "race",
    "thread_count",
]
