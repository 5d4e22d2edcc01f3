"""What a device has yet to say is believed, looked at once, and done again where it was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.device import Device
from torch import Tensor

from tersegrad.core import trust


@pytest.fixture
def device() -> Iterator[Device]:
    with Device() as made:
        yield made


def decoder(device: Device, says: int, calls: list[bool]) -> Callable[[], Tensor]:
    """Decodes to ones if the device says zero, else to twos."""

    def body() -> Tensor:
        (said,) = trust.numbers(device.to(torch.tensor([says])))
        calls.append(said == 0)
        return torch.full((2,), 1.0 if said == 0 else 2.0)

    return body


@pytest.mark.parametrize("says", [0, 7])
def test_bad_news_decode_again(says: int, device: Device) -> None:
    calls: list[bool] = []
    device.waits.clear()
    trust.decoded(decoder(device, says, calls))
    assert calls == ([True, False] if says else [True])
    assert device.count == (2 if says else 1)


def test_many_messages_are_looked_at_in_one_read(device: Device) -> None:
    doubts: list[trust.Doubt] = []
    calls: list[bool] = []
    device.waits.clear()
    with trust.postponing(doubts):
        for says in (0, 3, 0, 0):
            trust.decoded(decoder(device, says, calls))
        assert device.count == 0
        # What is used at once is looked at, at once.
        with trust.postponing(None):
            trust.decoded(decoder(device, 0, calls))
        assert device.count == 1
    flags = [device.to(torch.tensor(True)), device.to(torch.tensor(False))]
    changed, set_before = trust.settle(doubts, flags)
    assert [x.tolist() for x in changed] == [[2.0, 2.0]]
    assert not set_before
    assert device.count == 3
    assert doubts == []
    assert trust.settle(doubts) == ([], True)


def test_a_flag_is_believed_only_while_trusting(device: Device) -> None:
    no = device.to(torch.tensor(False))
    assert not trust.holds(no)
    with trust.trusting() as notes:
        assert trust.holds(no)
        assert trust.holds(device.to(torch.tensor(True)))
        # Of the host's own memory all is known.
        assert not trust.holds(torch.tensor(False))
        assert trust.numbers(torch.tensor([4, 5])) == [4, 5]
    assert [bool(note.there) for note in notes] == [False, True]
    assert not trust.holds(no)


@pytest.mark.parametrize("wanted", [b"ab", b"xb", b"bb"])
def test_bytes_are_compared_with_what_is_expected(wanted: bytes, device: Device) -> None:
    data = torch.tensor(list(b"ab"), dtype=torch.uint8)
    there, right, calls = device.to(data), wanted == b"ab", list[bool]()
    assert trust.reads()
    assert trust.reads((data, wanted)) == right
    assert trust.reads((there[:1], wanted[:1]), (there[1:], wanted[1:])) == right

    def body() -> Tensor:
        assert trust.reads((data[:1], b"a"), (data[1:], wanted[1:])) == (wanted[1:] == b"b")
        calls.append(trust.reads((there[:1], wanted[:1]), (there[1:], wanted[1:])))
        return torch.zeros(1)

    device.waits.clear()
    trust.decoded(body)
    assert calls == ([True] if right else [True, False])
    assert device.count == len(calls)


def test_what_fails_twice_raises(device: Device) -> None:
    def body() -> Tensor:
        if trust.numbers(device.to(torch.tensor([1]))) != [0]:
            raise ValueError("malformed")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="malformed"):
        trust.decoded(body)
