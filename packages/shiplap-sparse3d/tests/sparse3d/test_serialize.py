"""Codes along curves: against bits written out, against what a curve is, and back."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shiplap as sl
import shiplap_sparse3d as sparse3d

ORDERS = ["".join(p) for p in permutations("xyz")]
CURVES = {
    "z_order": (sparse3d.z_order_encode, sparse3d.z_order_decode),
    "hilbert": (sparse3d.hilbert_encode, sparse3d.hilbert_decode),
}


def cube(edge: int) -> torch.Tensor:
    cells = torch.cartesian_prod(*[torch.arange(edge)] * 3)
    return torch.cat([torch.zeros(len(cells), 1, dtype=torch.int64), cells], 1).int()


def interleaved(row: list[int], bits: int, axes: list[int]) -> int:
    """The Z-order code of one row, bit by bit, as an int of any width."""
    code = row[0]
    for bit in reversed(range(bits)):
        for axis in axes:
            code = code << 1 | (row[1 + axis] >> bit & 1)
    return code


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_codes_are_the_bits_and_decode_again(data):
    bits = data.draw(st.sampled_from([0, 1, 2, 10, 11, 16, 20, 21]))
    axes = data.draw(st.permutations([0, 1, 2]))
    edge, scenes = st.integers(0, 2**bits - 1), st.integers(0, min(2**31, 2 ** (63 - 3 * bits)) - 1)
    rows = data.draw(st.lists(st.one_of(st.tuples(scenes, edge, edge, edge), st.just((-1,) * 4)), max_size=12))
    coords = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    for mode, (encode, decode) in CURVES.items():
        codes = encode(coords, bits, axes)
        assert torch.equal(codes, encode.reference(coords, bits, axes))
        assert torch.equal(decode(codes, bits, axes), coords)
        assert torch.equal(decode.reference(codes, bits, axes), coords)
        assert (codes >> 3 * bits).tolist() == coords[:, 0].tolist()
        if mode == "z_order":
            assert codes.tolist() == [interleaved(r, bits, axes) if r[0] >= 0 else -1 for r in coords.tolist()]


@pytest.mark.parametrize("axes", ORDERS)
@pytest.mark.parametrize("edge", [2, 4, 8])
def test_a_hilbert_curve_goes_from_cell_to_neighbouring_cell(edge, axes):
    coords = cube(edge)
    codes = sparse3d.encode_seq(coords, (1, 1, edge, edge, edge), "hilbert", axes)
    assert torch.equal(codes.sort().values, torch.arange(edge**3, dtype=codes.dtype))
    path = coords[codes.argsort()]
    assert (path.diff(dim=0).abs().sum(1) == 1).all()


def test_axes_say_which_one_counts_most():
    coords = cube(4)
    for mode in CURVES:
        plain = sparse3d.encode_seq(coords, (1, 1, 4, 4, 4), mode)
        for order in ORDERS:
            columns = [0, *(1 + "xyz".index(axis) for axis in order)]
            turned = sparse3d.encode_seq(coords[:, columns].contiguous(), (1, 1, 4, 4, 4), mode)
            assert torch.equal(sparse3d.encode_seq(coords, (1, 1, 4, 4, 4), mode, order), turned)
        assert torch.equal(plain, sparse3d.encode_seq(coords, (1, 1, 4, 4, 4), mode, "xyz"))


@pytest.mark.parametrize("mode", CURVES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1, 1), torch.int32),
        ((5, 3, 1, 1, 1), torch.int32),  # no bits for the axes at all
        ((2, 1, 1024, 1000, 513), torch.int32),
        ((3, 1, 1024, 2, 2), torch.int64),  # 31 bits and 32
        ((8, 1, 4096, 4096, 4096), torch.int64),
        ((9, 1, 2048, 3, 3), torch.int64),  # 3 * bits >= 32: the batch stays
        ((1 << 15, 1, 1 << 16, 5, 5), torch.int64),
        ((1, 1, 1 << 21, 1 << 21, 1 << 21), torch.int64),
    ],
)
def test_shapes_keep_their_batch_and_every_axis(mode, shape, dtype):
    last = [shape[0] - 1, *(s - 1 for s in shape[2:])]
    rows = [last, [shape[0] - 1, 0, 0, 0], [0, *last[1:]], [0, 0, 0, 0], [shape[0] // 2, 0, shape[3] // 2, 0]]
    coords = torch.tensor(rows, dtype=torch.int32).unique(dim=0)
    codes = sparse3d.encode_seq(coords, shape, mode)
    assert codes.dtype == dtype
    assert (codes >= 0).all()
    assert len(codes.unique()) == len(coords)
    assert torch.equal(sparse3d.decode_seq(codes, shape, mode), coords)
    assert (coords[codes.argsort()][:, 0].diff() >= 0).all()


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize("mode", CURVES)
def test_what_does_not_fit_is_refused(mode, run):
    encode, decode = (op if run == "kernel" else op.reference for op in CURVES[mode])
    good = [1, 2, 3, 3]
    for bad in ([0, 4, 0, 0], [0, 0, -1, 0], [-2, 0, 0, 0], [4, 0, 0, 0]):
        with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*coords row 1 "):
            encode(torch.tensor([good, bad], dtype=torch.int32), 2, [0, 1, 2], 8)
    for code in (-2, -(2**63), 2**62):
        with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*codes\[1\]"):
            decode(torch.tensor([5, code]), 2, [0, 1, 2])


@pytest.mark.parametrize(
    "call",
    [
        lambda c: sparse3d.z_order_encode(c, 22),
        lambda c: sparse3d.z_order_encode(c, 5, [0, 1, 2], 14),
        lambda c: sparse3d.hilbert_encode(c, 2, [0, 1, 1]),
        lambda c: sparse3d.hilbert_encode(c, 2, [1, 1, 1]),
        lambda c: sparse3d.z_order_decode(c[:, 0].long(), 22),
        lambda c: sparse3d.encode_seq(c, (1, 1, 4, 4), "z_order"),
        lambda c: sparse3d.encode_seq(c, (1, 1, 4, 4, 0)),
        lambda c: sparse3d.encode_seq(c, (2, 1, 1 << 21, 1, 1)),
        lambda c: sparse3d.encode_seq(c, (1, 1, 4, 4, 4), "morton"),
        lambda c: sparse3d.decode_seq(c, (1,) * 5, axes="xxz"),
    ],
)
def test_calls_that_mean_nothing_are_refused(call):
    with pytest.raises(sl.ShiplapError, match="SL208"):
        call(torch.zeros(1, 4, dtype=torch.int32))


def test_views_and_threads():
    coords = torch.randint(0, 2**16, (70_000, 4), dtype=torch.int32) % torch.tensor([5, 2**16, 2**16, 2**16]).int()
    shape = (5, 1, 2**16, 2**16, 2**16)
    for mode in CURVES:
        codes = sparse3d.encode_seq(coords, shape, mode)
        assert torch.equal(sparse3d.decode_seq(codes, shape, mode), coords)
        turned = coords.t().contiguous().t()
        assert torch.equal(sparse3d.encode_seq(turned, shape, mode), codes)
        assert torch.equal(sparse3d.decode_seq(codes.repeat_interleave(2)[::2], shape, mode), coords)


def test_one_compiled_graph(fresh_compiler):
    def there_and_back(coords):
        codes = sparse3d.encode_seq(coords, (2, 1, 16, 16, 16), "hilbert")
        return codes, sparse3d.decode_seq(codes.sort().values, (2, 1, 16, 16, 16), "hilbert")

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 50):
        coords = torch.randint(0, 16, (n, 4), dtype=torch.int32) % torch.tensor([2, 16, 16, 16]).int()
        for a, b in zip(compiled(coords), there_and_back(coords), strict=True):
            assert torch.equal(a, b)
