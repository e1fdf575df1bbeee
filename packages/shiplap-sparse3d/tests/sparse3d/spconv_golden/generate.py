"""What spconv 2.3.8 itself says, frozen: run in an environment that has it (its CPU build will do).

Writes ``api.json`` (names and parameters of the public surface) and ``golden.npz`` (results). Features and weights of
the single layers are small integers, so that results are exact and can be compared without a tolerance.
"""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

import numpy as np
import spconv.pytorch as spconv
import torch
from spconv.pytorch import conv, core, functional, hash, identity, modules, ops, pool, tables, utils

HERE = Path(__file__).parent
GRID, BATCH, CI, CO = (7, 6, 5), 2, 3, 2
WINDOWS = list(itertools.product((2, 3), (1, 2, 3), (0, 1, 2), (1, 2, 3)))  # kernel, stride, padding, dilation


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(low: int, high: int, size: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(low, high, size, generator=rng(seed)).float()


def scene(n: int, grid: tuple[int, ...], seed: int) -> torch.Tensor:
    """``int32 [n, 1 + ndim]`` distinct rows in random order."""
    cells = torch.randperm(BATCH * int(np.prod(grid)), generator=rng(seed))[:n]
    columns = np.unravel_index(cells.numpy(), (BATCH, *grid))
    return torch.from_numpy(np.stack(columns, 1)).int()


def rows(x: spconv.SparseConvTensor, case: int) -> np.ndarray:
    """One row a voxel, ascending: case, indices, features."""
    feats = x.features.detach().round().numpy().astype(np.int16)
    table = np.concatenate([np.full((len(feats), 1), case, np.int16), x.indices.numpy().astype(np.int16), feats], 1)
    return table[np.lexsort(table.T[::-1])]


def with_weights(layer: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    return layer  # in training: the CPU build has a bias nowhere else


def windows(out: dict[str, np.ndarray]) -> None:
    """Every layer kind under every window that spconv takes."""
    indices, feats = scene(30, GRID, 0), integers(-3, 4, (30, CI), 1)
    out["indices"], out["feats"] = indices.numpy(), feats.numpy()
    weights = {k: integers(-2, 3, (CO, k, k, k, CI), 10 + k) for k in (1, 2, 3)}
    back = {k: integers(-2, 3, (CI, k, k, k, CO), 20 + k) for k in (2, 3)}
    bias, bias_back = integers(-3, 4, (CO,), 30), integers(-3, 4, (CI,), 31)
    out |= {f"weight{k}": w.numpy() for k, w in weights.items()} | {f"back{k}": w.numpy() for k, w in back.items()}
    out["bias"], out["bias_back"] = bias.numpy(), bias_back.numpy()
    cases: dict[str, list[np.ndarray]] = {"subm": [], "conv": [], "inverse": [], "transposed": [], "pool": []}
    shapes = {kind: np.zeros((len(WINDOWS), 3), np.int16) for kind in ("conv", "transposed", "pool")}

    def tensor(values: torch.Tensor) -> spconv.SparseConvTensor:
        return spconv.SparseConvTensor(values, indices, list(GRID), BATCH)

    for dilation in (1, 2, 3):
        layer = with_weights(spconv.SubMConv3d(CI, CO, 3, dilation=dilation), weights[3], bias)
        cases["subm"].append(rows(layer(tensor(feats)), dilation))
    for case, (k, s, p, d) in enumerate(WINDOWS):
        window = {"stride": s, "padding": p, "dilation": d, "indice_key": "key"}
        down = with_weights(spconv.SparseConv3d(CI, CO, k, **window), weights[k], bias)
        up = with_weights(spconv.SparseInverseConv3d(CO, CI, k, "key"), back[k], bias_back)
        layers = {
            "conv": (down, feats),
            "transposed": (with_weights(spconv.SparseConvTranspose3d(CI, CO, k, **window), weights[k], bias), feats),
            "pool": (spconv.SparseMaxPool3d(k, **window), feats),  # of either sign: spconv starts from zero
        }
        for kind, (layer, values) in layers.items():
            if kind != "transposed" and min(GRID) + 2 * p < d * (k - 1) + 1:
                continue
            y = layer(tensor(values))
            if not len(y.indices):
                continue
            cases[kind].append(rows(y, case))
            shapes[kind][case] = y.spatial_shape
            if kind == "conv":
                cases["inverse"].append(rows(up(y), case))
    out |= {kind: np.concatenate(tables_) for kind, tables_ in cases.items()}
    out |= {f"{kind}_shape": shape for kind, shape in shapes.items()}


def fewer_axes(out: dict[str, np.ndarray]) -> None:
    """One and two axes, a kernel of one cell, an uneven kernel, and channels that are not square."""
    for ndim, grid in ((1, (40,)), (2, (12, 9))):
        indices, feats = scene(14, grid, ndim), integers(-3, 4, (14, CI), 40 + ndim)
        x = spconv.SparseConvTensor(feats, indices, list(grid), BATCH)
        weight, bias = integers(-2, 3, (CO, *[3] * ndim, CI), 50 + ndim), integers(-3, 4, (CO,), 60)
        subm = with_weights(getattr(spconv, f"SubMConv{ndim}d")(CI, CO, 3), weight, bias)
        down = with_weights(getattr(spconv, f"SparseConv{ndim}d")(CI, CO, 3, 2, 1), weight, bias)
        up = with_weights(getattr(spconv, f"SparseConvTranspose{ndim}d")(CI, CO, 3, 2, 1), weight, bias)
        out |= {f"indices{ndim}d": indices.numpy(), f"feats{ndim}d": feats.numpy(), f"weight{ndim}d": weight.numpy()}
        out |= {f"bias{ndim}d": bias.numpy()}
        out |= {f"{kind}{ndim}d": rows(m(x), 0) for kind, m in (("subm", subm), ("conv", down), ("transposed", up))}
    indices, feats = torch.from_numpy(out["indices"]), torch.from_numpy(out["feats"])
    x = spconv.SparseConvTensor(feats, indices, list(GRID), BATCH)
    point = with_weights(
        spconv.SparseConv3d(CI, CO, 1), torch.from_numpy(out["weight1"]), torch.from_numpy(out["bias"])
    )
    out["pointwise"] = rows(point(x), 0)
    uneven = integers(-2, 3, (CO, 1, 3, 5, CI), 70)
    layer = with_weights(spconv.SubMConv3d(CI, CO, (1, 3, 5)), uneven, torch.from_numpy(out["bias"]))
    out |= {"uneven_weight": uneven.numpy(), "uneven": rows(layer(x), 0)}


def network(out: dict[str, np.ndarray]) -> None:
    """A checkpoint with its result: what a user who switches has."""
    torch.manual_seed(7)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(CI, 8, 3, indice_key="fine", bias=False),
        spconv.SparseBatchNorm(8),
        spconv.SparseReLU(),
        spconv.SparseConv3d(8, 12, 3, 2, 1, indice_key="down", record_voxel_count=True),
        torch.nn.BatchNorm1d(12),
        torch.nn.ReLU(),
        spconv.SubMConv3d(12, 6, 1),
        spconv.SubMConv3d(6, 6, 3, indice_key="coarse"),
        spconv.SparseInverseConv3d(6, 4, 3, "down"),
        spconv.ToDense(),
    )
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            module.eval()
    indices, feats = scene(60, (6, 5, 4), 5), torch.randn(60, CI, generator=rng(6))
    dense = net(spconv.SparseConvTensor(feats, indices, [6, 5, 4], BATCH))
    out |= {"net_indices": indices.numpy(), "net_feats": feats.numpy(), "net_dense": dense.detach().numpy()}
    out |= {f"state:{name}": value.numpy() for name, value in net.state_dict().items()}


def maxima(out: dict[str, np.ndarray]) -> None:
    """Max pooling of signed features, none of them equal, with its gradient."""
    indices, values = scene(60, GRID, 90), torch.randperm(60 * CI, generator=rng(91)).reshape(60, CI).float() - 120
    values = torch.where(values % 3 == 0, -values, values).requires_grad_()
    y = spconv.SparseMaxPool3d(3, 2, 1)(spconv.SparseConvTensor(values, indices, list(GRID), BATCH))
    y.features.backward(y.indices.sum(1, keepdim=True).float().expand_as(y.features).contiguous())
    out |= {"max_indices": indices.numpy(), "max_feats": values.detach().numpy(), "max": rows(y, 0)}
    out["max_grad"] = values.grad.numpy()


def points(out: dict[str, np.ndarray]) -> None:
    cloud = torch.rand(120, 4, generator=rng(8)) * torch.tensor([4.4, 3.3, 2.2, 1.0]) - 0.1
    voxelizer = utils.PointToVoxel([1.0, 0.5, 1.0], [0, 0, 0, 4, 3, 2], 4, 30, 3)
    voxels, indices, counts, ids = voxelizer.generate_voxel_with_id(cloud)
    out |= {"cloud": cloud.numpy(), "voxels": voxels.numpy(), "voxel_indices": indices.numpy()}
    out |= {"voxel_counts": counts.numpy(), "voxel_ids": ids.numpy()}
    out["gathered"] = utils.gather_features_by_pc_voxel_id(voxels[:, 0], ids, -7).numpy()


def union(out: dict[str, np.ndarray]) -> None:
    first, second = scene(10, (4, 3, 2), 11), scene(12, (4, 3, 2), 12)
    a, b = integers(-3, 4, (10, CO), 13), integers(-3, 4, (12, CO), 14)
    x, y = (spconv.SparseConvTensor(f, i, [4, 3, 2], BATCH) for f, i in ((a, first), (b, second)))
    out |= {"add_indices0": first.numpy(), "add_indices1": second.numpy(), "add0": a.numpy(), "add1": b.numpy()}
    out["added"] = rows(functional.sparse_add(x, y), 0)
    pairs = ops.get_indice_pairs(
        first, BATCH, [4, 3, 2], spconv.ConvAlgo.Native, [2] * 3, [2] * 3, [0] * 3, [1] * 3, [0] * 3
    )
    out["pair_out"], out["pairs"], out["pair_num"] = (t.numpy() for t in pairs)


def parameters(function: object) -> str:
    """``a, b=1, c=...``: names, and defaults where they are plain."""
    text = []
    for p in inspect.signature(function).parameters.values():
        if p.name not in ("self", "ctx"):
            plain = isinstance(p.default, (bool, int, float, str, type(None)))
            text.append(p.name if p.default is p.empty else f"{p.name}={p.default if plain else '...'}")
    return ", ".join(text)


def surface() -> dict[str, object]:
    """Parameters of every public class and function, and what classes have, by module and name."""
    classes, functions = {}, {}
    for module in (conv, core, functional, hash, identity, modules, ops, pool, tables, utils):
        where = module.__name__.rsplit(".", 1)[-1]
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isclass(value):
                classes[f"{where}.{name}"] = parameters(value.__init__)
            elif inspect.isfunction(value):
                functions[f"{where}.{name}"] = parameters(value)
    for name, value in vars(functional).items():
        if inspect.ismethod(value):  # Function.apply
            forward = value.__self__.forward
            functions[f"functional.{name}"] = parameters(getattr(forward, "__wrapped__", forward))
    exports = [n for n, v in vars(spconv).items() if getattr(v, "__module__", "").startswith("spconv")]
    members = [n for n in vars(core.SparseConvTensor) if not n.startswith("_")]
    return {"exports": sorted(exports), "tensor": sorted(members), "classes": classes, "functions": functions}


def main() -> None:
    out: dict[str, np.ndarray] = {}
    for part in (windows, fewer_axes, network, maxima, points, union):
        part(out)
    np.savez_compressed(HERE / "golden.npz", **out)
    (HERE / "api.json").write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
