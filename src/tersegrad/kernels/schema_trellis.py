"""The operations of trellis-coded quantisation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tersegrad.core.protocol import Context


class TrellisKernels(Protocol):
    """Whole messages of trellis-coded quantisers (``spec/wire.md``, "trellis" and "dithered_trellis").

    ``states``: 4, 8, 16 or 32. ``step``: the distance of neighbouring integers, a normal float32; encoders
    also take a float64 tensor of one on the device of x, which nobody waits for. ``ctx`` asks for dither, drawn from it.
    ``layout`` (``Spec.layout``) tells where rows and columns are and allows scale classes; without it an encoder finds none, and a decoder
    takes the vector as one row.
    """

    def trellis_max_bytes(self, numel: int) -> int:
        """No message for ``numel`` coordinates is longer."""
        ...

    def trellis_encode(
        self,
        x: Tensor,
        step: float | Tensor,
        states: int,
        chunk: int,
        ctx: Context | None,
        out: Tensor,
        layout: Tensor | None = None,
        left: Tensor | None = None,
        rdo: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write a message for x into ``out``: length in bytes (int64), ||x||^2 (not finite where x is not), squared error (float64).

        ``chunk``: the log2 of the length of rANS chunks, 14 to 18, or 0: 16, and 18 where classes leave less than half a bit per
        coordinate. The error is 0 with dither. ``left``, a place of its own, becomes x minus what the message decodes to; it is
        undefined where x is not finite. ``rdo``, without ``ctx``: not the nearest sequence, but one that takes fewer bits for its error.
        """
        ...

    def trellis_decode(
        self,
        data: Tensor,
        states: int,
        ctx: Context | None,
        out: Tensor,
        weight: float | None,
        layout: Tensor | None = None,
    ) -> Tensor:
        """``out = decoded``, or ``out += weight * decoded``; :class:`CorruptMessage` where ``data`` is no message."""
        ...

    def trellis_error(self, x: Tensor, step: float, states: int, layout: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Squared error (without dither, 0 for what is too large) and squared norm of x, float64, 0-d."""
        ...

    def trellis_aim(
        self, x: Tensor, alpha: float, kappa: float, states: int, layout: Tensor | None = None, norm: float = 0.0
    ) -> Tensor:
        """As ``dither_aim``, for ``trellis_encode``; a coordinate is expected to err by ``kappa`` squared steps.

        Only what is no sample but the whole has a layout.
        """
        ...
