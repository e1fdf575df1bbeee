"""torch.func and forward-mode gradients, for the Autograd kernel of an op, and calls of ops in TorchScript."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from shiplap.torch_private import available
from shiplap.torch_private.dispatcher_calls import DirectCall

if TYPE_CHECKING:
    from shiplap.torch_private.dispatcher_library import Keys, Overload


class AutogradFunction(Protocol):
    """A subclass of ``autograd.Function``. Its ``apply`` calls the forward and records the call."""

    def apply(self, *args: Any) -> Tensor | tuple[Tensor, ...] | None:
        """Return the results of the forward on ``args``, and record the call for the backward."""
        ...


def make_autograd_function(name: str, members: dict[str, Any]) -> AutogradFunction:
    """Return a new subclass of ``torch.autograd.Function`` with this name and these members."""
    made: Any = type(name, (torch.autograd.Function,), members)
    recorder: AutogradFunction = made
    return recorder


_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset


def is_transform_active() -> bool:
    """Return whether ``torch.func`` or a forward-mode gradient is active in this thread."""
    return _level() is not None or forward_ad._current_level >= 0


def transform_level() -> int:
    """Return the number of the innermost active transform (level) of ``torch.func``. Return 0 outside all
    transforms.
    """
    innermost = _level()
    return int(innermost.level()) if innermost is not None else 0


def is_nested(own: int, tensors: Iterable[Tensor]) -> bool:
    """Return whether derivatives of the gradients that a backward computes may be needed.

    They may be needed inside an outer ``grad``, in forward mode, or if one of ``tensors``, which the backward uses,
    requires a gradient. ``own`` is the number of the ``torch.func`` level whose gradients are computed. The level may
    have ended already, as in ``jacrev``. The wrappers of ``tensors`` show this.
    """
    stack = [(str(each.key()), each.level()) for each in torch._C._functorch.get_interpreter_stack() or ()]
    graphs = [number for key, number in stack if "Grad" in key]
    layers = [_transform_layers(t) for t in tensors]
    dead = any(_FUNCTORCH.is_gradtrackingtensor(t) and not _is_open(t) for each in layers for t in each)
    others = len(graphs) - (own in graphs and not dead)
    return others > 0 or any("Jvp" in key for key, _ in stack) or any(each[-1].requires_grad for each in layers)


def is_tracked(tensor: Tensor) -> bool:
    """Return whether plain autograd or an open level of ``torch.func`` records operations on the tensor, or forward
    mode has a tangent of it.
    """
    if not is_transform_active():
        return tensor.requires_grad
    *levels, base = _transform_layers(tensor)
    open_levels = [t for t in levels if _FUNCTORCH.is_gradtrackingtensor(t) and _is_open(t)]
    return base.requires_grad or any(t.requires_grad for t in open_levels) or carries_tangent([*open_levels, base])


def is_differentiated(tensor: Tensor) -> bool:
    """Return whether a derivative with respect to the tensor may be needed, by autograd, ``torch.func`` or forward
    mode.
    """
    if torch.compiler.is_dynamo_compiling() or not is_transform_active():
        return torch.is_grad_enabled() and tensor.requires_grad
    layers = [t for t in _transform_layers(tensor) if not _FUNCTORCH.is_batchedtensor(t)]
    return any(t.requires_grad for t in layers) or carries_tangent(layers)


def graph_nodes(tensor: Tensor) -> list[Any]:
    """Return the autograd nodes that have ``tensor`` as a result. Plain autograd and each level of ``torch.func`` that
    records the tensor have one such node. The node of the outermost wrapper comes first.
    """
    return [t.grad_fn for t in _transform_layers(tensor) if t.grad_fn is not None]


_FUNCTORCH: Any = torch._C._functorch


def _transform_layers(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, then the tensor inside each wrapper that a level of ``torch.func`` has put around it. The last
    tensor has no wrapper.
    """
    layers = [tensor]
    while _FUNCTORCH.is_functorch_wrapped_tensor(layers[-1]):
        layers.append(_FUNCTORCH.get_unwrapped(layers[-1]))
    return layers


def unwrap_ended(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors without the wrappers of gradient levels of ``torch.func``. Call this outside all transforms,
    where these levels have ended. Plain autograd then records operations on the tensors.
    """
    return tuple([next(t for t in _transform_layers(t) if not _FUNCTORCH.is_gradtrackingtensor(t)) for t in tensors])


def _is_open(tensor: Tensor) -> bool:
    """Return whether the tensor is a wrapper of a gradient level of ``torch.func`` that has not ended."""
    return bool(_FUNCTORCH.is_gradtrackingtensor(tensor) and _FUNCTORCH.maybe_get_level(tensor) > 0)


def _unbatched(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of ``torch.vmap``. Torch cannot unpack the tangent of a wrapped tensor."""
    while _FUNCTORCH.is_batchedtensor(tensor):
        tensor = _FUNCTORCH.get_unwrapped(tensor)
    return tensor


def carries_tangent(values: Iterable[Any]) -> bool:
    """Return whether any tensor among ``values``, or in a list among them, is a dual tensor of forward mode. The result
    of a call then needs a tangent.
    """
    lists = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    tensors = [_unbatched(v) for vs in lists for v in vs if isinstance(v, Tensor)]
    unpack: Any = forward_ad.unpack_dual
    return any(unpack(t, level=0).tangent is not None for t in tensors)  # torch has one level


def with_tangents(values: Any, other: Any) -> Any:
    """Return ``values`` (tensors, numbers, or lists of them) with each tensor as a dual tensor of forward mode.

    The tangent of a tensor is that of the tensor at the same position in ``other``. If that tensor has no tangent, the
    result is the plain tensor.
    """
    if not isinstance(values, Tensor):
        if not isinstance(values, (list, tuple)):
            return values
        return type(values)(with_tangents(v, o) for v, o in zip(values, other, strict=True))
    unpack: Any = forward_ad.unpack_dual
    primal, tangent = unpack(values, level=0).primal, unpack(other, level=0).tangent
    make_dual: Any = forward_ad.make_dual
    return primal if tangent is None else make_dual(primal, tangent, level=0)


def below_autograd(overload: Overload, keys: Keys) -> Callable[..., Any]:
    """Return a function that calls ``overload`` with autograd skipped at the innermost transform of ``torch.func``.

    Outer transforms, and autograd outside of all transforms, still apply to the call. ``keys`` are the dispatch keys of
    the call.
    """
    return partial(overload.redispatch, keys & _AFTER_AUTOGRAD)


def enable_outer_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``call`` with gradients and tangents enabled, for the outer transforms. The forward
    of an ``autograd.Function`` has both off.
    """

    def below(*args: Any, **kwargs: Any) -> Any:
        """Return the result of ``call``, which runs with gradients and tangents enabled."""
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return call(*args, **kwargs)

    return below


def level_function(name: str, members: dict[str, Any]) -> AutogradFunction:
    """Return a new ``autograd.Function`` class with this name and these members. It records at one level of
    ``torch.func``, as the formulas of torch's own ops do.
    """
    made: Any = type(name, (_SingleLevelFunction,), members)
    recorder: AutogradFunction = made
    return recorder


def apply_at_level(function: AutogradFunction, *args: Any) -> Tensor | tuple[Tensor, ...] | None:
    """Call a :func:`level_function` and return its results. The current level of ``torch.func`` records the call."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*args)


_MAPPED: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchVmapMode
)
Sample = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def map_samples(function: Callable[[Sample, int], Any]) -> Callable[..., Any]:
    """Return a function that ``torch.vmap`` calls in place of an op. ``function(sample, count)`` computes its batched
    results.

    ``sample(i)`` returns the arguments of sample ``i``, which are views of the mapped tensors. The results have the
    samples along their first dim, and may be in lists.
    """
    tools: Any = torch._C._functorch

    def mapped(*args: Any, **kwargs: Any) -> Any:
        """Return the results of ``function(sample, count)`` as batched tensors of the current ``torch.vmap`` level.

        ``count`` is the number of samples. ``sample(i)`` returns the arguments of sample ``i`` of this ``torch.vmap``
        call.
        """
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()

        def sample(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Return the positional and keyword arguments of the sample at ``index``."""

            def pick(value: Any) -> Any:
                """Return what ``value`` has for the sample at ``index``. For a mapped tensor, this is a view. Lists are
                converted item by item, and any other value is returned unchanged.
                """
                if isinstance(value, (list, tuple)):
                    return [pick(v) for v in value]
                if not isinstance(value, Tensor):
                    return value
                plain, at = tools._unwrap_batched(value, level)
                return plain if at is None else plain.select(at, index)

            return tuple(pick(a) for a in args), {k: pick(v) for k, v in kwargs.items()}

        def wrap(value: Any) -> Any:
            """Return ``value`` with each tensor in it wrapped as a batched tensor of the current ``torch.vmap`` level.
            Its first dim indexes the samples.
            """
            if isinstance(value, (list, tuple)):
                return type(value)(wrap(v) for v in value)
            return tools._add_batch_dim(value, 0, level) if isinstance(value, Tensor) else value

        with torch._C._ExcludeDispatchKeyGuard(_MAPPED):  # the transforms further out see the calls
            results = function(sample, interpreter.batch_size())
        return wrap(results)

    return mapped


def vmap_randomness() -> str:
    """Return the argument ``randomness`` of the innermost ``torch.vmap``, which is ``"error"``, ``"same"`` or
    ``"different"``. There must be one.
    """
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return str(interpreter.randomness())


def is_called_by_vmap() -> bool:
    """Return whether ``torch.vmap`` itself calls the op that runs now, in place of a function of the user, and wants
    tensors from it. With ``out_dims=None`` it takes None as well.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is DirectCall.__call__.__code__:
            caller = frame.f_back
            mapped = caller.f_globals.get("__name__") == torch._functorch.vmap.__name__
            return mapped and caller.f_locals.get("out_dims") not in (None, (None,))
        frame = frame.f_back
    return False


def is_mapped(value: Any) -> bool:
    """Return whether ``torch.vmap`` maps over ``value``, or over a tensor of a list, at the current level."""
    if isinstance(value, (list, tuple)):
        return any(is_mapped(v) for v in value)
    return isinstance(value, Tensor) and bool(torch._C._functorch.is_batchedtensor(value))


def show_to_scripts(function: object, name: str | None) -> None:
    """Make TorchScript compile calls of ``function``, which is no function of Python, as calls of the op ``name``, or
    no longer compile them if ``name`` is None. Do nothing on a version of torch on which no test run has verified that.
    """
    if not available("calls past OpOverload.__call__"):
        return
    torch.jit._builtins._register_builtin(function, name)
    # TorchScript knows functions by their id, which another object may get later.
    forget = weakref.finalize(function, torch.jit._builtins._get_builtin_table().pop, id(function), None)
    forget.atexit = False
