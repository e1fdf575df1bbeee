"""The dims that ``op.batches`` declares, along which calls of an op may be joined."""

from __future__ import annotations

from dataclasses import dataclass

from shiplap.declare.spec import Arg, Dim, OpSpec, TensorType
from shiplap.errors import error


@dataclass(frozen=True)
class Batching:
    """A rule by which several calls can be merged into one. In the merged call, the arguments ``joined`` are
    concatenated along the dim ``dim``. All other arguments must be equal in the merged calls.

    Attributes:
        dim: the name of the dim along which arguments are concatenated.
        joined: pairs of the name of an argument with that dim and the dim's position in it.
        outputs: the position of the dim in each output.
    """

    dim: str
    joined: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]


def read_batching(spec: OpSpec, dim: str) -> Batching:
    """Return the rule by which calls of the op ``spec`` are merged along the dim named ``dim``. It holds the position
    of ``dim`` in each argument and in each output.

    Raise ``SL117`` if an argument or an output has ``dim`` twice, as ``#n``, in an expression or beside a variadic dim.
    Raise it also if no argument has ``dim``, if an output lacks it, or if another size is computed from it. Lists of
    tensors with the dim ``dim``, ops that write to arguments, and ops with data-dependent sizes are refused by the same
    error.
    """

    def place(name: str, tensor: TensorType) -> int | None:
        """Return the position of the dim ``dim`` among the dims of the tensor ``name``, or None if the tensor lacks it.
        Raise ``SL117`` unless it occurs once, by its bare name, and without a variadic dim in the same tensor.
        """
        at = [i for i, d in enumerate(tensor.dims) if dim in _dim_names(d)]
        if not at:
            return None
        if len(at) > 1 or tensor.dims[at[0]].kind != "name" or tensor.dims[at[0]].of or tensor.variadic:
            raise _batching_error(spec, dim, f"{dim!r} in {name!r}, {tensor}", "once, as a plain dim")
        return at[0]

    if spec.mutated or spec.dynamic:
        raise _batching_error(spec, dim, "an op that writes to its arguments, or whose sizes depend on data", "neither")
    tensors = [(a, place(a.name, a.tensor)) for a in spec.tensors if a.tensor is not None]
    joined = [(a.name, at) for a, at in tensors if at is not None and _require_single_size(spec, dim, a)]
    outputs = [place(o.name, o.tensor) for o in spec.outputs]
    # A size computed from the dim would have another value in the merged call.
    derived = [name for name, expr in spec.dims if dim in expr.names]
    if not joined or None in outputs or derived:
        got = f"{derived[0]} follows from it" if derived else "it is missing in an output, or in all arguments"
        raise _batching_error(spec, dim, got, "a dim of an argument and of every output")
    return Batching(dim, tuple(joined), tuple(at for at in outputs if at is not None))


def _dim_names(dim: Dim) -> frozenset[str]:
    """Return the names that the annotation of one dim mentions. For an expression, they are all names in it. For ``#n``
    it is ``n``, and for any other dim its own name.
    """
    return (dim.expr.names if dim.expr is not None else frozenset()) or frozenset({dim.of or dim.text})


def _require_single_size(spec: OpSpec, dim: str, arg: Arg) -> bool:
    """Return True if ``arg`` is a single tensor. Raise ``SL117`` if it is a list of tensors, whose members may differ
    in the size ``dim``.
    """
    if arg.many:
        raise _batching_error(spec, dim, f"the list {arg.name!r}", "single tensors")
    return True


def _batching_error(spec: OpSpec, dim: str, got: str, expected: str) -> Exception:
    """Return the exception ``SL117`` for a dim along which calls of the op cannot be merged. ``got`` is what was found,
    and ``expected`` is what the op or the dim must be.
    """
    return error("SL117", where=f"{spec.name}, batches({dim!r})", got=got, expected=expected)
