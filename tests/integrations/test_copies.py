"""How often a float is copied on its way from a framework's buffer to a group and back: the table in docs/engine.md."""

from __future__ import annotations

import pytest
import torch

from tersegrad.engine import Staging, make_groups
from tersegrad.integrations.fsdp_units import Layout, Slot
from tests.integrations.test_local_sgd import Written, net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ddp_copies_each_gradient_once_in_each_direction(dtype: torch.dtype) -> None:
    parameters = dict(net().to(dtype).named_parameters())
    gradients = [torch.randn(p.shape).to(dtype) for p in parameters.values()]
    wanted = [g.clone() for g in gradients]
    (group,) = make_groups(parameters)
    staging = Staging([group], parameters)
    for _ in range(2):
        assert staging.put(list(parameters.values()), gradients) == [0]
        staging.flat(0)  # the buffer is made in the first step
        staging.clear()
    assert staging.put(list(parameters.values()), gradients) == [0]
    with Written() as written:
        flat = staging.flat(0)
    assert written.elements == group.spec.numel
    flat.mul_(2.0)
    with Written() as written:
        staging.get({0: flat})
    assert written.elements == group.spec.numel
    assert all(torch.equal(g, 2 * w) for g, w in zip(gradients, wanted))


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_copies_rows_once_where_they_are_padded_or_narrow(dtype: torch.dtype, rows: int) -> None:
    size = 2
    layout = Layout((Slot("a", (rows, 6), 6 * rows, 6 * -(-rows // size)), Slot("b", (2, 3), 6, 3)), size)
    x = torch.randn(size * layout.width).to(dtype)
    elements = 6 * rows + 6
    as_it_is = dtype == torch.float32 and rows == 4
    with Written() as written:
        flat, copied = layout.take(x, range(size))
    assert copied != as_it_is
    assert written.elements == (0 if as_it_is else elements)
    assert flat.numel() == elements
    row = torch.full((layout.width,), torch.nan, dtype=dtype)
    own = layout.spec(1).numel
    with Written() as written:
        layout.put(flat[-own:], row, 1)
    # Padding is written too.
    assert written.elements == layout.width
    assert bool(torch.isfinite(row).all())
