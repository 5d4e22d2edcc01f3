"""What an exchange will cost, before it is run: the one cost model of links, exchanges and steps."""

from tersegrad.planner.coding import measure_coding
from tersegrad.planner.costs import (
    ETHERNET,
    Link,
    all_gather_naive,
    all_gather_pipelined,
    direct_all_gather,
    moments_operations,
    ring_all_reduce,
    two_shot,
)
from tersegrad.planner.link import measure_link
from tersegrad.planner.plan import Forecast, Plan, Setting, Workload, forecast, make_plan
from tersegrad.planner.timeline import Timeline, simulate
from tersegrad.planner.trips import Coding, Leg, Measured, Topology, Trip, break_even, predict, trip

__all__ = [
    "ETHERNET", "Coding", "Forecast", "Leg", "Link", "Measured", "Plan", "Setting", "Timeline", "Topology", "Trip", "Workload",
    "all_gather_naive", "all_gather_pipelined", "break_even", "direct_all_gather", "forecast", "make_plan", "measure_coding",
    "measure_link", "moments_operations", "predict", "ring_all_reduce", "simulate", "trip", "two_shot",
]  # fmt: skip
