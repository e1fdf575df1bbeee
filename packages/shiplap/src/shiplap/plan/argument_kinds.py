"""The arrangement of a call's arguments by name, and the check for tensors in place of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from torch import Tensor

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Value
from shiplap.errors import ShiplapError, error
from shiplap.torch_private.dispatcher_transforms import is_differentiated

ABSENT_FIX = "pass a tensor. If the argument may be absent, add | None to its annotation"
_NUMBERS = frozenset(("int", "float", "bool", "complex", "Scalar"))


def number_check(
    spec: OpSpec, *, recorded: bool = False
) -> Callable[[Sequence[Value], Mapping[str, Value]], None] | None:
    """Return ``check(args, kwargs)``, which refuses tensors that torch would turn into numbers with a loss and without
    a warning. It raises ``SL220`` if an argument declared as a number is a tensor with a gradient, and ``SL209`` if an
    argument declared as an int is a tensor of floating-point numbers. Return None if no argument is a number.

    If ``recorded`` is true, the check runs inside the forward of an ``autograd.Function``, where gradients are off. It
    then reads only the tensor's ``requires_grad``. Otherwise it finds a gradient only while gradients are on.
    """
    # A number in a list, ``list[float]``, may be a tensor with a gradient as well.
    numbers = [(i, a) for i, a in enumerate(spec.args) if a.scalar and a.scalar.removeprefix("list[")[:-1] in _NUMBERS]
    numbers += [(i, a) for i, a in enumerate(spec.args) if a.scalar in _NUMBERS]
    if not numbers:
        return None

    def check(args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """Raise ``SL220`` if a number argument of the op, or a number in a list, is a tensor that carries a gradient.
        Raise ``SL209`` if it is an int, and the tensor is not of integers. The argument may be positional or a keyword.
        """
        for i, arg in numbers:
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(each, Tensor):
                    continue
                if each.requires_grad if recorded else is_differentiated(each):
                    raise _number_error(spec, arg, "SL220", "a tensor that requires a gradient", "")
                if arg.scalar in ("int", "list[int]") and (each.is_floating_point() or each.is_complex()):
                    fix = "pass an int, such as int(t) of the tensor t to cut off its fraction, or round(t.item())"
                    raise _number_error(spec, arg, "SL209", f"a tensor of {each.dtype}", fix)

    return check


def _number_error(spec: OpSpec, arg: Arg, id: str, got: str, fix: str) -> ShiplapError:
    """Return the error ``id`` of a call of the op ``spec`` with the tensor ``got`` for ``arg``, a declared number."""
    return error(id, where=f"{spec.name}, argument {arg.name!r}", got=got, expected=arg.kind, fix=fix)


def fix_of_tensor_for_number(arg: Arg, value: Value) -> str:
    """Return the fix of a call that passes ``value`` for the argument ``arg``, if that is a number and ``value`` is a
    tensor. Return an empty string otherwise.
    """
    if arg.scalar not in _NUMBERS or not isinstance(value, Tensor):
        return ""
    return (
        f"pass a number, such as t.item() of a tensor t with one element. If {arg.name} is to be several numbers, "
        "annotate it as a tensor"
    )


def fix_of_value_for_tensor(arg: Arg, value: Value) -> str:
    """Return the fix of a call that passes ``value``, which is no tensor, for the tensor argument ``arg``."""
    if value is None:
        return ABSENT_FIX
    name, kind = arg.name, type(value)
    if kind in (bool, int, float, complex):
        return (
            f"pass a tensor, such as torch.tensor({value!r}). If {name} is to be a number, annotate it as {name}: "
            f"{kind.__name__}"
        )
    if kind in (list, tuple):
        of_tensors = f"annotate it as {name}: list[{arg.tensor}]"
        return f"pass one tensor, such as torch.tensor(values). If {name} is to be a list of tensors, {of_tensors}"
    if kind.__module__.partition(".")[0] == "numpy":
        return f"pass a tensor, such as torch.from_numpy(a) for the array a that is passed as {name}"
    return f"pass a tensor as {name}"


def arrange_arguments(
    spec: OpSpec, schema: str, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the values of a call as a dict from argument name to value. Arguments that are absent are not in the dict.

    Raise ``SL209``, worded as Python's ``TypeError``, if ``args`` and ``kwargs`` do not fit the signature. ``schema``
    is the signature as the error prints it.
    """
    values: dict[str, Value] = {}
    missing = ""
    for index, arg in enumerate(spec.args):
        name, by_name = arg.name, arg.name in kwargs
        if index < len(args) and not arg.keyword_only:
            values[name] = args[index]
            if by_name:
                fix = f"pass {name} once, by position or as {name}="
                raise _signature_mismatch(spec, schema, f"multiple values for argument {name!r}", fix)
        elif by_name:
            values[name] = kwargs[name]
        # Only noted: an argument that is given twice further on is reported first.
        elif arg.default is ... and not missing:
            missing = name
        # A positional value beyond the last positional argument has no parameter to go to.
        if (index < len(args) and arg.keyword_only) or index + 1 == len(spec.args) < len(args):
            raise _signature_mismatch(spec, schema, "too many positional arguments")
    if missing:
        fix = f"pass {missing} as well"
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs and not spec.args[0].many:
            fix = f"to pass the items of one {type(args[0]).__name__} as arguments, write {spec.opname}(*values)"
        raise _signature_mismatch(spec, schema, f"missing a required argument: {missing!r}", fix)
    for name in kwargs:
        if name not in values:
            near = get_close_matches(name, [a.name for a in spec.args if a.name not in values], 1)
            fix = f"write {near[0]}= in place of {name}=" if near else ""
            fix = fix or f"remove {name}=, or write the name that 'expected' gives the argument"
            raise _signature_mismatch(spec, schema, f"an unexpected keyword argument {name!r}", fix)
    return values


def _signature_mismatch(spec: OpSpec, schema: str, got: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL209`` of a call whose arguments do not fit the signature. ``got`` is the reason, ``schema``
    the expected signature, and ``fix`` the repair, which the schema shows if it is empty.
    """
    what, fix = "the arguments do not fit the signature", fix or "pass the arguments that 'expected' lists, each once"
    return error("SL209", where=spec.name, what=what, got=got, expected=schema, fix=fix)
