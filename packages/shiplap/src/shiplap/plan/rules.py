"""The rules of calls, one function each. A rule is a condition in Python and in C++, and the error of a call that
breaks it.

There are four groups of rules. They concern one tensor argument, the sizes of a tensor, all arguments together, and the
memory that a caller passes for outputs and workspace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shiplap import dtypes
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import Arg, TensorType
from shiplap.plan.argument_kinds import ABSENT_FIX
from shiplap.plan.expression import (
    Expression,
    TensorPlace,
    Text,
    VariableNames,
    declared_value,
    equal_expression,
    quoted_text,
    shared_variable,
    values_text,
)
from shiplap.plan.rule import TRUE, ArgumentRule

# By dtype class, the unions that admit each of its common dtypes on its own.
_OWN_CLASSES = {
    "Float": ("Float16", "BFloat16", "Float32", "Float64"),
    "Int": ("Int8", "Int16", "Int32", "Int64"),
}
EXPAND_FIX = "pass tensors with the sizes under 'expected'. A size of 1 does not broadcast: call .expand() first"
BROADCASTS_ONE = "pass a tensor with one of the sizes under 'expected'"
ALIGNMENT = 64  # bytes: what kernels are promised of a workspace
GRADIENTS_ENABLED = "aoti_torch_grad_mode_is_enabled()"
NO_LISTS = "no code: a declaration with lists of tensors has no C++ form"
NO_VARIADIC_DIMS = "no code: a declaration with variadic dims has no C++ form"
BY_PYTHON = "Python, to which such calls are handed over: the stable ABI does not say whether a tensor has a gradient"

# --- one tensor argument ----------------------------------------------------------------------------------------------


def argument_rules(at: TensorPlace, arg: Arg) -> Iterator[ArgumentRule]:
    """Yield the rules (conditions with error texts) for one tensor argument that its declared flags require.

    The tensor must be contiguous if that is declared. If the op writes to it, no two of its elements may share memory.
    It must then also not require a gradient.
    """
    if arg.contiguous:
        yield is_contiguous(at)
    if arg.mutated:
        yield has_distinct_elements(at)
        if arg.tensor is not None and dtypes.differentiable(arg.tensor.dtypes):
            yield is_outside_autograd(at)


def argument_is_kind(op: str, arg: Arg) -> ArgumentRule:
    """Return the rule that an argument is of its annotated kind, such as a tensor, a number or a list. The error is
    ``SL209``.
    """
    by = "the dispatcher, and tvm-ffi's Arguments, which convert each value or refuse it"
    mismatch = (Expression("mismatch(arg, value)", ""),)
    where, expected = (f"{op}, argument '{arg.name}'",), (argument_kind_text(arg),)
    return ArgumentRule("SL209", Expression("not mismatch(arg, value)", TRUE.cpp), where, mismatch, expected, cpp_by=by)


def argument_kind_text(arg: Arg) -> str:
    """Return the kind of an argument as errors print it, such as ``list of 3 int or None``."""
    size = f"{arg.length} " if arg.length else ""
    kind = str(arg.tensor or arg.kind)
    if arg.many:
        kind = f"list of {size}{kind}" + " or None" * arg.absent
    elif size:
        kind += f" of length {arg.length}"
    return kind + " or None" * arg.optional


def is_tensor(at: TensorPlace, declared: str) -> ArgumentRule:
    """Return the rule (``SL209``) that an argument is a tensor. The dispatcher would also accept None. ``declared`` is
    the type as errors print it.
    """
    t = at.tensor.python
    return ArgumentRule(
        "SL209",
        # The dispatcher passes C++ nothing but tensors and None, and a call with None goes to Python.
        Expression(f"isinstance({t}, Tensor)", TRUE.cpp),
        at.where,
        (Expression(f"'None' if {t} is None else type({t}).__name__", ""),),
        (declared,),
        at.arg,
        cpp_by="Python, to which a call with None is handed over, and tvm-ffi's Arguments, which hand over tensors",
        fix=ABSENT_FIX,
        undecided="None for a tensor",
        deferral=undefined_condition("{index}"),
    )


def undefined_condition(index: int | str) -> str:
    """Return the C++ condition that None was passed for the tensor argument at ``index``. It must be tested before any
    property of the tensor is read.
    """
    return f"!peek_defined(values[{index}])"


def is_dense(at: TensorPlace) -> ArgumentRule:
    """Return the rule (``SL207``) that a tensor has strides, and so is neither sparse nor nested."""
    t = at.tensor.python
    got = (Expression(f"'a nested tensor' if {t}.is_nested else {t}.layout", ""),)
    by, fix = "the dispatch key under which the code is registered", "call .to_dense() first"
    holds = Expression(f"{t}.layout is strided", TRUE.cpp)
    return ArgumentRule("SL207", holds, at.where, got, ("a dense tensor",), at.arg, fix=fix, cpp_by=by)


def dtype_is_among(at: TensorPlace, dtype_class: str, names: tuple[str, ...]) -> ArgumentRule:
    """Return the rule (``SL204``) that the dtype of a tensor is one of ``names``, the dtypes of the class
    ``dtype_class``.
    """
    kind, numbers, single = at.dtype, dtypes.numbers(names), len(names) == 1
    # One comparison of integers, or one look into a bit mask of dtype numbers.
    cpp = f"{kind.cpp} == {numbers[0]}" if single and numbers else f"among({kind.cpp}, {dtypes.mask(names)})"
    holds = Expression(f"{kind.python} {'is' if single else 'in'} ok_{at.arg}", cpp)
    known = frozenset(getattr(torch, name) for name in names)
    constants = {f"ok_{at.arg}": next(iter(known)) if single else known}
    expected = (f"{dtype_class}: {', '.join(sorted(names))}",)
    return ArgumentRule("SL204", holds, at.where, (kind,), expected, at.arg, constants=constants)


def dtype_variable(dtype_class: str) -> Expression:
    """Return the expression that reads the variable ``dtype_<class>`` of generated code. It holds the dtype that all
    tensors of the dtype class have in a call.
    """
    name = f"dtype_{dtype_class}"
    return Expression(name, name, "", f"Dtype{{{name}}}")


def same_dtype(at: TensorPlace, kind: TensorType, origin: Text) -> ArgumentRule:
    """Return the rule (``SL205``) that a tensor has the dtype that an earlier tensor gave to the dtype class of
    ``kind``.

    ``origin`` names the earlier tensor. The fix of the error is to convert one of the tensors. For a single tensor of
    the classes ``Float`` and ``Int``, it also names an annotation with a dtype class of its own.
    """
    bound, fix = dtype_variable(kind.dtype_class), "convert one of the tensors with .to(dtype)"
    # All of them, since the text is written before the dtype of the tensor is known.
    classes = _OWN_CLASSES.get(kind.dtype_class, ())
    if classes and not at.many:
        annotation = " | ".join(str(replace(kind, dtype_class=each)) for each in classes)
        fix += f", or give {at.arg} a dtype class of its own in the declaration: {at.arg}: {annotation}"
    expected = (bound, ", as ", *origin, f" ({kind.dtype_class})")
    return ArgumentRule("SL205", equal_expression(at.dtype, bound), at.where, (at.dtype,), expected, at.arg, fix=fix)


def same_device(at: TensorPlace, origin: Text) -> ArgumentRule:
    """Return the rule (``SL206``) that a tensor is on the device of the call. ``origin`` names the argument that has
    set the device.
    """
    device = shared_variable("device")
    return ArgumentRule(
        "SL206", equal_expression(at.device, device), at.where, (at.device,), (device, ", as ", *origin), at.arg
    )


def is_contiguous(at: TensorPlace, id: str = "SL207") -> ArgumentRule:
    """Return the rule that the tensor at ``at`` is contiguous. ``id`` is the number of the error that a call gets
    otherwise.
    """
    holds = Expression(f"{at.tensor.python}.is_contiguous()", f"{at.tensor.cpp}.is_contiguous()")
    return ArgumentRule(id, holds, at.where, ("strides ", at.strides), ("a contiguous tensor",), at.arg)


def has_distinct_elements(at: TensorPlace) -> ArgumentRule:
    """Return the rule (``SL210``) for a tensor to which the op writes. No two of its elements may share memory."""
    t = at.tensor
    # Nearly every tensor is contiguous, which is answered without counting elements.
    holds = Expression(f"({t.python}.is_contiguous() or own_memory({t.python}))", f"own_memory({t.cpp})")
    return ArgumentRule(
        "SL210", holds, at.where, ("shape ", at.shape, ", strides ", at.strides), ("distinct memory",), at.arg
    )


def is_outside_autograd(at: TensorPlace) -> ArgumentRule:
    """Return the rule (``SL304``) for a tensor to which the op writes. It may not require a gradient while gradients
    are enabled.
    """
    return ArgumentRule(
        "SL304",
        Expression(f"not ({at.tensor.python}.requires_grad and is_grad_enabled())", TRUE.cpp),
        at.where,
        ("a tensor that requires grad",),
        ("a mutated tensor outside autograd",),
        at.arg,
        fix="call the op under torch.no_grad(), or pass .detach()",
        cpp_by=BY_PYTHON,
        undecided="a tensor that may require a gradient, since gradients are enabled",
        deferral=GRADIENTS_ENABLED,
    )


def shares_no_memory(at: TensorPlace, other: TensorPlace, *, output: bool = False, both: bool = False) -> ArgumentRule:
    """Return the rule (``SL210``) that the tensor ``at``, which is written to, shares no memory with the tensor
    ``other`` of the call. Otherwise the content of ``other`` would be undefined. ``output`` states whether ``at`` is an
    output or workspace that the caller passes, and otherwise it is a mutated argument. ``both`` states that the op
    writes to ``other`` too, so that a clone of neither tensor would keep both writes.
    """
    t, o, function = at.tensor, other.tensor, "overlap" if output else "shares_memory"
    title, fix = "an output overlaps another tensor", "pass a tensor of its own"
    if not output:
        title = "a mutated tensor is another argument too"
        fix = f"pass {other.arg}.clone() as {other.arg}, since a write to a clone of {at.arg} would not reach {at.arg}"
        if both:
            fix = f"pass tensors that share no memory as {at.arg} and {other.arg}, since the op writes to both"
    holds = Expression(f"not {function}({t.python}, {o.python})", f"!{function}({t.cpp}, {o.cpp})")
    got = ("memory of " if output else "memory of argument ", *quoted_text((other.arg,)))
    return ArgumentRule("SL210", holds, at.where, got, ("memory of its own",), at.arg, title=title, fix=fix)


def is_aligned(at: TensorPlace, alignment: int, *, output: bool = False) -> ArgumentRule:
    """Return the rule that the address of the tensor at ``at`` is a multiple of ``alignment`` bytes. If ``output`` is
    true, the tensor is an output that no copy can replace. The error is then ``SL212``, and otherwise ``SL207``.
    """
    t = at.tensor
    rest = Expression(f"{t.python}.data_ptr() % {alignment}", f"address({t.cpp}) % {alignment}")
    holds = Expression(f"{rest.python} == 0", f"{rest.cpp} == 0")
    if output:
        got, expected = f"an address that is no multiple of {alignment} bytes", "memory as an allocator gives it"
        fix = "pass torch.empty of the expected shape and dtype"
        return ArgumentRule("SL212", holds, at.where, (got,), (expected,), at.arg, fix=fix)
    got_rest = ("an address that is ", rest, f" modulo {alignment}")
    return ArgumentRule(
        "SL207", holds, at.where, got_rest, (f"memory aligned to {alignment} bytes",), at.arg, fix="pass .clone()"
    )


# --- the sizes of a tensor --------------------------------------------------------------------------------------------


def has_rank(at: TensorPlace, rank: int, declared: str, *, least: bool = False) -> ArgumentRule:
    """Return the rule (``SL201``) that a tensor has ``rank`` dims. If ``least`` is true, it has at least as many, since
    its type has a variadic dim (a dim that stands for any number of axes). ``declared`` is the declared type as text.
    """
    sign = ">=" if least else "=="
    holds = Expression(f"{at.rank.python} {sign} {rank}", f"{at.rank.cpp} {sign} {rank}")
    return ArgumentRule("SL201", holds, at.where, (at.rank, " dims, shape ", at.shape), (declared,), at.arg)


def same_size(
    at: TensorPlace, axis: int, name: str, bound: Expression, origin: Text, *, or_one: bool = False
) -> ArgumentRule:
    """Return the rule (``SL202``) that the named dim ``name`` of a tensor has the size ``bound``. If ``or_one`` is
    true, the size may also be 1, since the dim broadcasts.

    ``origin`` names the argument that gave the dim this size. ``axis`` is the position of the dim in the tensor. It is
    negative behind a variadic dim, which stands for any number of axes.
    """
    size, holds = at.size(axis), equal_expression(at.size(axis), bound)
    if or_one:
        # ``|`` and not ``or``: a symbolic comparison must not be turned into a bool.
        python = f"({size.python} == 1) | ({size.python} == {bound.python})"
        holds = Expression(python, f"({size.cpp} == 1 || {size.cpp} == {bound.cpp})")
    where = (*at.where, f", dim '{name}' (axis ", *at.axis(axis), ")")
    expected = (*(("1, or ",) if or_one else ()), f"{name} = ", bound, ", ", *origin)
    fix, of_one = (BROADCASTS_ONE, "") if or_one else ("", EXPAND_FIX)
    got, is_one = (f"{name} = ", size), f"{size.cpp} == 1"
    return ArgumentRule(
        "SL202", holds, where, got, expected, at.arg, fix=fix, fix_of_one=of_one, cpp_is_one=is_one if of_one else ""
    )


def fixed_size(at: TensorPlace, axis: int, wanted: int) -> ArgumentRule:
    """Return the rule (``SL203``) that the size of the tensor at ``at`` along ``axis`` is the number ``wanted`` of the
    declaration.
    """
    size, got = at.size(axis), ("size ", at.size(axis), " in axis ", *at.axis(axis))
    return ArgumentRule(
        "SL203", equal_expression(size, shared_variable(str(wanted))), at.where, got, (str(wanted),), at.arg
    )


def computed_size(at: TensorPlace, axis: int, source: str, wanted: Expression) -> ArgumentRule:
    """Return the rule (``SL202``) that the size of the tensor at ``at`` along ``axis`` is ``wanted``, the value of the
    expression ``source`` in the declaration.
    """
    size, got = at.size(axis), ("size ", at.size(axis), " in axis ", *at.axis(axis))
    return ArgumentRule("SL202", equal_expression(size, wanted), at.where, got, (f"{source} = ", wanted), at.arg)


def same_variadic_dims(at: TensorPlace, name: str) -> tuple[ArgumentRule, ArgumentRule]:
    """Return the two rules of the variadic dim ``name``, which stands for any number of axes.

    It has as many axes as the argument that set it (``SL201``), and the same sizes (``SL202``). The variable
    ``spread_<argument>`` holds the sizes of this argument.
    """
    here = Expression(f"spread_{at.arg}", "", f"show(spread_{at.arg})")
    bound = Expression(f"d_{name}", "", f"show(d_{name})")
    rank = Expression(f"len({here.python}) == len({bound.python})", TRUE.cpp)
    sizes = Expression(f"same_sizes({here.python}, {bound.python})", TRUE.cpp)
    got = (f"{name} = ", here)
    return (
        ArgumentRule("SL201", rank, at.where, got, (f"{name} = ", bound), at.arg, cpp_by=NO_VARIADIC_DIMS),
        ArgumentRule("SL202", sizes, at.where, got, (bound,), at.arg, cpp_by=NO_VARIADIC_DIMS),
    )


# --- all arguments together -------------------------------------------------------------------------------------------


def is_object(op: str, argument: str, cls: type, optional: bool) -> ArgumentRule:
    """Return the rule (``SL209``) that an argument is an instance of the declared class ``cls``. If ``optional`` is
    true, it may also be None. torch does not check this.
    """
    absent, none = f"a_{argument} is None or " * optional, " or None" * optional
    holds = Expression(f"{absent}isinstance(a_{argument}, class_{argument})", TRUE.cpp)
    where, got = (f"{op}, argument '{argument}'",), (Expression(f"type(a_{argument}).__name__", ""),)
    by, constants = "no code: a declaration with objects has no C++ form", {f"class_{argument}": cls}
    return ArgumentRule("SL209", holds, where, got, (cls.__name__ + none,), constants=constants, cpp_by=by)


def has_no_nul(op: str, argument: str) -> ArgumentRule:
    """Return the rule (``SL209``) that a string argument has no null character. A C kernel would read the string only
    up to that character, and the reference would read all of it.
    """
    return ArgumentRule(
        "SL209",
        Expression(f"'\\0' not in a_{argument}", f"a_{argument}.find('\\0') == std::string::npos"),
        (f"{op}, argument '{argument}'",),
        ("a text with a NUL character",),
        ("a text that C reads to its end",),
        title="a text has a NUL character",
        fix="pass the text without the NUL character",
    )


def is_choice(op: str, arg: Arg) -> ArgumentRule:
    """Return the rule (``SL221``) that an argument has one of its declared choices."""
    name, text = f"a_{arg.name}", arg.scalar == "str"
    # JSON's escapes of texts are those of C++.
    literals = [json.dumps(c, ensure_ascii=False) if text else repr(c) for c in arg.choices]
    cpp = " || ".join(f"{name} == {literal}" for literal in literals)
    condition = Expression(f"{name} in {arg.choices!r}", f"({cpp})")
    # The empty C++ form keeps such an op with Python.
    if arg.optional:
        condition = Expression(f"{name} is None or {name} in {arg.choices!r}", "")
    got: Text = ("'", shared_variable(name), "'") if text else (shared_variable(name),)
    expected = (arg.shown_choices + " or None" * arg.optional,)
    return ArgumentRule("SL221", condition, (f"{op}, argument '{arg.name}'",), got, expected)


def members_are_distinct(op: str, argument: str) -> ArgumentRule:
    """Return the rule (``SL210``) for a list of tensors to which the op writes. No two of its members may
    share memory.
    """
    members = f"a_{argument}"
    return ArgumentRule(
        "SL210",
        Expression(f"({members} is None or not any_shares_memory({members}))", TRUE.cpp),
        (f"{op}, argument '{argument}'",),
        ("memory of another member",),
        ("memory of its own",),
        title="two members of a mutated list share memory",
        cpp_by=NO_LISTS,
    )


def lists_have_members(op: str, variables: Sequence[str]) -> ArgumentRule:
    """Return the rule (``SL209``) that lists of tensors have a member if nothing else sets ``variables``. Each of these
    variables of generated code holds a size, a dtype or the device.
    """
    holds = Expression(" and ".join(f"{v} is not None" for v in variables), TRUE.cpp)
    return ArgumentRule("SL209", holds, (op,), ("an empty list of tensors",), ("at least one tensor",), cpp_by=NO_LISTS)


def agrees_with_computed(op: str, name: str, bound: Expression, computed: Expression, origin: Text) -> ArgumentRule:
    """Return the rule (``SL202``) that the size ``bound`` of a dim equals ``computed``, the value of the expression in
    ``dims=``. ``origin`` names the argument that gave the dim the size ``bound``.
    """
    expected = (f"{name} = ", bound, ", ", *origin)
    return ArgumentRule("SL202", equal_expression(computed, bound), (op,), (f"{name} = ", computed), expected)


def requirement_holds(op: str, expr: Expr, names: VariableNames, truth: Expression) -> ArgumentRule:
    """Return the rule (``SL208``) that the precondition ``expr`` of ``requires=`` holds. ``truth`` is its value."""
    return ArgumentRule("SL208", truth, (op,), values_text(expr, names), (expr.source,))


def has_value(op: str, expr: Expr, names: VariableNames) -> ArgumentRule:
    """Return the rule (``SL208``) that the evaluation of the declared expression ``expr`` raises nothing. The variable
    ``why`` is the exception.
    """
    got = (*values_text(expr, names), ": ", Expression("why", "why.what()", "why_none(why)"))
    return ArgumentRule("SL208", declared_value(expr, names), (op,), got, (f"a value of {expr}",))


# --- outputs, workspace, and what a kernel demands of memory ----------------------------------------------------------


def dense_condition(tensor: str) -> str:
    """Return the Python condition that the tensor in the variable ``tensor`` is neither sparse nor nested."""
    return f"{tensor}.layout is strided and not {tensor}.is_nested"


def wanted_dtype(output: str, dtype_class: str, names: tuple[str, ...]) -> Expression:
    """Return the expression for the dtype of ``output``. It is the variable ``want_<output>`` if ``names`` has only one
    dtype, and otherwise the variable of its dtype class.
    """
    if len(names) != 1:
        return dtype_variable(dtype_class)
    number = dtypes.number(names[0])
    return Expression(f"want_{output}", str(number), "", f"Dtype{{{number}}}")


def output_fits_kind(at: TensorPlace, dtype: Expression, concrete: str) -> ArgumentRule:
    """Return the rule (``SL212``) that an output passed by the caller is a tensor with strides, of the dtype ``dtype``,
    on the device of the call. If the declaration admits only one dtype, ``concrete`` is its name. Otherwise
    ``concrete`` is an empty string.
    """
    t, same, device = (
        at.tensor.python,
        equal_expression(at.dtype, dtype),
        equal_expression(at.device, shared_variable("device")),
    )
    python = f"isinstance({t}, Tensor) and {dense_condition(t)} and {t}.dtype == {dtype.python} and {device.python}"
    # C++ formats the text only where the check fails.
    filled = f'filled("{{}} on {{}}", {{{at.dtype.shown[1]}, {at.device.cpp}}})'
    constants = {dtype.python: getattr(torch, concrete)} if concrete else {}
    holds, got = Expression(python, f"{same.cpp} && {device.cpp}"), (Expression(f"kind_of_memory({t})", filled),)
    return ArgumentRule(
        "SL212", holds, at.where, got, (dtype, " on ", shared_variable("device")), at.arg, constants=constants
    )


def output_fits_shape(at: TensorPlace, sizes: Expression) -> ArgumentRule:
    """Return the rule (``SL212``) that an output passed by the caller has the shape ``sizes``."""
    name, rank = f"shape_{at.arg}", f"rank_{at.arg}"
    holds = Expression(f"tuple({name}) == {sizes.python}", f"has_sizes({name}, {rank}, {sizes.cpp})")
    got = ("shape ", Expression(f"tuple({name})", f"Tuple({name}, {rank})"))
    return ArgumentRule(
        "SL212", holds, at.where, got, ("shape ", Expression(sizes.python, f"Tuple({sizes.cpp})")), at.arg
    )


def output_size_is_valid(at: TensorPlace, source: str, size: Expression) -> ArgumentRule:
    """Return the rule (``SL208``) that a computed size of an output, the value of ``source``, is not negative."""
    holds = Expression(f"{size.python} >= 0", f"{size.cpp} >= 0")
    return ArgumentRule("SL208", holds, at.where, (f"{source} = ", size), ("a size",), at.arg)


def out_has_no_gradient(op: str, tensors: Sequence[str]) -> ArgumentRule:
    """Return the rule (``SL304``) that none of the variables ``tensors`` of an out-variant requires a gradient while
    gradients are enabled.
    """
    return ArgumentRule(
        "SL304",
        Expression(f"not (is_grad_enabled() and requires_grad(({', '.join(tensors)},)))", TRUE.cpp),
        (f"{op}, out=",),
        ("a tensor that requires grad",),
        ("tensors outside autograd",),
        title="an out-variant has no gradient",
        fix="call it under torch.no_grad(), or call the op without out=",
        cpp_by=BY_PYTHON,
        undecided="tensors that may require a gradient, since gradients are enabled",
        deferral=GRADIENTS_ENABLED,
    )


def scratch_fits_kind(op: str, name: str) -> ArgumentRule:
    """Return the rule (``SL213``) that a workspace passed by the caller is a uint8 tensor with one contiguous dim, on
    the device of the call. It has to be checked before the other rules of a workspace.
    """
    t, device = "scratch", "device_of(scratch)"
    python = f"isinstance({t}, Tensor) and {dense_condition(t)} and {t}.dtype == uint8 and {t}.device == device"
    holds = Expression(
        f"{python} and {t}.dim() == 1 and {t}.stride(0) == 1",
        f"{t}.dtype() == {dtypes.number('uint8')} && {device} == device && is_vector({t})",
    )
    extents = f"Tuple({t}.sizes(), {t}.dim()), Tuple({t}.strides(), {t}.dim())"
    filled = f'filled("{{}} on {{}}, {{}} by {{}}", {{Dtype{{{t}.dtype()}}, {device}, {extents}}})'
    got = (Expression(f"kind_of_memory({t}, extents=True)", filled),)
    expected = ("torch.uint8 on ", shared_variable("device"), ", one contiguous dim")
    return ArgumentRule("SL213", holds, (f"{op}, {name}",), got, expected, constants={"uint8": torch.uint8})


def scratch_has_room(op: str, name: str) -> ArgumentRule:
    """Return the rule (``SL213``) that a workspace passed by the caller has at least as many bytes as the variable
    ``needed`` of generated code.
    """
    size = Expression("scratch.numel()", "scratch.sizes()[0]")
    holds = Expression(f"{size.python} >= needed", f"{size.cpp} >= needed")
    return ArgumentRule(
        "SL213", holds, (f"{op}, {name}",), (size, " bytes"), ("at least ", shared_variable("needed"), " bytes")
    )


def scratch_is_aligned(op: str, name: str) -> ArgumentRule:
    """Return the rule (``SL213``) that the address of a workspace passed by the caller is a multiple of 64 bytes.
    Kernels may rely on this alignment.
    """
    # PyTorch's allocator aligns to this and more, a caller's view need not.
    rest = Expression(f"scratch.data_ptr() % {ALIGNMENT}", f"address(scratch) % {ALIGNMENT}")
    holds = Expression(f"{rest.python} == 0", f"{rest.cpp} == 0")
    got = ("an address that is ", rest, f" modulo {ALIGNMENT}")
    return ArgumentRule("SL213", holds, (f"{op}, {name}",), got, (f"memory aligned to {ALIGNMENT} bytes",))


def is_on_cpu(op: str) -> ArgumentRule:
    """Return the rule (``SL206``) that a call of a tvm-ffi function is on the CPU, since its kernel runs there. tvm-ffi
    itself accepts tensors of any device.
    """
    device = shared_variable("device")
    return ArgumentRule(
        "SL206", Expression("device.type == 'cpu'", "device.type == kDLCPU"), (op,), (device,), ("cpu",)
    )


def size_is_within_bound(where: str, dim: str, source: str) -> ArgumentRule:
    """Return the rule (``SL302``) that a data-dependent size, the variable ``extent_<dim>``, is between 0 and its
    declared bound, the variable ``d_<dim>``. ``source`` is the expression of the bound.
    """
    size, bound = shared_variable(f"extent_{dim}"), shared_variable(f"d_{dim}")
    holds = Expression(f"0 <= {size.python} <= {bound.python}", f"0 <= {size.cpp} && {size.cpp} <= {bound.cpp}")
    return ArgumentRule("SL302", holds, (where,), (f"{dim} = ", size), (f"{dim} <= {source} = ", bound))
