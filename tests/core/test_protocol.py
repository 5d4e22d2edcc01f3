"""The values that a compressor is called with: what they hold, what they refuse."""

import dataclasses
import math
import pickle

import pytest
import torch

from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Guarantee, Message, Piece, Spec, Stats, check_size, flat_float32


def test_spec_of_tensors() -> None:
    spec = Spec.of(torch.zeros(3, 4), torch.zeros(5), torch.zeros(()))
    assert [p.numel for p in spec.pieces] == [12, 5, 1]
    assert spec.numel == 18
    assert spec.dtype == torch.float32
    assert Spec.of(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert Spec.flat(7) == Spec((Piece((7,), 0, 7),))
    assert Spec.flat(0).numel == 0
    assert hash(Spec.flat(7)) == hash(Spec.flat(7))
    with pytest.raises(BadConfiguration, match="at least one"):
        Spec.of()
    with pytest.raises(BadConfiguration, match="one dtype"):
        Spec.of(torch.zeros(1), torch.zeros(1, dtype=torch.float16))


def test_pieces_lie_inside_their_tensor() -> None:
    assert Piece((4, 5), 3, 20).numel == 17
    assert Piece((), 0, 1).numel == 1
    assert Piece((0, 3), 0, 0).numel == 0
    for start, stop in ((-1, 2), (3, 2), (0, 21)):
        with pytest.raises(BadConfiguration, match="does not lie inside"):
            Piece((4, 5), start, stop)


@pytest.mark.parametrize(("name", "bits"), [("seed", 64), ("step", 32), ("buffer", 16), ("sender", 16)])
def test_context_ranges(name: str, bits: int) -> None:
    assert getattr(Context(**{name: 2**bits - 1}), name) == 2**bits - 1
    for value in (-1, 2**bits):
        with pytest.raises(BadConfiguration, match=f"Context.{name}"):
            Context(**{name: value})


def test_children_of_contexts_differ_in_the_seed_only() -> None:
    context = Context(1, 2, 3, 4)
    children = [context.child(k) for k in range(50)]
    assert len({c.seed for c in children} | {context.seed}) == 51
    assert {dataclasses.replace(c, seed=1) for c in children} == {context}
    assert context.child(0).child(1) != context.child(1).child(0)


def test_messages() -> None:
    message = Message(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 3)
    assert message.payload.tolist() == [1, 2, 3]
    assert message.tobytes() == b"\x01\x02\x03"
    assert Message(message.data, torch.tensor(2)).tobytes() == b"\x01\x02"
    for data in (b"", b"abc", bytearray(b"abc"), memoryview(b"abc")):
        back = Message.frombytes(data)
        assert back.tobytes() == bytes(data)
        assert back.data.dtype == torch.uint8
        assert back.nbytes == len(data)
    source = bytearray(b"abc")
    copied = Message.frombytes(source)
    source[0] = 0
    assert copied.tobytes() == b"abc"  # a message does not change under its reader


def test_sizes_are_checked() -> None:
    message = Message.frombytes(b"abc")
    check_size(message, 3)
    for expected in (2, 4):
        with pytest.raises(CorruptMessage, match=f"of {expected} bytes"):
            check_size(message, expected)
    with pytest.raises(CorruptMessage):
        check_size(Message(message.data, 5), 5)  # more announced than there is


def test_flat_float32() -> None:
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert flat_float32(x).data_ptr() == x.data_ptr()
    assert flat_float32(x.T).tolist() == [0, 3, 1, 4, 2, 5]
    assert flat_float32(x[:, ::2]).is_contiguous()
    assert flat_float32(x.to(torch.bfloat16)).dtype == torch.float32
    assert not flat_float32(x.clone().requires_grad_()).requires_grad
    assert flat_float32(torch.zeros(())).shape == (1,)
    assert flat_float32(torch.zeros(0, 3)).shape == (0,)
    with pytest.raises(BadConfiguration, match="floating-point"):
        flat_float32(x.int())


def test_guarantees_print_their_class() -> None:
    assert str(Guarantee("none")) == "none"
    assert str(Guarantee("contractive", 0.5, sure=True)) == "C(alpha=0.5)"
    assert str(Guarantee("contractive", 0.25)) == "B(alpha=0.25)"
    assert str(Guarantee("unbiased", 3)) == "U(omega=3)"
    assert Guarantee("none").value == math.inf


def test_values_are_frozen() -> None:
    for value in (Spec.flat(1), Context(), Guarantee("none"), Stats(), Message.frombytes(b""), Piece((1,), 0, 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)


def test_a_compressor_is_recognised_by_its_shape() -> None:
    class Nothing:
        wire_id = 0

        def init(self, spec: Spec, device: torch.device | str) -> None: ...
        def encode(self) -> None: ...
        def decode(self) -> None: ...
        def max_nbytes(self) -> None: ...
        def guarantee(self) -> None: ...

    assert isinstance(Nothing(), Compressor)
    assert not isinstance(object(), Compressor)


def test_a_spec_that_travels_is_hashed_where_it_arrives() -> None:
    spec = Spec((Piece((4, 3), 0, 12, "weight"),), torch.bfloat16)
    assert hash(spec) == hash(Spec(spec.pieces, torch.bfloat16))
    assert spec.numel == 12
    arrived = pickle.loads(pickle.dumps(spec))
    # Texts have other hashes in another process: what was found here must not go with it.
    assert set(vars(arrived)) == {"pieces", "dtype"}
    assert arrived == spec
    assert spec.in_float32 == Spec(spec.pieces)
