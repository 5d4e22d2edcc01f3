"""What a user says to ``attach``: the options that every integration has, checked in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import torch

from tersegrad.advice import DEFAULT
from tersegrad.compressors import BF16, Identity
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context, needs_second_moment
from tersegrad.core.text import require
from tersegrad.exchange import Scheme, scheme
from tersegrad.recipes import parse
from tersegrad.wrappers import ByTensor

Given = Compressor[Any] | str
Choice = Given | tuple[Given | None, Scheme | str | None] | None


class Options(TypedDict, total=False):
    """The options that every integration takes.

    ``dense_below``: tensors with fewer elements (default 1024; 0 for compressors that decide by the variance over samples) are sent
    with ``dense`` (default: exactly, as float32 or bfloat16), as is everything in the first ``warmup_steps`` steps. ``schedule``: a
    function of the step, the same on every rank, that returns the compressor to use from then on, a pair of compressor and exchange,
    or None for no change; it is called once per step, in the warm-up too. ``seed``: of all randomness, the same on every rank.
    ``check_every`` and ``measure_every``: every so many steps compare the replicas' parameters, and the result with the exact one (a
    dense exchange).
    """

    dense_below: int | None
    dense: Given | None
    warmup_steps: int
    schedule: Callable[[int], Choice] | None
    seed: int
    check_every: int
    measure_every: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked options. A compressor of None is kept as Identity; it goes with exchanges that compress by themselves."""

    compressor: Compressor[Any]
    scheme: Scheme
    collects: bool  # whether the integration gives second moments
    dense_below: int
    dense: Compressor[Any] | None
    warmup_steps: int
    schedule: Callable[[int], Choice] | None
    seed: int
    check_every: int
    measure_every: int
    auto: Literal["", "both", "compressor"] = (
        ""  # what is chosen by measuring: compressor and exchange, or the compressor alone
    )

    @staticmethod
    def make(
        compressor: Given | None,
        exchange: Scheme | str | None,
        *,
        collects: bool = False,
        dense_below: int | None = None,
        dense: Given | None = None,
        warmup_steps: int = 0,
        schedule: Callable[[int], Choice] | None = None,
        seed: int = 0,
        check_every: int = 0,
        measure_every: int = 0,
    ) -> Settings:
        """Parse and check what a user said; the exchange is two_shot, or all_gather for compressors that decide by variance.

        "auto" begins with bfloat16: by torch's all-reduce, or through the exchange that the user names. As exchange it goes with "auto" as
        compressor, which alone says the same.
        """
        auto: Literal["", "both", "compressor"] = ""
        exchange = without_auto(compressor, exchange)
        if isinstance(compressor, str) and compressor.strip() == "auto":
            require(schedule is None, "auto and a schedule both choose the compressor: give one of them")
            auto = "both" if exchange is None else "compressor"
            require(
                exchange is None or not scheme(exchange).compresses,
                f'auto chooses a compressor, and {exchange} takes none: attach(model, "auto") chooses the exchange too, or name two_shot, '
                "all_gather or hierarchical",
            )
            compressor, exchange = (None, "all_reduce") if exchange is None else ("bf16", exchange)
        chosen = None if compressor is None else compressor_of(compressor)
        by_variance = needs_second_moment(chosen)
        if dense_below is None:
            # By variance even small tensors send next to nothing, and dense they would be most of the bytes.
            dense_below = 0 if by_variance else 1024
        counts = {
            "dense_below": dense_below,
            "warmup_steps": warmup_steps,
            "check_every": check_every,
            "measure_every": measure_every,
        }
        for name, value in counts.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 0, f"{name} is a whole number that is not negative, got {value!r}")
        require(schedule is None or callable(schedule), f"schedule is a function of the step, got {schedule!r}")
        require(isinstance(seed, int), f"seed is a whole number, got {seed!r}")
        Context(seed=seed)  # refuses a seed that does not fit
        how = scheme(exchange if exchange is not None else "all_gather" if by_variance else "two_shot")
        return Settings(
            compressor=paired(chosen, how, collects),
            scheme=how,
            collects=collects,
            dense=None if dense is None else compressor_of(dense),
            schedule=schedule,
            seed=seed,
            auto=auto,
            **counts,
        )

    def choose(self, compressor: Given | None, exchange: Scheme | str | None) -> Settings:
        """The same settings with another compressor, another exchange, or both; None keeps what there is."""
        how = self.scheme if exchange is None else scheme(exchange)
        keeps = compressor is None and not how.compresses
        given = self.compressor if keeps else compressor
        require(not (keeps and self.scheme.compresses), f"{how} needs a compressor: change(compressor, exchange) takes both")
        return dataclasses.replace(self, compressor=paired(given, how, self.collects), scheme=how)

    def dense_for(self, dtype: torch.dtype) -> Compressor[Any]:
        """What dense parts are sent with: nothing is lost that the gradient's own dtype would keep."""
        return self.dense or (BF16() if dtype == torch.bfloat16 else Identity())

    def effective(self, compressor: Compressor[Any], dtype: torch.dtype) -> Compressor[Any]:
        """The compressor of a group, small tensors apart."""
        if not self.dense_below:
            return compressor
        return ByTensor(compressor, small=self.dense_for(dtype), below=self.dense_below)

    def facts(self) -> dict[str, str]:
        """What ranks must agree on."""
        return {
            "dense_below": str(self.dense_below),
            "dense": str(self.dense),
            "warmup_steps": str(self.warmup_steps),
            "schedule": "a schedule" if self.schedule else "no schedule",
            "seed": str(self.seed),
            "auto": self.auto or "no",
            "check_every": str(self.check_every),
            "measure_every": str(self.measure_every),
        }


def without_auto(compressor: Given | None, exchange: Scheme | str | None, alone: bool = False) -> Scheme | str | None:
    """The exchange that a user names; None for "auto", which goes with "auto" as compressor. ``alone``: only that is chosen here."""
    if not isinstance(exchange, str) or exchange.strip() != "auto":
        return exchange
    require(not alone, "between nodes auto chooses the compressor alone: leave the exchange out (two_shot), or name all_gather")
    both = isinstance(compressor, str) and compressor.strip() == "auto"
    require(both, f'the exchange is chosen together with the compressor: give "auto" for both, or an exchange for {compressor}')
    return None


def compressor_of(given: Given) -> Compressor[Any]:
    """A compressor from itself or from its text form."""
    return parse(given) if isinstance(given, str) else given


def paired(given: Given | None, how: Scheme, collects: bool) -> Compressor[Any]:
    """The compressor that goes with an exchange, or an error that says why it does not."""
    chosen: Compressor[Any] = Identity() if given is None else compressor_of(given)
    if how.compresses and chosen != Identity():
        raise BadConfiguration(f"{how} compresses by itself and takes no compressor: pass None instead of {chosen}")
    if not how.compresses and given is None:
        raise BadConfiguration(f"{how} needs a compressor, got None; identity sends gradients as they are")
    if needs_second_moment(chosen) and not collects:
        raise BadConfiguration(
            f"{chosen} decides by the variance over samples, which only integrations.ddp collects: choose another compressor here, "
            f"for example {DEFAULT}"
        )
    if needs_second_moment(chosen) and how.recompresses:
        raise BadConfiguration(
            f"{chosen} decides by the variance over samples, and {how} compresses means a second time, which have none: use "
            'exchange="all_gather" (or hierarchical(between=all_gather))'
        )
    return chosen
