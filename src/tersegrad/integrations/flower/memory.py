"""What a client remembers between messages, as Flower's records and as a file."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import Layout


@dataclasses.dataclass
class Memory:
    """What a client keeps from one message to the next."""

    layout: Layout | None = None
    version: int | None = None
    base: Tensor | None = None  # the model of that version, as received
    compressor: str = ""
    entries: dict[str, Any] = dataclasses.field(default_factory=dict)  # the compressor's state
    epoch: int = -1  # the run of the server that the last update went to
    step: int = -1  # of the last update sent
    frame: bytes = b""  # that update, until that server says whether it was used

    def records(self) -> tuple[ArrayRecord, ConfigRecord]:
        """As Flower records."""
        tensors = {f"state.{k}": v for k, v in self.entries.items() if isinstance(v, Tensor)}
        numbers = {k: v for k, v in self.entries.items() if not isinstance(v, Tensor)}
        if self.base is not None:
            tensors["base"] = self.base
        facts = {
            "layout": self.layout.facts() if self.layout else None,
            "version": self.version,
            "compressor": self.compressor,
            "numbers": numbers,
            "epoch": self.epoch,
            "step": self.step,
        }
        arrays = ArrayRecord({name: envelope.pack_tensor(tensor) for name, tensor in tensors.items()})
        return arrays, ConfigRecord({"facts": json.dumps(facts), "frame": self.frame})

    @staticmethod
    def from_records(arrays: ArrayRecord, config: Mapping[str, Any]) -> Memory:
        """The inverse of :meth:`records`."""
        facts = json.loads(config["facts"])
        entries = {name[6:]: envelope.read_tensor(a) for name, a in arrays.items() if name.startswith("state.")}
        return Memory(
            Layout.from_facts(facts["layout"], 1 << 62) if facts["layout"] else None,
            facts["version"],
            envelope.read_tensor(arrays["base"]) if "base" in arrays else None,
            facts["compressor"],
            {**entries, **facts["numbers"]},
            facts["epoch"],
            facts["step"],
            config["frame"],
        )

    def tobytes(self) -> bytes:
        """As the content of a file."""
        arrays, config = self.records()
        index = [[name, a.dtype, list(a.shape), a.stype, len(a.data)] for name, a in arrays.items()]
        header = json.dumps({"facts": config["facts"], "arrays": index, "frame": len(self.frame)}).encode()
        body = struct.pack("<I", len(header)) + header + self.frame + b"".join(a.data for a in arrays.values())
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def frombytes(data: bytes) -> Memory:
        """The inverse of :meth:`tobytes`."""
        try:
            if struct.pack("<I", zlib.crc32(data[:-4])) != data[-4:]:
                raise CorruptMessage("checksum mismatch")
            (length,) = struct.unpack_from("<I", data)
            header, at = json.loads(data[4 : 4 + length]), 4 + length
            sent, at = data[at : at + header["frame"]], at + header["frame"]
            arrays = {}
            for name, dtype, shape, stype, nbytes in header["arrays"]:
                arrays[name] = Array(dtype, tuple(shape), stype, data[at : at + nbytes])
                at += nbytes
            return Memory.from_records(ArrayRecord(arrays), {"facts": header["facts"], "frame": sent})
        except (KeyError, ValueError, TypeError, struct.error) as error:
            raise CorruptMessage(f"not a client's state: {error}") from error
