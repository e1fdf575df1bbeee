"""The life of a call below autograd: bind → pick a kernel → allocate → launch → hand over outputs that fit.

Kernels come in two styles, told apart by their signature. *Out-style* takes the outputs' names as keywords and fills
tensors that shiplap allocated. *Functional* returns its outputs; they are then made fresh, contiguous and shown to fit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shiplap.errors import error
from shiplap.op.binding import Binding, shape_of
from shiplap.op.config import NO_CONFIG, Config, Space
from shiplap.op.expr import Expr
from shiplap.op.spec import OpSpec

if TYPE_CHECKING:
    from shiplap.op.template import Template

__all__ = [
    "Kernel",
    "PythonKernel",
    "Runnable",
    "allocate_workspace",
    "check_sharing",
    "fit_outputs",
    "is_current",
    "on_poison",
    "own_outputs",
    "poisoned_workspace",
    "workspace_size",
]


class Runnable(Protocol):
    """What an implementation provides: run one bound call, return its outputs in order.

    One that also has ``into(call, outs, scratch)`` can fill tensors of the caller (``op/out.py``); one whose kernel
    declares configs has ``with_config(config)``, a copy that launches with these values. A template's has
    ``refuses(call)``, which speaks for its config, and ``first(call)``: the first config that takes the call, or why
    none does. ``start(call) -> (outs, again)`` also says how to run calls that differ from this one in addresses alone:
    ``again(args)`` is the op's result (``op/route.py``).
    """

    def __call__(self, call: Binding) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op for one device type.

    ``dtypes`` are those that the dtype classes of a call may have, empty for all declared ones. ``supports`` gets the
    arguments and returns True or the reason why not; ``identity`` is what digests see. ``template`` is what it was
    made from, if so.
    """

    name: str
    device: str
    run: Runnable
    identity: str
    supports: Callable[..., bool | str] | None = None
    dtypes: tuple[str, ...] = ()
    space: Space | None = None
    config: Config = NO_CONFIG
    template: Template | None = None
    _variants: dict[Config, Kernel] = field(default_factory=dict, compare=False, repr=False)

    def variant(self, config: Config) -> Kernel:
        """This kernel with the values of ``config``; made once."""
        found = self._variants.get(config)
        if found is None:
            run: Any = self.run
            run = run.with_config(config) if config.items else run
            found = self._variants.setdefault(config, replace(self, run=run, config=config, _variants={}))
        return found

    def refuses(self, call: Binding) -> str:
        """Empty when the kernel takes this call, else the reason."""
        for dtype in call.dtypes.values() if self.dtypes else ():
            if str(dtype).removeprefix("torch.") not in self.dtypes:
                return f"it takes {' and '.join(self.dtypes)}, not {dtype}"
        if self.template is not None:
            run: Any = self.run
            return run.refuses(call)
        verdict = True if self.supports is None else self.supports(*call.args)
        return "" if verdict is True else (verdict or "supports() returned False")

    def serving(self, call: Binding) -> Kernel | str:
        """The kernel with the config of a call that nobody has tuned, or the reason why it does not take the call."""
        if self.template is not None:
            run: Any = self.run
            found = run.first(call)
            return found if isinstance(found, str) else self.variant(found)
        if reason := self.refuses(call):
            return reason
        return self if self.space is None else self.variant(self.space.default(call.env))


class PythonKernel:
    """A Python function as a kernel, in either style, run with the call's device as the current one.

    It may ask for ``workspace`` (uint8) by keyword.
    """

    def __init__(self, spec: OpSpec, fn: Callable[..., Any], workspace: Expr | None) -> None:
        self.spec, self.fn, self.workspace = spec, fn, workspace
        keywords = inspect.signature(fn).parameters
        names = {o.name for o in spec.outputs}
        self.out_style = bool(names) and names <= keywords.keys() and not spec.dynamic
        self.wants_workspace = "workspace" in keywords
        self.named = [a.name for a in spec.args if a.keyword_only]  # the last ones
        self.made = [(o, None if not o.tensor.concrete else getattr(torch, o.tensor.dtypes[0])) for o in spec.outputs]
        self.config: dict[str, Any] = {}

    def with_config(self, config: Config) -> PythonKernel:
        """The same function, which gets the values of ``config`` by keyword."""
        configured = copy.copy(self)
        configured.config = config.as_dict()
        return configured

    def __call__(self, call: Binding) -> tuple[Tensor, ...]:
        if not self.out_style:
            return fit_outputs(self.spec, call, self._run(call, None))
        outs = {
            o.name: torch.empty(
                shape_of(o, call.env), dtype=dtype or call.dtypes[o.tensor.dtype_class], device=call.device
            )
            for o, dtype in self.made
        }
        self._run(call, None, **outs)
        return tuple(outs.values())

    def into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill ``outs``; a functional kernel's outputs are copied into them."""
        if self.out_style:
            self._run(call, scratch, **{o.name: t for o, t in zip(self.spec.outputs, outs, strict=True)})
            return
        for out, value in zip(outs, fit_outputs(self.spec, call, self._run(call, scratch)), strict=True):
            out.copy_(value)

    def start(self, call: Binding) -> tuple[tuple[Tensor, ...], Callable[[tuple[Any, ...]], Any] | None]:
        """Run ``call``; and how to run calls that differ from it in addresses alone."""
        outs = self(call)
        if not self.out_style or (self.workspace is not None and "threads" in self.workspace.names):
            return outs, None
        made = [(o.name, t.shape, t.dtype) for o, t in zip(self.spec.outputs, outs, strict=True)]
        device, room = call.device, workspace_size(self.workspace, call)

        def again(args: tuple[Any, ...]) -> Any:
            found = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in made}
            self._call(args, device, _scratch(room, device) if self.wants_workspace else None, **found)
            return found[made[0][0]] if len(made) == 1 else tuple(found.values())

        return outs, again

    def _run(self, call: Binding, scratch: Tensor | None, **extra: Any) -> Any:
        if self.wants_workspace and scratch is None:
            scratch = allocate_workspace(self.workspace, call)
        return self._call(call.args, call.device, scratch, **extra)

    def _call(self, args: tuple[Any, ...], device: torch.device | None, scratch: Tensor | None, **extra: Any) -> Any:
        if self.config:
            extra.update(self.config)
        if self.wants_workspace:
            extra["workspace"] = scratch
        if self.named:
            extra.update(zip(self.named, args[-len(self.named) :], strict=True))
            args = args[: -len(self.named)]
        assert device is not None
        if is_current(device):
            return self.fn(*args, **extra)
        with torch.cuda.device(device):
            return self.fn(*args, **extra)


def is_current(device: torch.device) -> bool:
    """Whether a launcher that takes the current device, as Triton does, launches on ``device``; True for CPUs."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def fit_outputs(spec: OpSpec, call: Binding, result: Any) -> tuple[Tensor, ...]:
    """Returned tensors → outputs that keep the declaration's promise: shape, dtype, device, contiguous, fresh."""
    values = () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(values) != len(spec.outputs):
        raise error("SL301", where=spec.name, got=f"{len(values)} outputs", expected=f"{len(spec.outputs)} outputs")
    env = dict(call.env)
    owned = {t.untyped_storage().data_ptr() for t in _tensors(call.args)}
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        dtype = call.dtype_of(out.tensor)
        if not isinstance(value, Tensor) or value.dtype != dtype or value.device != call.device:
            got = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise error("SL301", where=where, got=got, expected=f"{dtype} on {call.device}")
        _measure_dynamic(spec, where, env, out.tensor.dims, value)
    outs = []
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        if list(value.shape) != (shape := shape_of(out, env)):
            raise error(
                "SL301", where=where, got=f"shape {tuple(value.shape)}", expected=f"{out.tensor} = {tuple(shape)}"
            )
        value = value.resolve_conj().resolve_neg()
        storage = value.untyped_storage().data_ptr()
        fresh = value.contiguous() if storage not in owned else value.clone(memory_format=torch.contiguous_format)
        owned.add(fresh.untyped_storage().data_ptr())
        outs.append(fresh)
    return tuple(outs)


def own_outputs(result: Any) -> Any:
    """What a reference returned, as outputs that share no memory with anything: by operations that autograd knows."""
    if isinstance(result, Tensor):
        return result.clone(memory_format=torch.contiguous_format)
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in result)


def _measure_dynamic(spec: OpSpec, where: str, env: dict[str, Any], dims: Sequence[Any], value: Tensor) -> None:
    """Read data-dependent sizes off the first output that has them, and hold them to their bounds."""
    if not spec.dynamic or value.dim() < len(dims) - 1:
        return
    spread = next((i for i, d in enumerate(dims) if d.kind == "variadic"), len(dims))
    for i, dim in enumerate(dims):
        axis = i if i < spread else i - len(dims)
        if dim.text in spec.dynamic and dim.text not in env and -value.dim() <= axis < value.dim():
            env[dim.text] = value.shape[axis]
            check_bound(spec, where, dim.text, env)


def check_bound(spec: OpSpec, where: str, dim: str, env: dict[str, Any]) -> None:
    """SL302 unless ``env[dim]`` respects the declared bound."""
    bound = spec.dynamic[dim](env)
    if not 0 <= env[dim] <= bound:
        raise error("SL302", where=where, got=f"{dim} = {env[dim]}", expected=f"{dim} <= {spec.dynamic[dim]} = {bound}")


def check_sharing(spec: OpSpec, call: Binding) -> None:
    """SL210 when a mutated tensor starts where another argument does: what the other one holds would be undefined."""
    tensors = [(a.name, t) for a, v in zip(spec.args, call.args, strict=True) for t in _tensors((v,))]
    for name in spec.mutated:
        target = call.args[spec.args.index(spec.arg(name))]
        for other, t in tensors:
            if other != name and t.numel() and t.data_ptr() == target.data_ptr():
                raise error(
                    "SL210",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"memory of argument {other!r}",
                    expected="memory of its own",
                    what="mutated tensor is another argument too",
                )


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))


_fill: ContextVar[int | None] = ContextVar("shiplap_workspace_fill", default=None)
_listeners: list[Callable[[int | None], None]] = []


def on_poison(listener: Callable[[int | None], None]) -> None:
    """Tell ``listener`` the byte in force, now and at each change: for bindings that allocate workspaces themselves."""
    _listeners.append(listener)
    listener(_fill.get())


def _tell() -> None:
    for listener in _listeners:
        listener(_fill.get())


@contextmanager
def poisoned_workspace(byte: int) -> Iterator[None]:
    """Within this context every workspace arrives filled with ``byte``: what a kernel must not depend on."""
    token = _fill.set(byte)
    _tell()
    try:
        yield
    finally:
        _fill.reset(token)
        _tell()


def allocate_workspace(expr: Expr | None, call: Binding) -> Tensor:
    """Scratch of the declared size in bytes, from PyTorch's allocator on the call's device: a graph pool owns it."""
    return _scratch(workspace_size(expr, call), call.device)


def _scratch(size: int, device: torch.device | None) -> Tensor:
    scratch = torch.empty(size, dtype=torch.uint8, device=device)
    byte = _fill.get()
    return scratch if byte is None else scratch.fill_(byte)


def workspace_size(expr: Expr | None, call: Binding) -> int:
    """What the workspace expression ``expr`` asks for in this call, in bytes."""
    if expr is None:
        return 0
    env = call.env
    if "threads" in expr.names:
        env = {**env, "threads": torch.get_num_threads()}
    if "itemsize" in expr.names:
        env = {**env, "itemsize": _itemsize(call)}
    return int(expr(env))


def _itemsize(call: Binding) -> int:
    """Bytes of an element of the widest dtype class of the call (its ``Float``, usually), else of its widest tensor."""
    return max((d.itemsize for d in call.dtypes.values() or (t.dtype for t in _tensors(call.args))), default=1)
