"""Recycled memory: ordinary tensors, given out again only when nobody holds them."""

from __future__ import annotations

import threading

import pytest
import torch

from tersegrad.core import buffers

LARGE = 300_000


@pytest.fixture(autouse=True)
def nothing_waits() -> None:
    buffers.release()


def test_a_block_comes_back_when_its_last_view_is_gone() -> None:
    first = buffers.empty(LARGE, torch.float32, "cpu")
    address, view = first.data_ptr(), first[7:9].view(torch.int32)
    del first
    other = buffers.empty(LARGE, torch.float32, "cpu")
    assert other.data_ptr() != address
    assert buffers.waiting() == 0
    del view
    assert buffers.waiting() >= 4 * LARGE
    assert buffers.empty(LARGE, torch.float32, "cpu").data_ptr() == address


def test_blocks_serve_other_types_and_nearby_sizes() -> None:
    first = buffers.empty(LARGE, torch.float32, "cpu")
    address = first.data_ptr()
    del first
    again = buffers.empty(4 * LARGE - 1000, torch.uint8, "cpu")
    assert again.data_ptr() == address
    assert again.shape == (4 * LARGE - 1000,)
    assert again.dtype == torch.uint8


def test_small_tensors_and_empty_ones_are_ordinary() -> None:
    for numel in (0, 1, 1000):
        assert buffers.empty(numel, torch.float32, "cpu").shape == (numel,)
    assert buffers.waiting() == 0


def test_what_waits_is_limited_and_can_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT", 3 << 20)
    held = [buffers.empty(1 << 20, torch.uint8, "cpu") for _ in range(5)]
    del held
    assert buffers.waiting() == 3 << 20
    assert buffers.release() == 3 << 20
    assert buffers.waiting() == 0


def test_cat_equals_torch() -> None:
    parts = [torch.randn(n) for n in (0, 5, LARGE, 1)]
    assert torch.equal(buffers.cat(parts), torch.cat(parts))


def test_threads_never_share_a_block() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = buffers.empty(LARGE, torch.uint8, "cpu").fill_(number)
            other = buffers.empty(LARGE, torch.uint8, "cpu").fill_(number + 100)
            if int(mine[0]) != number or int(mine[-1]) != number or int(other[0]) != number + 100:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
