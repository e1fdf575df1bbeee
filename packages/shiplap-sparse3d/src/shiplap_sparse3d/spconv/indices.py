"""The life of an ``indice_key``: how a record is made, which layers may use it, and which uses are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.axes import same_numbers
from shiplap_sparse3d.spconv.core import ConvAlgo, IndiceData, LayerWindow, SparseConvTensor, indices_of
from shiplap_sparse3d.spconv.sizes import check_least

__all__ = [
    "COUNT",
    "build_record",
    "check_inverse",
    "check_subm",
    "choose_algorithm",
    "count_voxels",
    "find_record",
    "get_conv_output_size",
    "get_deconv_output_size",
    "key_taken_error",
    "leads_back",
    "note_way_back",
    "without_count",
]

COUNT = "max_num_voxels_during_training"  # the buffer's name in spconv's checkpoints


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the spatial size of a convolution's output, which is ``(W + 2P - D*(K-1) - 1) // S + 1`` for each axis.
    ``W`` is the input size, and ``K``, ``S``, ``P`` and ``D`` are kernel size, stride, padding and dilation. A kernel
    size of -1 covers its whole axis, so its output has one cell.
    """
    axes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [1 if k == -1 else (w + 2 * p - d * (k - 1) - 1) // s + 1 for w, k, s, p, d in axes]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """Return the spatial size of a transposed convolution's output, which is ``(W - 1)*S - 2P + K + output_padding``
    for each axis. ``W`` is the input size, and ``K``, ``S`` and ``P`` are kernel size, stride and padding. Unlike in
    ``ConvTranspose3d``, the dilation is not counted.

    Raise ``SL208`` for a kernel of -1.
    """
    if -1 in kernel_size:
        raise error(
            "SL208",
            where="get_deconv_output_size",
            got=f"kernel_size {list(kernel_size)}",
            expected="1 or more per axis",
        )
    axes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(w - 1) * s - 2 * p + k + o for w, k, s, p, o in axes]


def choose_algorithm(algo: ConvAlgo | None, taps: int, limit: int) -> ConvAlgo:
    """Return the algorithm of a layer with ``taps`` taps. If ``algo`` is given, it is that one, also if ``algo`` is a
    member of spconv's own enumeration. If ``algo`` is None, it is ``MaskImplicitGemm`` for up to ``limit`` taps, and
    ``Native`` for more.
    """
    if algo is None:
        return ConvAlgo.MaskImplicitGemm if taps <= limit else ConvAlgo.Native
    return ConvAlgo(algo.value if hasattr(algo, "value") else algo)  # also spconv's own enumeration


def find_record(where: str, input: SparseConvTensor, key: str | None, algo: ConvAlgo) -> IndiceData | None:
    """Return the record (input voxels, output voxels and neighbours) under ``key`` in the ``indice_dict`` of ``input``.
    Return None if there is none or if ``key`` is None. Raise ``SL208`` if a layer with another ``algo`` made the
    record. ``where`` is the layer's name in the message.
    """
    data = None if key is None else input.indice_dict.get(key)
    if data is not None and data.algo != algo:
        raise error(
            "SL208",
            where=_where_key(where, key),
            got=f"algo={algo}",
            expected=f"algo={data.algo}",
            fix="give layers that share an indice_key the same algo",
        )
    return data


def key_taken_error(where: str, key: str | None) -> ShiplapError:
    """Return the error ``SL208`` of a layer that makes new voxels under an ``indice_key``, ``key``, that an earlier
    layer has used. ``where`` is the layer's name in the message.
    """
    return error(
        "SL208",
        where=_where_key(where, key),
        got="a key that an earlier layer has used",
        expected="a new key: only submanifold layers share one",
    )


def build_record(
    where: str,
    input: SparseConvTensor,
    window: LayerWindow,
    algo: ConvAlgo,
    *,
    subm: bool = False,
    training: bool = False,
    pooled: bool = False,
    back: bool | None = None,
) -> IndiceData:
    """Return a new record of the input voxels, the output voxels and the neighbour tables between them, for a layer
    with ``window`` and ``algo`` on ``input``.

    If ``subm`` is true, the outputs are the inputs. If ``pooled`` is true, the layer is a pool, whose record gets its
    tables at their first use. If ``back`` is true, tables from outputs to inputs are built, too. If it is None, they
    are built only if grad mode is on. ``training`` is whether the layer is in training.

    Raise ``SL208`` if the output grid has no cells. Raise ``SL211`` if there are voxels and none of them has an output.
    ``where`` is the layer's name in messages.
    """
    here, shape = input.geometry, input.spatial_shape
    if subm:
        return IndiceData(input.indices, input.indices, shape, shape, True, algo, window, here, here)
    sizes = window.ksize, window.stride, window.padding, window.dilation
    check_least(
        where, [*window.stride, *window.dilation], lambda: window.text, "pass strides and dilations of 1 or more"
    )
    if window.output_padding is None:
        out_shape = get_conv_output_size(shape, *sizes)
    else:
        out_shape = get_deconv_output_size(shape, *sizes, window.output_padding)
    fix = "enlarge spatial_shape or the padding"
    check_least(where, out_shape, lambda: f"output shape {out_shape} of input shape {shape}, {window.text}", fix)
    # The geometry keeps the step, so layers with other keys share its tables.
    step = window.step(here, pooled=pooled, back=back)
    there, plan = step.geometry, None if pooled else step.plan
    indices = indices_of(there.coords, input.ndim)
    _check_vanished(where, input, indices.shape[0], window, training)
    return IndiceData(input.indices, indices, shape, out_shape, False, algo, window, here, there, plan)


_LED_BACK: set[tuple[str | None, str]] = set()  # keys and windows along which inverse layers went back
_MOST_KEYS = 4096


def note_way_back(key: str | None, data: IndiceData) -> None:
    """Record in this process that an inverse convolution maps outputs back to inputs along ``data``. ``data`` holds the
    voxels and neighbours that an earlier layer stored under ``key``.

    In later forward passes, :func:`leads_back` returns True for this ``key`` and the layer's window. The tables from
    outputs to inputs are then built together with the tables from inputs to outputs. Nothing is recorded while a graph
    is compiled, or if ``data`` already has both kinds of tables.
    """
    if not torch.compiler.is_compiling() and not data.whole and len(_LED_BACK) < _MOST_KEYS:
        # Bounded by ``_MOST_KEYS``: keys may be generated for each batch.
        _LED_BACK.add((key, data.window.text))


def leads_back(key: str | None, window: LayerWindow) -> bool | None:
    """Return True if :func:`note_way_back` has recorded an inverse convolution for this ``key`` and ``window`` (kernel,
    stride, padding, dilation). The caller then builds the tables of both directions by one launch program.

    Return None if no such record exists. Also return None in a compiled graph, since graphs must not depend on earlier
    runs.
    """
    if torch.compiler.is_compiling() or not _LED_BACK:
        return None
    return True if (key, window.text) in _LED_BACK else None


def _check_vanished(where: str, input: SparseConvTensor, out_rows: int, window: LayerWindow, training: bool) -> None:
    """Raise ``SL211`` if there are input voxels and ``out_rows``, the number of output voxels, is 0, as spconv does.

    In a graph this is an assertion at run time. The graph asserts that there are at least two output voxels if
    ``training`` is true, and otherwise at least one. Batch norm tests for a single row, and a graph cannot branch on a
    size that depends on data.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

    rows = input.indices.shape[0]
    if not guard_or_false(rows > 0):
        return
    if torch.compiler.is_compiling():
        # The graph's assertion replaces the branch below, which would need the size.
        torch._check(out_rows > (1 if training else 0))
    elif out_rows == 0:
        raise error(
            "SL211",
            where=where,
            got=f"{rows} voxels, none with an output, in {input.spatial_shape} under {window.text}",
            expected="an output for one voxel at least",
            fix="enlarge spatial_shape or the padding",
        )


def check_subm(
    where: str, input: SparseConvTensor, key: str | None, data: IndiceData, ksize: list[int], dilation: list[int]
) -> IndiceData:
    """Return ``data`` if a submanifold layer with the kernel size ``ksize`` and ``dilation`` can use it for ``input``.
    ``data`` is the record (voxels and neighbours) of an earlier layer with the same ``key``.

    Raise ``SL208`` if kernel, dilation, spatial shape or number of voxels differ. Raise it also if the earlier layer is
    not submanifold. ``where`` is the layer's name in the message.
    """
    if not data.is_subm:
        raise key_taken_error(where, key)
    window = data.window
    if ksize != window.ksize or dilation != window.dilation:
        _check_same(where, key, "kernel_size", ksize, window.ksize)
        _check_same(where, key, "dilation", dilation, window.dilation)
    _same_cells(where, key, input.spatial_shape, data.spatial_shape)
    # The same tensor needs no comparison. Values are not compared, since a GPU would have to be waited for.
    if input.indices is not data.indices:
        _check_same(where, key, "number of voxels", input.indices.shape[0], data.indices.shape[0])
    return data


def check_inverse(
    where: str, input: SparseConvTensor, key: str | None, data: IndiceData | None, ksize: list[int]
) -> IndiceData:
    """Return ``data`` if an inverse layer with the kernel size ``ksize`` can map ``input`` back along it. ``data`` is
    the record (voxels and neighbours) of an earlier layer with the same ``key``, or None.

    Raise ``SL208`` if there is no record or if it is that of a submanifold layer. Raise it also if kernel, spatial
    shape or number of voxels differ. ``where`` is the layer's name in the message.
    """
    if data is None or data.is_subm:
        got = "no such key" if data is None else "the key of a submanifold layer"
        raise error("SL208", where=_where_key(where, key), got=got, expected="the key of an earlier SparseConv or pool")
    _check_same(where, key, "kernel_size", ksize, data.ksize)
    _same_cells(where, key, input.spatial_shape, data.out_spatial_shape)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

    rows, wanted = input.indices.shape[0], data.out_indices.shape[0]
    if guard_or_false(rows != wanted):  # of sizes that only the data knows nothing is asked
        _check_same(where, key, "number of voxels", rows, wanted)
    return data


def _same_cells(where: str, key: str | None, got: list[int], expected: list[int]) -> None:
    """Raise ``SL208`` unless the spatial shapes ``got`` and ``expected`` of two layers with one ``indice_key`` are
    equal. ``where`` is the layer's name in the message, and ``key`` is the ``indice_key``.
    """
    if len(got) != len(expected) or not same_numbers(got, expected):
        _check_same(where, key, "spatial_shape", got, expected)


def _check_same(where: str, key: str | None, what: str, got: object, expected: object) -> None:
    """Raise ``SL208`` unless ``got`` equals ``expected``. They are the values of ``what``, such as "dilation", of two
    layers that share the ``indice_key``, ``key``. ``where`` is the layer's name in the message.
    """
    if got != expected:
        raise error(
            "SL208",
            where=_where_key(where, key),
            got=f"{what} {got}",
            expected=f"{what} {expected}",
            fix="use another indice_key: layers that share a key must work on the same voxels",
        )


def _where_key(where: str, key: str | None) -> str:
    """Return the location for an error message, made of the layer's name ``where`` and its ``indice_key``, ``key``."""
    return f"{where}, indice_key={key!r}"


def count_voxels(most: Tensor | None, rows: int) -> None:
    """Set the counter ``most``, a tensor of one element, to ``rows`` in place if ``rows`` is larger. Do nothing if
    ``most`` is None, as for a layer without ``record_voxel_count``.
    """
    if most is not None:
        most.copy_(torch.maximum(most, torch.full_like(most, rows)))


def without_count(layer: Any, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Set the voxel count of ``layer`` in ``state_dict`` to 0 if the layer counts voxels and the checkpoint has no
    count. This hook runs before loading. A checkpoint that was saved without ``record_voxel_count`` has no count.
    """
    if layer.get_max_num_voxels() is not None and isinstance(state_dict, dict):
        state_dict.setdefault(prefix + COUNT, torch.zeros(1, dtype=torch.int32))
