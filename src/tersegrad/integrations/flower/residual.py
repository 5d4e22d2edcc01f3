"""The residual of error feedback inside any composition: read it by coordinate, and add an update to it.

Error feedback may stand alone, around a part of ``by_tensor``, or inside ``metered``. A client whose update was lost, or whose
compressor was changed, wants the same two things of all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.protocol import Spec
from tersegrad.core.state import Parts
from tersegrad.wrappers.error_feedback import ErrorFeedbackState
from tersegrad.wrappers.metered import MeterState


def residual(state: Any, spec: Spec) -> Tensor:
    """What error feedback adds to the next update, by coordinate; zero where nothing is kept."""
    if isinstance(state, ErrorFeedbackState):
        return state.residual.float()
    if isinstance(state, MeterState):
        return residual(state.inner, spec)
    whole = torch.zeros(spec.numel)
    if isinstance(state, Parts):
        for group, part in state.states:
            _scatter(residual(part, state.subspec(group)), whole, state.runs(group))
    return whole


def return_to_residual(state: Any, spec: Spec, update: Tensor) -> tuple[Any, Tensor]:
    """``state`` with ``update`` added to its residuals, and the part of ``update`` for which there is no residual."""
    if isinstance(state, ErrorFeedbackState):
        grown = (state.residual + update).to(state.residual.dtype)
        return dataclasses.replace(state, residual=grown), torch.zeros_like(update)
    if isinstance(state, MeterState):
        inner, rest = return_to_residual(state.inner, spec, update)
        return dataclasses.replace(state, inner=inner), rest
    if isinstance(state, Parts):
        rest, states = update.clone(), []
        for group, part in state.states:
            runs = state.runs(group)
            after, left = return_to_residual(part, state.subspec(group), torch.cat([update[a:b] for a, b in runs]))
            _scatter(left, rest, runs)
            states.append((group, after))
        return dataclasses.replace(state, states=tuple(states)), rest
    return state, update


def _scatter(part: Tensor, whole: Tensor, runs: tuple[tuple[int, int], ...]) -> None:
    at = 0
    for a, b in runs:
        whole[a:b] = part[at : at + b - a]
        at += b - a
