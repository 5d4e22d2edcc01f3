"""Federated learning with Flower: small uplinks, small broadcasts, hostile replies turned away.

Two parts, one on each side, around an ordinary Flower app::

    app = ClientApp(mods=[flower.compress_mod()])                        # the client: everything else stays as it was
    strategy = flower.CompressedStrategy(FedAvg(), uplink="subtractive_dithering(omega=1)")  # the server

How it works: ``envelope.py`` says what travels. The client's side is ``mod.py`` with its ``memory.py`` and ``residual.py``. The
server's is ``strategy.py``, which speaks Flower's interface: ``broadcast.py`` makes what goes out, ``gate.py`` lets replies in,
``conversation.py`` keeps questions and replies together, ``ledger.py`` and ``sizes.py`` count, ``strategies.py`` knows what Flower's
strategies keep, ``checkpoint.py`` saves it. ``local.py`` runs many clients in one process, through the same code and the same bytes.
``docs/flower.md`` explains the rest.
"""

from __future__ import annotations

from tersegrad.core.errors import MissingExtra

try:
    import flwr as _flwr  # noqa: F401 - asked for here, so that a missing package is named before anything else fails
except ImportError as error:  # pragma: no cover - the tests run with Flower
    raise MissingExtra("tersegrad.integrations.flower needs Flower: pip install 'tersegrad[flower]'") from error

from tersegrad.integrations.flower.envelope import to_arrays, to_state_dict
from tersegrad.integrations.flower.ledger import ClientRecord, Parcel, Rejection, RoundReport, by_bandwidth
from tersegrad.integrations.flower.local import LocalGrid
from tersegrad.integrations.flower.mod import compress_mod
from tersegrad.integrations.flower.sizes import wire_nbytes
from tersegrad.integrations.flower.strategy import CompressedStrategy

__all__ = [
    "ClientRecord",
    "CompressedStrategy",
    "LocalGrid",
    "Parcel",
    "Rejection",
    "RoundReport",
    "by_bandwidth",
    "compress_mod",
    "to_arrays",
    "to_state_dict",
    "wire_nbytes",
]
