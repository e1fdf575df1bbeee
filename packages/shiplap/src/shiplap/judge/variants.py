"""Forms of inputs for a reference that comes with one function for inputs only: other shapes and other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap.judge.index_bounds import is_index_data
from shiplap.judge.shapes import (
    LARGEST_WINDOW,
    ONES,
    SECRET_RANDOM,
    Shapes,
    count_elements,
    neighbouring_shapes,
    replace_size,
    shapes_from_constants,
    shapes_near_constants,
    shapes_with_many_rows,
    varied_shapes,
    varied_sizes,
)
from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sampling.compare import float8_to_float32
from shiplap.sampling.layouts import LAYOUTS, apply_layout, layout_is_possible
from shiplap.sampling.recipe import SampleRecipe

_KINDS = "drawn normal wide tiny skewed ties shifted constant scaled large small sunk huge"
VALUE_KINDS = tuple(_KINDS.split())
INTEGER_KINDS = ("whole", "flags")  # kinds of values of integers and flags
# Kinds that are used only if every result of the reference is finite.
FINITE_KINDS = ("blank", "exact", *INTEGER_KINDS)
# Powers of ten between which a scale is drawn.
DECADES = {"scaled": (-3.0, 3.0), "large": (3.0, 5.0), "small": (-7.0, -3.0), "huge": (9.5, 12.0)}
WHOLE_NUMBERS, MOST_EXACT = (-0.0, *map(float, range(-8, 9))), 32  # at most so many numbers of the code
MAX_THRESHOLDS = 6  # the most constants of the candidate around which values are drawn
MAX_SIGNED_FORMS = 4  # the most arguments that get negative numbers, each alone
LARGEST_INTEGER = 1 << 20  # the largest integer, whose sums are not exact in float32
MAX_SCALAR_FORMS = 6  # the most scalars that get another value
LARGER, ROOM = 4, 1 << 14  # other shapes may grow by this factor, or to this number of elements
LARGE, REDUCED = 1 << 20, 1 << 16  # elements above which most kinds of values are tried on fewer, and their number
COMPARED_NUMBERS, FAR_ELEMENTS = 8, 1 << 21  # constants near which sizes are tried, and the most elements for that
KINDS_AT_SIZE = 3  # kinds of values, chosen secretly, that a large shape gets as well
# Rows of slices, strided elements, transposed matrices and broadcast rows are frequent, so that no draw may miss them.
LAYOUT_FORMS = ("offset", "padded", "strided", "transposed", "expanded", "expanded_last", "mixed")
MIXED_LAYOUTS = tuple(name for name in LAYOUTS if name != "offset" and not name.startswith("expanded"))
LARGEST_THRESHOLD = 1e7  # larger constants are no thresholds of values


@dataclass(frozen=True)
class InputForm:
    """The shapes, the memory layout and the kind of values of the inputs of one call.

    For a declared op, ``recipe`` holds all of these. For a function or module, ``recipe`` is None and the other fields
    hold them.
    """

    label: str
    timed: bool = False
    recipe: SampleRecipe | None = None
    shapes: Shapes = ()
    kind: str = "drawn"
    scale: float = 0.0  # the approximate size of the values of kind "about"
    shift: float = 0.0  # what is added to the values of kind "about"
    exact: tuple[float, ...] = ()  # the numbers that half of the values of kind "exact" are
    signed: tuple[int, ...] = ()  # tensors that get negative numbers although none of their own is negative
    plain: tuple[int, ...] = ()  # the arguments, numbers or flags, that get other values
    far: bool = False  # whether numbers among them become much larger or change their sign
    text: tuple[int, Any] | None = None  # an argument, a text, a number or a list of them, and the value that it gets
    added: tuple[Any, ...] = ()  # arguments behind those of the reference's input function, which leaves them out
    layout: str = ""  # of the tensor arguments, or "mixed" for one that is drawn for each of them
    alike: int = -1  # the tensor of integers that has the same ones in each draw, and gets others of their range
    mark: int | None = None  # an integer of the reference's own code, at some places of integer tensors
    given: tuple[int, tuple[int, ...]] | None = None  # an argument that is None in each draw, and the shape of a tensor
    longer: bool = False  # whether lists of tensors of one shape get one more
    reduced: bool = False  # whether the shapes stand for large ones
    far_size: bool = False  # whether a size is much larger than those of the reference's own inputs

    @property
    def usual(self) -> bool:
        """Whether the inputs are contiguous tensors with ordinary values, and no argument is varied alone. Ordinary
        values are those that ``get_inputs`` returns, or normally distributed ones.
        """
        varied = self.signed or self.layout or self.plain or self.text or self.added or self.longer or self.alike >= 0
        return self.kind in ("drawn", "normal") and not varied and self.mark is None and self.given is None

    @property
    def changes_integers(self) -> bool:
        """Whether tensors of integers, which may be indices, get other values than the reference's input function
        gives them.
        """
        return self.kind == "whole" or self.alike >= 0 or self.mark is not None

    @property
    def whole(self) -> bool:
        """Whether this form is used only if every result of the reference is finite. This holds for values that the
        reference may not be meant for.
        """
        odd = (
            bool(self.plain or self.text or self.added or self.longer)
            or self.alike >= 0
            or self.mark is not None
            or self.given is not None
        )
        return self.kind in FINITE_KINDS or bool(self.signed) or odd


@dataclass(frozen=True)
class InputFacts:
    """Facts about inputs and source code that are known before the forms of inputs are made.

    Attributes:
        constant: whether the inputs of the reference are the same in each draw, so that other values are timed.
        numbers: constants of the candidate. Some of them become sizes, and some values are drawn around them.
        always: the tensors of integers that are the same in each draw.
        marks: integers that the reference treats specially, such as an index to ignore.
        absent: the arguments that are None in each draw.
        results: the shapes of the results.
        slow: whether a call of the reference takes so long that few calls of large shapes fit into a judgement.
        texts: texts in the source of the reference, which arguments may have as values.
        defaults: the defaults of the arguments that come behind those of the input function.
    """

    constant: bool = False
    numbers: Sequence[float] = ()
    always: Sequence[int] = ()
    marks: Sequence[int] = ()
    absent: Sequence[int] = ()
    results: Shapes = ()
    slow: bool = False
    texts: Sequence[str] = ()
    defaults: Sequence[Any] = ()


def make_input_forms(
    first: tuple[Any, ...],
    runs: Callable[[InputForm], bool],
    *,
    most: int,
    facts: InputFacts = InputFacts(),
    layouts: bool = True,
) -> list[InputForm]:
    """Return the forms (shapes and kinds of values) of inputs on which a candidate is called.

    The first forms have the shapes of ``first``, the reference's own inputs, and every kind of values. At most ``most``
    random shapes follow, and at most as many shapes with sizes from constants in the candidate's code. The first form
    is always returned. The others are returned if ``runs`` returns True for them, which means that the reference
    accepts them. For large shapes, most kinds of values are tried on smaller shapes. If ``layouts`` is true,
    non-contiguous memory and unaligned addresses are tried, too.
    """
    own = tuple(tuple(t.shape) for t in tensors_among(first))
    plain = InputForm(_form_label(own, "drawn"), shapes=own)
    # Large inputs would use up the time for other kinds of values.
    small = _reduce_form(plain, runs) if most and count_elements(own) > LARGE else plain
    kinds = [replace(small, kind=kind, label=_form_label(small.shapes, kind)) for kind in VALUE_KINDS]
    forms = [f for f in kinds if f.kind == "drawn" or runs(f)]
    forms += [f for f in _unusual_value_forms(first, small, bool(most), facts) if runs(f)]
    for scale, shift in _threshold_scales(facts.numbers, min(MAX_THRESHOLDS, most or MAX_THRESHOLDS)):
        what = f"values about {shift or scale:.3g}"
        form = replace(small, kind="about", scale=scale, shift=shift, label=_form_label(small.shapes, what))
        forms += [form] if runs(form) else []
    if layouts:
        named = (replace(small, layout=at, label=_form_label(small.shapes, f"{at} layout")) for at in LAYOUT_FORMS)
        forms += [f for f in named if runs(f)]
    # Times on values that a candidate knows in advance would be worthless.
    wanted = ("normal", "scaled") if facts.constant and len(forms) > 1 else ("drawn", "normal")
    if small is not plain:
        return _with_large_forms(plain, small, forms, wanted, most, facts, runs, host=_on_host(first))
    timed = [f.kind in wanted and not f.whole and not f.layout for f in forms]
    forms = [replace(f, timed=is_timed) for f, is_timed in zip(forms, timed, strict=True)]
    limit = LARGER * count_elements(own)
    others = _other_shape_forms(own, most, facts.numbers, runs, limit, host=_on_host(first)) if most else []
    usual = [f for f in others if count_elements(f.shapes) <= 2 * count_elements(own)]
    if usual:  # the largest shape of usual size is timed as well
        largest = max(usual, key=lambda f: count_elements(f.shapes))
        others = [replace(f, timed=f is largest) for f in others]
    return [*forms, *others]


def _with_large_forms(
    plain: InputForm,
    small: InputForm,
    forms: list[InputForm],
    wanted: tuple[str, str],
    most: int,
    facts: InputFacts,
    runs: Callable[[InputForm], bool],
    *,
    host: bool,
) -> list[InputForm]:
    """Return all forms (shapes and kinds of values) for a reference with large inputs.

    ``plain`` is the form of the reference's own inputs. Forms of its large shapes come first, some of which are timed.
    ``forms``, which have reduced shapes, follow. Forms with shapes near those of ``small``, at most ``most`` of them
    random, and one with many rows if ``host`` is true, come last.
    """
    first = plain if not facts.constant else replace(plain, kind=wanted[0], label=_form_label(plain.shapes, wanted[0]))
    kinds = sorted({f.kind for f in forms if f.kind in VALUE_KINDS and not (f.layout or f.whole)} - {first.kind})
    secret = SECRET_RANDOM.sample(kinds, min(1 if facts.slow else KINDS_AT_SIZE, len(kinds)))
    large = [replace(first, timed=True)]
    large += [replace(plain, kind=kind, label=_form_label(plain.shapes, kind)) for kind in secret]
    limit = count_elements(plain.shapes)
    shaped = [] if facts.slow else _other_shape_forms(plain.shapes, 1, (), runs, limit)
    large += [replace(f, timed=True) for f in shaped]
    limit = LARGER * count_elements(small.shapes)
    others = _other_shape_forms(small.shapes, most, facts.numbers, runs, limit, reduced=True, host=host)
    return [*large, *forms, *others]


def _on_host(args: tuple[Any, ...]) -> bool:
    """Return whether no tensor among ``args`` lies on a GPU, for which a kernel is compiled anew for many rows."""
    return all(t.device.type == "cpu" for t in tensors_among(args))


def _reduce_form(plain: InputForm, runs: Callable[[InputForm], bool]) -> InputForm:
    """Return a copy of ``plain``, a form (shapes and kind of values) with large shapes, that has smaller shapes. Return
    ``plain`` itself if ``runs`` accepts no smaller form. A size that the reference requires, as of channels, stays.
    """
    form, required = plain, {*range(LARGEST_WINDOW + 1)}  # windows may stay, too
    while count_elements(form.shapes) > REDUCED and (sizes := {*varied_sizes(form.shapes)} - required):
        size = max(sizes)
        # A random size, or else the half, since a reference may require multiples of a number.
        fewer = size // 3 + SECRET_RANDOM.randrange(size // 6 + 1), size // 2
        shapes = [replace_size(form.shapes, size, n) for n in fewer]
        smaller = (replace(plain, shapes=s, label=_form_label(s, "drawn"), reduced=True) for s in shapes)
        accepted = next(filter(runs, smaller), None)
        form, required = (form, {*required, size}) if accepted is None else (accepted, required)
    return form


def _unusual_value_forms(
    first: tuple[Any, ...], plain: InputForm, varied: bool, facts: InputFacts
) -> Iterator[InputForm]:
    """Yield forms like ``plain`` with values that the reference's own inputs, ``first``, never have, such as rows of
    zeros and negative numbers.

    If ``varied`` is true, scalars, flags, integers that are the same in each draw, and arguments that are always None
    get other values, too. Otherwise such forms are left out.
    """
    all_of = tensors_among(first)

    def form(kind: str, what: str, **changes: Any) -> InputForm:
        """Return a copy of ``plain`` with the kind of values ``kind`` and with the fields in ``changes``. Its label has
        the shapes and ``what``, a description of the values.
        """
        return replace(plain, kind=kind, label=_form_label(plain.shapes, what), **changes)

    if any(t.is_floating_point() for t in all_of):
        yield form("blank", "some rows of zeros")
        # A candidate may compare with a number, or be wrong where nothing is left to round.
        code = tuple(v for v in facts.numbers if abs(v) < LARGEST_THRESHOLD)[:MOST_EXACT]
        yield from (form("exact", "exact numbers", exact=numbers) for numbers in (WHOLE_NUMBERS, code) if numbers)
    if any(_is_integer_data(t) for t in all_of):
        yield form("whole", "large integers")
    if varied and any(t.dtype == torch.bool for t in all_of):
        yield form("flags", "other flags in tensors")
    never = [i for i, t in enumerate(all_of) if t.is_floating_point() and t.numel() and not _has_negative(t)]
    alone = [(i,) for i in SECRET_RANDOM.sample(never, min(MAX_SIGNED_FORMS, len(never)))]
    for which in dict.fromkeys((tuple(never), *alone) if never else ()):
        yield form("signed", f"negative numbers in tensor {', '.join(map(str, which))}", signed=which)
    yield from _plain_argument_forms(first, form, facts) if varied else ()
    if varied and any(map(_is_list_of_alike, first)):
        yield form("drawn", "one more tensor in a list", longer=True)
    for at in facts.always if varied else ():
        if all_of[at].dtype != torch.bool and _has_other_integers(all_of[at]):
            yield form("drawn", f"other integers in tensor {at}", alike=at)
    # On a GPU, an index out of range ends all use of the device in this process.
    if any(is_index_data(t) for t in all_of) and all(t.device.type == "cpu" for t in all_of):
        for mark in facts.marks:
            yield form("drawn", f"{mark} among the integers", mark=mark)
    for at in facts.absent if varied else ():
        for shape in _shapes_of_absent(plain.shapes, facts.results if not plain.reduced else ()):
            yield form("drawn", f"a tensor of {_form_label((shape,), '')}in argument {at}", given=(at, shape))


def _plain_argument_forms(
    first: tuple[Any, ...], form: Callable[..., InputForm], facts: InputFacts
) -> Iterator[InputForm]:
    """Yield forms in which numbers, flags, texts and lists of numbers among the arguments ``first`` get other values.

    Each number gets one near its own and one far from it. All numbers and flags also change together, since a candidate
    may be right for each of them alone. A text becomes one that the source of the reference contains. ``form`` makes a
    form from the kind of values, a description and further fields.
    """
    numbers = [i for i, v in enumerate(first) if type(v) in (bool, int, float)]
    some = SECRET_RANDOM.sample(numbers, min(MAX_SCALAR_FORMS, len(numbers)))
    for at in some:
        yield form("drawn", f"another value of argument {at}", plain=(at,))
    for at in (i for i in some if type(first[i]) is not bool):
        yield form("drawn", f"a far value of argument {at}", plain=(at,), far=True)
        if first[at]:  # as in ``scale or 1.0``
            yield form("drawn", f"zero as argument {at}", text=(at, type(first[at])(0)))
    if len(numbers) > 1:
        yield form("drawn", "other values of all plain arguments", plain=tuple(numbers))
    for at, value in enumerate(first):
        others = [t for t in facts.texts if t != value] if isinstance(value, str) else _other_lists(value)
        for other in SECRET_RANDOM.sample(others, min(MAX_SCALAR_FORMS, len(others))):
            yield form("drawn", f"another value of argument {at}", text=(at, other))
    for at, value in enumerate(facts.defaults):
        if type(value) in (bool, int, float):
            added = (*facts.defaults[:at], _other_scalar(value, far=False))
            yield form("drawn", f"a value of argument {len(first) + at}", added=added)


def _is_list_of_alike(value: Any) -> bool:
    """Return whether ``value`` is a list or tuple of two or more tensors of one shape and dtype."""
    tensors = [v for v in value if isinstance(v, Tensor)] if type(value) in (list, tuple) else []
    return len(tensors) > 1 and len(tensors) == len(value) and len({(t.shape, t.dtype) for t in tensors}) == 1


def _other_lists(value: Any) -> list[Any]:
    """Return variations of a list or tuple of numbers: in reverse order, and with one number changed. The result is
    empty for any other value.
    """
    if type(value) not in (list, tuple) or not value or any(type(v) not in (bool, int, float) for v in value):
        return []
    changed = [[*value[:i], _other_scalar(v, far=False), *value[i + 1 :]] for i, v in enumerate(value)]
    lists = [listed for listed in (list(value)[::-1], *changed) if listed != list(value)]
    return [tuple(listed) for listed in lists] if type(value) is tuple else lists


def _shapes_of_absent(shapes: Shapes, results: Shapes) -> list[tuple[int, ...]]:
    """Return up to six shapes of a tensor to try in place of an argument that is None in each draw. One-dimensional
    shapes come first, each with the size of a last dim, as a bias has it. The shapes of the results and of the other
    arguments follow.
    """
    near = [*results, *shapes]
    return list(dict.fromkeys([*((s[-1],) for s in near if s), *near]))[:6]


def _is_integer_data(t: Tensor) -> bool:
    """Return whether the integers of ``t`` may be varied as data, that is whether they have at most 32 bits. Indices,
    which must stay in their range, usually have 64 bits.
    """
    return t.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)


def _threshold_scales(numbers: Sequence[float], most: int) -> Iterator[tuple[float, float]]:
    """Yield four pairs of a scale and a shift for each of at most ``most`` of ``numbers``, which are constants in the
    candidate's code at which it may branch.

    Normally distributed values are multiplied by the scale, and the shift is added. With the first pair, nearly all of
    them lie below the constant. With the second, many lie above it. With the others, all of them and so their mean lie
    beyond the constant, or beyond its negative. The constants are chosen at random and in secret, fractions before
    whole numbers.
    """
    sizes = {abs(v) for v in numbers if v and abs(v) < LARGEST_THRESHOLD}
    for whole in (False, True):
        fitting = sorted(v for v in sizes if (v == int(v)) == whole)
        for number in SECRET_RANDOM.sample(fitting, min(most, len(fitting))):
            most -= 1
            yield number * 10.0 ** SECRET_RANDOM.uniform(-1.5, -1.0), 0.0
            yield number * 10.0 ** SECRET_RANDOM.uniform(0.3, 1.0), 0.0
            for sign in (1.0, -1.0):
                yield 0.2 * number, sign * number * SECRET_RANDOM.uniform(2.0, 4.0)


def _other_shape_forms(
    own: Shapes,
    most: int,
    constants: Sequence[float],
    runs: Callable[[InputForm], bool],
    limit: int,
    *,
    reduced: bool = False,
    host: bool = False,
) -> list[InputForm]:
    """Return forms of inputs whose shapes differ from ``own``, and which the reference accepts.

    ``runs`` returns whether it accepts a form. At most ``most`` of the shapes are random, at most three times as many
    have sizes from ``constants`` of the candidate's code, and one has many rows if ``host`` is true. Shapes of more
    than ``limit`` elements together are left out, since the reference would take too long, but for sizes near the first
    constants and for that with many rows. ``reduced`` is copied into the forms, and says that their shapes stand for
    large ones.
    """
    seen, groups = {own}, list[list[InputForm]]()
    limit, numbers = max(limit, ROOM), [int(v) for v in constants if v == int(v)]
    # What the code compares comes first.
    compared = shapes_near_constants(own, numbers[:COMPARED_NUMBERS], limit)
    for listed, largest, most_of in (
        (shapes_with_many_rows(own), max(limit, FAR_ELEMENTS) if host else 0, 1),
        (varied_shapes(own, ONES if host else 1), limit, most),
        (compared, max(limit, FAR_ELEMENTS) if constants else 0, 2 * most),
        (shapes_from_constants(own, numbers[COMPARED_NUMBERS:]), limit, most),
    ):
        fitting, tried = list[InputForm](), 0
        groups.append(fitting)
        for shapes in listed:
            if shapes in seen or (count := count_elements(shapes)) > largest:
                continue
            seen.add(shapes)
            # Normal values show more, drawn ones are surely valid.
            kind, far = SECRET_RANDOM.choice(("drawn", "normal")), count > limit
            label = _form_label(shapes, kind)
            form = InputForm(label, shapes=shapes, kind=kind, reduced=reduced, far_size=far)
            tried += 1
            # A size is taken by chance where a dim of one element is broadcast, but not where it is a multiple.
            nearby = [[replace(form, shapes=s, far_size=False) for s in p] for p in neighbouring_shapes(shapes, own)]
            if runs(form) and all(any(map(runs, pair)) for pair in nearby):
                fitting.append(form)
            # A reference that refuses most shapes must not use up the time.
            if len(fitting) == most_of or tried == 4 * most_of:
                break
    # In turn, since the last ones may be left out for a candidate that takes long for each.
    return [form for row in zip_longest(*groups) for form in row if form is not None]


def _form_label(shapes: Shapes, kind: str) -> str:
    """Return the label of inputs in reports, made of their shapes and the kind of their values, such as ``3x4, 4
    normal``.
    """
    return f"{', '.join('x'.join(map(str, s)) or 'scalar' for s in shapes)} {kind}"


def vary_arguments(made: tuple[Any, ...], form: InputForm, seed: int) -> tuple[Any, ...]:
    """Return a copy of the arguments ``made`` with the shapes, layout and kind of values of ``form``. New values are
    drawn with ``seed`` on the device of the tensors.
    """
    listed = tensors_among(made)
    device = next((t.device for t in listed if t.device.type != "meta"), torch.device("cpu"))
    rng = torch.Generator(device).manual_seed(seed)
    pairs = enumerate(zip(listed, form.shapes, strict=False))
    drawn = iter([_vary_tensor(t, shape, form, rng, i) for i, (t, shape) in pairs])
    varied = list(tree_map(lambda t: next(drawn), made))
    for at in form.plain:
        varied[at] = _other_scalar(varied[at], far=form.far)
    if form.text is not None:
        varied[form.text[0]] = form.text[1]
    if form.longer:
        varied = [type(v)([*v, v[0].clone()]) if _is_list_of_alike(v) else v for v in varied]
    varied += form.added
    if form.given is not None:
        at, shape = form.given
        varied[at] = torch.randn(shape, generator=rng, device=rng.device).to(device, _floating_dtype(listed))
    return tuple(varied)


def _floating_dtype(listed: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first floating-point tensor among ``listed``, or float32 if there is none."""
    return next((t.dtype for t in listed if t.is_floating_point()), torch.float32)


def _other_scalar(value: bool | int | float, *, far: bool) -> bool | int | float:
    """Return another number than ``value``, or the negation if it is a bool.

    It is of about the same size, or larger by one if it is an int. If ``far`` is true, an int becomes at least twice as
    large, and a floating-point number changes its sign.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * abs(value) + 1 + SECRET_RANDOM.randrange(abs(value) + 2) if far else value + 1
    if far:
        return -value if value else -SECRET_RANDOM.uniform(0.1, 1.0)
    return value * SECRET_RANDOM.choice((0.5, 0.75, 1.5, 2.0)) if value else SECRET_RANDOM.uniform(0.1, 1.0)


def _vary_tensor(t: Tensor, shape: tuple[int, ...], form: InputForm, rng: torch.Generator, number: int) -> Tensor:
    """Return a tensor like the argument ``t`` with the shape ``shape``, and with the kind of values and the memory
    layout of ``form``. A layout that is not possible for the tensor is left out. ``number`` is the position of ``t``
    among the tensor arguments.
    """
    if tuple(t.shape) != shape:
        t = _resample_values(t, shape, rng)
    t = _vary_values(t, form, rng, number)
    if form.layout == "offset":
        return apply_layout(t, "offset") if t.numel() else t
    if form.layout in LAYOUTS:
        possible = layout_is_possible(form.layout, t, contiguous=False, mutated=False)
        return apply_layout(t, form.layout) if possible else t
    if form.layout:
        able = [name for name in MIXED_LAYOUTS if layout_is_possible(name, t, contiguous=False, mutated=False)]
        return apply_layout(t, SECRET_RANDOM.choice(able)) if able else t
    return t


def _vary_values(t: Tensor, form: InputForm, rng: torch.Generator, number: int) -> Tensor:
    """Return a tensor with the shape and dtype of ``t`` and with values of the kind of ``form``, drawn with ``rng``.

    Return ``t`` itself if that kind does not apply to its dtype. ``number`` is the position of ``t`` among the tensor
    arguments.
    """
    kind, signed = form.kind, number in form.signed
    if number == form.alike:
        return _other_integers(t, rng)
    if form.mark is not None and is_index_data(t):
        return t.masked_fill(_some_places(t, rng), form.mark)
    if kind == "whole" and _is_integer_data(t):
        return _large_integers(t, rng)
    if kind == "flags" and t.dtype == torch.bool:
        return _some_places(t, rng, 0.5)
    if kind in ("drawn", *INTEGER_KINDS) or not t.is_floating_point() or not t.numel() or (form.signed and not signed):
        return t
    precise = torch.float64 if t.numel() <= LARGE else torch.float32  # drawing takes longer than most kernels
    values = _noise_of_kind(t, form, torch.randn(t.shape, generator=rng, device=rng.device, dtype=precise), rng)
    return (values if signed or _has_negative(t) else values.abs()).to(t.dtype)


def _has_negative(t: Tensor) -> bool:
    """Return whether the floating-point tensor ``t``, which is not empty, has a number below zero, or NaN."""
    return not float(float8_to_float32(t).min()) >= 0


def _some_places(t: Tensor, rng: torch.Generator, share: float = 0.25) -> Tensor:
    """Return a random boolean mask of the shape of ``t`` in which about ``share`` (0 to 1) of the elements are True."""
    return (torch.rand(t.shape, generator=rng, device=rng.device) < share).to(t.device)


def _has_other_integers(t: Tensor) -> bool:
    """Return whether ``_other_integers`` can return values other than those of ``t``. It cannot if all elements are
    equal and are at most 1.
    """
    low, high = int(t.min()), int(t.max())
    return low < high or high > 1


def _other_integers(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return random integers between the least and the largest element of ``t``, with its shape and dtype. If all
    elements are one positive number, the integers lie between 1 and that number.

    If ``t`` is sorted, as offsets of rows are, the integers are sorted and keep its first and last element. An empty
    ``t`` is returned itself.
    """
    if not t.numel():
        return t
    low, high = int(t.min()), int(t.max())
    low = min(low, 1) if low == high and high > 0 else low
    drawn = torch.randint(low, high + 1, t.shape, generator=rng, device=rng.device).to(t.device, t.dtype)
    if t.dim() == 1 and t.numel() > 2 and bool((t[1:] >= t[:-1]).all()) and int(t[0]) < int(t[-1]):
        drawn = drawn.sort().values
        drawn[0], drawn[-1] = t[0], t[-1]
    return drawn


def _large_integers(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return random integers up to about a million with the shape and dtype of ``t``. They include negative ones only
    if ``t`` does.
    """
    high = min(torch.iinfo(t.dtype).max, LARGEST_INTEGER)
    low = -high if t.numel() and int(t.min()) < 0 else 0
    return torch.randint(low, high + 1, t.shape, generator=rng, device=rng.device).to(t.device, t.dtype)


def _noise_of_kind(t: Tensor, form: InputForm, noise: Tensor, rng: torch.Generator) -> Tensor:
    """Return the normally distributed numbers ``noise``, transformed into the kind of values of ``form``, such as rows
    of zeros.

    The result is on the device of ``t``, the argument that it replaces.
    """
    kind, noise = form.kind, noise.to(t.device)

    def uniform(shape: Sequence[int] = ()) -> Tensor:
        """Return a tensor of this shape with random numbers between 0 and 1, on the device of ``t``."""
        return torch.rand(tuple(shape), generator=rng, device=rng.device).to(t.device)

    # Zeros, halves and minus halves: equal values, and sums without rounding errors.
    if kind == "ties":
        drawn = torch.randint(-1, 2, t.shape, generator=rng, device=rng.device)
        return drawn.to(t.device, torch.float64) / 2
    if kind == "skewed":  # most values are small, and a few large ones decide the result
        return noise * torch.where(uniform(t.shape) < 0.02, 300.0, 0.01)
    if kind == "constant":
        return torch.full_like(noise, float(torch.randn((), generator=rng, device=rng.device)))
    if kind == "blank":  # a single row becomes zero as a whole
        rows = uniform((*t.shape[:-1], 1) if t.dim() else ()) < 0.25
        rows.view(-1)[:1] = True
        return torch.where(rows, 0.0, noise)
    if kind == "exact":
        at = torch.randint(len(form.exact), t.shape, generator=rng, device=rng.device).to(t.device)
        return torch.where(uniform(t.shape) < 0.5, noise.new_tensor(form.exact)[at], noise)
    if kind == "sunk":  # far below zero, where a finite number in the place of minus infinity is the maximum
        return torch.sub(noise, 10.0 ** (4.7 + 0.8 * float(uniform())))
    if kind in DECADES:
        low, high = DECADES[kind]
        return torch.mul(noise, 10.0 ** (low + (high - low) * float(uniform())))
    if kind == "about":
        return noise * form.scale + form.shift
    scale = {"normal": 1.0, "wide": 30.0, "tiny": 1e-3, "shifted": 1.0, "signed": 1.0}[kind]
    return noise * scale + (20.0 if kind == "shifted" else 0.0)


def _resample_values(t: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return a tensor of the given shape whose values are drawn from those of ``t``, since these are valid for the
    reference. If ``t`` is empty, return zeros.
    """
    count = prod(shape)
    if not t.numel() or not count:
        return t.new_zeros(shape)
    flat = t.detach().reshape(-1)
    if count <= flat.numel():
        at = SECRET_RANDOM.randrange(flat.numel() - count + 1)
        return flat[at : at + count].reshape(shape).clone()
    return flat[torch.randint(0, flat.numel(), (count,), generator=rng, device=rng.device).to(t.device)].reshape(shape)
