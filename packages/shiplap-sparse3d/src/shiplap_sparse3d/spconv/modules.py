"""Containers, and modules that take a sparse tensor or a plain one."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shiplap_sparse3d.reentrant import inside_checkpoint
from shiplap_sparse3d.spconv.core import SparseConvTensor, check_sparse
from shiplap_sparse3d.spconv.pairs import norm_and_relu
from shiplap_sparse3d.spconv.sizes import assume_rows
from shiplap_sparse3d.spconv.tracing import one_node

__all__ = [
    "PrintCurrentTime",
    "PrintTensorMeta",
    "RemoveGrid",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]


class SparseModule(nn.Module):
    """The base of the modules that take the ``SparseConvTensor`` itself inside a :class:`SparseSequential`, and not its
    features.
    """

    is_convolution: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        """Store ``name``. spconv's layers have such a name, or None, but no code here reads it."""
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


def _apply_to_features(forward: Any, input: Any) -> Any:
    """Return ``input`` with its features replaced by ``forward`` of them, if it is a sparse tensor. Otherwise return
    ``forward(input)``.
    """
    if isinstance(input, SparseConvTensor):
        return input.replace_feature(forward(input.features))
    return forward(input)


class SparseBatchNorm(nn.BatchNorm1d):
    """A batch norm of the features over all voxels of the batch. It takes a sparse tensor or a ``torch.Tensor``."""

    @one_node
    def forward(self, input: Any) -> Any:
        """Return ``input`` with the batch norm applied to its features. If ``input`` is a ``torch.Tensor``, the norm is
        applied to the tensor itself.
        """
        return _apply_to_features(super().forward, input)


class SparseSyncBatchNorm(nn.SyncBatchNorm):
    """A batch norm of the features over the voxels of all processes. It takes a sparse tensor or a ``torch.Tensor``."""

    @one_node
    def forward(self, input: Any) -> Any:
        """Return ``input`` with the batch norm over all processes applied to its features. If ``input`` is a
        ``torch.Tensor``, the norm is applied to the tensor itself.
        """
        return _apply_to_features(super().forward, input)


class SparseReLU(nn.ReLU):
    """A ReLU of the features. It takes a sparse tensor or a ``torch.Tensor``."""

    @one_node
    def forward(self, input: Any) -> Any:
        """Return ``input`` with the ReLU applied to its features. If ``input`` is a ``torch.Tensor``, the ReLU is
        applied to the tensor itself.
        """
        return _apply_to_features(super().forward, input)


class SparseIdentity(nn.Identity):
    """An identity layer, which takes a sparse tensor or a ``torch.Tensor``."""

    @one_node
    def forward(self, input: Any) -> Any:
        """Return ``input`` if it is a ``torch.Tensor``. For a sparse tensor, return a new one with the same features
        and voxels.
        """
        return _apply_to_features(super().forward, input)


# Modules of these classes take the sparse tensor itself.
_TAKE_SPARSE = (SparseModule, SparseBatchNorm, SparseSyncBatchNorm, SparseReLU, SparseIdentity)


def is_spconv_module(module: nn.Module) -> bool:
    """Return whether ``module`` takes the ``SparseConvTensor`` itself inside a :class:`SparseSequential`. torch's own
    modules take its features.
    """
    return isinstance(module, _TAKE_SPARSE)


def is_sparse_conv(module: nn.Module) -> bool:
    """Return whether ``module`` is one of spconv's convolution layers."""
    return isinstance(module, SparseModule) and module.is_convolution


class PrintTensorMeta(nn.Module):
    """A module that prints the least, the largest and the mean value of its input and returns the input."""

    def forward(self, x: Any) -> Any:
        """Print the least, largest and mean value of the features of ``x``, and return ``x``."""
        values = x.features if isinstance(x, SparseConvTensor) else x
        print(values.min(), values.max(), values.mean())
        return x


class PrintCurrentTime(nn.Module):
    """A module that prints the seconds since it was created, or since the last call in which ``reset`` was true. It
    waits for the GPU before it reads the clock.
    """

    def __init__(self) -> None:
        """Record the time from which seconds are counted."""
        super().__init__()
        self.first_time = time.time()

    def forward(self, x: Any, msg: str = "", reset: bool = False) -> Any:
        """Print ``msg`` and the seconds since this module was created, or since the last call in which ``reset`` was
        true. Return ``x``. If ``reset`` is true, the seconds count from this call on, so that nearly 0 is printed. The
        GPU is waited for first.
        """
        if reset:
            self.first_time = time.time()
        if torch.cuda.is_available():
            # Kernels run asynchronously: without waiting the time would be that of their launches.
            torch.cuda.synchronize()
        print(msg, time.time() - self.first_time)
        return x


def has_rows(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has any rows. While a graph is compiled whose number of rows depends on data, return
    True.
    """
    rows = tensor.shape[0]
    if type(rows) is int and not torch.compiler.is_compiling():
        return rows != 0
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # here: it is slow to import

    return guard_or_true(rows != 0)


class SparseSequential(SparseModule):
    """A container that calls its modules one after the other. Sparse modules get the sparse tensor, and any other
    module gets its features.

    Args:
        *args: modules, or one ``OrderedDict`` of them.
        **kwargs: modules by name.

    Modules that are not sparse are skipped when there is no voxel, so that an empty batch leaves the running
    statistics of batch norm alone.
    """

    def __init__(self, *args: Any, **kwargs: nn.Module) -> None:
        """Append the modules ``args`` under their numbers and those of ``kwargs`` under their names. A single
        ``OrderedDict`` in ``args`` also brings its own names.
        """
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            named = list(args[0].items())
        else:
            named = [(str(i), module) for i, module in enumerate(args)]
        for name, module in [*named, *kwargs.items()]:
            self.add(module, name)

    def __getitem__(self, idx: int) -> nn.Module:
        """Return the module at the position ``idx``. Members that are None do not count."""
        return self._members()[idx]

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append ``module`` under ``name``. If ``name`` is None, it is the number of modules so far. Raise ``KeyError``
        if the name is taken.
        """
        name = str(len(self._modules)) if name is None else name
        if name in self._modules:
            raise KeyError(f"SparseSequential already has a module {name!r}")
        self.add_module(name, module)

    def _members(self) -> list[nn.Module]:
        """Return the members in order, without those that are None. A module that was added twice is listed twice."""
        return [module for module in self._modules.values() if module is not None]  # children() has no repetitions

    def forward(self, input: Any) -> Any:
        """Return ``input`` after all modules in turn. A module that is not sparse gets the features of a sparse tensor,
        and is skipped if the tensor has no voxels. While ``torch.fx`` traces, return a proxy of the result.
        """
        compiling = torch.compiler.is_compiling()
        tracer: Any = input.tracer if not compiling and isinstance(input, Proxy) else None
        if not compiling and tracer is None:
            return self._run_eagerly(input, inside_checkpoint())
        for module in self._modules.values():  # children() has no repetitions
            if module is None:
                continue
            if isinstance(module, _TAKE_SPARSE):
                input = module(input)
            elif tracer is None:
                input = _run_dense_module(module, input)
            else:  # torch.fx is tracing, and a later run knows whether the tensor is sparse
                layer = tracer.create_proxy("get_attr", tracer.path_of_module(module), (), {})
                input = tracer.create_proxy("call_function", _run_dense_module, (layer, input), {})
        return input

    def _run_eagerly(self, input: Any, checkpointed: bool) -> Any:
        """Return ``input`` after all modules in turn, outside of compilation. A batch norm is joined with a ReLU behind
        it where one kernel computes both. ``checkpointed`` is whether the call runs inside a reentrant checkpoint.
        """
        norm: nn.BatchNorm1d | None = None
        for module in self._modules.values():
            if module is None:
                continue
            if norm is not None:
                # The exact type: a subclass may compute something else.
                made = norm_and_relu(norm, module, input) if type(module) is nn.ReLU else None
                if made is not None:
                    input, norm = input.with_features(made, checkpointed, input._indices), None
                    continue
                input, norm = _run_dense_module_eager(norm, input, checkpointed), None
            if isinstance(module, _TAKE_SPARSE):
                input = module(input)
            elif type(module) is nn.BatchNorm1d:
                norm = module
            else:
                input = _run_dense_module_eager(module, input, checkpointed)
        return input if norm is None else _run_dense_module_eager(norm, input, checkpointed)


def _run_dense_module(module: nn.Module, input: Any) -> Any:
    """Return ``input`` after ``module``, which takes no sparse tensors. If ``input`` is a sparse tensor, ``module`` is
    applied to its features, and a sparse tensor without voxels is returned unchanged.
    """
    if not isinstance(input, SparseConvTensor):
        return module(input)
    if not has_rows(input.indices):
        return input
    if module.training:  # a graph knows of one row since the tensor was made
        assume_rows(input.indices.shape[0], training=True)
    return input.replace_feature(module(input.features))


def _run_dense_module_eager(module: nn.Module, input: Any, checkpointed: bool) -> Any:
    """Return ``input`` after ``module``, which takes no sparse tensors, outside of compilation. The result is that of
    ``_run_dense_module``, in fewer Python calls. ``checkpointed`` is whether the call runs inside a reentrant
    checkpoint.
    """
    if not isinstance(input, SparseConvTensor):
        return module(input)
    indices = input._indices
    if indices.shape[0] == 0:
        return input
    return input.with_features(module(input._features), checkpointed, indices)


class ToDense(SparseModule):
    """A layer that returns its input as a tensor ``[batch, c, *spatial]`` with a value for each cell, which is zero
    where there is no voxel.
    """

    @one_node
    def forward(self, x: SparseConvTensor) -> Tensor:
        """Return ``x`` as a tensor ``[batch, c, *spatial]`` with a value for each cell, which is zero where there is no
        voxel. Raise ``SL209`` if ``x`` is not a sparse tensor.
        """
        check_sparse("ToDense", x)
        return x.dense()


class RemoveGrid(SparseModule):
    """A module that sets the attribute ``grid`` of its input to None. No layer reads this attribute."""

    @one_node
    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Set the attribute ``grid`` of ``x`` to None, in place, and return ``x``."""
        x.grid = None
        return x


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Set ``_sparse_unique_name`` of every ``SparseModule`` in ``module`` to its qualified name in ``module``, as
    spconv does.
    """
    for name, child in module.named_modules():
        if isinstance(child, SparseModule):
            child._sparse_unique_name = name
