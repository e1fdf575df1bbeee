"""The annotated arguments of a pattern.

The annotations state the values to which the arguments may be bound, and a proof draws samples from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.declare.broadcast import broadcast_dims
from shiplap.declare.dim_expression import Expr
from shiplap.declare.signature import read_arguments
from shiplap.declare.spec import Arg, OpSpec, TensorType
from shiplap.rewrite.graph import describe_node, fake_value
from shiplap.rewrite.match import Obstacle
from shiplap.torch_private.symbolic_sizes import sizes_equal


class PatternSignature:
    """The parameters of a pattern, with the types that their annotations state.

    ``name`` is the name of the rewrite, and ``parameters`` are the names of the parameters. ``args`` holds the
    annotated arguments. It is empty if a parameter has no annotation or only ``Tensor``. The author of the pattern then
    has to give samples.
    """

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        """Read the parameters of the pattern ``fn``. If all are annotated with more than a bare ``Tensor``, read their
        types. Raise an error of the catalogue for a wrong annotation.
        """
        self.name, self.parameters = name, tuple(inspect.signature(fn).parameters)
        # A plain Tensor says neither which dtypes nor which sizes are meant, so that samples have to.
        says_nothing = (inspect.Parameter.empty, Any, Tensor, "Any", "Tensor", "torch.Tensor")
        annotated = all(p.annotation not in says_nothing for p in inspect.signature(fn).parameters.values())
        self.args: tuple[Arg, ...] = read_arguments(f"rewrite::{name}", fn) if annotated else ()

    @property
    def dims(self) -> frozenset[str]:
        """The names of the dims in the annotations of the arguments, such as ``rows``. Dims of a fixed size and
        variadic dims are left out.
        """
        return frozenset(d.text for a in self.args if a.tensor for d in a.tensor.dims if d.kind == "name")

    def dim_at(self, name: str, position: int) -> str:
        """Return the name of the dim at ``position`` of the argument ``name``. For ``("x", -1)``, it is the name of the
        last dim of ``x``. Return an empty string if there is no such dim, if it has no name, or if a variadic dim makes
        its position unknown.
        """
        arg = next((a for a in self.args if a.name == name and a.tensor), None)
        dims = arg.tensor.dims if arg and arg.tensor else ()
        variadic = any(d.kind == "variadic" for d in (dims[: position + 1] if position >= 0 else dims[position:]))
        if variadic or not -len(dims) <= position < len(dims):
            return ""
        return dims[position].text if dims[position].kind == "name" else ""

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of the tensor arguments that may be None."""
        return tuple(a.name for a in self.args if a.tensor and a.optional)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the arguments that are scalars, in the order of the parameters."""
        return tuple(a.name for a in self.args if a.scalar)

    def spec(self, requires: Iterable[str] = ()) -> OpSpec:
        """Return a declaration, like that of an op, with the pattern's arguments and the preconditions ``requires``.
        Samples of arguments are drawn from it. It has no outputs.
        """
        return OpSpec(
            f"rewrite::{self.name}",
            self.args,
            (),
            dims=tuple((k, Expr(v)) for k, v in broadcast_dims(self.args).items()),
            requires=tuple(Expr.parse(r, f"rewrite {self.name!r}, where") for r in requires),
        )

    def bind(
        self, bound: Mapping[str, Any], *, may_guard: bool = False
    ) -> tuple[dict[str, Any], tuple[Obstacle, str] | None]:
        """Compare the values that a match binds to arguments with the pattern's annotations. Return a dict of the
        values of arguments and dims by name, and an obstacle.

        The obstacle is a pair of its kind and the reason, or None if all values fit. ``bound`` maps the names of
        arguments to values or nodes. If ``may_guard`` is true, the equality of two symbolic sizes may become a guard of
        the compiled code.
        """
        env = {k: fake_value(v) if isinstance(v, Node) else v for k, v in bound.items()}
        seen: dict[str, tuple[Any, str]] = {}
        for arg in self.args:
            held = env.get(arg.name)
            if arg.tensor is None or (held is None and arg.optional):
                continue
            if not isinstance(held, Tensor):
                return env, ("argument", f"{arg.name} would be {held!r}, the pattern takes {arg.tensor}")
            node = bound[arg.name]
            problem = _why_dtype_unfit(arg, held, seen, node) or _why_shape_unfit(
                arg, arg.tensor, held, seen, node, may_guard
            )
            if problem:
                return env, problem
        return {**{k: v for k, (v, _) in seen.items() if k.isidentifier()}, **env}, None


def _why_dtype_unfit(
    arg: Arg, held: Tensor, seen: dict[str, tuple[Any, str]], node: Any
) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if the annotation of ``arg`` does not admit the dtype of its value
    ``held``. Return None if it does. ``seen`` holds the dtype of each class of arguments that must share a dtype, and
    is extended. ``node`` is described in the reason.
    """
    assert arg.tensor is not None
    name = str(held.dtype).removeprefix("torch.")
    if arg.tensor.dtypes and name not in arg.tensor.dtypes:
        return "dtype", f"{arg.name} is {describe_node(node)}, the pattern takes {arg.tensor.dtype_class}"
    if not arg.tensor.concrete:
        first, whose = seen.setdefault(f"dtype {arg.tensor.dtype_class}", (name, arg.name))
        if first != name:
            return "dtype", f"{arg.name} is {describe_node(node)}, {whose} is {first}: the pattern takes one dtype"
    return None


def _why_shape_unfit(
    arg: Arg, kind: TensorType, held: Tensor, seen: dict[str, tuple[Any, str]], node: Any, may_guard: bool
) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if the annotation ``kind`` of the argument ``arg`` does not admit the
    shape of its value ``held``. Return None if it does.

    ``seen`` holds the sizes of named dims, and is extended. If ``may_guard`` is true, the equality of two symbolic
    sizes may become a guard of the compiled code. ``node`` is described in the reason.
    """
    fixed = len(kind.dims) - kind.variadic
    if held.dim() < fixed or (held.dim() > fixed and not kind.variadic):
        return "shape", f"{arg.name} is {describe_node(node)}: {held.dim()} dims, the pattern takes {kind}"
    sizes = list(held.shape)
    for dim in kind.dims:
        got = tuple(sizes[: held.dim() - fixed]) if dim.kind == "variadic" else sizes[0]
        sizes = sizes[len(got) if isinstance(got, tuple) else 1 :]
        if dim.kind in ("any", "expr") or dim.text == "...":
            continue
        # A repeated dim may broadcast from 1.
        if dim.of and sizes_equal(got, 1, may_guard=False):
            continue
        name = dim.of or dim.text
        wanted, whose = (dim.size, "") if dim.kind == "fixed" else seen.setdefault(name, (got, arg.name))
        if not sizes_equal(got, wanted, may_guard=may_guard):
            origin = f", in {whose} it is {wanted}" if whose else f", the pattern has {wanted}"
            return "shape", f"{arg.name} is {describe_node(node)}: dim {dim.text} is {got}{origin}"
    return None
