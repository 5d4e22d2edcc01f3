"""Hostile replies: ``python -m experiments.federated.hostile [--replies N] [--jobs N] [--out FOLDER]``.

A hundred clients of a federation answer every question with something hostile, ten are honest. The strategy, the mod, Flower's FedAvg
and the serialisation of every message are the real ones. Compared is, bit for bit and after every round, the aggregate of the same
federation in which the hundred are silent. Writes a table and JSON: what was turned away, for which reason, and the memory it took.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import logging
import multiprocessing
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from rich.console import Console

import tersegrad
from tersegrad import bench
from tersegrad.bench.machine import cores
from tersegrad.core import frame
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import KEY, Answer
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Column, Table

RESULTS = Path(__file__).parent / "results"
UPLINK = "error_feedback(sparse_dithering(alpha=0.25))"
HOSTILE, HONEST = 100, 10  # clients
ROOM = 8 << 20  # bytes that a round's replies may take while they are handled; the largest of them has a million
RECORDS = (
    "two-arrays", "no-arrays", "two-metrics", "no-metrics", "other-name", "stype", "extra", "missing", "bomb", "text"
)  # fmt: skip


# ---- what attackers send -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Material:
    """What an attacker has: the honest frame that it could send, and frames seen before, its own and others'."""

    framed: bytes
    seen: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True)
class Forgery:
    """What it sends instead: another frame, other metrics, other arrays beside it, records of another structure, an error."""

    framed: bytes
    metrics: dict[str, Any] | None = None
    records: str = ""  # one of RECORDS
    beside: tuple[str, Any] = ("", None)  # the end of an array's name, and the number or numbers it is filled with
    extra: bytes = b""  # in a record that nobody asked for
    error: bool = False


Attack = Callable[[random.Random, Material], Forgery]


def reframed(framed: bytes, **changes: Any) -> bytes:
    """A well-formed frame with a right checksum whose facts were changed."""
    opened = frame.unpack(framed)
    facts: dict[str, Any] = {
        "wire_id": opened.wire_id, "text": opened.text, "numel": opened.numel, "dtype": opened.dtype, "payload": opened.payload
    } | {k: v for k, v in changes.items() if k != "context"}  # fmt: skip
    context = changes.get("context", opened.context)
    label = facts["text"].encode()
    header = struct.pack(
        "<4sBBHQIHHQQB", frame.MAGIC, frame.VERSION, frame.DTYPES.index(facts["dtype"]), facts["wire_id"], context.seed,
        context.step, context.buffer, context.sender, facts["numel"], len(facts["payload"]), len(label),
    )  # fmt: skip
    body: bytes = header + label + facts["payload"]
    return body + struct.pack("<I", zlib.crc32(body))


def _corrupt(rng: random.Random, mine: Material) -> Forgery:
    data = bytearray(mine.framed)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return Forgery(bytes(data))


def _payload(rng: random.Random, mine: Material) -> Forgery:
    payload = frame.unpack(mine.framed).payload
    return Forgery(reframed(mine.framed, payload=payload[: rng.randrange(1, 5)] + rng.randbytes(rng.randrange(40))))


def _truncated(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(mine.framed[: rng.randrange(len(mine.framed))])


def _oversized(rng: random.Random, mine: Material) -> Forgery:
    numel = frame.unpack(mine.framed).numel
    return Forgery(reframed(mine.framed, payload=rng.randbytes(rng.randrange(20 * numel, 60 * numel))))


def _shape(rng: random.Random, mine: Material) -> Forgery:
    if rng.random() < 0.3:
        return Forgery(reframed(mine.framed, dtype=rng.choice([torch.float16, torch.bfloat16])))
    numel = frame.unpack(mine.framed).numel
    return Forgery(reframed(mine.framed, numel=rng.choice([0, 1, numel - 1, numel + 1, 1 << 20, 1 << 40, (1 << 64) - 1])))


def _version(rng: random.Random, mine: Material) -> Forgery:
    body = mine.framed[:4] + bytes([rng.choice([v for v in range(256) if v != frame.VERSION])]) + mine.framed[5:-4]
    return Forgery(body + struct.pack("<I", zlib.crc32(body)))


def _replayed(rng: random.Random, mine: Material) -> Forgery:
    if mine.seen and rng.random() < 0.7:
        return Forgery(rng.choice(mine.seen))
    context = frame.unpack(mine.framed).context  # or an update for this round, under a wrong fact
    changes = {"step": context.step - 1, "sender": (context.sender + 1) % 0xFFFF, "seed": context.seed ^ 1, "buffer": 1}
    name = rng.choice(list(changes))
    return Forgery(reframed(mine.framed, context=dataclasses.replace(context, **{name: changes[name]})))


def _not_finite(rng: random.Random, mine: Material) -> Forgery:
    opened = frame.unpack(mine.framed)
    compressor, spec = tersegrad.parse(opened.text), opened.spec
    bad = torch.zeros(opened.numel)
    bad[rng.randrange(opened.numel)] = rng.choice([float("nan"), float("inf"), -float("inf")])
    message, _ = compressor.encode(bad, spec, compressor.init(spec, "cpu"), opened.context)
    return Forgery(envelope.pack_frame(message, compressor, spec, opened.context))


def _compressor(rng: random.Random, mine: Material) -> Forgery:
    texts = [
        "spherical(alpha=0.01,block=64)", "identity(", "", "top_k(fraction=1e-9)", "x" * 255, "((((" * 50, "error_feedback(sign)",
    ]  # fmt: skip
    return Forgery(reframed(mine.framed, text=rng.choice(texts)))


def _wire_id(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(reframed(mine.framed, wire_id=rng.choice([0, 1, 65, 65535])))


def _metrics(rng: random.Random, mine: Material) -> Forgery:
    bad: list[dict[str, Any]] = [
        {}, {"num-examples": float("nan")}, {"num-examples": -1}, {"num-examples": 0}, {"num-examples": [1.0]},
        {"num-examples": 10, "loss": float("inf")}, {"num-examples": 2**33, "loss": 1.0}, {"num-examples": 10, f"other{rng.random()}": 1.0},
        {"num-examples": 10, "loss": [1.0] * rng.randrange(1, 2000)}, {"loss": 1.0},
    ]  # fmt: skip
    return Forgery(mine.framed, metrics=rng.choice(bad))


def _weight(rng: random.Random, mine: Material) -> Forgery:
    # Two of the largest overflow when they are added; one of the others owns a mean of honest clients.
    claim = rng.choice([1.7e308, 1e300, 1e18, 2.0**32, 2**62, 2**33])
    return Forgery(mine.framed, metrics={"num-examples": claim, "loss": 1.0})


def _structure(rng: random.Random, mine: Material) -> Forgery:
    odd: list[dict[str, Any]] = [
        {f"other{rng.random()}": 1.0}, {"loss": [1.0] * rng.randrange(1, 20_000)},
        {f"{name}{rng.random()}": 1.0 for name in range(rng.randrange(1, 100))},
    ]  # fmt: skip
    return Forgery(mine.framed, metrics={"num-examples": 10} | rng.choice(odd))


def _dtype(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(mine.framed, beside=("", rng.choice([1e300, -1e300, 3.5e38, 0.5, np.longdouble(1)])))


def _beside(rng: random.Random, mine: Material) -> Forgery:
    variance = ("running_var", np.float32(-rng.choice([5.0, 1e-3, 1e30])))
    counter = ("num_batches_tracked", np.int64(rng.choice([-1, -(10**15), 1 << 60, -(1 << 63)])))
    return Forgery(mine.framed, beside=rng.choice([variance, counter]))


def _large(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(mine.framed, extra=rng.randbytes(rng.randrange(300_000, 1_000_000)))


def _records(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(mine.framed, records=rng.choice(RECORDS))


def _error(rng: random.Random, mine: Material) -> Forgery:
    return Forgery(mine.framed, error=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of attack and the reasons for which it may be turned away."""

    attack: Attack
    reasons: frozenset[str]
    lie: bool = False  # may decode to something finite, which then is an update like any other


def _kind(attack: Attack, *reasons: str, lie: bool = False) -> Kind:
    return Kind(attack, frozenset(reasons), lie)


KINDS = {
    "corrupt": _kind(_corrupt, "corrupt", "wrong-version"),
    "truncated": _kind(_truncated, "corrupt"),
    "oversized": _kind(_oversized, "oversized"),
    "wrong shape": _kind(_shape, "wrong-shape"),
    "wrong version": _kind(_version, "wrong-version"),
    "replayed": _kind(_replayed, "replayed"),
    "not finite": _kind(_not_finite, "non-finite"),
    "another compressor": _kind(_compressor, "not-offered"),
    "another wire id": _kind(_wire_id, "corrupt"),
    "odd metrics": _kind(_metrics, "metrics"),
    "heavy weight": _kind(_weight, "metrics"),
    "metrics of another structure": _kind(_structure, "metrics"),
    "array of another dtype": _kind(_dtype, "beside", "corrupt"),
    "negative variance or counter": _kind(_beside, "beside"),
    "large record": _kind(_large, "oversized"),
    "odd records": _kind(_records, "no-update", "metrics", "corrupt"),
    "error": _kind(_error, "error"),
    "corrupt before the checksum": _kind(_payload, "corrupt", "non-finite", lie=True),
}
MAIN = (
    "corrupt", "truncated", "oversized", "wrong shape", "wrong version", "replayed", "not finite", "heavy weight",
    "array of another dtype", "large record",
)  # fmt: skip


def material(reply: Message, seen: tuple[bytes, ...] = ()) -> Material:
    """What the sender of a reply has in its hands."""
    (record,) = reply.content.array_records.values()
    return Material(Answer.unpack(record[KEY].data)[1], seen)


def forge(reply: Message, forgery: Forgery) -> Message:
    """The reply with the forgery in it, under the same sender and number."""
    if forgery.error:
        return _instead(reply, Message(Error(0, "no"), reply_to=reply))
    (record,), kind = reply.content.array_records.values(), forgery.records
    data = Answer(0.1, False).pack(forgery.framed)
    arrays = dict(record) | {KEY: Array("uint8", (len(data),), "numpy.ndarray" if kind == "stype" else envelope.UPDATE, data)}
    beside = next(name for name in arrays if name != KEY)
    if kind == "bomb":  # its header claims eight terabytes
        claim = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n"
        arrays[beside] = Array("float64", (1 << 40,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00" + claim + bytes(64))
    if kind == "text":
        arrays[beside] = Array("<U4", (1,), "numpy.ndarray", Array(np.array(["evil"])).data)
    end, value = forgery.beside
    if value is not None:
        name = next(name for name in arrays if name != KEY and name.endswith(end))
        arrays[name] = Array(np.full(arrays[name].shape, value))
    if kind == "extra":
        arrays["more"] = Array(np.zeros(3))
    if kind == "missing":
        del arrays[beside]
    metrics = MetricRecord({"num-examples": 10, "loss": 1.0} if forgery.metrics is None else forgery.metrics)
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    if forgery.extra:
        content["more"] = ConfigRecord({"more": forgery.extra})
    if kind in ("no-arrays", "other-name"):
        del content["arrays"]
    if kind == "two-arrays":
        content["again"] = ArrayRecord(arrays)
    if kind in ("two-metrics", "other-name"):
        content["other"] = MetricRecord({"num-examples": 10, "loss": 1.0})
    if kind == "no-metrics":
        del content["metrics"]
    return _instead(reply, Message(content, reply_to=reply))


def _instead(reply: Message, made: Message) -> Message:
    made.metadata.__dict__.update(reply.metadata.__dict__)
    return made


# ---- the federation ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one kind; aggregates are digests, one per round."""

    kind: str
    replies: int
    reasons: dict[str, int]
    example: str  # one reason as it was reported
    used: int  # hostile replies that entered the aggregate
    aggregates: tuple[str, ...]
    finite: bool
    memory: int | None  # bytes that the address space grew by, at most, while one round's replies were handled
    model: int  # bytes of the model
    seconds: float  # for handling all replies


def federation(kind: str | None, hostile: int = HOSTILE, honest: int = HONEST, rounds: int = 10) -> Outcome:
    """An honest round, then ``rounds`` in which the hostile clients attack (``None``: are silent)."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    rng, attacking = random.Random(0), False
    seen: list[bytes] = []

    def deliver(reply: Message) -> list[Message]:
        mine = material(reply, tuple(seen[-3 * (hostile + honest) :]))
        seen.append(mine.framed)
        if not attacking or reply.metadata.src_node_id >= hostile:
            return [reply]
        return [] if kind is None else [forge(reply, KINDS[kind].attack(rng, mine))]

    random.seed(0)  # Flower samples clients with it
    torch.manual_seed(0)
    arrays = ArrayRecord(_network().state_dict())
    model = sum(len(a.data) for a in arrays.values())
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = flower.CompressedStrategy(inner, UPLINK, seed=1, history=rounds + 1)
    grid = flower.LocalGrid(_app(), hostile + honest, deliver=deliver)
    digests: list[str] = []
    finite, seconds, growth = True, 0.0, 0
    for number in range(1, rounds + 2):
        attacking = number > 1
        questions = list(strategy.configure_train(number, arrays, ConfigRecord({"server-round": number}), grid))
        replies = list(grid.send_and_receive(questions))
        before, began = _address_space("VmSize"), time.perf_counter()
        found, _ = strategy.aggregate_train(number, replies)
        seconds += time.perf_counter() - began if attacking else 0.0
        growth = max(growth, _address_space("VmPeak") - before) if attacking else 0
        arrays = arrays if found is None else found
        values = [a.numpy() for a in arrays.values()]
        finite &= all(bool(np.isfinite(v).all()) for v in values)
        digests.append(hashlib.blake2b(b"".join(v.tobytes() for v in values), digest_size=16).hexdigest())
    attacks = [r for r in strategy.rejections if r.round > 1]
    used = sum(p.outcome == "accepted" and p.node < hostile for r in strategy.rounds[1:] for p in r.parcels.values())
    return Outcome(
        kind or "silence", hostile * rounds if kind else 0, dict(Counter(r.kind for r in attacks).most_common()),
        attacks[0].reason if attacks else "", used, tuple(digests), finite, growth if before else None, model, seconds,
    )  # fmt: skip


def _network() -> torch.nn.Module:
    """Batch normalisation gives it arrays that travel beside the frame."""
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 10))


def _app() -> ClientApp:
    """Clients that move every parameter a little, each in a direction of its own."""
    app = ClientApp(mods=[flower.compress_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"].to_torch_state_dict()
        number = int(str(message.content.config_records["config"]["server-round"]))
        generator = torch.Generator().manual_seed(1000 * number + context.node_id)
        for tensor in model.values():
            if tensor.is_floating_point():
                tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
        content: dict[str, Any] = {"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 10, "loss": 1.0})}
        return Message(RecordDict(content), reply_to=message)

    return app


def _address_space(name: str) -> int:
    """Bytes, from Linux: unlike resident memory it counts what was asked for and never touched. Elsewhere 0."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


# ---- the table -----------------------------------------------------------------------------------------------------------------


def verdict(outcome: Outcome, silence: Outcome) -> str:
    """What became of the model, in words."""
    if outcome.aggregates == silence.aggregates:
        return "identical"
    return "finite" if outcome.finite and KINDS[outcome.kind].lie else "WRONG"


def table(outcomes: list[Outcome], silence: Outcome) -> Table:
    """One row a kind."""
    rows = []
    for o in [*outcomes, silence]:
        reasons = ", ".join(f"{name} {count:,}" for name, count in o.reasons.items())
        state = verdict(o, silence) if o is not silence else ""
        memory = "" if o.memory is None else f"{o.memory / 2**20:.1f}"
        each = f"{1000 * o.seconds / o.replies:.1f}" if o.replies else ""
        turned = f"{sum(o.reasons.values()):,}"
        rows.append((o.kind, f"{o.replies:,}", turned, f"{o.used:,}", reasons, state, memory, each))
    columns = (
        Column("kind", number=False), Column("replies"), Column("turned away"), Column("used"), Column("reasons", number=False),
        Column("aggregate", number=False), Column("memory MiB"), Column("ms per reply"),
    )  # fmt: skip
    return Table(columns, tuple(rows), f"{HOSTILE} hostile clients, {HONEST} honest, a model of {silence.model:,} bytes")


def _execute(job: tuple[str | None, int]) -> Outcome:
    torch.set_num_threads(1)
    return federation(job[0], rounds=job[1])


def main(
    replies: Annotated[int, typer.Option(help="hostile replies of every kind, rounded up to hundreds")] = 1000,
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS,
) -> None:
    """Send hostile replies of every kind through the real strategy; exit 1 if one of them was not handled."""
    rounds = -(-replies // HOSTILE)
    work: list[tuple[str | None, int]] = [(None, rounds), *((name, rounds) for name in KINDS)]
    context = multiprocessing.get_context("spawn")  # each kind in a process of its own: memory is measured
    with concurrent.futures.ProcessPoolExecutor(jobs or cores(), context, max_tasks_per_child=1) as pool:
        silence, *outcomes = list(pool.map(_execute, work))
    shown, console = table(outcomes, silence), Console(width=max(Console().width, 140))
    console.print(shown.title, style="bold")
    console.print(shown.rich())
    out.mkdir(parents=True, exist_ok=True)
    head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": bench.describe()}
    (out / "hostile.json").write_text(json.dumps({**head, "silence": as_json(silence), "results": as_json(outcomes)}) + "\n")
    examples = [f"- {o.kind}: {o.example}" for o in outcomes if o.example]
    text = [
        "# Hostile replies",
        f"Every round {HOSTILE} clients attack, in a federation through the real mod, strategy and serialisation. *aggregate*: "
        "*identical* means that after every round the model has the same bits as in the same federation with those clients "
        "silent (last row). *memory* is what the address space grew by, at most, while a round's replies were handled; some of "
        "them claim up to 2^64 coordinates. Damage under a right checksum (last attack) that decodes to finite numbers is an "
        "update like any other: `clip` and robust strategies are for that.",
        f"## {shown.title}",
        dataclasses.replace(shown, title="").markdown(),
        "The first reason of each kind, as it is reported:",
        "\n".join(examples),
        f"{head['date']}, {head['machine']}",
    ]
    (out / "hostile.md").write_text("\n\n".join(text) + "\n")
    if not all(handled(o, silence) and (o.memory or 0) <= ROOM for o in outcomes):
        raise typer.Exit(1)


def handled(outcome: Outcome, silence: Outcome) -> bool:
    """Every reply reported for a fitting reason, none used but lies, and the aggregate right."""
    kind = KINDS[outcome.kind]
    complete = sum(outcome.reasons.values()) + outcome.used == outcome.replies and set(outcome.reasons) <= kind.reasons
    return complete and (kind.lie or not outcome.used) and verdict(outcome, silence) != "WRONG"


if __name__ == "__main__":
    typer.run(main)
