"""Checks of an op or a function that has no declaration: its calls are compared with other calls of itself.

Each check takes ``op``, an op of torch or a ``PythonFunction``, and ``make``, which returns fresh arguments by name. It
returns the problem as text, "" for none, and raises ``NotApplicable`` where the op cannot show anything. A finding's
script contains the text of this module and of ``tensors``, so that both import torch alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.tensors import map_tensors, seed_generators, shifted, strided, tensors_in, transposed

FAKE_REFUSES = "the fake implementation refuses a call that the kernel takes"
# A check needs new arguments for each call, since the op may write to them.
Make = Callable[[], dict[str, Any]]


class NotApplicable(Exception):
    """The error that the op refuses a call that a check needs, so that the check does not apply."""


class MissingRegistration(Exception):
    """The error that the op lacks a registration that torch needs, such as a fake implementation."""


def invoke(op: Any, arguments: dict[str, Any]) -> Any:
    """Return the result of a torch op or a ``PythonFunction`` on ``arguments``, a dict from name to value. Keyword-only
    arguments are passed as keywords, and all others by position.
    """
    if isinstance(op, PythonFunction):
        call, named = op.function, set(op.keywords)
    else:
        call, named = op, {a.name for a in op._schema.arguments if a.kwarg_only}
    positional = [v for n, v in arguments.items() if n not in named]
    return call(*positional, **{n: v for n, v in arguments.items() if n in named})


def call_op(op: Any, arguments: dict[str, Any]) -> Any:
    """Return the result of the op on ``arguments``, a dict from name to value, after torch was seeded with 0. Raise
    ``NotApplicable`` if the op raises an exception, so that a check skips arguments that the op refuses.
    """
    seed_generators()
    try:
        result = invoke(op, arguments)
    except MissingRegistration:
        raise
    except Exception as e:
        end_if_device_fails()
        raise NotApplicable(f"{type(e).__name__}: {e}") from e
    end_if_device_fails()
    return result


def end_if_device_fails() -> None:
    """End this process by SIGABRT if a kernel has left the CUDA device of this process unusable, as an access to memory
    that is not its own does. Every later call of the process would fail as well. Do nothing if CUDA is not in use.
    """
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            print(str(e).partition("\n")[0], flush=True)
            os.abort()


def difference(result: Any, expected: Any, tolerance: float = 1e-4, floor: float = 0.0) -> str:
    """Return a message that says where two results differ by more than ``tolerance`` times the largest expected
    magnitude, or an empty string if they do not. Integers must be equal, and infinities and NaN must be at the same
    positions. Unless ``tolerance`` is 0, four times the precision of the dtype is allowed as well, and a thousandth on
    a GPU but for float64. An error of at most ``floor`` is allowed, too.
    """
    left, right = tensors_in(result), tensors_in(expected)
    if len(left) != len(right):
        return f"{len(left)} tensors in place of {len(right)}"
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {number}: {tuple(a.shape)} {a.dtype} in place of {tuple(b.shape)} {b.dtype}"
        if not a.numel():
            continue
        a, b = a.detach(), b.detach()
        if not (a.dtype.is_floating_point or a.dtype.is_complex):
            if not torch.equal(a, b):
                return f"result {number}: {int((a != b).sum())} of {a.numel()} values differ"
            continue
        # Sums in another order round to a neighbouring value, which is far away in a narrow dtype. A GPU adds in any
        # order, and multiplies numbers of ten bits where torch or Triton allows TF32.
        double = a.dtype in (torch.float64, torch.complex128)
        least = max(4 * torch.finfo(a.dtype).eps, 0.0 if double or a.device.type == "cpu" else 1e-3)
        allowed = max(tolerance, least) if tolerance else 0.0
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        a, b = a.to(wide), b.to(wide)
        # Infinities are compared by their places, since their difference is NaN.
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return f"result {number}: other values are infinite or NaN"
        if not finite.any():
            continue
        size, error = b[finite].abs().max().item(), (a[finite] - b[finite]).abs().max().item()
        if error > max(allowed * max(size, 1e-30), floor):
            return f"result {number}: differs by {error:.3g}, where the largest value is {size:.3g}"
    return ""


def on_cpu_alone(e: BaseException) -> bool:
    """Return whether ``e`` says that a kernel without a fake implementation refuses tensors that are not on the CPU."""
    words = ("on cpu", "on the cpu", "be a cpu tensor", "cpu tensors", "on device meta")
    return any(w in str(e).lower() for w in words)


def written_names(op: Any) -> set[str]:
    """Return the names of the arguments that the op writes to, according to its schema. Return an empty set for a
    function, which has no schema.
    """
    if isinstance(op, PythonFunction):
        return set()
    return {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def aliased_names(op: Any) -> set[str]:
    """Return the names of the arguments that the op's schema marks as aliased or written. A result may share memory
    with these.
    """
    return {a.name for a in op._schema.arguments if a.alias_info is not None}


def storage_place(t: torch.Tensor) -> int:
    """Return the address of the memory of a tensor. Tensors that share memory have the same one."""
    return t.untyped_storage().data_ptr()


def check_repeat(op: Any, make: Make) -> str:
    """Call the op twice with equal arguments, which ``make()`` returns anew each time. Return a message that says how
    the results differ, or an empty string if they do not differ.
    """
    first, second = call_op(op, make()), call_op(op, make())
    problem = difference(second, first, 1e-5)
    return problem and f"a second call with equal arguments gives something else: {problem}"


def check_uninitialized(op: Any, make: Make) -> str:
    """Call the op while torch fills new memory with NaN or the largest integer. Return a message that says how the
    result changes, which shows that it holds memory that the op has not written. Return an empty string if it does not
    change. ``make()`` returns the arguments.
    """
    expected = call_op(op, make())
    first, second = make(), make()  # before new memory is filled, as another op may make an argument
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        result, again = call_op(op, first), call_op(op, second)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if difference(again, result, 1e-3):  # the memory is not the cause
        return ""
    problem = difference(result, expected, 1e-3)
    return problem and f"a result holds memory that was never written: {problem} once new memory is filled"


def check_mutation(op: Any, make: Make) -> str:
    """Call the op on the arguments that ``make()`` returns. Return a message that names an argument that it writes to
    although its schema does not say so, or an empty string if there is none. A function may write to an argument that
    it returns, as functions that work in place do.
    """
    arguments, declared = make(), written_names(op)
    before = map_tensors(arguments, torch.clone)
    returned = {storage_place(t) for t in tensors_in(call_op(op, arguments))}
    for name, value in arguments.items():
        problem = "" if name in declared else difference(value, before[name], 0.0)
        if problem and isinstance(op, PythonFunction):
            if not returned & {storage_place(t) for t in tensors_in(value)}:
                return f"the function writes to {name}, which it does not return: {problem}"
        elif problem:
            return f"the op writes to {name}, which its schema does not say: {problem}"
    return ""


def check_alias(op: Any, make: Make) -> str:
    """Call the op twice on arguments that ``make()`` returns. Return a message that names a result that shares memory
    with another result, with an argument or with a result of the other call, or an empty string if there is none.

    An argument with which the schema lets a result share memory is left out. If there is such an argument, results may
    also share memory with each other. A function has no schema, so that its results may be views.
    """
    arguments, others = make(), make()
    results = [t for t in tensors_in(call_op(op, arguments)) if t.numel()]
    given = {storage_place(t) for t in tensors_in(arguments)}
    kept = {storage_place(t) for t in results} - given
    for number, t in enumerate(tensors_in(call_op(op, others))):
        if t.numel() and storage_place(t) in kept:
            return f"result {number} lies in the memory of an earlier call's result, which the second call overwrites"
    if isinstance(op, PythonFunction):
        return ""
    allowed = aliased_names(op)
    # Tensors without elements have no memory that could be shared.
    owners = {
        storage_place(t): name
        for name, value in arguments.items()
        if name not in allowed
        for t in tensors_in(value)
        if t.numel()
    }
    places = [storage_place(t) for t in results]
    for number, place in enumerate(places):
        if place in owners:
            return f"result {number} shares the memory of {owners[place]}, which the schema does not say"
        if place in places[:number] and not allowed:
            return f"results {places.index(place)} and {number} share memory, which the schema does not say"
    return ""


def check_layout(op: Any, make: Make) -> str:
    """Call the op on tensors with equal values but other strides or another storage offset. Return a message that says
    how the result changes, or an empty string if it does not change. Raise ``NotApplicable`` if the op refuses some of
    these calls and the result changes in none of the others. ``make()`` returns the arguments.
    """
    expected, declared = call_op(op, make()), written_names(op)
    refused = ""
    for name in (n for n, v in make().items() if tensors_in(v) and n not in declared):
        for change in (strided, transposed, shifted):
            arguments = make()
            arguments[name] = map_tensors(arguments[name], change)
            try:
                result = call_op(op, arguments)
            except NotApplicable as e:
                refused = str(e)
                continue
            if problem := difference(result, expected):
                return f"{name} {change.__name__} (equal values, other strides or offset): {problem}"
    # An op may refuse strides, so that a refusal alone is no finding.
    if refused:
        raise NotApplicable(refused)
    return ""


def check_fake(op: Any, make: Make) -> str:
    """Call the op and its fake implementation on the arguments that ``make()`` returns. Return a message that says how
    the shapes, dtypes or strides of the results differ, or an empty string if they agree. Raise ``MissingRegistration``
    if there is no fake implementation, and ``NotApplicable`` if sizes depend on data, and for a function.
    """
    if isinstance(op, PythonFunction):
        raise NotApplicable("a function has no fake implementation")
    real = tensors_in(call_op(op, make()))
    arguments = map_tensors(make(), lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
    try:
        made = invoke(op, arguments)
    except NotImplementedError as e:
        raise MissingRegistration("no fake implementation") from e
    except Exception as e:
        if on_cpu_alone(e) or "no fake impl" in str(e):
            raise MissingRegistration("no fake implementation") from e
        if (
            "unbacked" in str(e)
            or "DataDependent" in type(e).__name__
            or "get_ctx" in str(e)
            or "meta tensor" in str(e)
        ):
            raise NotApplicable("sizes of results depend on data") from e
        return f"{FAKE_REFUSES}: {type(e).__name__}: {e}"
    fakes = tensors_in(made)
    if len(fakes) != len(real):
        return f"the fake implementation returns {len(fakes)} tensors, the kernel {len(real)}"
    for number, (fake, true) in enumerate(zip(fakes, real, strict=True)):
        if fake.shape != true.shape or fake.dtype != true.dtype:
            if fake.dtype == true.dtype and has_size_of_data(op, make):
                raise NotApplicable("sizes of results depend on data")
            return (
                f"result {number}: the fake implementation returns {tuple(fake.shape)} {fake.dtype}, "
                f"the kernel {tuple(true.shape)} {true.dtype}"
            )
        # The stride of a dim of one element is never used.
        steps = [(a, b) for n, a, b in zip(true.shape, fake.stride(), true.stride(), strict=True) if n > 1]
        if true.numel() and any(a != b for a, b in steps):
            return f"result {number}: strides {fake.stride()} of the fake implementation, {true.stride()} of the kernel"
    return ""


def has_size_of_data(op: Any, make: Make) -> bool:
    """Return whether the fake implementation of the op gives a result a size that depends on data. Outside of a trace,
    where there are no such sizes, it has to return another one. ``make()`` returns the arguments.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        traced = make_fx(lambda arguments: tensors_in(invoke(op, arguments)), tracing_mode="fake")(make())
    except Exception:
        return False
    (results,) = next(iter(traced.graph.find_nodes(op="output"))).args
    return any(type(n) is not int for result in results for n in result.meta["val"].shape)


def check_precision(op: Any, make: Make) -> str:
    """Call the op with float32 arguments and with their values in float64. Return a message that says how the results
    differ, or an empty string if they are close. Whole numbers are not compared, since rounding may move one to its
    neighbour. Raise ``NotApplicable`` if the op does not compute in both. ``make()`` returns the arguments.
    """
    if not any(t.dtype is torch.float32 for t in tensors_in(make())):
        raise NotApplicable("no argument in float32")
    result = call_op(op, make())
    wide = call_op(op, map_tensors(make(), lambda t: t.double() if t.dtype is torch.float32 else t))
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    if not any(t.dtype in narrower for t in tensors_in(wide)):
        raise NotApplicable("float64 gives no result in float64")
    narrow = [t.to(narrower.get(t.dtype, t.dtype)) for t in tensors_in(wide)]

    def numbers(ts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of floating-point or complex numbers among ``ts``."""
        return [t for t in ts if t.is_floating_point() or t.is_complex()]

    problem = difference(numbers(tensors_in(result)), numbers(narrow), 1e-2)
    return problem and f"as float64 the same values give something else than as float32: {problem}"


def check_compile(op: Any, make: Make) -> str:
    """Compile a call of the op into one graph with dynamic sizes. A function may be compiled into several graphs.
    Return a message that says how the results differ from those of an eager call, or an empty string if they agree.
    Raise ``MissingRegistration`` if there is no fake implementation, or if a function cannot be compiled. ``make()``
    returns the arguments.
    """
    expected = call_op(op, make())
    python = isinstance(op, PythonFunction)
    call = op.function if python else op

    def function(arguments: dict[str, Any]) -> Any:
        """Return the result of the op on the values of ``arguments``, passed by position."""
        return call(*arguments.values())

    keywords = op.keywords if python else [a.name for a in op._schema.arguments if a.kwarg_only]
    if keywords or not tensors_in(expected):
        raise NotApplicable("keyword arguments, or no tensor in the result")
    torch.compiler.reset()
    seed_generators()
    try:
        # This backend traces the op with fake tensors as Inductor does, but generates no code.
        result = torch.compile(function, fullgraph=not python, dynamic=True, backend="aot_eager")(make())
    except Exception as e:
        if python:
            raise MissingRegistration("a compiled call of the function raises") from e
        text = " ".join(str(e).split())
        if "no fake impl" in text or "Meta" in text or "fake" in text.lower() or "data-dependent" in text.lower():
            raise MissingRegistration("no fake implementation for compiled code") from e
        if "output has alias annotations" in text:
            raise MissingRegistration("no form without aliased results for compiled code") from e
        return f"a compiled call raises where an eager one does not: {type(e).__name__}: {text[:200]}"
    problem = difference(result, expected)
    return problem and f"a compiled call gives something else: {problem}"


def check_crash(op: Any, make: Make) -> str:
    """Call the op once on the arguments that ``make()`` returns, and return an empty string. If the call ends the
    process, the parent process reports that.
    """
    call_op(op, make())
    return ""


def check_rows(op: Any, make: Make) -> str:
    """Call the op on arguments with 0 rows or 1 row, which ``make()`` returns, and return an empty string. Raise
    ``MissingRegistration`` if the op raises, which is counted apart, since an op may refuse such arguments.
    """
    try:
        call_op(op, make())
    except NotApplicable as e:
        raise MissingRegistration("a call with 0 rows or 1 row raises") from e
    return ""


def check_surplus(op: Any, make: Make) -> str:
    """Call the op on the arguments that ``make()`` returns, and with one element more in each vector of offsets alone.
    It repeats the last one, and so adds an empty row. Return an empty string. Raise ``MissingRegistration`` if the
    result is the same, so that the op does not compare the number of offsets with its other arguments, and a wrong
    number of them goes unnoticed.
    """
    expected = call_op(op, make())
    for name, value in make().items():
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
            continue
        if value.dim() != 1 or len(value) < 2 or value[0] != 0 or value[-1] == 0 or (value.diff() < 0).any():
            continue
        arguments = make()
        arguments[name] = torch.cat([arguments[name], arguments[name][-1:]])
        try:
            result = call_op(op, arguments)
        except NotApplicable:
            continue
        if not difference(result, expected, 0.0):
            raise MissingRegistration("an offset too many is taken and ignored")
    return ""


def check_reference(op: Any, make: Make) -> str:
    """Call a function and its plain version on the arguments that ``make()`` returns. Return a message that says how
    the results differ, or an empty string if they are close. Raise ``NotApplicable`` if the package ships no plain
    version, if that refuses the arguments or returns another number of tensors, or if an argument that it does not take
    has another value than its default.
    """
    if not isinstance(op, PythonFunction) or op.reference is None:
        raise NotApplicable("no plain version")
    arguments = make()
    for name, parameter in inspect.signature(op.function).parameters.items():
        own = name in arguments and name not in op.shared and parameter.default is not parameter.empty
        if own and (tensors_in((arguments[name], parameter.default)) or arguments[name] != parameter.default):
            raise NotApplicable(f"the plain version does not take {name}")
    result = call_op(op, arguments)
    plain = call_op(PythonFunction(op.reference, op.shared), {n: v for n, v in make().items() if n in op.shared})
    if len(tensors_in(plain)) != len(tensors_in(result)):
        raise NotApplicable("the plain version returns another number of tensors")
    problem = difference(result, plain, 1e-2)
    name = f"{op.reference.__module__}.{op.reference.__qualname__}"
    return problem and f"{name}, the plain version of the package, returns something else: {problem}"
