"""Networks of spconv's users as one file: from a checkpoint and the network's own code to ``.onnx`` or ``.pt2``.

The file takes ``features [n, c]`` and ``coords int32 [n, 1 + axes]`` for any number of voxels, whatever the network of
the checkpoint takes. Each project passes voxels in its own way, which the layout of its checkpoints tells.
"""

from __future__ import annotations

import math
import pickletools
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.containers import leaves
from shiplap_sparse3d import spconv
from shiplap_sparse3d.tensor import SparseTensor

# The projects whose checkpoints can be read.
PROJECTS = ("openpcdet", "mmdet3d", "pointcept", "plain")
# Keys of a checkpoint under which weights are.
_NESTS = ("model_state", "state_dict", "model_state_dict", "model", "net", "network")
ENDINGS = (".onnx", ".pt2")


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a checkpoint by name. ``path`` is the file that they were read from. ``project`` is the project
    that defines the layout of the checkpoint, an element of ``PROJECTS`` such as ``openpcdet``.
    """

    path: Path
    project: str
    weights: Mapping[str, Tensor]


class _Unread:
    """A stand-in for an object of a checkpoint that is not a tensor, a number, a string or a container of these. The
    code of the object's own class never runs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept any arguments and store none."""

    def __setstate__(self, state: Any) -> None:
        """Accept any state and store none."""


def _names_in(path: Path) -> set[str]:
    """Return the qualified names of the classes and functions that the pickles of a checkpoint refer to, without
    unpickling anything. The checkpoint is torch's zip file or has its older format. A compressed pickle is skipped.
    """
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                folder = archive.namelist()[0].partition("/")[0]  # the one that torch reads
                held = archive.getinfo(f"{folder}/data.pkl")
                # Torch compresses nothing, and what is compressed may be a thousand times as long as the file.
                pickles = [archive.read(held)] if held.compress_type == zipfile.ZIP_STORED else []
                names = {name for content in pickles for name in _globals_of(content)}
        else:
            file.seek(0)
            names = {name for _ in range(4) for name in _globals_of(file)}  # three of torch's own come first
    return {re.sub(r"^__builtin__\.", "builtins.", name) for name in names}  # pickles have the modules of Python 2


def _globals_of(content: Any) -> Iterator[str]:
    """Return an iterator over the qualified names of the classes and functions to which the pickle ``content`` (bytes
    or a file) refers.
    """
    return (str(name).replace(" ", ".") for code, name, _ in pickletools.genops(content) if code.name == "GLOBAL")


def read_checkpoint(path: Path, project: str | None = None) -> Checkpoint:
    """Return the weights in the file ``path``, and the project that defines the layout of the checkpoint. The file is a
    checkpoint of OpenPCDet, mmdet3d or Pointcept, or a state dict. If ``project`` is None, it is derived from the
    checkpoint's keys.

    Only tensors, numbers, strings and containers are read. Other objects, such as the log of a training run, are left
    out, and none of their code runs. Raise ``SL840`` for a file without weights. Raise it also if torch cannot read the
    file with ``weights_only=True``, such as one with a subclass of ``dict`` or ``list``.
    """
    try:
        unread: list[Any] = [(_Unread, name) for name in _names_in(path)]
        with torch.serialization.safe_globals(unread):  # torch prefers what it knows itself
            held = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as e:
        got, fix = e.strerror or str(e), "pass the path of a checkpoint that exists and that you may read"
        expected = "a checkpoint of OpenPCDet, mmdet3d or Pointcept, or a state dict"
        raise error("SL840", where=str(path), got=got, expected=expected, fix=fix) from e
    except Exception as e:
        lines = str(e).splitlines() or [""]
        raise error(
            "SL840",
            where=str(path),
            got=f"{type(e).__name__}: {lines[0]}",
            expected="a checkpoint of tensors and plain values",
            fix="load a file that you trust with torch.load(path, weights_only=False), and save its state dict alone",
        ) from e
    nested = held
    for _ in _NESTS:  # not without an end: a mapping of a file may hold itself
        inside = [nested.get(k) for k in _NESTS] if isinstance(nested, Mapping) else []
        nested = next((each for each in inside if isinstance(each, Mapping)), nested)
    named = nested.items() if isinstance(nested, Mapping) else ()
    # DistributedDataParallel and torch.compile wrap a module, which its names then say.
    weights = {str(n).removeprefix("module.").replace("_orig_mod.", ""): v for n, v in named if isinstance(v, Tensor)}
    if not weights:
        got = f"keys {', '.join(map(str, list(held)[:6]))}" if isinstance(held, Mapping) else type(held).__name__
        raise _checkpoint_error(
            path, got, "model_state (OpenPCDet), state_dict (mmdet3d, Pointcept), or tensors by name"
        )
    return Checkpoint(path, project or _project_of(held), weights)


def _project_of(held: Mapping[str, Any]) -> str:
    """Return the project whose layout the checkpoint ``held`` has, according to its keys. It is ``openpcdet``,
    ``mmdet3d``, ``pointcept`` or ``plain``.
    """
    if "model_state" in held:
        return "openpcdet"
    if "state_dict" in held:
        return "mmdet3d" if "meta" in held else "pointcept"
    return "plain"


def load_weights(network: nn.Module, checkpoint: Checkpoint, prefix: str | None = None) -> str:
    """Load the weights of ``checkpoint`` whose names begin with ``prefix`` into ``network``, and return the prefix.

    If ``prefix`` is None, it is the only string under which the checkpoint has all weights of the network. Raise
    ``SL840`` if there is no such string or there are several. Raise it also if weights are missing or have another
    shape.
    """
    wanted = network.state_dict()
    # Checkpoints of old versions of torch lack this counter, and evaluation does not read it.
    names = [name for name in wanted if not name.endswith("num_batches_tracked")]
    first = names[0] if names else ""
    prefixes = [n[: -len(first)] for n in checkpoint.weights if n == first or n.endswith("." + first)]
    whole = [p for p in prefixes if all(p + name in checkpoint.weights for name in names)]
    if prefix is None:
        if len(whole) != 1:
            got = (
                f"prefixes {', '.join(map(repr, whole))}"
                if whole
                else f"no place with all of {', '.join(names[:4])}, ..."
            )
            raise _checkpoint_error(checkpoint.path, got, "one place that has all weights of the network; see --prefix")
        prefix = whole[0]
    given = {name: checkpoint.weights[prefix + name] for name in wanted if prefix + name in checkpoint.weights}
    missing = [name for name in names if name not in given]
    if missing:
        raise _checkpoint_error(checkpoint.path, f"no {prefix}{missing[0]}", f"{len(names)} weights under {prefix!r}")
    try:
        # Not strict, since only those counters can be missing here.
        network.load_state_dict(given | _kernels_of_today(network, given), strict=False)
    except RuntimeError as e:
        raise _checkpoint_error(checkpoint.path, str(e).splitlines()[-1].strip(), "weights of this network") from e
    return prefix


def _kernels_of_today(network: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the kernels of the convolution layers of ``network`` among the weights ``given``, by name, in the layout
    of spconv 2.x, ``[out, *window, in]``. Return an empty mapping if no layout fits all layers.

    Kernels of spconv 1.x are ``[*window, in, out]``, and those of early releases of 2.x may be ``[*window, out, in]``.
    One kernel may fit several layouts, but all kernels of a checkpoint have the same one.
    """
    named = network.named_modules(remove_duplicate=False)  # a state dict has each name of a layer that is shared
    layers = {f"{name}.weight" if name else "weight": m for name, m in named if _is_layer(m)}
    for last in (None, -1, -2):
        moved = {
            # A kernel of one cell is a product with its memory as [in, out], which a transposition would change.
            name: given[name].reshape(m.weight.shape) if last and m.conv1x1 else given[name].movedim(last or 0, 0)
            for name, m in layers.items()
            if name in given and given[name].numel() == m.weight.numel()
        }
        if all(name in moved and moved[name].shape == m.weight.shape for name, m in layers.items()):
            return moved
    return {}


def _is_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is a convolution layer of shiplap's module ``spconv``, which replaces the package of
    that name.
    """
    return isinstance(module, spconv.conv.SparseConvolution)


class Deployed(nn.Module):
    """A network that takes features and coordinates as tensors. It passes them to the network of a checkpoint as the
    checkpoint's project expects them.

    Args:
        network: the network of the checkpoint.
        project: a name of ``PROJECTS``. A plain network is called as ``network(features, coords, batch_size)``.
        batch_size: the number of scenes of a call.
    """

    def __init__(self, network: nn.Module, project: str, batch_size: int) -> None:
        """Store the network, the project whose calling convention it has, and the number of scenes."""
        super().__init__()
        self.network, self.project, self.batch_size = network, project, batch_size
        self.numbers: list[Any] | None = None

    def forward(self, features: Tensor, coords: Tensor) -> Any:
        """Return the tensors in the network's result, nested in lists and dicts as there. A sparse tensor is returned
        as its features and coordinates.

        If the attribute ``numbers`` is a list, each read of a number from a tensor in the network, such as
        ``int(t.max())``, returns the next item of the list. If it is None, reads are unchanged.
        """
        if self.numbers is None:
            return self._call_network(features, coords)
        with FixedNumbers(self.numbers):
            return self._call_network(features, coords)

    def _call_network(self, features: Tensor, coords: Tensor) -> Any:
        """Return the tensors in the network's result for voxels with ``features`` and ``coords``, nested in lists and
        dicts as there. The voxels are passed as the network's project (openpcdet, pointcept or another) expects them.
        """
        if self.project == "openpcdet":
            given = {"voxel_features": features, "voxel_coords": coords, "batch_size": self.batch_size}
            # A copy, since these networks write their results into the dictionary.
            made = self.network(dict(given))
            return _result_tensors(
                {k: v for k, v in made.items() if k not in given} if isinstance(made, dict) else made
            )
        if self.project == "pointcept":
            scene = coords[:, 0].long()
            # Pointcept separates scenes by the row behind the last one of each.
            ends = torch.stack([(scene <= number).sum() for number in range(self.batch_size)])
            return _result_tensors(self.network({"feat": features, "grid_coord": coords[:, 1:].long(), "offset": ends}))
        return _result_tensors(self.network(features, coords, self.batch_size))


def _result_tensors(value: Any) -> Any:
    """Return the tensors in a network's result ``value``, nested in lists and dicts as there. A tuple becomes a list,
    and a sparse tensor the pair ``(features, coordinates)``. Any other value is left out of its container. If ``value``
    itself is such a value, return None.
    """
    if isinstance(value, spconv.SparseConvTensor):
        return value.features, value.indices
    if isinstance(value, SparseTensor):
        return value.feats, value.coords
    if isinstance(value, Mapping):
        kept = {name: _result_tensors(v) for name, v in value.items()}
        return {name: v for name, v in kept.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [v for v in map(_result_tensors, value) if v is not None]
    return value if isinstance(value, Tensor) else None


class FixedNumbers(TorchFunctionMode):
    """A mode of torch that records the numbers that a network's code reads from tensors, or replaces them. The sizes of
    the grid that Pointcept's networks read are such numbers.

    Without given numbers, the attribute ``numbers`` lists what was read. With given numbers, each read returns the next
    of them. Reads by the code of shiplap and of torch are neither recorded nor replaced.
    """

    def __init__(self, numbers: list[Any] | None = None) -> None:
        """Store ``numbers``. If it is given, each read of a number while the mode is active returns the next of them.
        If it is None, the attribute ``numbers`` collects the numbers that are read.
        """
        super().__init__()
        self.numbers: list[Any] = []
        self._fixed = None if numbers is None else iter(numbers)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return ``func(*args, **kwargs)``, where ``func`` is a function of torch. If the network's own code reads a
        number from a tensor, return the fixed number or record the one that is read.
        """
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name in ("tolist", "<listcomp>") and _package_of(frame) == "torch":
            frame = frame.f_back  # the list of a tensor that is traced is read number by number
        if getattr(func, "__name__", "") not in _READS or _package_of(frame) in (
            "torch",
            "shiplap",
            "shiplap_sparse3d",
        ):
            return func(*args, **(kwargs or {}))
        if self._fixed is not None:
            return next(self._fixed)
        made = func(*args, **(kwargs or {}))
        self.numbers += leaves(made)
        return made


def _package_of(frame: Any) -> str:
    """Return the name of the top-level package whose code runs in ``frame``."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_READS = ("tolist", "item", "__int__", "__index__", "__float__")


def trace_network(network: nn.Module, project: str, example: Sequence[Tensor], batch_size: int, most: int) -> Any:
    """Return the exported program of ``network`` for 2 to ``most`` voxels, traced with the ``example`` features and
    coordinates. ``project`` and ``batch_size`` are arguments of :class:`Deployed`.

    Numbers that the network reads from its tensors are those of the example in every call. Raise ``SL840`` with the
    error of the network or of torch. Raise it also if the program and the network give different results for some of
    the example's voxels.
    """
    from shiplap.plugin_api.exporting import computed_sizes_unguarded

    rows = torch.export.Dim("voxels", min=2, max=most)
    module = Deployed(network.eval(), project, batch_size).eval()
    with torch.no_grad():
        try:
            with FixedNumbers() as read:
                module(*example)
        except ShiplapError:
            raise
        except Exception as e:  # the network's own, of any kind
            raise error(
                "SL840",
                where=type(network).__name__,
                what="the network fails with example voxels",
                got=f"{type(e).__name__}: {e}",
                expected=f"a network that takes voxels as those of {project} do",
                fix=f"name how it takes voxels by --project ({', '.join(PROJECTS)}), and its cells by --grid",
            ) from e
        try:
            module.numbers = read.numbers
            with computed_sizes_unguarded():
                shapes = {0: rows}, {0: rows}
                program = torch.export.export(module, tuple(example), dynamic_shapes=shapes, strict=False)
        except Exception as e:
            lines = [line for line in str(e).splitlines() if line.strip()]
            raise error(
                "SL840",
                where=type(network).__name__,
                what="torch.export does not take the network",
                got=f"{type(e).__name__}: {lines[0] if lines else ''}",
                expected="a network whose number of voxels may vary",
                fix="see 'shiplap doctor' for lines of the network that read numbers from tensors",
            ) from e
        finally:
            # The comparison below needs the numbers that the network itself reads.
            module.numbers = None
        _compare_program(program, module, example)
    return program


def _compare_program(program: Any, module: Deployed, example: Sequence[Tensor]) -> None:
    """Raise ``SL840`` if ``program`` and ``module`` give different results for all, every second or every third voxel
    of ``example``. The program has the numbers that the network read from the whole example. A difference shows that
    they matter.
    """
    features, coords = example
    # Every voxel, every second and every third one: other numbers of them than in the example.
    for step in (1, 2, 3):
        scene = features[step - 1 :: step], coords[step - 1 :: step]
        # A program is exported for two voxels at least.
        if len(scene[0]) < 2:
            continue
        got, want = (leaves(call(*scene)) for call in (program.module(), module))
        same = [a.shape == b.shape and torch.allclose(a, b, 1e-3, 1e-3) for a, b in zip(got, want, strict=True)]
        if not all(same):
            raise error(
                "SL840",
                where=type(module.network).__name__,
                what="the network reads numbers from its tensors that change its results",
                got=f"other results for {len(scene[0])} of {len(features)} voxels",
                expected="results that do not depend on the numbers of the example",
                fix="keep what depends on the scene in tensors",
            )


def write_network(program: Any, path: Path, *, opset: int | None = None, checks: bool = True) -> tuple[str, ...]:
    """Write ``program`` to ``path``, and return the names of the ops in it. A path that ends in ``.onnx`` gets an ONNX
    model, and any other path a torch package.

    ``opset`` is the version of ONNX's operators. If it is None, torch's default is used. If ``checks`` is true, the
    file checks the values of coordinates as it runs, and otherwise it does not.
    """
    from shiplap.plugin_api.exporting import export_onnx, package_model

    if path.suffix == ".onnx":
        return export_onnx(program, path, opset=opset, checks=checks).ops
    return package_model(program, path, checks=checks).ops


def example_voxels(network: nn.Module, grid: Sequence[int], batch_size: int, voxels: int = 64) -> tuple[Tensor, Tensor]:
    """Return features ``[v, channels]`` and coordinates ``int32 [v, 4]`` of 2 to ``voxels`` random voxels in
    ``batch_size`` scenes of ``grid``. The number of channels is that of the network's first layer, or 4 if it has no
    convolution.
    """
    first = next((m for m in network.modules() if isinstance(m, spconv.conv.SparseConvolution)), None)
    channels = 4 if first is None else int(first.in_channels)
    cells = math.prod(grid)
    number = torch.randint(0, batch_size * cells, (voxels - 2,))
    # The last cell of the last scene, and the first one, as a program is traced with two voxels at least.
    number = torch.cat([number, torch.tensor([0, batch_size * cells - 1])]).unique()
    coords = torch.stack(torch.unravel_index(number, (batch_size, *grid)), 1).int()
    return torch.randn(len(coords), channels), coords


def _checkpoint_error(path: Path, got: str, expected: str) -> Exception:
    """Return the error ``SL840`` for the checkpoint ``path``, whose weights do not fit the network. In the error's
    text, ``got`` is what the checkpoint contains, and ``expected`` is what the network needs.
    """
    return error("SL840", where=str(path), got=got, expected=expected)
