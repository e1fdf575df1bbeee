"""PyTorch's operator database on a device, compared with the CPU: torch's own kind of device test.

``instantiate`` makes the test cases. A project's ``test_opinfo.py`` runs them under pytest or unittest, and
``shiplap_backend.sweep`` in processes that may crash.
"""

from __future__ import annotations

import copy
import unittest
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from shiplap.dtypes import in_aten
from shiplap.torch_private import aten_operators
from shiplap.torch_private.graph_objects import leaves, map_leaves

DTYPES = {short: row.torch for short, row in in_aten().items()}

# What these return is not determined by their arguments.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


@dataclass
class SampleEvidence:
    """The outcome of running the samples of one operator in one dtype.

    ``samples`` counts the samples that ran, and ``gradients`` those whose gradients were compared. ``native`` names the
    operators that ran on the device. ``fallback`` counts the calls that ran on the CPU, by operator and reason.
    ``refused`` is the message of a ``NotImplementedError``. ``failure`` describes a wrong value or another error.
    """

    samples: int = 0
    gradients: int = 0  # samples of which the gradients were compared too
    native: set[str] = field(default_factory=set)
    fallback: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: str = ""
    failure: str = ""

    def count(self, counters: dict[str, Any]) -> None:
        """Add the operators that the device has called to ``native`` and ``fallback``.

        ``counters`` has the numbers of native calls and of fallbacks to the CPU by operator.
        """
        for name, calls in counters.items():
            if calls["native"]:
                self.native.add(name)
            if calls["fallback"]:
                self.fallback[name] = {**self.fallback.get(name, {}), **calls["fallback"]}


def case_name(device: str, op: Any, dtype: torch.dtype) -> str:
    """Return the name of the test method that compares the OpInfo ``op`` in ``dtype`` on ``device``."""
    return f"test_compare_cpu_{op.formatted_name}_{device}_{str(dtype).removeprefix('torch.')}"


def instantiate(
    scope: dict[str, Any],
    *,
    names: Collection[str] | None = None,
    dtypes: Collection[str] = ("f32", "bf16", "f16", "i64", "i32", "u8", "bool"),
    samples: int = 8,
) -> type[unittest.TestCase]:
    """Define the test class ``TestOpInfoPRIVATEUSE1`` in ``scope`` for the device that was loaded before, and return
    it.

    Args:
        scope: The globals of a module.
        names: The full names of the operators in torch's database. By default all operators are tested.
        dtypes: The dtypes, as keys of ``DTYPES``.
        samples: The largest number of samples that are compared for each operator.
    """
    infos = [op for name, op in sorted(aten_operators.op_infos().items()) if names is None or name in names]

    def test_compare_cpu(self: Any, device: str, dtype: torch.dtype, op: Any) -> None:
        """Compare the operator ``op`` in ``dtype`` on ``device`` with the CPU, and raise the first error.

        Skip the test if the CPU accepts no sample. The outcome is stored as ``self.evidence``.
        """
        # The sweep reads the evidence from the test case afterwards.
        self.evidence = evidence = SampleEvidence()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = _check_samples(op, device, dtype, samples, evidence)
        if error is not None:
            raise error
        if not evidence.samples:
            self.skipTest("the CPU accepts no sample")

    return aten_operators.make_device_tests("TestOpInfo", test_compare_cpu, infos, [DTYPES[d] for d in dtypes], scope)


def _check_samples(op: Any, device: str, dtype: torch.dtype, most: int, evidence: SampleEvidence) -> Exception | None:
    """Compare the operator ``op`` in ``dtype`` on ``device`` with the CPU, and return the first error or None.

    Up to ``most`` samples that the CPU accepts are run. The outcome of each sample is added to ``evidence``. A
    ``NotImplementedError`` is returned only if there is no other error.
    """
    module = getattr(torch, device.partition(":")[0])
    failure = refusal = None
    samples = iter(op.sample_inputs(device, dtype, requires_grad=False))
    while evidence.samples < most:
        try:
            sample = next(samples, None)
            if sample is None:
                break
            # Copies of the arguments are made before the call, since some operators write to them.
            ours = sample.input, sample.args, sample.kwargs
            theirs = _on_cpu(ours, device)
            kept = copy.deepcopy(theirs)
            places = [v.device if isinstance(v, torch.Tensor) else v for v in leaves(ours)]
        except NotImplementedError as e:  # arguments that the device cannot hold; the generator ends here
            refusal = refusal or e
            break
        try:
            # A sample that the CPU refuses says nothing about the device.
            want = _call_operator(op, theirs)
        except Exception:
            continue
        evidence.samples += 1
        # Making the samples on the device calls operators too, which do not count.
        module.reset_counters()
        try:
            got = _call_operator(op, ours)
            evidence.count(module.counters())
            _compare_results(op, dtype, (got, ours), (want, theirs), kept)
            evidence.gradients += _compare_gradients(op, sample, dtype, places, kept)
        except NotImplementedError as e:
            refusal = refusal or e
        except Exception as e:
            failure = failure or e
    evidence.refused, evidence.failure = (
        f"{type(e).__name__}: {str(e)[:300]}" if e is not None else "" for e in (refusal, failure)
    )
    return failure or refusal


def _on_cpu(arguments: Any, device: str) -> Any:
    """Return the nested ``arguments`` with each tensor replaced by a copy on the CPU.

    The copies have the strides and the offsets of the tensors, since whole storages are copied. The name ``device`` in
    ``arguments`` becomes ``"cpu"``.
    """

    def twin(value: Any) -> Any:
        """Return a copy of a tensor on the CPU. Return another value unchanged.

        A string or ``torch.device`` that names the enclosing ``device`` becomes ``"cpu"``.
        """
        if isinstance(value, (str, torch.device)) and str(value) == device:
            return "cpu"
        if not isinstance(value, torch.Tensor):
            return value
        # These tensors have no plain storage, or one that means something else without the flag.
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return value.cpu().clone()
        # The whole storage is copied, so that the views of the CPU overlap as those of the device do.
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        return whole.cpu().clone().as_strided(value.size(), value.stride(), value.storage_offset())

    return map_leaves(twin, arguments)


def _call_operator(op: Any, arguments: Any) -> Any:
    """Return the results of the operator ``op`` on ``arguments``, a tuple ``(input, args, kwargs)``.

    Torch is seeded first, so that random numbers agree.
    """
    input, args, kwargs = arguments
    # Operators that draw numbers must draw the same ones on both devices.
    torch.manual_seed(0)
    return op.op(input, *args, **kwargs)


def _gradients(op: Any, sample: Any, arguments: Any) -> list[torch.Tensor | None]:
    """Return the gradient of the results of ``op`` with respect to each floating-point or complex tensor in
    ``arguments``.

    ``sample`` is the sample of these arguments. The results are weighted with fixed random numbers. An item is None if
    the tensor has no gradient. The list is empty if the results require no gradient.
    """
    tracked: list[torch.Tensor] = []

    def track(value: Any) -> Any:
        """Return a floating-point or complex tensor as a new leaf that requires a gradient, and append it to
        ``tracked``.

        Return another value unchanged.
        """
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        tracked.append(value.detach().clone().requires_grad_())
        return tracked[-1]

    made = sample.output_process_fn_grad(_call_operator(op, map_leaves(track, arguments)))
    results = [r for r in leaves(made) if isinstance(r, torch.Tensor) and r.requires_grad]
    if not results or not tracked:
        return []
    # The same weights for the CPU and the device.
    numbers = torch.Generator().manual_seed(1)
    by = [torch.randn(r.shape, generator=numbers, dtype=torch.double).to(r.dtype).to(r.device) for r in results]
    return list(torch.autograd.grad(results, tracked, by, allow_unused=True))


def _compare_gradients(op: Any, sample: Any, dtype: torch.dtype, places: list[Any], kept: Any) -> bool:
    """Compare the gradients on the device with the CPU's, and return whether any gradients were compared.

    Raise ``AssertionError`` for a difference.

    Args:
        op: The OpInfo of the operator.
        sample: The sample with the arguments.
        dtype: The dtype of the sample.
        places: One item for each leaf of ``kept``, in order. For a tensor, the item is the device to which it is moved,
            because some operators require indices on the CPU. For any other argument, the item is the argument itself.
        kept: The arguments before the call, on the CPU.
    """
    tensors = [v for v in leaves(kept) if isinstance(v, torch.Tensor)]
    strided = all(v.layout is torch.strided for v in tensors)
    if not op.supports_autograd or not dtype.is_floating_point or not strided or op.name in UNDEFINED:
        return False

    where = iter(places)

    def placed(value: Any) -> Any:
        """Return the tensor ``value`` on the device that is the next item of ``places``.

        If ``value`` is no tensor, return the next item itself.
        """
        place = next(where)
        return value.to(place) if isinstance(value, torch.Tensor) else place

    try:
        want = _gradients(op, sample, kept)
    except Exception:  # the CPU has no gradient of this sample
        return False
    for i, (g, w) in enumerate(zip(_gradients(op, sample, map_leaves(placed, kept)), want, strict=True)):
        assert (g is None) == (w is None), f"gradient {i} is {'missing' if g is None else 'there'}, unlike the CPU's"
        if g is None or w is None:
            continue
        assert (g.dtype, g.shape) == (w.dtype, w.shape), f"gradient {i} is {g.dtype} {tuple(g.shape)}"
        loose = {torch.float16: 4e-3, torch.bfloat16: 4e-2}.get(dtype, 4e-5)
        close = torch.allclose(g.cpu(), w, rtol=loose, atol=loose, equal_nan=True)
        assert close or _gradient_is_exact(op, sample, kept, i, (g, w), dtype), f"gradient {i}: {g.cpu()} for {w}"
    return bool(want)


def _gradient_is_exact(op: Any, sample: Any, kept: Any, index: int, pair: Any, dtype: torch.dtype) -> bool:
    """Return whether gradient ``index`` of ``op`` on the device is about as exact as that of the CPU.

    Its NaNs must be those of the CPU, and its error against float64 may be three times as large. ``pair`` has the
    gradients of the device and of the CPU. ``kept`` are the arguments of ``sample`` on the CPU, in ``dtype``.
    """
    exact = _gradients(op, sample, _widened(kept, dtype))[index]
    if exact is None or not pair[1].numel():
        return False
    ours, theirs = (v.detach().cpu() for v in pair)
    us, them = ((v.to(exact.dtype) - exact).abs().nan_to_num().max().item() for v in (ours, theirs))
    return bool(torch.equal(ours.isnan(), theirs.isnan()) and us <= 3 * them)


def _widened(arguments: Any, dtype: torch.dtype) -> Any:
    """Return nested ``arguments`` with the tensors of ``dtype`` converted to float64."""
    return map_leaves(lambda v: v.double() if isinstance(v, torch.Tensor) and v.dtype == dtype else v, arguments)


def _compare_results(op: Any, dtype: torch.dtype, got: Any, want: Any, kept: Any) -> None:
    """Compare what ``op`` did on the device (``got``) with what it did on the CPU (``want``).

    Each of them has the results and the arguments, since some operators write to their arguments. Raise
    ``AssertionError`` with the first difference. Values that differ by more than the tolerance for ``dtype`` are
    compared once more with a call in float64 on ``kept``, the arguments before the call.
    """
    ours, theirs = (leaves(v) for v in (got, want))
    for g, w in zip(ours, theirs, strict=True):
        if isinstance(w, torch.Tensor):
            assert g.dtype == w.dtype, f"dtype {g.dtype} for {w.dtype}"
            assert g.shape == w.shape, f"shape {tuple(g.shape)} for {tuple(w.shape)}"
        else:
            assert g == w or isinstance(g, (str, torch.device)) or (g != g and w != w), f"{g} for {w}"
    # The values are undefined by PyTorch's documentation, such as those of ``empty``.
    if op.name in UNDEFINED:
        return
    # Looser than torch's defaults. Results beyond these tolerances are compared with float64 below.
    loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}.get(dtype, 0.0)
    try:
        for g, w in zip(ours, theirs, strict=True):
            if isinstance(w, torch.Tensor):
                torch.testing.assert_close(
                    g.cpu(), w, rtol=max(loose, 1.3e-6), atol=max(loose, 1e-5), equal_nan=True, check_stride=False
                )
    except AssertionError:
        # Values may differ where both are about equally far from those in a wider dtype.
        if not _as_exact(op, kept, ours, theirs, dtype):
            raise


def _as_exact(op: Any, arguments: Any, ours: list[Any], theirs: list[Any], dtype: torch.dtype) -> bool:
    """Return whether the values of the device (``ours``) are about as exact as those of the CPU (``theirs``).

    Both are values of ``op`` on ``arguments`` in ``dtype``. Their NaNs must be those of the CPU. Their error, the
    difference from a result in float64, may be three times as large. Torch does not prescribe how an operator rounds.
    """
    if not dtype.is_floating_point or dtype is torch.float64:
        return False
    wide = _widened(arguments, dtype)
    for g, w, exact in zip(ours, theirs, leaves((_call_operator(op, wide), wide)), strict=True):
        if not isinstance(w, torch.Tensor) or not w.numel():
            continue
        if not w.is_floating_point():
            if not torch.equal(g.cpu(), w):
                return False
            continue
        us, them = ((v.cpu().double() - exact).abs().nan_to_num().max().item() for v in (g, w))
        if g.isnan().cpu().ne(w.isnan()).any() or us > 3 * them:
            return False
    return True
