"""``Declared``: one crossed declaration as plain data, the features that it has, and how one is drawn from a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from heapq import nsmallest
from itertools import combinations
from typing import Any

# What may go into a value, in the order in which it does; "tensors" and "maybe" have no form in C.
TERMS = (
    "second",
    "index",
    "broadcast",
    "tensors",
    "optional",
    "float",
    "int",
    "bool",
    "text",
    "ints",
    "floats",
    "pair",
    "number",
    "maybe",
    "dtype",
    "literal",
    "enum",
)
TENSOR_TERMS = ("second", "index", "broadcast", "tensors", "optional")
OUTS = ("same", "rows", "turned", "twice", "count", "mask", "total", "kept")
TRACED = ("list", "size", "perhaps")  # results of which only the reference tells what they are
FLOATING = ("same", "rows", "turned", "twice", "total", "kept", "list", "perhaps")
STATES = ("pure", "mutated", "returned", "mutated_list", "mutated_optional", "view")
KERNELS = (
    *("none", "python", "python_out", "python_flat", "c", "c_strided", "c_aligned"),
    *("chosen", "source", "template", "triton", "cuda"),
)
BINDINGS = ("python", "native", "packaged")
RULES = ("widest", "autocast", "float32", None)
ANNOTATIONS = (
    ("Float", "float32"),
    ("Float", "float64"),
    ("Float", "bfloat16"),
    ("Float32", "float32"),
    ("Float64", "float64"),
)
WAYS = (
    "inductor",
    "inductor_dynamic",
    "dynamic",
    "export",
    "export_dynamic",
    "vmap",
    "func_grad",
    "jvp",
    "autocast",
    "inference",
    "fake",
    "checkpoint",
    "threads",
    "compiled_autograd",
    "double_backward",
    "deepcopy",
    "nested",
    "out",
    "cuda_graph",
    "no_grad",
    "packaged",
)
COMPILED = ("inductor", "inductor_dynamic")
LAYOUTS = (
    "plain",
    "offset",
    "padded",
    "strided",
    "transposed",
    "column_major",
    "reversed",
    "heads",
    "channels_last",
    "gaps",
    "channels_last_sliced",
    "expanded",
    "expanded_last",
)
SIZES = ("usual", "zero_rows", "one_row", "one_column", "tile")
# What this package writes a C++ template and a Triton kernel for.
TEMPLATE_TERMS = (
    *("second", "index", "optional", "float", "int", "bool", "text", "ints", "floats", "pair", "broadcast"),
    *("number", "maybe", "dtype", "literal", "enum"),
)
TRITON_TERMS = ("second", "index", "optional", "float", "int", "bool", "ints", "pair", "broadcast", "enum")
TEMPLATE_OUTS = ("same", "turned", "twice", "mask", "rows", "count")
TRITON_OUTS = ("same", "rows", "turned", "twice", "count", "mask", "total")
NATIVE = ("c", "c_strided", "c_aligned", "cuda", "chosen", "source")
RAREST = 64  # pairs that are tried for a declaration
OUTSIDE = 8  # one declaration of so many may have a C kernel for what has no form in C


@dataclass(frozen=True)
class Declared:
    """One declaration of an op with a test of it, as plain data.

    The fields describe the declaration, the kernel and the binding of the op, the calls, and the arguments. ``layouts``
    are given to the tensor arguments alternately. An argument whose shape does not allow its layout is contiguous.
    ``ways`` names how the op is also called, such as under ``vmap``, after an eager call and one under ``aot_eager``.
    """

    seed: int
    rank: int = 2
    variadic: bool = False
    annotation: str = "Float32"
    dtype: str = "float32"
    terms: tuple[str, ...] = ()
    absent: bool = False
    defaults: bool = True
    omitted: bool = False
    tuple_of_one: bool = False
    keyword_only: bool = False
    by_name: bool = False
    outs: tuple[str, ...] = ("same",)
    state: str = "pure"
    gradient: bool = True
    requires: bool = False
    rule: str | None = "widest"
    kernel: str = "python"
    binding: str = "python"
    workspace: bool = False
    layouts: tuple[str, ...] = ("plain",)
    sizes: str = "usual"
    repeated: bool = False
    ways: tuple[str, ...] = ()
    fault: str = ""

    @property
    def traced(self) -> bool:
        """Whether a result is a list, a number or possibly None.

        Only a run of the reference shows which of these a result is.
        """
        return any(o in TRACED for o in self.outs)

    @property
    def dynamic(self) -> bool:
        """Whether a result has a size that depends on data."""
        return "kept" in self.outs

    @property
    def mutates(self) -> bool:
        """Whether the op writes to one of its arguments."""
        return self.state in ("mutated", "returned", "mutated_list", "mutated_optional")

    @property
    def differentiable(self) -> bool:
        """Whether the gradients of the op are compared with those of the reference."""
        if self.state == "view":
            return True
        return self.gradient and not self.mutates and any(o in FLOATING for o in self.outs)

    @property
    def features(self) -> tuple[str, ...]:
        """The features of the declaration and its arguments, as strings such as ``rank:2`` or ``term:second``. The ways
        of calling the op, such as ``way:vmap``, are not among them.
        """
        found = [f"rank:{self.rank}", f"dtype:{self.annotation}/{self.dtype}", f"state:{self.state}"]
        found += [f"kernel:{self.kernel}", f"binding:{self.binding}", f"size:{self.sizes}", f"rule:{self.rule}"]
        found += [f"term:{t}" for t in self.terms if t != "optional"]
        if "optional" in self.terms:
            found.append("term:absent" if self.absent else "term:optional")
        found += [f"out:{o}" for o in self.outs or ("nothing",)]
        found += [f"layout:{layout}" for layout in dict.fromkeys(self.layouts)]
        named = ("variadic", "keyword_only", "by_name", "omitted", "requires", "repeated", "workspace", "tuple_of_one")
        found += [f"has:{name}" for name in named if getattr(self, name)]
        found += ["has:several outputs"] if len(self.outs) > 1 else []
        found += ["has:gradient"] if self.differentiable else []
        found += ["has:no defaults"] if not self.defaults else []
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict, which :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Declared:
        """Return the declaration with the fields ``data``. Lists in ``data`` become tuples."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

    def simpler(self) -> Iterator[Declared]:
        """Yield declarations that lack one feature of this one, or several of one kind. For each kind of feature but
        the kernel, those that lack most come first. A kernel in Python comes before none, since most faults of a native
        kernel need some kernel. :func:`shrink` searches them for a smaller declaration that still fails.
        """
        plain = Declared(self.seed, ways=self.ways, kernel=self.kernel, binding=self.binding, fault=self.fault)
        for name in ("terms", "outs", "layouts"):
            value = getattr(self, name)
            if value != getattr(plain, name):
                yield replace(self, **{name: getattr(plain, name)})
            yield from (replace(self, **{name: (v,)}) for v in value if len(value) > 1)
            for i in range(len(value) if len(value) > 1 else 0):
                yield replace(self, **{name: value[:i] + value[i + 1 :]})
        if len(self.ways) > 1:
            yield from (replace(self, ways=(way,)) for way in self.ways)
        elif self.ways:
            yield replace(self, ways=())
        for each in fields(self):
            if each.name in ("seed", "ways", "kernel", "binding", "fault", "terms", "outs", "layouts"):
                continue
            if getattr(self, each.name) != getattr(plain, each.name):
                yield replace(self, **{each.name: getattr(plain, each.name)})
        if self.kernel not in ("none", "python"):
            yield replace(self, kernel="python", binding="python")
        if self.kernel != "none":
            yield replace(self, kernel="none", binding="python")
        if self.binding != "python":
            yield replace(self, binding="python")


def _kernel_on(kernel: str, device: str) -> str:
    """Return the kind of kernel that stands for ``kernel`` on ``device``. On a GPU, kinds of C kernels become ``cuda``.
    On the CPU, ``cuda`` becomes ``c``. Other kinds are returned unchanged.
    """
    if device == "cuda":
        return "cuda" if kernel in ("c", "c_strided", "c_aligned") else kernel
    return "c" if kernel == "cuda" else kernel


def fitting(case: Declared, device: str = "cpu") -> Declared:
    """Return a copy of the op declaration ``case`` for ``device`` without features that contradict each other.

    The reason for each pair of features that is dropped is in ``impossible.py``. Features that shiplap refuses by an
    error stay, since a run counts refusals.
    """
    kernel = _kernel_on(case.kernel, device)
    binding = case.binding if kernel in NATIVE else "python"
    case = replace(case, kernel=kernel, binding=binding)
    case = _fitting_outs(_fitting_kernel(case))
    outs, terms, state = case.outs, case.terms, case.state
    has_scalars = any(t not in TENSOR_TERMS for t in terms)
    mutates = state not in ("pure", "view")
    returned = len(outs) + (state == "returned") + (state == "view") + ("kept" in outs)
    return replace(
        case,
        # Only with another tensor argument can ``x`` be passed twice.
        repeated=case.repeated and ("second" in terms or "tensors" in terms or mutates),
        ways=_fitting_ways(case, device),
        absent=case.absent and "optional" in terms,
        keyword_only=case.keyword_only and has_scalars,
        omitted=case.omitted and case.defaults and has_scalars,
        defaults=case.defaults or not has_scalars,
        workspace=case.workspace and kernel not in ("none", "template"),
        sizes="one_row" if case.sizes == "one_column" and case.rank < 2 else case.sizes,
        tuple_of_one=case.tuple_of_one and returned == 1,
    )


def _fitting_kernel(case: Declared) -> Declared:
    """Return a copy of the op declaration ``case`` with only those terms, results and states that its kind of kernel
    can have. The state, such as ``mutated``, says whether the op writes to or returns an argument.
    """
    terms, outs, state = case.terms, case.outs, case.state
    if case.kernel == "template":
        outs = tuple(o for o in outs if o in TEMPLATE_OUTS and (o not in ("rows", "count") or case.rank > 1))[:1]
        return replace(case, terms=tuple(t for t in terms if t in TEMPLATE_TERMS), outs=outs or ("same",), state="pure")
    if case.kernel == "triton":
        outs = tuple(o for o in outs if o in TRITON_OUTS)
        state = {"mutated_list": "mutated", "view": "pure"}.get(state, state)
        return replace(case, terms=tuple(t for t in terms if t in TRITON_TERMS), outs=outs, state=state)
    if case.kernel in NATIVE and case.seed % OUTSIDE:
        terms = tuple(t for t in terms if t not in ("tensors", "number", "maybe", "dtype"))
        outs = tuple(o for o in outs if o not in TRACED) or (() if not outs else ("same",))
        return replace(
            case, terms=terms, outs=outs, state={"view": "pure", "mutated_list": "mutated"}.get(state, state)
        )
    return case


def _fitting_outs(case: Declared) -> Declared:
    """Return a copy of the op declaration ``case`` without results that its number of dims or its state rules out. The
    state, such as ``mutated``, says whether the op writes to or returns an argument.
    """
    variadic = case.variadic and "broadcast" not in case.terms
    outs = case.outs
    if case.tuple_of_one and "kept" not in outs:
        outs = () if case.state in ("returned", "view") else outs[:1]
    if variadic and case.rank < 3:
        outs = tuple(o for o in outs if o != "turned")
    if variadic and case.rank < 2:
        outs = tuple(o for o in outs if o not in ("rows", "count", "twice", "kept"))
    if case.state == "view":
        return replace(case, outs=outs, variadic=variadic and case.rank > 2, gradient=True)
    return replace(case, outs=outs or (("same",) if case.state == "pure" else ()), variadic=variadic)


def _fitting_ways(case: Declared, device: str) -> tuple[str, ...]:
    """Return those of the ways of calling the op of ``case``, such as ``vmap`` and ``export``, that ``device`` allows.
    If the op has a C++ template and no way runs it, keep only the last way and add ``inductor``. Add ``packaged`` if
    the binding is of this kind.
    """
    ways = tuple(w for w in case.ways if w != "packaged" and (w != "cuda_graph" or device == "cuda"))
    if case.kernel == "template" and not ({*ways} & {*COMPILED}) and device == "cpu":
        ways = (*ways[-1:], "inductor")  # nothing else runs a C++ template
    return (*ways, "packaged") if case.binding == "packaged" else ways


def draw(seed: int, rng: random.Random, device: str = "cpu", interpreter: bool = True) -> Declared:
    """Return a random declaration for ``device`` with the seed ``seed``, drawn by ``rng``, whose features do not
    contradict each other. If ``interpreter`` is false, Triton's interpreter cannot be used, and the declaration has no
    Triton kernel.
    """
    annotation, dtype = rng.choice(ANNOTATIONS)
    pick = rng.random
    kernels = [k for k in KERNELS if k != "triton" or interpreter]
    outs: tuple[str, ...] = tuple(rng.sample(OUTS, rng.choice((1, 1, 1, 2, 3))))
    if pick() < 0.12:
        outs = (*outs[:1], rng.choice(TRACED))
    if pick() < 0.08:
        outs = (rng.choice(TRACED),)
    state = rng.choices(STATES, (60, 12, 12, 6, 6, 4))[0]
    if state in ("mutated", "returned", "mutated_list", "mutated_optional") and pick() < 0.5:
        outs = ()
    ways = [w for w in WAYS if w not in (*COMPILED, "packaged")]
    drawn = rng.sample(ways, 2)
    if pick() < 0.1:
        drawn[1] = rng.choice(COMPILED)
    case = Declared(
        seed,
        rank=rng.choice((1, 2, 2, 3, 4)),
        variadic=pick() < 0.2,
        annotation=annotation,
        dtype=dtype,
        terms=tuple(t for t in TERMS if pick() < 0.15),
        absent=pick() < 0.4,
        defaults=pick() < 0.8,
        omitted=pick() < 0.3,
        keyword_only=pick() < 0.2,
        by_name=pick() < 0.2,
        outs=outs,
        state=state,
        gradient=pick() < 0.85,
        requires=pick() < 0.15,
        rule=rng.choice(RULES),
        kernel=rng.choice(kernels),
        binding=rng.choice(BINDINGS),
        workspace=pick() < 0.2,
        layouts=tuple(rng.sample(LAYOUTS, rng.choice((1, 2, 3)))) if pick() < 0.8 else ("plain",),
        sizes=rng.choices(SIZES, (50, 15, 15, 12, 8))[0],
        repeated=pick() < 0.15,
        tuple_of_one=pick() < 0.1,
        ways=tuple(drawn),
    )
    return fitting(case, device)


def pairs(features: Iterable[str], way: str) -> list[tuple[str, str]]:
    """Return all pairs of different features among ``features`` and ``way:<way>``.

    A feature is a string such as ``rank:2``. ``way`` names how the op is called, such as ``vmap``. The two features of
    a pair are in alphabetical order.
    """
    return list(combinations(sorted({*features, f"way:{way}"}), 2))


def with_feature(case: Declared, feature: str) -> Declared:
    """Return a copy of the op declaration ``case`` that has ``feature``, a string such as ``kernel:c``.

    The features of the copy may contradict each other. :func:`fitting` removes such contradictions.
    """
    kind, _, value = feature.partition(":")
    if kind == "dtype":
        return replace(case, annotation=value.partition("/")[0], dtype=value.partition("/")[2])
    if kind == "way":
        binding = "packaged" if value == "packaged" else case.binding
        return replace(case, ways=(*case.ways[:1], value), binding=binding)
    if kind == "term":
        term = "optional" if value == "absent" else value
        terms = tuple(t for t in TERMS if t in (*case.terms, term))
        return replace(case, terms=terms, absent=value == "absent" or (term != "optional" and case.absent))
    if kind == "out":
        others = [o for o in case.outs if o != value]
        return replace(case, outs=(value, *others[:1]) if value != "nothing" else ())
    if kind == "layout":
        return replace(case, layouts=(value, *[each for each in case.layouts if each != value][:2]))
    if kind == "has":
        given = _WITH.get(value, {value: True})
        if value == "variadic" and case.state != "view":
            given = {"variadic": True}
        if value == "repeated" and {"second", "tensors"} & {*case.terms}:
            given = {"repeated": True}
        return replace(case, **given)
    name = {"size": "sizes"}.get(kind, kind)
    return replace(case, **{name: {"rank": int}.get(kind, _rule)(value)})


_WITH: dict[str, dict[str, Any]] = {
    "several outputs": {"outs": ("same", "total")},
    "gradient": {"gradient": True, "state": "pure"},
    "no defaults": {"defaults": False},
    "omitted": {"defaults": True, "omitted": True},
    "variadic": {"variadic": True, "rank": 3},
    "repeated": {"repeated": True, "terms": ("second",)},
}


def _rule(value: str) -> str | None:
    """Return the autocast rule that ``value`` names. It is None for the string ``"None"``, and otherwise ``value``
    itself.
    """
    return None if value == "None" else value


def with_pair(case: Declared, rarest: Iterable[tuple[str, str]], device: str) -> Declared | None:
    """Return a copy of the op declaration ``case`` that has both features of a pair. It is the first pair of ``rarest``
    that ``case`` can have on ``device``. Return None if there is no such pair.
    """
    for first, second in rarest:
        for order in ((first, second), (second, first)):
            found = fitting(with_feature(with_feature(case, order[0]), order[1]), device)
            if {first, second} <= {*found.features, *(f"way:{w}" for w in ("eager", "aot_eager", *found.ways))}:
                return found
    return None


def plan(count: int, seed: int = 0, device: str = "cpu", *, interpreter: bool = True, among: int = 6) -> list[Declared]:
    """Return ``count`` declarations for ``device`` in which each pair of features occurs about equally often. A longer
    plan with the same ``seed`` begins with the shorter one.

    For each declaration, ``among`` are drawn, and the one with the rarest pairs is kept. Some are then changed to have
    one of the rarest pairs. If ``interpreter`` is false, Triton's interpreter cannot be used, and no declaration has a
    Triton kernel.
    """
    seen: Counter[tuple[str, str]] = Counter()
    chosen: list[Declared] = []
    for number in range(count):
        # By number, so that a longer plan begins with the shorter one.
        rng = random.Random(f"{seed}/{number}/{device}")
        drawn = [draw(seed * 1_000_000 + number, rng, device, interpreter) for _ in range(among)]
        found = [[p for way in ("eager", *c.ways) for p in pairs(c.features, way)] for c in drawn]
        worth = [sum(1 / (1 + seen[p]) ** 2 for p in set(ps)) / len(ps) ** 0.5 for ps in found]
        case = drawn[max(range(among), key=worth.__getitem__)]
        # The others stay as they were drawn, so that not each declaration is made for a pair.
        if among > 1 and (number % 2 or number % OUTSIDE == 0):
            rarest = nsmallest(RAREST, seen, key=seen.__getitem__)
            case = with_pair(case, rarest, device) or case
        chosen.append(case)
        seen.update(dict.fromkeys([p for way in ("eager", *case.ways) for p in pairs(case.features, way)], 1))
    return chosen


def plan_missing(
    missing: Mapping[tuple[str, str], int], seed: int, device: str = "cpu", most: int = 1000
) -> list[Declared]:
    """Return at most ``most`` declarations in which pairs of features occur as often as ``missing`` says, if possible.

    ``missing`` maps pairs of features, such as ``rank:2``, to numbers. The declarations are drawn for ``device`` from
    the random seed ``seed``. They have a gradient if their kind allows one, and are called in more ways than those of
    :func:`plan`.
    """
    left = dict(missing)
    chosen: list[Declared] = []
    for number in range(most):
        wanted = sorted((p for p, count in left.items() if count > 0), key=lambda p: (-left[p], p))
        if not wanted:
            break
        drawn = draw(seed * 1_000_000 + number, random.Random(f"{seed}/missing/{number}/{device}"), device)
        # Most pairs that are missing are those with ways that need a gradient. An op without results has one as a view.
        bases = (with_feature(drawn, "has:gradient"), with_feature(drawn, "state:view"), drawn)
        found = [case for base in bases if (case := with_pair(base, wanted, device)) is not None]
        case = next((case for case in found if case.differentiable), found[0] if found else None)
        if case is None:
            continue
        ways = [f.partition(":")[2] for p in wanted for f in p if f.startswith("way:") and {*p} & {*case.features}]
        more = dict.fromkeys(w for w in ways if w not in (*case.ways, *COMPILED, "packaged"))
        case = fitting(replace(case, ways=(*case.ways, *list(more)[:3])), device)
        chosen.append(case)
        for pair in {p for way in ("eager", "aot_eager", *case.ways) for p in pairs(case.features, way)} & {*left}:
            left[pair] -= 1
    return chosen
