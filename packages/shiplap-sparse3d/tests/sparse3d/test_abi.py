"""The C symbols of sparse3d against plain numpy, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shiplap_testing.effort import sampled
from tests.sparse3d.abi_harness import ISAS, Bfloat16, KernelError, Sparse3d, bfloat16, library_path, wide

if not library_path().exists():
    pytest.skip(f"{library_path()} is not built", allow_module_level=True)

RNG = np.random.default_rng
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "float16": 2**-11, "bfloat16": 2**-8}  # of 16 bits: one rounding
DTYPES = tuple(TOLERANCE)


# ---------------------------------------------------------------------------------------------- references


def random_coords(rng: np.random.Generator, n: int, shape: tuple[int, ...], batches: int = 2) -> np.ndarray:
    """At most ``n`` distinct voxels in random order."""
    cells = rng.integers(0, (batches, *shape), (n, 4)) if n else np.zeros((0, 4))
    return rng.permutation(np.unique(cells.astype(np.int32), axis=0))


def taps_of(kernel: tuple[int, ...]) -> np.ndarray:
    return np.array(list(itertools.product(*map(range, kernel)))).reshape(-1, 3)


def numbers_of(batch: np.ndarray, cells: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A number for each cell of a batch, and whether the cell lies in the shape."""
    inside = ((cells >= 0) & (cells < shape)).all(axis=-1)
    return ((batch * shape[0] + cells[..., 0]) * shape[1] + cells[..., 1]) * shape[2] + cells[..., 2], inside


def reference_table(coords, out_coords, shape, kernel, stride, padding, dilation) -> np.ndarray:
    coords, out_coords = coords.astype(np.int64), out_coords.astype(np.int64)
    cells = out_coords[:, None, 1:] * stride - padding + taps_of(kernel) * dilation
    wanted, inside = numbers_of(out_coords[:, None, 0], cells, shape)
    rows = {number: row for row, number in enumerate(numbers_of(coords[:, 0], coords[:, 1:], shape)[0].tolist())}
    table = np.full(wanted.shape, -1, np.int32)
    table[inside] = [rows.get(number, -1) for number in wanted[inside].tolist()]
    return table


def reference_out_coords(coords, shape, kernel, stride, padding, dilation) -> np.ndarray:
    size = tuple((shape[a] + 2 * padding[a] - dilation[a] * (kernel[a] - 1) - 1) // stride[a] + 1 for a in range(3))
    coords = coords.astype(np.int64)
    moved = coords[:, None, 1:] + padding - taps_of(kernel) * dilation
    inside = numbers_of(coords[:, None, 0], moved // stride, size)[1] & (moved % stride == 0).all(axis=-1)
    batch = np.broadcast_to(coords[:, None, :1], (*inside.shape, 1))
    cells = np.concatenate([batch, moved // stride], axis=-1)[inside]
    return np.unique(cells.astype(np.int32), axis=0).reshape(-1, 4)


def reference_conv(feats, weight, table, bias=None, groups=1) -> np.ndarray:
    feats = wide(feats).reshape(len(feats), groups, weight.shape[2])
    weight = wide(weight).reshape(groups, len(weight) // groups, *weight.shape[1:])
    out = np.zeros((groups, len(table), weight.shape[1]))
    for v in range(table.shape[1]):
        hit = table[:, v] >= 0
        out[:, hit] += feats[table[hit, v]].swapaxes(0, 1) @ weight[:, :, v].swapaxes(1, 2)
    out = out.swapaxes(0, 1).reshape(len(table), groups * weight.shape[1])
    return out if bias is None else out + wide(bias)


def reference_weight_grad(grad, feats, table, groups=1) -> np.ndarray:
    cg, cog = feats.shape[1] // groups, grad.shape[1] // groups
    grad, feats = wide(grad).reshape(len(grad), groups, cog), wide(feats).reshape(len(feats), groups, cg)
    out = np.zeros((groups, cog, table.shape[1], cg))
    for v in range(table.shape[1]):
        hit = table[:, v] >= 0
        out[:, :, v] = grad[hit].transpose(1, 2, 0) @ feats[table[hit, v]].swapaxes(0, 1)
    return out.reshape(groups * cog, *out.shape[2:])


def random_table(rng, m: int, k: int, n: int, density: float = 0.5) -> np.ndarray:
    table = rng.integers(0, max(n, 1), (m, k), dtype=np.int32)
    table[rng.random((m, k)) >= (density if n else 0)] = -1
    return table


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    scale = np.abs(expected).max(initial=1e-30)
    tolerance = TOLERANCE["bfloat16" if isinstance(actual, Bfloat16) else str(actual.dtype)]
    np.testing.assert_allclose(wide(actual) / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.fixture(params=[None, *ISAS])
def matrix(request) -> Sparse3d:
    """The library on each instruction set of this machine; None is the one it picks."""
    kernels = Sparse3d(threads=2, isa=request.param)
    if request.param and not kernels.has_isa():
        pytest.skip(f"this machine has no {request.param}")
    return kernels


# ---------------------------------------------------------------------------------------------- voxels


@pytest.mark.parametrize("n", [0, 1, 2, 300, 5000])
def test_unique_coords_is_torch_unique(n):
    coords = RNG(n).integers(-20, 20, (n, 4), dtype=np.int32)
    unique, inverse, counts = Sparse3d().unique_coords(coords)
    if n == 0:
        assert (len(unique), len(inverse), len(counts)) == (0, 0, 0)
        return
    expected = np.unique(coords, axis=0, return_inverse=True, return_counts=True)
    for actual, wanted in zip((unique, inverse, counts), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted.reshape(actual.shape))


def test_unique_coords_over_the_widest_range_that_fits():
    coords = np.array([[0, -(2**31), 5, -(2**29)], [1, 2**31 - 1, 5, 2**29 - 2], [0, -(2**31), 5, -1]], np.int32)
    unique, inverse, counts = Sparse3d().unique_coords(coords)
    np.testing.assert_array_equal(unique, coords[[0, 2, 1]])
    np.testing.assert_array_equal(inverse, [0, 2, 1])
    np.testing.assert_array_equal(counts, [1, 1, 1])


def test_unique_coords_refuses_a_wider_range():
    coords = np.array([[0, -(2**31), 0, 0], [3, 2**31 - 1, 0, 2**31 - 1]], np.int32)
    with pytest.raises(
        KernelError, match=r"^coords span \(4, 4294967296, 1, 2147483648\) cells, 2\^63 or more in all$"
    ):
        Sparse3d().unique_coords(coords)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "m", "c"), [(0, 0, 3), (1, 1, 1), (50, 7, 5), (9000, 700, 40), (10, 4, 0)])
def test_segment_mean(dtype, n, m, c):
    rng = RNG(n)
    index = np.concatenate([np.arange(m), rng.integers(0, max(m, 1), n - m)]).astype(np.int32)
    rng.shuffle(index)
    counts = np.bincount(index, minlength=m).astype(np.int32)
    feats = rng.standard_normal((n, c)).astype(dtype)
    expected = np.zeros((m, c))
    np.add.at(expected, index, feats.astype(np.float64))
    results = [Sparse3d(threads=t).segment_mean(feats, index, counts) for t in (1, 2, 5)]
    assert_close(results[0], expected / counts[:, None] if m else expected)
    assert all((r == results[0]).all() for r in results)


def test_segment_mean_of_no_rows_is_zero():
    means = Sparse3d().segment_mean(np.ones((1, 2), np.float32), np.ones(1, np.int32), np.array([0, 1, 0], np.int32))
    np.testing.assert_array_equal(means, [[0, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize("bad", [-1, 2])
def test_segment_mean_refuses_an_index_out_of_range(bad):
    with pytest.raises(KernelError, match=rf"index\[1\] = {bad}, outside \[0, 2\)"):
        Sparse3d().segment_mean(np.ones((2, 3), np.float32), np.array([0, bad], np.int32), np.ones(2, np.int32))


# ---------------------------------------------------------------------------------------------- tables

SUBM = [
    ((3, 3, 3), (1, 1, 1)),
    ((1, 3, 5), (1, 1, 1)),
    ((3, 3, 3), (1, 2, 3)),
    ((2, 2, 4), (1, 1, 1)),
    ((5, 1, 2), (2, 1, 1)),
]


@pytest.mark.parametrize(("kernel", "dilation"), SUBM)
@pytest.mark.parametrize("n", [0, 1, 40, 900])
def test_subm_table(n, kernel, dilation):
    shape = (9, 8, 11)
    coords = random_coords(RNG(n), n, shape)
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    expected = reference_table(coords, coords, shape, kernel, (1, 1, 1), padding, dilation)
    for ordered in (coords, coords[np.lexsort(coords.T[::-1])]):
        rows = Sparse3d(threads=2).subm_table(ordered, shape, kernel, dilation)
        if ordered is coords:
            np.testing.assert_array_equal(rows, expected)
        assert (rows >= 0).sum() == (expected >= 0).sum()


def test_subm_table_has_no_taps_for_an_empty_kernel():
    assert Sparse3d().subm_table(np.zeros((3, 4), np.int32)[:1], (4, 4, 4), (3, 0, 3)).shape == (1, 0)


STRIDED = [
    ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
    ((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    ((1, 1, 1), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
    ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    ((5, 5, 5), (2, 2, 2), (2, 2, 2), (1, 1, 1)),
    ((4, 3, 2), (3, 2, 1), (2, 0, 1), (1, 2, 3)),
    ((3, 3, 3), (4, 4, 4), (1, 1, 1), (2, 2, 2)),
    ((2, 3, 3), (1, 3, 2), (3, 3, 3), (2, 1, 3)),
    ((3, 3, 3), (2, 2, 2), (0, 0, 0), (7, 1, 1)),  # the first output axis is empty
]


@pytest.mark.parametrize("geometry", STRIDED)
@pytest.mark.parametrize("n", [0, 1, 60, 700])
def test_strided_tables(n, geometry):
    rng, shape = RNG(n), (9, 12, 10)
    coords = random_coords(rng, n, shape)
    kernels = Sparse3d(threads=2)
    out = kernels.out_coords(coords, shape, *geometry)
    np.testing.assert_array_equal(out, reference_out_coords(coords, shape, *geometry))
    for queries in (out, rng.permutation(out)):
        table = kernels.conv_table(coords, queries, shape, *geometry)
        np.testing.assert_array_equal(table, reference_table(coords, queries, shape, *geometry))
    transposed = kernels.transpose_table(table, len(coords))
    expected = np.full_like(transposed, -1)
    j, v = np.nonzero(table >= 0)
    expected[table[j, v], v] = j
    np.testing.assert_array_equal(transposed, expected)


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize(("k", "padding"), [(3, 1), (1, 0), (5, 2)])
def test_out_coords_of_all_even_or_all_odd_voxels(parity, k, padding):
    # The worst case of the output bound, where a table sized by a guess overflows.
    coords = random_coords(RNG(parity), 3000, (20, 20, 20), 1) * [1, 2, 2, 2] + [0, parity, parity, parity]
    coords = np.ascontiguousarray(coords, np.int32)
    geometry = ((k,) * 3, (2,) * 3, (padding,) * 3, (1,) * 3)
    out = Sparse3d().out_coords(coords, (41, 41, 41), *geometry)
    np.testing.assert_array_equal(out, reference_out_coords(coords, (41, 41, 41), *geometry))


def test_tables_of_a_grid_just_below_2_63_cells():
    shape = (2**21 - 1, 2**21, 2**20)
    coords = np.array(
        [[1, 2**21 - 2, 2**21 - 1, 2**20 - 1], [1, 2**21 - 2, 2**21 - 1, 2**20 - 2], [0, 0, 0, 0]], np.int32
    )
    padding = (1, 1, 1)
    table = Sparse3d().subm_table(coords, shape, (3, 3, 3))
    geometry = ((3, 3, 3), (1, 1, 1), padding, (1, 1, 1))
    np.testing.assert_array_equal(table, reference_table(coords, coords, shape, *geometry))
    np.testing.assert_array_equal(Sparse3d().conv_table(coords, coords, shape, *geometry), table)
    out = Sparse3d().out_coords(coords, shape, *geometry)
    np.testing.assert_array_equal(out, reference_out_coords(coords, shape, *geometry))


@pytest.mark.parametrize("scalar", [2**31 - 1, 2**30])
def test_tables_with_huge_scalars_do_not_overflow(scalar):
    coords = random_coords(RNG(0), 50, (6, 6, 6))
    same = ((3, 3, 3), (scalar,) * 3)
    padding = (scalar, scalar, scalar)
    expected = reference_table(coords, coords, (6, 6, 6), same[0], (1, 1, 1), padding, same[1])
    np.testing.assert_array_equal(Sparse3d().subm_table(coords, (6, 6, 6), *same), expected)
    geometry = ((2, 2, 2), (scalar,) * 3, (scalar,) * 3, (scalar,) * 3)
    out = Sparse3d().out_coords(coords, (6, 6, 6), *geometry)
    np.testing.assert_array_equal(out, reference_out_coords(coords, (6, 6, 6), *geometry))
    table = Sparse3d().conv_table(coords, out, (6, 6, 6), *geometry)
    np.testing.assert_array_equal(table, reference_table(coords, out, (6, 6, 6), *geometry))


def test_tables_do_not_depend_on_threads():
    shape = (40, 41, 42)
    coords = random_coords(RNG(5), 20000, shape)
    geometry = ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    results = []
    for threads in (1, 2, 5):
        kernels = Sparse3d(threads=threads)
        out = kernels.out_coords(coords, shape, *geometry)
        strided = kernels.conv_table(coords, out, shape, *geometry)
        submanifold = kernels.subm_table(coords, shape, (3, 3, 3))
        results.append((out, strided, kernels.transpose_table(strided, len(coords)), submanifold))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


GEOMETRY = ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
TABLE_OPS = {
    "subm_table": lambda k, c, shape: k.subm_table(c, shape, (3, 3, 3)),
    "out_coords": lambda k, c, shape: k.out_coords(c, shape, *GEOMETRY),
    "conv_table": lambda k, c, shape: k.conv_table(c, np.zeros((0, 4), np.int32), shape, *GEOMETRY),
}


@pytest.mark.parametrize("op", TABLE_OPS.values(), ids=TABLE_OPS)
class TestTableErrors:
    @pytest.mark.parametrize("row", [(-2, 0, 0, 0), (0, -1, 2, 3), (0, 10, 0, 0), (0, 0, 11, 0), (0, 0, 0, 12)])
    def test_coordinate_outside(self, op, row):
        coords = np.array([(0, i, 0, 0) for i in range(4)] + [row], np.int32)
        message = f"coords row 4 is {row}, outside spatial_shape (10, 11, 12)"
        with pytest.raises(KernelError) as caught:
            op(Sparse3d(), coords, (10, 11, 12))
        assert str(caught.value) == message

    def test_duplicate_rows(self, op):
        coords = np.array([(0, i // 5, i % 5, 9 - i % 7) for i in range(18)], np.int32)
        coords[3] = coords[17] = (0, 5, 6, 7)
        with pytest.raises(KernelError) as caught:
            op(Sparse3d(), coords, (10, 10, 10))
        assert str(caught.value) == "duplicate coordinates: rows 3 and 17 are both (0, 5, 6, 7)"

    def test_too_many_cells(self, op):
        coords = np.array([(1, 5, 5, 5)], np.int32)
        with pytest.raises(KernelError) as caught:
            op(Sparse3d(), coords, (2**21, 2**21, 2**20))
        assert str(caught.value).endswith("(2097152, 2097152, 1048576) with batch index 1 has 2^63 cells or more")

    def test_workspace_too_small(self, op):
        with pytest.raises(KernelError, match=r"^workspace of \d+ bytes, needs \d+$"):
            op(Sparse3d(workspace_shortage=1000), np.zeros((1, 4), np.int32), (4, 4, 4))


def test_conv_table_refuses_bad_out_coords():
    coords = np.zeros((1, 4), np.int32)
    with pytest.raises(KernelError) as caught:
        Sparse3d().conv_table(coords, np.array([[0, 0, 5, 0]], np.int32), (10, 10, 10), *GEOMETRY)
    assert str(caught.value) == "out_coords row 0 is (0, 0, 5, 0), outside the output grid (5, 5, 5)"
    with pytest.raises(KernelError, match="duplicate coordinates: out_coords rows 0 and 1 are both"):
        Sparse3d().conv_table(coords, np.zeros((2, 4), np.int32), (10, 10, 10), *GEOMETRY)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        (((4, 4), (3, 3, 3), (1, 1, 1)), "spatial_shape has 2 values, expected 3"),
        (((4, 4, 4), (3, -1, 3), (1, 1, 1)), "kernel[1] = -1, expected a value in [0, 2^31)"),
        (((4, 4, 4), (3, 3, 3), (1, 1, 0)), "dilation[2] = 0, expected a value in [1, 2^31)"),
        (((4, 4, 2**31), (3, 3, 3), (1, 1, 1)), "spatial_shape[2] = 2147483648, expected a value in [0, 2^31)"),
    ],
)
def test_scalars_are_checked(scalars, message):
    with pytest.raises(KernelError) as caught:
        Sparse3d().call("subm_table", 10**6, np.zeros((1, 4), np.int32), np.zeros((1, 27), np.int32), *scalars)
    assert str(caught.value) == message


def test_transpose_table_refuses_bad_entries():
    for entry in (5, -2):
        with pytest.raises(KernelError) as caught:
            Sparse3d().transpose_table(np.array([[0, 1], [-1, entry]], np.int32), 5)
        assert str(caught.value) == f"table[1, 1] = {entry} but rows is 5"
    with pytest.raises(KernelError) as caught:
        Sparse3d().transpose_table(np.array([[0, 1], [-1, 3], [2, 1]], np.int32), 5)
    assert str(caught.value) == "table[0, 1] and table[2, 1] are both 1: no transpose has both"


# ---------------------------------------------------------------------------------------------- conv


def conv_case(
    seed: int, dtype: str, m: int, n: int, k: int, ci: int, co: int, density: float = 0.5, groups: int = 1
) -> tuple[np.ndarray, ...]:
    """Features, weight, table, bias and a gradient of the result."""
    rng = RNG(seed)
    shapes = (n, ci), (co, k, ci // groups), (co,), (m, co)
    drawn = (rng.standard_normal(shape) for shape in shapes)
    feats, weight, bias, grad = (bfloat16(x) if dtype == "bfloat16" else x.astype(dtype) for x in drawn)
    return feats, weight, random_table(rng, m, k, n, density), bias, grad


SIZES = [(0, 0), (0, 5), (1, 1), (5, 0), (3, 7), (64, 64), (300, 200), (1000, 1300)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), sampled([pytest.param(*size) for size in SIZES], 3))
def test_conv_of_any_number_of_rows(matrix, m, n, dtype):
    feats, weight, table, bias, grad = conv_case(m, dtype, m, n, 5, 6, 19)
    assert_close(matrix.conv(feats, weight, table, bias), reference_conv(feats, weight, table, bias))
    assert_close(matrix.conv(feats, weight, table), reference_conv(feats, weight, table))
    assert_close(matrix.conv_weight_grad(grad, feats, table), reference_weight_grad(grad, feats, table))


# Whole vectors of 4 to 64 elements, one more and one less, and what is below all of them.
CHANNELS = (*range(6), *(width + more for width in (8, 16, 32, 64) for more in (-1, 0, 1)), 70)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv_of_any_number_of_channels(matrix, dtype):
    for channels in CHANNELS:
        ci, co = channels, (channels * 37) % 71
        feats, weight, table, bias, grad = conv_case(channels, dtype, 90, 70, 3, ci, co)
        assert_close(matrix.conv(feats, weight, table, bias), reference_conv(feats, weight, table, bias))
        assert_close(matrix.conv_weight_grad(grad, feats, table), reference_weight_grad(grad, feats, table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", sampled([0, 1, 8, 27, 64, 125], 2))
def test_conv_of_any_number_of_taps(matrix, k, dtype):
    feats, weight, table, bias, grad = conv_case(k, dtype, 400, 300, k, 20, 33, 0.2)
    assert_close(matrix.conv(feats, weight, table, bias), reference_conv(feats, weight, table, bias))
    assert_close(matrix.conv_weight_grad(grad, feats, table), reference_weight_grad(grad, feats, table))


GROUPS = [
    (1, 1, 2),
    (2, 3, 1),
    (7, 1, 1),
    (70, 1, 1),
    (64, 1, 1),
    (5, 3, 4),
    (4, 16, 16),
    (2, 40, 20),
    (12, 1, 3),
    (3, 5, 70),
]


# Few input channels, for which sums are turned, panels that stay in registers, whole vectors, and the rest.
WIDTHS = [(1, 16), (4, 16), (4, 40), (8, 64), (8, 24), (16, 16), (16, 4), (16, 72), (32, 48), (20, 48), (70, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ci", "co"), sampled([pytest.param(*channels) for channels in WIDTHS], 3))
def test_conv_of_few_channels_and_of_whole_vectors(matrix, ci, co, dtype):
    """Rows of more than two blocks, of which the last ones are not whole. Reflected where the symbol takes that."""
    feats, weight, table, bias, grad = conv_case(ci, dtype, 1037, 900, 27, ci, co)
    reflect = matrix.isa is None
    taps = slice(None, None, -1) if reflect else slice(None)
    for threads in (1, 5):
        kernels = Sparse3d(threads=threads, isa=matrix.isa)
        expected = reference_conv(feats, weight[:, taps], table, bias)
        assert_close(kernels.conv(feats, weight, table, bias, reflect=reflect), expected)
        gradient = kernels.conv_weight_grad(grad, feats, table, reflect=reflect)
        assert_close(gradient, reference_weight_grad(grad, feats, table)[:, taps])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "cg", "cog"), sampled([pytest.param(*group) for group in GROUPS], 2))
def test_conv_in_groups(matrix, groups, cg, cog, dtype):
    """(70, 1, 1) and (64, 1, 1) are depthwise, with and without a vector that is not whole."""
    case = conv_case(groups, dtype, 700, 600, 27, groups * cg, groups * cog, groups=groups)
    feats, weight, table, bias, grad = case
    expected = reference_conv(feats, weight, table, bias, groups)
    for kernels in (matrix, Sparse3d(threads=5, isa=matrix.isa)):
        assert_close(kernels.conv(feats, weight, table, bias, groups=groups), expected)
        gradient = kernels.conv_weight_grad(grad, feats, table, groups=groups)
        assert_close(gradient, reference_weight_grad(grad, feats, table, groups))


@pytest.mark.parametrize(("groups", "k", "m"), [(1, 0, 9), (6, 0, 9), (6, 3, 0), (6, 70, 40), (6, 130, 40)])
def test_depthwise_and_plain_conv_of_few_rows_and_many_taps(matrix, groups, k, m):
    feats, weight, table, bias, grad = conv_case(k, "float64", m, 30, k, 6, 6, groups=groups)
    assert_close(
        matrix.conv(feats, weight, table, bias, groups=groups), reference_conv(feats, weight, table, bias, groups)
    )
    gradient = matrix.conv_weight_grad(grad, feats, table, groups=groups)
    assert_close(gradient, reference_weight_grad(grad, feats, table, groups))


def sorted_form(rng, table: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """``table`` with the rows of each part in an order of its own, and that order."""
    size, sorted_table = -(-table.shape[1] // parts), table.copy()
    order = np.stack([rng.permutation(len(table)) for _ in range(parts)]).astype(np.int32)
    for part in range(parts):
        taps = slice(part * size, (part + 1) * size)
        sorted_table[:, taps] = table[order[part], taps]
    return sorted_table, order


@pytest.mark.parametrize(("k", "parts"), [(27, 1), (27, 3), (27, 5), (8, 8), (4, 3), (1, 1)])
@pytest.mark.parametrize("reflect", [False, True])
def test_conv_over_sorted_tables(k, parts, reflect):
    feats, weight, table, bias, grad = conv_case(k, "float32", 300, 200, k, 8, 12)
    (rows, order), kernels = sorted_form(RNG(parts), table, parts), Sparse3d(threads=2)
    taps = slice(None, None, -1) if reflect else slice(None)
    expected = reference_conv(feats, weight[:, taps], table, bias)
    assert_close(kernels.conv(feats, weight, rows, bias, order=order, reflect=reflect), expected)
    gradient = kernels.conv_weight_grad(grad, feats, rows, order=order, reflect=reflect)
    assert_close(gradient, reference_weight_grad(grad, feats, table)[:, taps])


@pytest.mark.parametrize("entry", [-1, 50, 2**31 - 1])
def test_an_order_that_leaves_the_table_is_refused(entry):
    feats, weight, table, bias, grad = conv_case(3, "float32", 50, 40, 4, 3, 3)
    rows, order = sorted_form(RNG(0), table, 2)
    order[1, 7] = entry
    for call in (
        lambda: Sparse3d().conv(feats, weight, rows, bias, order=order),
        lambda: Sparse3d().conv_weight_grad(grad, feats, rows, order=order),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert str(caught.value) == f"order[1, 7] = {entry} but the table has 50 rows"


def test_16_bit_sums_are_rounded_to_the_nearest_even_once(matrix):
    """1 + 2^-11 is half way between two halves; so for 1 + 2^-8 and bfloat16. Infinities and NaN stay what they are."""
    one, table = np.ones((1, 1)), np.array([[0], [1], [2], [3], [4], [5], [-1]], np.int32)
    for cast, step in ((lambda x: x.astype(np.float16), 2.0**-10), (bfloat16, 2.0**-7)):
        tiny = wide(cast(np.array([2.0**-24])))[0]
        values = np.array([[0.5], [1.5], [np.inf], [np.nan], [0.0], [tiny]]) * np.array(
            [[step], [step], [1], [1], [1], [1]]
        )
        bias = np.array([1.0])
        out = wide(matrix.conv(cast(values), cast(one)[:, :, None], table, cast(bias)))[:, 0]
        np.testing.assert_array_equal(out, [1.0, 1 + 2 * step, np.inf, np.nan, 1.0, 1.0, 1.0])
        bare = wide(matrix.conv(cast(values), cast(one)[:, :, None], table))[:, 0]
        np.testing.assert_array_equal(bare, [0.5 * step, 1.5 * step, np.inf, np.nan, 0.0, tiny, 0.0])


@pytest.mark.parametrize("density", sampled([0.0, 0.02, 1.0], 2))
def test_conv_of_empty_and_full_tables(matrix, density):
    feats, weight, table, bias, grad = conv_case(9, "float32", 700, 600, 27, 32, 128, density)
    assert_close(matrix.conv(feats, weight, table, bias), reference_conv(feats, weight, table, bias))
    assert_close(matrix.conv_weight_grad(grad, feats, table), reference_weight_grad(grad, feats, table))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_conv_takes_weights_of_any_strides(matrix, order):
    feats, weight, table, bias, _ = conv_case(3, "float32", 100, 90, 4, 17, 70)
    expected = matrix.conv(feats, weight, table, bias)
    stored = np.ascontiguousarray(weight.transpose(order)).transpose(np.argsort(order))
    assert (matrix.conv(feats, stored, table, bias) == expected).all()
    spread = np.zeros((140, 8, 34), np.float32)[::2, ::2, ::2]
    spread[:] = weight
    assert (matrix.conv(feats, spread, table, bias) == expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "ci", "co"), sampled([pytest.param(700, 70, 200), pytest.param(3000, 32, 48), pytest.param(5000, 3, 5)], 1)
)
def test_conv_is_bitwise_equal_for_every_thread_count(matrix, m, ci, co, dtype):
    feats, weight, table, bias, grad = conv_case(7, dtype, m, m, 27, ci, co)
    results = []
    for threads in (1, 2, 5):
        kernels = Sparse3d(threads=threads, isa=matrix.isa)
        results.append((kernels.conv(feats, weight, table, bias), kernels.conv_weight_grad(grad, feats, table)))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


def test_gradients_are_the_transposed_ops(matrix):
    shape, geometry = (9, 9, 9), ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    coords = random_coords(RNG(1), 200, shape)
    out = matrix.out_coords(coords, shape, *geometry)
    table = matrix.conv_table(coords, out, shape, *geometry)
    feats, weight, _, _, _ = conv_case(1, "float64", 1, len(coords), 27, 5, 6)
    grad = RNG(2).standard_normal((len(out), 6))
    swapped = weight.transpose(2, 1, 0)
    grad_feats = matrix.conv(grad, swapped, matrix.transpose_table(table, len(coords)))
    # <conv(x), g> is linear in x and in w: both gradients give it back.
    value = (reference_conv(feats, weight, table) * grad).sum()
    assert (grad_feats * feats).sum() == pytest.approx(value, rel=1e-12)
    assert (matrix.conv_weight_grad(grad, feats, table) * weight).sum() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_miss_is_not_a_product_with_zero(matrix, groups):
    feats, weight, table, bias, grad = conv_case(4, "float32", 50, 40, 3, 8, 8, groups=groups)
    table[table == 0] = -1
    feats[0] = np.nan
    assert np.isfinite(matrix.conv(feats, weight, table, bias, groups=groups)).all()
    assert np.isfinite(matrix.conv_weight_grad(grad, feats, table, groups=groups)).all()


def test_groups_do_not_see_each_other(matrix):
    feats, weight, table, bias, grad = conv_case(4, "float32", 50, 40, 3, 12, 12, groups=4)
    feats[:, 3:6] = np.nan
    alien = np.arange(12) // 3 == 1
    out = matrix.conv(feats, weight, table, bias, groups=4)
    assert np.isfinite(out[:, ~alien]).all()
    assert np.isnan(out[:, alien]).any()
    assert np.isfinite(matrix.conv_weight_grad(grad, feats, table, groups=4)[~alien]).all()


@pytest.mark.parametrize("groups", [1, 4, 20])
@pytest.mark.parametrize("entry", [99, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("threads", [1, 3])
def test_conv_refuses_a_table_entry_out_of_range(entry, threads, groups):
    feats, weight, table, bias, grad = conv_case(4, "float32", 600, 50, 27, 20, 20, groups=groups)
    table[500, 2] = 70
    table[5, 13] = entry
    kernels = Sparse3d(threads=threads)
    for call in (
        lambda: kernels.conv(feats, weight, table, bias, groups=groups),
        lambda: kernels.conv_weight_grad(grad, feats, table, groups=groups),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert str(caught.value) == f"table[5, 13] = {entry} but feats has 50 rows"


def test_arguments_are_checked():
    feats, weight, table, bias, grad = conv_case(4, "float32", 6, 5, 3, 2, 4)
    kernels = Sparse3d()
    for message, call in {
        "feats is neither float32 nor float64": lambda: kernels.conv(feats.astype(np.int32), weight, table),
        "2 groups do not divide 3 and 4 channels": lambda: kernels.conv(
            feats[:, :1].repeat(3, 1), weight, table, groups=2
        ),
        "bias is not bfloat16 like feats": lambda: kernels.conv(bfloat16(feats), bfloat16(weight), table, bias),
        "weight is not float32 like feats": lambda: kernels.conv(feats, weight.astype(np.float64), table),
        "weight has size 3 in dim 1, expected 2": lambda: kernels.conv(feats, weight, table[:, :2].copy()),
        "table is not int32": lambda: kernels.conv(feats, weight, table.astype(np.int64)),
        "table is not contiguous": lambda: kernels.conv(feats, weight[:, :2], table[:, :2]),
        "bias has size 3 in dim 0, expected 4": lambda: kernels.conv(feats, weight, table, bias[:3]),
        "grad has size 5 in dim 0, expected 6": lambda: kernels.conv_weight_grad(grad[:5], feats, table),
        "coords has size 3 in dim 1, expected 4": lambda: kernels.subm_table(
            np.zeros((2, 3), np.int32), (4, 4, 4), (3, 3, 3)
        ),
        "coords has 1 dims, expected 2": lambda: kernels.subm_table(np.zeros(4, np.int32), (4, 4, 4), (3, 3, 3)),
    }.items():
        with pytest.raises(KernelError) as caught:
            call()
        assert str(caught.value) == message


def test_results_do_not_depend_on_the_workspace_content():
    coords, shape = random_coords(RNG(8), 3000, (20, 20, 20)), (20, 20, 20)
    feats, weight, _, bias, _ = conv_case(8, "float32", 1, len(coords), 27, 13, 21)
    results = []
    for poison in (0x00, 0xFF, 0x7F):
        kernels = Sparse3d(threads=2, poison=poison)
        out = kernels.out_coords(coords, shape, *GEOMETRY)
        table = kernels.conv_table(coords, out, shape, *GEOMETRY)
        result = kernels.conv(feats, weight, table, bias)
        gradient = kernels.conv_weight_grad(result, feats, table)
        submanifold = kernels.subm_table(coords, shape, (3, 3, 3))
        results.append((*kernels.unique_coords(coords // 2), out, table, submanifold, result, gradient))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


def test_a_workspace_one_byte_short_is_an_error():
    feats, weight, table, _, grad = conv_case(8, "float32", 9, 9, 3, 4, 4)
    kernels = Sparse3d(threads=2, workspace_shortage=1)
    for call in (
        lambda: kernels.conv(feats, weight, table),
        lambda: kernels.conv_weight_grad(grad, feats, table),
        lambda: kernels.unique_coords(np.zeros((3, 4), np.int32)),
    ):
        with pytest.raises(KernelError, match=r"^workspace of \d+ bytes, needs \d+$"):
            call()
