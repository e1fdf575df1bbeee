"""``drop_in``: the names of the peers are there, in a program of its own too, and gone afterwards."""

from __future__ import annotations

import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import shiplap as sl
import shiplap_sparse3d.flexgemm as flex_gemm
import shiplap_sparse3d.spconv as facade
from shiplap import torch_private
from shiplap.torch_private.graph_objects import leaves
from shiplap_sparse3d.drop_in import drop_in
from shiplap_testing.forked import WITH_FAMILIES, python

# What OpenPCDet, mmdet3d, Pointcept, TRELLIS, TRELLIS.2, second.pytorch and CenterPoint import or read.
CONVS = [f"{kind}Conv{d}d" for kind in ("SubM", "Sparse", "SparseInverse") for d in (1, 2, 3)]
USED = {
    "spconv": ["__version__", "constants", "SparseConvTensor", "SparseSequential", "SubMConv3d", "ToDense"],
    "spconv.constants": ["SPCONV_USE_DIRECT_TABLE", "SPCONV_ALLOW_TF32", "FILTER_HWIO", "SPCONV_DO_SORT"],
    "spconv.modules": ["SparseModule", "SparseSequential"],  # spconv 1.x
    "spconv.ops": ["get_indice_pairs", "indice_conv", "nms"],
    "spconv.conv": ["SparseConvolution"],
    "spconv.core": ["ConvAlgo", "AlgoHint"],
    "spconv.cppconstants": ["CPU_ONLY_BUILD"],
    "spconv.tools": ["CUDAKernelTimer"],
    "spconv.pytorch": [
        *CONVS,
        *[f"SparseConvTranspose{d}d" for d in (1, 2, 3)],
        *[f"Sparse{kind}Pool{d}d" for kind in ("Max", "Avg") for d in (1, 2, 3)],
        *("SparseConvTensor", "SparseModule", "SparseSequential", "ConvAlgo", "Identity", "SparseReLU"),
        *("SparseBatchNorm", "SparseSyncBatchNorm", "ToDense", "RemoveGrid", "AddTable", "ConcatTable", "JoinTable"),
        *(
            "SparseGlobalMaxPool",
            "SparseGlobalAvgPool",
            "conv",
            "modules",
            "ops",
            "functional",
            "assign_name_for_sparse_modules",
        ),
    ],
    "spconv.pytorch.conv": ["SparseConvolution", "DEFAULT_SPARSE_CONV_TYPES"],
    "spconv.pytorch.core": ["SparseConvTensor", "IndiceData", "ImplicitGemmIndiceData", "expand_nd", "scatter_nd"],
    "spconv.pytorch.cppcore": ["torch_tensor_to_tv", "get_current_stream", "get_arch"],
    "spconv.pytorch.functional": ["sparse_add", "indice_conv", "implicit_gemm", "indice_maxpool"],
    "spconv.pytorch.hash": ["HashTable"],
    "spconv.pytorch.modules": [
        "SparseModule",
        "SparseSequential",
        "is_spconv_module",
        "is_sparse_conv",
        "PrintTensorMeta",
    ],
    "spconv.pytorch.ops": [
        "ConvAlgo",
        "get_indice_pairs",
        "get_indice_pairs_implicit_gemm",
        "indice_conv",
        "get_conv_output_size",
    ],
    "spconv.pytorch.pool": ["SparseMaxPool", "ALL_POOL_LAYERS"],
    "spconv.pytorch.spatial": ["RemoveDuplicate"],
    "spconv.pytorch.tables": ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"],
    "spconv.pytorch.utils": ["PointToVoxel", "gather_features_by_pc_voxel_id"],
    "spconv.utils": [
        *[f"Point2Voxel{kind}{d}d" for kind in ("CPU", "GPU") for d in (1, 2, 3, 4)],
        *("VoxelGenerator", "VoxelGeneratorV2", "non_max_suppression", "non_max_suppression_cpu", "nullcontext"),
        *("rotate_non_max_suppression_cpu", "rbbox_iou", "rbbox_intersection"),
    ],
    "flex_gemm": ["sparse_submanifold_conv3d", "grid_sample_3d", "ops"],
    "flex_gemm.ops.spconv": [
        "Algorithm",
        "set_algorithm",
        "set_hashmap_ratio",
        "sparse_conv3d",
        "sparse_submanifold_conv3d",
    ],
    "flex_gemm.ops.grid_sample": ["grid_sample_3d"],
    "flex_gemm.ops.serialize": ["encode_seq", "decode_seq"],
}


@pytest.mark.parametrize("module", USED)
def test_names_in_use_are_there(module):
    with drop_in():
        imported = import_module(module)
        assert [name for name in USED[module] if not hasattr(imported, name)] == []
    assert module not in sys.modules


def test_the_facades_are_what_is_imported_and_nothing_stays():
    before = set(sys.modules)
    with drop_in("spconv"):
        import spconv.pytorch as spconv
        from spconv.pytorch.utils import PointToVoxel

        assert (spconv, PointToVoxel) == (facade, facade.utils.PointToVoxel)
        with pytest.raises(ImportError):
            import_module("flex_gemm")
    left = {name for name in set(sys.modules) - before if not name.startswith("shiplap")}
    assert {name.partition(".")[0] for name in left} & {"spconv", "cumm", "flex_gemm"} == set()
    kept = drop_in("flex_gemm")
    assert import_module("flex_gemm") is flex_gemm
    drop_in("flex_gemm").undo()  # it placed nothing, and takes nothing away
    assert "flex_gemm" in sys.modules
    kept.undo()
    assert "flex_gemm" not in sys.modules


def test_it_refuses_beside_the_real_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "spconv", ModuleType("spconv"))
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*imported already"):
        drop_in()
    assert "flex_gemm" not in sys.modules
    with pytest.raises(sl.ShiplapError, match="SL208"):
        drop_in("torchsparse")


PROGRAM = """
import sys
import numpy as np
import torch
import spconv
import spconv.pytorch as sp
import cumm.tensorview as tv
from spconv.utils import Point2VoxelCPU3d

spconv.constants.SPCONV_USE_DIRECT_TABLE = False
generator = Point2VoxelCPU3d([1.0, 0.5, 1.0], [0, 0, 0, 4, 3, 2], 4, 30, 3)
points = np.random.default_rng(0).uniform(0, 2, (40, 4)).astype(np.float32)
voxels, cells, counts = (t.numpy() for t in generator.point_to_voxel(tv.from_numpy(points)))
indices = torch.from_numpy(np.pad(cells, ((0, 0), (1, 0))))
x = sp.SparseConvTensor(torch.from_numpy(voxels.mean(1)), indices, generator.grid_size, 1)
y = sp.SubMConv3d(4, 5, 3)(x)
print(__name__, sys.argv[1:], y.features.shape[1], len(cells) == len(y.features))
"""


@pytest.mark.long
def test_a_program_runs_unedited(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = python("-m", "shiplap_sparse3d.drop_in", script, "--epochs", "3", imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "__main__ ['--epochs', '3'] 5 True"
    alone = python("-m", "shiplap_sparse3d.drop_in", imported=WITH_FAMILIES)
    assert (alone.returncode, alone.stdout[:6]) == (2, "usage:")
    typo = python("-m", "shiplap_sparse3d.drop_in", "no_such_program.py", imported=WITH_FAMILIES)
    assert (typo.returncode, typo.stdout) == (2, "")
    assert "SL613" in typo.stderr
    assert "no file no_such_program.py" in typo.stderr
    assert "Traceback" not in typo.stderr


def test_voxel_generators_agree_with_each_other():
    with drop_in("spconv"):
        utils, tv = import_module("spconv.utils"), import_module("cumm.tensorview")
    points = np.random.default_rng(1).uniform(-0.2, 4.2, (120, 4)).astype(np.float32)
    edges, ranges = [1.0, 0.5, 1.0], [0, 0, 0, 4, 3, 2]
    old = utils.VoxelGeneratorV2(voxel_size=edges, point_cloud_range=ranges, max_num_points=3, max_voxels=30)
    named = old.generate(points)
    new = utils.Point2VoxelCPU3d(edges, ranges, 4, 30, 3)
    arrays = [t.numpy() for t in new.point_to_voxel(tv.from_numpy(points))]
    for a, b in zip(arrays, (named["voxels"], named["coordinates"], named["num_points_per_voxel"]), strict=True):
        assert np.array_equal(a, b)
    assert named["voxel_point_mask"].sum() == named["num_points_per_voxel"].sum()
    assert (old.grid_size.tolist(), list(new.grid_size)) == ([4, 6, 2], [2, 6, 4])
    assert len(utils.VoxelGenerator(edges, ranges, 3).generate(points, 5)[0]) == 5
    with pytest.raises(sl.ShiplapError, match="SL208"):
        utils.Point2VoxelCPU2d(edges, ranges, 4, 30, 3)


def corners(x: float, y: float, width: float, height: float, angle: float) -> np.ndarray:
    around = np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]]) * [width / 2, height / 2]
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return around @ turn.T + [x, y]


def test_overlaps_of_boxes():
    with drop_in("spconv"):
        utils = import_module("spconv.utils")
    square, turned, far = corners(0, 0, 2, 2, 0), corners(0, 0, 2, 2, np.pi / 4), corners(9, 9, 1, 1, 0)
    boxes, near = np.stack([square, turned, far]), np.ones((3, 3))
    octagon = 8 * (2**0.5 - 1)  # what a square of edge 2 shares with itself turned by 45 degrees
    shared = utils.rbbox_intersection(boxes, boxes, near, 0.0)
    np.testing.assert_allclose(shared, [[4, octagon, 0], [octagon, 4, 0], [0, 0, 1]], atol=1e-9)
    iou = utils.rbbox_iou(boxes, boxes, near, 0.0)
    np.testing.assert_allclose(iou[0, 1], octagon / (8 - octagon), atol=1e-9)
    np.testing.assert_allclose(utils.rbbox_iou_loss(boxes, boxes[::-1]), [0, 1, 0], atol=1e-9)
    assert utils.rbbox_iou(boxes, boxes, near * 0, 0.0).sum() == 0
    order = np.array([1, 0, 2])
    assert utils.rotate_non_max_suppression_cpu(boxes, order, near, 0.5) == [1, 2]
    upright = np.array([[0, 0, 2, 2], [0.2, 0, 2, 2], [3, 3, 4, 4]], np.float32)
    assert utils.non_max_suppression_cpu(upright, np.array([0, 1, 2]), 0.5) == [0, 2]
    kept = np.zeros(3, np.int64)
    assert utils.non_max_suppression(upright, kept, 0.5) == 2
    assert kept[:2].tolist() == [0, 2]


def test_activations_of_layers():
    indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32)
    x = facade.SparseConvTensor(torch.randn(2, 4), indices, [2, 2, 2], 1)
    activation = facade.tensorview.gemm.Activation
    for act, expected in (
        (activation.ReLU, torch.relu),
        ("Sigmoid", torch.sigmoid),
        (activation.LeakyReLU, lambda f: torch.nn.functional.leaky_relu(f, 0.3)),
        (activation.None_, lambda f: f),
    ):
        layer = facade.conv.SparseConvolution(3, 4, 6, 3, subm=True, act_type=act, act_alpha=0.3)
        plain = facade.SubMConv3d(4, 6, 3)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x).features, expected(plain(x).features))


def test_duplicates_leave_their_first_row():
    rows = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.int32)
    x = facade.SparseConvTensor(torch.arange(3.0)[:, None], rows, [2, 2, 2], 1)
    y = facade.spatial.RemoveDuplicate()(x)
    assert (y.indices.tolist(), y.features.tolist()) == ([[0, 0, 0, 1], [0, 1, 0, 0]], [[1.0], [0.0]])
    assert Path(facade.__file__).parent.name == "spconv"


def test_suppression_of_spconv_1_takes_tensors():
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 12, 12], [20, 20, 22, 22]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.7])
    with drop_in("spconv"):
        import spconv

        nms = spconv.ops.nms
    assert nms(boxes, scores, -1, -1, 0.5, 1.0).tolist() == [1, 3, 2]
    assert nms(boxes, scores, -1, 2, 0.5, 1.0).tolist() == [1, 3]
    assert nms(boxes, scores, 3, -1, 0.5, 1.0).tolist() == [1, 3]
    assert nms(boxes, scores, 0, 0, 0.95, 1.0).tolist() == [1, 3, 0, 2]


class Scaled:
    """A tensor of a consumer's own, which keeps what it computed by the text of its scale, as those of TRELLIS.2 do."""

    def __init__(self, feats: torch.Tensor, scale: tuple[Fraction, ...], kept: dict[str, torch.Tensor]) -> None:
        self.feats, self.scale, self.kept = feats, scale, kept


def doubled(x: Scaled) -> torch.Tensor:
    key = str(x.scale)
    if key not in x.kept:
        x.kept[key] = x.feats * 2
    return x.kept[key] + 1


def test_a_cache_by_the_text_of_fractions_is_part_of_one_graph():
    with drop_in("flex_gemm"):
        torch_private.reset_compiler()
        run = torch.compile(doubled, fullgraph=True, backend="eager")
        for rows in (3, 4, 5):
            feats = torch.ones(rows, 2)
            torch.testing.assert_close(run(Scaled(feats, (Fraction(1, 2),) * 3, {})), feats * 3)
        assert torch_private.compile_counts().recompiles <= 1
        assert leaves((Fraction(1, 2), feats)) == [feats]
    assert len(leaves((Fraction(1, 2), feats))) == 2, "what drop_in registered is gone"


def coarser(x: Scaled, factor: int) -> Scaled:
    return Scaled(x.feats, tuple([s * factor for s in x.scale]), x.kept)


def test_scales_that_a_graph_computes_are_part_of_it():
    """A level after the first: TRELLIS.2 multiplies the scale there and looks caches up by its text."""

    def levels(feats: torch.Tensor, scale: tuple[Fraction, ...] | None) -> tuple[torch.Tensor, str]:
        x = Scaled(feats, scale or (Fraction(1),) * 3, {})
        for _ in range(2):
            x = coarser(Scaled(doubled(x), x.scale, x.kept), 2)
        up = Scaled(x.feats, tuple(s / 4 for s in x.scale), x.kept)
        return doubled(up), f"{[*x.kept]} {up.scale} {x.scale[0] / 8}"

    with drop_in("flex_gemm"):
        torch_private.reset_compiler()
        run = torch.compile(levels, fullgraph=True, backend="eager")
        for rows, scale in ((3, (Fraction(1, 2),) * 3), (4, (Fraction(1, 2),) * 3), (5, None)):
            feats = torch.ones(rows, 2)
            (got, text), (expected, same) = run(feats, scale), levels(feats, scale)
            torch.testing.assert_close(got, expected)
            assert text == same
