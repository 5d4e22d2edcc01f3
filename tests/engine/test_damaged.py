"""Damaged checkpoints: each is refused with one kind of error, and nothing of the handle has changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tersegrad.core.errors import BadCheckpoint
from tests.engine.models import KINDS, Run, start
from tests.integrations.test_ddp import same

pytestmark = pytest.mark.usefixtures("single")
State = dict[str, Any]
DROP = object()


def facts(**changes: Any) -> Callable[[State], State]:
    """Other facts; a value may be a function of the one that was saved."""

    def damage(state: State) -> State:
        public = json.loads(state["rank0"]["public"])
        for name, value in changes.items():
            if value is DROP:
                public.pop(name)
            else:
                public[name] = value(public.get(name)) if callable(value) else value
        state["rank0"]["public"] = json.dumps(public)
        return state

    return damage


def part(name: str, value: Any) -> Callable[[State], State]:
    def damage(state: State) -> State:
        if value is DROP:
            state["rank0"].pop(name)
        else:
            state["rank0"][name] = value
        return state

    return damage


def round_of(state: State) -> Any:
    return next(state["rank0"][r] for r in ("first", "reduce", "second") if state["rank0"].get(r))


def ranges(change: Callable[[Any, Any], None]) -> Callable[[State], State]:
    """``change(parameters, ranges)`` of the first round, and of its first parameter."""

    def damage(state: State) -> State:
        found = round_of(state)
        change(found, found[next(iter(found))])
        return state

    return damage


def renamed(key: str) -> Callable[[State], State]:
    return ranges(lambda _, r: r.update({key: r.pop(next(iter(r)))}))


def residual(change: Callable[[Any], Any]) -> Callable[[State], State]:
    def damage(_: Any, r: Any) -> None:
        entries = next(iter(r.values()))
        name = next(n for n in entries if n.endswith("residual"))
        entries[name] = change(entries[name])

    return ranges(damage)


def filled(value: float, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    return lambda t: torch.cat([t[:-1].to(dtype or t.dtype), torch.tensor([value], dtype=dtype or t.dtype)])


def settings(**changes: Any) -> Callable[[State], State]:
    return facts(settings=lambda old: {**old, **changes})


def groups(change: Callable[[list[Any]], Any]) -> Callable[[State], State]:
    def changed(old: list[Any]) -> Any:
        made = change(old)
        return old if made is None else made

    return facts(groups=changed)


def shapes(change: Callable[[dict[str, Any]], Any]) -> Callable[[State], State]:
    def changed(old: dict[str, Any]) -> Any:
        change(old)
        return old

    return facts(shapes=changed)


def second_rank(size: int, **changes: Any) -> Callable[[State], State]:
    """One more rank's part."""

    def damage(state: State) -> State:
        other = copy.deepcopy(state)
        facts(rank=1, size=size, **changes)(other)
        return {**state, "rank1": other["rank0"]}

    return damage


def replaced(text: str) -> Callable[[State], State]:
    return part("public", text)


DAMAGES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda s: {},
    "none": lambda s: None,
    "a list": lambda s: [s],
    "a part that is a number": lambda s: {"rank0": 3},
    "a part that is empty": lambda s: {"rank0": {}},
    "a key that is a number": lambda s: {0: s["rank0"]},
    "another key": lambda s: {"rank3": s["rank0"]},
    "no facts": part("public", DROP),
    "facts as bytes": part("public", b"{}"),
    "facts as a table": part("public", {}),
    "facts cut short": lambda s: part("public", s["rank0"]["public"][:-20])(s),
    "facts that are empty": replaced(""),
    "facts that are a list": replaced("[]"),
    "facts that are null": replaced("null"),
    "facts that are nested too deep": replaced("[" * 100_000),
    "another format": facts(format=2),
    "a later format": facts(format=99),
    "no format": facts(format=DROP),
    "a further fact": facts(colour="red"),
    "no step": facts(step=DROP),
    "step -1": facts(step=-1),
    "step 2^40": facts(step=1 << 40),
    "step 1e99": facts(step=1e99),
    "step 3.0": facts(step=3.0),
    "step as text": facts(step="3"),
    "step true": facts(step=True),
    "step null": facts(step=None),
    "seed -1": facts(seed=-1),
    "seed 2^80": facts(seed=1 << 80),
    "seed as text": facts(seed="1"),
    "seed true": facts(seed=True),
    "seed 1.5": facts(seed=1.5),
    "rank beyond the size": facts(rank=7),
    "rank as text": facts(rank="0"),
    "size 0": facts(size=0),
    "size 2 of one": facts(size=2),
    "another kind": facts(kind="flower"),
    "kind null": facts(kind=None),
    "settings null": facts(settings=None),
    "settings as a list": facts(settings=[]),
    "another compressor": settings(compressor="qsgd"),
    "another exchange": settings(exchange="hierarchical(ranks_per_node=1)"),
    "another dense_below": settings(dense_below=7),
    "groups null": facts(groups=None),
    "no groups": facts(groups=[]),
    "a group without names": groups(lambda g: g[0].pop("names") and None),
    "a group less": groups(lambda g: g[1:]),
    "a group twice": groups(lambda g: [g[0], *g]),
    "a group that is null": groups(lambda g: [None, *g[1:]]),
    "a name less": groups(lambda g: g[0].update(names=g[0]["names"][1:])),
    "a name twice": groups(lambda g: g[0].update(names=[g[0]["names"][0], *g[0]["names"]])),
    "another name": groups(lambda g: g[0].update(names=["x", *g[0]["names"][1:]])),
    "names that are numbers": groups(lambda g: g[0].update(names=[1, 2])),
    "a group with another compressor": groups(lambda g: g[0].update(compressor="error_feedback(sign, residual=bf16, decay=7)")),
    "a group with a compressor of no state": groups(lambda g: g[0].update(compressor="qsgd")),
    "a group by variance": groups(lambda g: g[0].update(compressor="vgc(alpha=1.5)")),
    "a group with no exchange that exists": groups(lambda g: g[0].update(exchange="ring")),
    "a group without place": groups(lambda g: g[0].pop("place") and None),
    "a place that is text": groups(lambda g: [{**one, "place": "here"} for one in g]),
    "a place before the first": groups(lambda g: g[0].update(place=[-1, 1])),
    "a place beyond the last": groups(lambda g: g[0].update(place=[1, 1])),
    "a place among too many": groups(lambda g: g[0].update(place=[0, 1 << 70])),
    "a group whose compressor is null": groups(lambda g: g[0].update(compressor=None)),
    "a group whose exchange is null": groups(lambda g: g[0].update(exchange=None)),
    "a group that kept true": groups(lambda g: g[0]["kept"].update(second=True)),
    "a group that kept nothing": groups(lambda g: g[0].update(kept=None)),
    "shapes null": facts(shapes=None),
    "another model": shapes(lambda s: s.update({next(iter(s)): [3, 3]})),
    "a parameter less in the model": shapes(lambda s: s.pop(next(iter(s)))),
    "a parameter more in the model": shapes(lambda s: s.update(x=[2])),
    "extra null": facts(extra=None),
    "an entry nobody knows": part("third", {}),
    "residual NaN": residual(filled(float("nan"))),
    "residual infinite": residual(filled(float("inf"))),
    "residual beyond float32": residual(filled(1e300, torch.float64)),
    "residual of integers": residual(lambda t: t.to(torch.int64)),
    "residual of booleans": residual(lambda t: t > 0),
    "residual complex": residual(lambda t: t.to(torch.complex64)),
    "residual on no device": residual(lambda t: t.to("meta")),
    "residual as a list": residual(lambda t: t.tolist()),
    "residual null": residual(lambda t: None),
    "residual shorter": residual(lambda t: t[:-1]),
    "residual longer": residual(lambda t: torch.cat([t, t[:1]])),
    "residual empty": residual(lambda t: t[:0]),
    "residual of two dimensions": residual(lambda t: t[None]),
    "residual a scalar": residual(lambda t: t[0]),
    "a range far too long": renamed("0:99999999999999"),
    "a range that ends before it begins": renamed("5:3"),
    "a range of letters": renamed("a:b"),
    "a range that is empty": renamed("0:0"),
    "a range with a sign": renamed("-1:5"),
    "a range of digits that are not ours": renamed("\u0660:\u0665"),
    "a range one longer": ranges(lambda _, r: r.update({f"0:{int(next(iter(r)).split(':')[1]) + 1}": r.pop(next(iter(r)))})),
    "a range twice": ranges(lambda _, r: r.update({"0:1": {k: v[:1] for k, v in next(iter(r.values())).items()}})),
    "no range": ranges(lambda _, r: r.clear()),
    "a range without entries": ranges(lambda _, r: r.update({next(iter(r)): {}})),
    "a range that is a list": ranges(lambda _, r: r.update({next(iter(r)): []})),
    "an entry more": ranges(lambda _, r: next(iter(r.values())).update(v=torch.zeros(2))),
    "a parameter less": ranges(lambda p, _: p.pop(next(iter(p)))),
    "a parameter more": ranges(lambda p, r: p.update(x=r)),
    "a parameter that is a list": ranges(lambda p, _: p.update({next(iter(p)): []})),
    "no parameters": ranges(lambda p, _: p.clear()),
    "first as a list": part("first", []),
    "second as a number": part("second", 3),
    "no first and no reduce": lambda s: part("first", {})(part("reduce", {})(s)),
    "a rank too many": second_rank(1),
    "a rank of another size": second_rank(2),
}


def both(change: Callable[[State, Any], Any]) -> Callable[[State], State]:
    """``change(part, extra)``: what local SGD adds to a state and to its facts."""

    def damage(state: State) -> State:
        public = json.loads(state["rank0"]["public"])
        change(state["rank0"], public["extra"])
        state["rank0"]["public"] = json.dumps(public)
        return state

    return damage


def tensor_of(where: str, change: Callable[[Any], Any]) -> Callable[[State], State]:
    def damage(state: State, _: Any) -> None:
        table = state[where] if where != "flights" else next(iter(state[where].values()))
        table[next(iter(table))] = change(table[next(iter(table))])

    return both(damage)


def first_of(where: str) -> Callable[[State], State]:
    return both(lambda s, _: s[where].pop(next(iter(s[where]))))


LOCAL: dict[str, Callable[[State], Any]] = {
    **{
        f"{where} {word}": tensor_of(where, change)
        for where in ("anchors", "momenta", "flights")
        for word, change in {
            "NaN": lambda t: t * float("nan"),
            "too large": lambda t: t.double() + 1e300,
            "integers": lambda t: t.long(),
            "another shape": lambda t: t.reshape(-1)[:-1],
            "null": lambda t: None,
        }.items()
    },
    **{f"{where} less one": first_of(where) for where in ("anchors", "momenta", "flights")},
    **{f"no {where}": part(where, DROP) for where in ("anchors", "momenta", "flights")},
    **{f"{where} as a list": part(where, []) for where in ("anchors", "momenta", "flights")},
    "an anchor more": both(lambda s, _: s["anchors"].update(x=torch.zeros(2))),
    "steps -1": both(lambda _, e: e.update(steps=-1)),
    "steps as text": both(lambda _, e: e.update(steps="3")),
    "steps true": both(lambda _, e: e.update(steps=True)),
    "steps 2.5": both(lambda _, e: e.update(steps=2.5)),
    "no steps": both(lambda _, e: e.pop("steps")),
    "a fragment that does not exist": both(lambda _, e: e.update(departed=[[9, 1]])),
    "a fragment of the future": both(lambda _, e: e.update(departed=[[0, 1 << 50]])),
    "a flight of fragment -1": both(lambda _, e: e["flights"][0].__setitem__(0, -1)),
    "a flight that was due": both(lambda _, e: e["flights"][0].__setitem__(1, 0)),
    "a flight due as text": both(lambda _, e: e["flights"][0].__setitem__(1, "5")),
    "a flight of which nobody knows whether it was kept": both(lambda _, e: e["flights"][0].__setitem__(2, None)),
    "a flight that was kept as text": both(lambda _, e: e["flights"][0].__setitem__(2, "yes")),
    "a flight that was not kept, with means": both(lambda _, e: e["flights"][0].__setitem__(2, False)),
    "a flight that was kept, without means": both(lambda s, _: s["flights"][next(iter(s["flights"]))].clear()),
    "a flight twice": both(lambda _, e: e["flights"].append(e["flights"][0])),
    "another method": settings(method="diloco(every=3)"),
}


def trained(kind: str) -> Run:
    run = start(kind, exchange=None if kind == "fsdp" else "two_shot", how="diloco(every=4, fragments=2, overlap=1)")
    run.steps(0, 6)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_state_is_refused_and_nothing_changes(kind: str) -> None:
    run = trained(kind)
    good = run.handle.state_dict()
    damages = DAMAGES | (LOCAL if kind == "local_sgd" else {})
    assert len(damages) > 90
    wrong = []
    for name, damage in damages.items():
        bad = damage(copy.deepcopy(good))
        try:
            run.handle.load_state_dict(bad)
        except BadCheckpoint as error:
            if not str(error):
                wrong.append(f"{name}: no text")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {error}")
        else:
            wrong.append(f"{name}: accepted")
        if not same(run.handle.state_dict(), good):
            wrong.append(f"{name}: the handle changed")
            run = trained(kind)
    assert not wrong, "\n".join(wrong)
    run.handle.load_state_dict(copy.deepcopy(good))
    assert same(run.handle.state_dict(), good)
    run.steps(6, 8)


def test_parts_of_several_runs_are_not_mixed() -> None:
    run = trained("ddp")
    good = run.handle.state_dict()
    other = second_rank(2, step=99)(facts(size=2)(copy.deepcopy(good)))
    with pytest.raises(BadCheckpoint, match="step"):
        run.handle.load_state_dicts([{"rank0": other["rank0"]}, {"rank1": other["rank1"]}])
    with pytest.raises(BadCheckpoint, match="twice"):
        run.handle.load_state_dicts([good, good])
    assert same(run.handle.state_dict(), good)
