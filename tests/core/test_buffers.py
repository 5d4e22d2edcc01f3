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


def test_sizes_that_are_no_longer_asked_for_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT", 8 << 20)
    old = [buffers.empty(1 << 20, torch.uint8, "cpu") for _ in range(8)]
    del old
    assert buffers.waiting() == 8 << 20
    for _ in range(3):
        block = buffers.empty(3 << 20, torch.uint8, "cpu")
        address = block.data_ptr()
        del block
        assert buffers.waiting() <= 8 << 20
        again = buffers.empty(3 << 20, torch.uint8, "cpu")
        assert again.data_ptr() == address
        del again
    # What was asked for last stays, and of the rest as much as fits.
    recent = buffers.empty(1 << 20, torch.uint8, "cpu")
    assert buffers.waiting() == (8 << 20) - (1 << 20)
    large = buffers.empty(7 << 20, torch.uint8, "cpu")
    del large, recent
    assert buffers.waiting() == 8 << 20
    assert {size for size, blocks in buffers._waiting.items() if blocks} == {1 << 20, 7 << 20}


def test_tensors_may_die_in_any_thread_while_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT", 4 << 20)
    failed: list[BaseException] = []
    ended = threading.Event()

    def churn(number: int) -> None:
        try:
            for k in range(300):
                held = [buffers.empty((1 << 17) + (number + k + j) % 9 * 50_000, torch.uint8, "cpu") for j in range(4)]
                del held[::2]
        except BaseException as error:
            failed.append(error)

    def count() -> None:
        try:
            while not ended.is_set():
                assert buffers.waiting() >= 0
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(3)]
    counting = threading.Thread(target=count)
    for thread in (*threads, counting):
        thread.start()
    for thread in threads:
        thread.join(60)
    ended.set()
    counting.join(60)
    assert not failed
    assert not counting.is_alive()
    assert buffers.waiting() <= 4 << 20


def test_a_tensor_may_die_while_the_pool_is_at_work() -> None:
    """The garbage collector may run a finaliser in a thread that holds the pool's lock."""
    block = buffers.empty(LARGE, torch.uint8, "cpu")
    with buffers._lock:
        del block
    assert buffers.waiting() >= LARGE
