"""The engine under every integration: what happens to gradients between a framework's hook and the wire, written once.

An integration lays vectors in and takes means out; the engine knows no framework. It keeps groups of named parameters
(:mod:`~tersegrad.engine.groups`), one exchange and one committed state per group (:mod:`~tersegrad.engine.lane`), steps that commit
their tentative states together or not at all (:mod:`~tersegrad.engine.step`), checkpoints (:mod:`~tersegrad.engine.checkpoint`), changes
of compressor and exchange (:mod:`~tersegrad.engine.carry`), counters (:mod:`~tersegrad.engine.report`), and it compares the set-up of all
ranks before anything is exchanged (:mod:`~tersegrad.engine.agreement`).
"""

from tersegrad.engine.engine import Change, Engine
from tersegrad.engine.groups import GPU_GROUP_BYTES, GROUP_BYTES, Group, from_layout, make_groups
from tersegrad.engine.handle import Handle
from tersegrad.engine.lane import Lane
from tersegrad.engine.late import LateHandle
from tersegrad.engine.meter import TimedGroup
from tersegrad.engine.replicas import ReplicasDiffer
from tersegrad.engine.settings import Options, Settings
from tersegrad.engine.staging import Staging
from tersegrad.engine.step import Step

__all__ = [
    "GPU_GROUP_BYTES", "GROUP_BYTES", "Change", "Engine", "Group", "Handle", "Lane", "LateHandle", "Options", "ReplicasDiffer", "Settings",
    "Staging", "Step", "TimedGroup", "from_layout", "make_groups",
]  # fmt: skip
