"""Messages of chunks in plain torch: the definition of what kernels do in one go. The general path is in ``codecs``."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.chunks import areas, chunk_bins, chunk_decode, chunk_encode, chunk_scatter
from tersegrad.kernels.reference.rans import USUAL, rans_decode, rans_encode
from tersegrad.kernels.reference.values import mean_scales
from tersegrad.kernels.schema_codes import Form

# And for others: FORMS, own_tables, to_bfloat16.
__all__ = ["chunk_message_decode", "chunk_message_encode"]

FORMS: tuple[Form, ...] = get_args(Form)
NORMAL, ZERO, NON_FINITE = range(3)
# Values of a tensor, on average, from which on every tensor has a table of its own.
OWN_TABLE = 512
LARGEST_BFLOAT = torch.finfo(torch.bfloat16).max


def own_tables(counts: Tensor) -> int:
    """How many tables bins are coded with: one, or one for each tensor."""
    tensors = counts.numel()
    return 1 if tensors > 256 or int(counts.sum()) < OWN_TABLE * tensors else tensors


def to_bfloat16(values: Tensor) -> Tensor:
    """To nearest; what would round up to Inf becomes the largest finite number."""
    return values.clamp(-LARGEST_BFLOAT, LARGEST_BFLOAT).to(torch.bfloat16)


def _owners(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(counts.numel()), counts)


def _bits(flags: Tensor) -> Tensor:
    out = torch.empty((flags.numel() + 7) // 8, dtype=torch.uint8)
    pack_bits(flags.to(torch.uint8), 1, out)
    return out


def _block(symbols: Tensor, alphabet: int, contexts: Tensor | None, tables: int, sample: bool) -> Tensor:
    out = torch.empty(1 + symbols.numel(), dtype=torch.uint8)
    return out[: int(rans_encode(symbols, alphabet, contexts, tables, sample, USUAL, out))]


def chunk_message_encode(
    places: Tensor,
    values: Tensor,
    finite: Tensor,
    regions: Tensor,
    counts: Tensor,
    form: Form,
    bins: int,
    out: Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """The whole message; its length."""
    there, values, owners = values.device, values.cpu(), _owners(counts)
    if not bool(finite):
        out[0] = NON_FINITE
        return torch.ones((), dtype=torch.int64, device=there)
    if form == "bins":
        cells = counts.numel() * bins
        chosen, stands = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(cells)
        filled = torch.empty(cells, dtype=torch.int64)
        chunk_bins(values, counts, bins, chosen, stands, filled)
        tables = own_tables(counts)
        contexts = owners.to(torch.uint8) if tables > 1 else None
        block = _block(chosen, bins, contexts, tables, False)
        parts = [_bits(filled > 0), stands[filled > 0].view(torch.uint8), block]
        decoded = stands[owners * bins + chosen]
    elif form == "sign":
        scales = mean_scales(values, owners, counts.numel())
        parts = [scales.view(torch.uint8), _bits(torch.signbit(values))]
        decoded = torch.copysign(scales.float()[owners], values)
    else:
        rounded = values if form == "float32" else to_bfloat16(values)
        planes = rounded.view(torch.uint8).reshape(values.numel(), -1)
        parts = [_block(planes[:, -1].contiguous(), 256, None, 1, True), planes[:, :-1].reshape(-1)]
        decoded = rounded.float()
    if kept is not None:
        kept.copy_(decoded)
    if not bool(values.any()):
        out[0] = ZERO
        return torch.ones((), dtype=torch.int64, device=there)
    head = torch.cat((torch.tensor([NORMAL], dtype=torch.uint8), *parts)).to(there)
    out[: head.numel()] = head
    numel = sum(a.rows * a.cols for a in areas(regions))
    return chunk_encode(places, regions, numel, out[head.numel() :]) + head.numel()


def _values(data: Tensor, counts: Tensor, form: Form, bins: int) -> tuple[Tensor, int]:
    """The values at the beginning of ``data``, and the bytes that they take."""
    count, owners = int(counts.sum()), _owners(counts)

    def take(at: int, number: int) -> Tensor:
        if data.numel() < at + number:
            raise CorruptMessage("the message ends inside of its values")
        return data[at : at + number].clone()

    def flags(at: int, number: int) -> Tensor:
        packed, found = take(at, (number + 7) // 8), torch.empty(number, dtype=torch.uint8)
        if number % 8 and int(packed[-1]) >> number % 8:
            raise CorruptMessage("the bits after the last code are not zero")
        unpack_bits(packed, 1, found)
        return found

    if form == "sign":
        at = 2 * counts.numel()
        scales = take(0, at).view(torch.bfloat16).float()
        return scales[owners] * (1.0 - 2.0 * flags(at, count)), at + (count + 7) // 8
    symbols = torch.empty(count, dtype=torch.uint8)
    if form == "bins":
        cells = counts.numel() * bins
        present, at = flags(0, cells).bool(), (cells + 7) // 8
        end, stands = at + 4 * int(present.sum()), torch.zeros(cells)
        stands[present] = take(at, end - at).view(torch.float32)
        tables = own_tables(counts)
        contexts = owners.to(torch.uint8) if tables > 1 else None
        used = int(rans_decode(data[end:], bins, contexts, tables, symbols))
        return stands[owners * bins + symbols], end + used
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    width, at = dtype.itemsize - 1, int(rans_decode(data, 256, None, 1, symbols))
    low = take(at, width * count).view(count, width)
    return torch.cat((low, symbols.unsqueeze(1)), 1).view(dtype).reshape(-1).float(), at + width * count


def chunk_message_decode(
    data: Tensor, regions: Tensor, counts: Tensor, form: Form, bins: int, out: Tensor, weight: float | None = None
) -> Tensor:
    """The whole message; whether it was one."""
    there, here = out.device, data.cpu()
    mode = int(here[0]) if here.numel() else -1
    if here.numel() == 1 and mode in (ZERO, NON_FINITE):
        if mode == NON_FINITE:
            out.fill_(torch.nan)
        elif weight is None:
            out.zero_()
        return torch.tensor(True, device=there)
    try:
        if mode != NORMAL:
            raise CorruptMessage(f"mode {mode}")
        values, used = _values(here[1:], counts, form, bins)
        places = torch.empty(values.numel(), dtype=torch.int32)
        chunk_decode(here[1 + used :], regions, out.numel(), places)
    except CorruptMessage:
        return torch.tensor(False, device=there)
    chunk_scatter(places.to(there), values.to(there), regions, out, weight)
    return torch.tensor(True, device=there)
