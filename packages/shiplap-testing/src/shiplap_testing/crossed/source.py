"""A crossed declaration as the text of a Python module: reference, gradient and kernels, written out.

Every op computes one value for each element of ``x``, out of the terms that it has, and gives it back in one or several
forms. So an author would write it: the reference in PyTorch, the gradient as formulas, kernels as loops.
"""

from __future__ import annotations

import enum

from shiplap_testing.crossed.declared import FLOATING, TENSOR_TERMS, Declared

NAMES = ("n", "c", "h", "w")
NAMESPACE = "crossed"


class Shade(enum.Enum):
    """The values that the argument ``shade`` of a crossed declaration can have."""

    DARK = 1
    LIGHT = 3


# term → parameter: (name, annotation, default)
SCALARS = {
    "float": ("s", "float", "1.5"),
    "int": ("k", "int", "2"),
    "bool": ("flag", "bool", "False"),
    "text": ("mode", "str", '"plain"'),
    "ints": ("ks", "list[int]", "[1, 2]"),
    "floats": ("fs", "list[float]", "[0.5, 0.25]"),
    "pair": ("pair", "tuple[int, int]", "(1, 2)"),
    "number": ("number", "int | float", "3"),
    "maybe": ("maybe", "float | None", "None"),
    "dtype": ("dtype", "torch.dtype", "torch.float32"),
    "literal": ("level", 'Literal["low", "high"]', '"low"'),
    "enum": ("shade", "Shade", "Shade.DARK"),
}
# What a call passes where it does not leave the argument to its default.
PASSED = {
    "s": "-0.5",
    "k": "1",
    "flag": "True",
    "mode": '"square"',
    "ks": "[2, 0, 1]",
    "fs": "[1.5]",
    "pair": "(2, 1)",
    "number": "0.5",
    "maybe": "0.25",
    "dtype": "torch.float64",
    "level": '"high"',
    "shade": "Shade.LIGHT",
}


def dims_of(case: Declared) -> list[str]:
    """Return the names of the dims of the tensor ``x`` of the op declaration ``case``, in order. If the declaration is
    variadic, ``*b`` takes the place of the first name.
    """
    names = list(NAMES[: case.rank])
    return ["*b", *names[1:]] if case.variadic else names


def _broadcast(case: Declared) -> list[str]:
    """Return the names of the dims of the argument ``b`` of the op declaration ``case``. One of them has ``#`` in
    front, since that dim may have size 1.
    """
    dims, at = dims_of(case), 1 if case.variadic else 0
    return [*dims[:at], f"#{dims[at]}", *dims[at + 1 :]]


def has(case: Declared, term: str) -> bool:
    """Return whether the op declaration ``case`` has the term ``term``, such as ``second``. A term is a factor or
    summand of the op's value.
    """
    return term in case.terms


def tensor(case: Declared, dims: list[str]) -> str:
    """Return the annotation, as a string of source code, of a tensor with the dims ``dims`` and the dtypes of the op
    declaration ``case``.
    """
    return f'{case.annotation}[Tensor, "{" ".join(dims)}"]'


def parameters(case: Declared) -> list[tuple[str, str, str]]:
    """Return the name, annotation and default of each parameter of the op declaration ``case``, as strings in declared
    order. The default is empty if there is none. An element named ``*`` precedes keyword-only parameters.
    """
    dims = dims_of(case)
    full = tensor(case, dims)
    first = {"mutated": ("acc", full, ""), "returned": ("acc", full, ""), "mutated_list": ("accs", f"list[{full}]", "")}
    required = [("x", full, "")]
    if case.state in first:
        # The argument that is written to comes first or second, so that both orders are tested.
        required.insert(case.seed % 2, first[case.state])
    if has(case, "second"):
        required.append(("y", full, ""))
    if has(case, "index"):
        required.append(("idx", f'Int64[Tensor, "{dims[-1]}"]', ""))
    if has(case, "broadcast"):
        required.append(("b", tensor(case, _broadcast(case)), ""))
    if has(case, "tensors"):
        required.append(("ts", f"list[{full}]", ""))
    optional = []
    if case.state == "mutated_optional":
        optional.append(("acc", f"{full} | None", "None"))
    if has(case, "optional"):
        optional.append(("o", f"{tensor(case, dims[-1:])} | None", "None"))
    scalars = [SCALARS[t] for t in case.terms if t not in TENSOR_TERMS]
    if not case.defaults:
        scalars = [(n, a, "") for n, a, _ in scalars]
        optional = [(n, a, "") for n, a, _ in optional]
    scalars = [("*", "", ""), *scalars] if case.keyword_only and scalars else scalars
    return [*required, *optional, *scalars]


def signature(case: Declared, *, annotated: bool = True, more: tuple[str, ...] = ()) -> str:
    """Return the parameters of the op declaration ``case`` as a string of source code, followed by the keyword-only
    names ``more``. If ``annotated`` is true, they have annotations and defaults. Otherwise they are names only.
    """
    shown = []
    given = parameters(case)
    for name, annotation, default in given:
        if name == "*":
            shown.append(name)
        else:
            shown.append(f"{name}: {annotation}{f' = {default}' if default else ''}" if annotated else name)
    if more:
        shown += ["*", *more] if "*" not in shown else [*more]
    return ", ".join(shown)


def value_lines(case: Declared) -> list[str]:
    """Return the lines of Python that compute ``v``, the tensor of values, from the terms of the op declaration
    ``case``. If the term ``text`` may square ``v``, the lines also set ``u`` to ``v`` before the square.
    """
    t = case.terms
    lines = ["v = x * 2"]
    lines += ["v = v * y"] if "second" in t else []
    lines += ["v = v * s"] if "float" in t else []
    lines += ["v = v * (1 + sum(ks))"] if "ints" in t else []
    lines += ["v = v * (0.5 + sum(fs))"] if "floats" in t else []
    lines += ["v = v * pair[0] - pair[1]"] if "pair" in t else []
    lines += ["v = v * number"] if "number" in t else []
    lines += ["v = v if maybe is None else v * maybe"] if "maybe" in t else []
    lines += ["v = v + (1 if dtype == torch.float32 else 2)"] if "dtype" in t else []
    lines += ['v = v + (1 if level == "high" else 2)'] if "literal" in t else []
    lines += ["v = v * shade.value"] if "enum" in t else []
    lines += ["v = v + b"] if "broadcast" in t else []
    lines += ["v = v if o is None else v + o"] if "optional" in t else []
    lines += ["v = v + idx.to(v.dtype)"] if "index" in t else []
    lines += ["v = v + k"] if "int" in t else []
    lines += ["for t in ts:", "    v = v + t"] if "tensors" in t else []
    lines += ["v = -v if flag else v"] if "bool" in t else []
    lines += ["u = v", 'v = v * v if mode == "square" else v'] if "text" in t else []
    return lines


RESULT = {
    "same": "v",
    "rows": "v.sum(-1)",
    "turned": "v.{turn}.contiguous()",
    "twice": "torch.cat([v, -v], {along})",
    "count": "(x > 0).sum(-1)",
    "mask": "x > 0",
    "total": "v.sum()",
    "list": "[v.clone(), v * 2]",
    "size": "x.shape[0] + 1",
    "perhaps": "(v * 3 if x.shape[-1] > 1 else None)",
}


def results(case: Declared) -> list[tuple[str, str, str]]:
    """Return the name, annotation and Python expression of each new result of the op declaration ``case``, as strings
    in order. A result that is an argument or a view of one is left out.
    """
    dims = dims_of(case)
    made = []
    for out in case.outs:
        if out == "kept":
            kept = [*dims[:-1], "m"] if case.variadic else ["m", *dims[1:]]
            made.append(("kept", tensor(case, kept), "v[..., at]" if case.variadic else "v[at]"))
            made.append(("at", 'Int64[Tensor, "m"]', "at"))
            continue
        kinds = {
            "same": tensor(case, dims),
            "rows": tensor(case, dims[:-1]),
            "turned": _turned(case),
            "twice": tensor(case, [*dims[:-1], f"2*{dims[-1]}"] if case.variadic else [f"2*{dims[0]}", *dims[1:]]),
            "count": f'Int64[Tensor, "{" ".join(dims[:-1])}"]',
            "mask": f'Bool[Tensor, "{" ".join(dims)}"]',
            "total": tensor(case, []),
            "list": f"list[{tensor(case, dims)}]",
            "size": "int",
            "perhaps": f"{tensor(case, dims)} | None",
        }
        made.append((out, kinds[out], RESULT[out].format(turn=_turn(case), along=-1 if case.variadic else 0)))
    return made


def _turn(case: Declared) -> str:
    """Return the source code of the method call that reverses the dims of a tensor of the op declaration ``case``. If
    the declaration is variadic, the call swaps the last two dims instead.
    """
    return "transpose(-1, -2)" if case.variadic else f"permute({', '.join(map(str, range(case.rank)[::-1]))})"


def kept_line(case: Declared) -> list[str]:
    """Return a list with the line of Python that sets ``at`` to the indices of the elements to be kept. The list is
    empty if no result of the op declaration ``case`` has a size that depends on data.
    """
    if not case.dynamic:
        return []
    if case.variadic:
        return ["at = (x > 0).flatten(0, -2).any(0).nonzero()[:, 0]"]
    return [f"at = (x[{', '.join([':', *['0'] * (case.rank - 1)])}] > 0).nonzero()[:, 0]"]


def mutation_lines(case: Declared) -> list[str]:
    """Return the lines of Python that add ``v`` in place to the arguments to which the op of ``case`` writes. The list
    is empty if it writes to none.
    """
    return {
        "mutated": ["acc.add_(v)"],
        "returned": ["acc.add_(v)"],
        "mutated_list": ["for a in accs:", "    a.add_(v)"],
        "mutated_optional": ["if acc is not None:", "    acc.add_(v)"],
    }.get(case.state, [])


def returned_line(case: Declared, *, kernel: bool = False) -> str:
    """Return the return statement of the function of the op declaration ``case`` as source code.

    The first result is a view, or the argument to which the op writes, if the declaration returns one. New results
    follow. If ``kernel`` is true, the function is a kernel, which does not return the argument to which it writes.
    Otherwise it is the reference.
    """
    found = [e for _, _, e in results(case)]
    if case.state == "returned" and not kernel:
        found = ["acc", *found]
    if case.state == "view":
        found = [f"x.{_turn(case)}", *found]
    if case.tuple_of_one and len(found) == 1:
        return f"return ({found[0]},)"
    return f"return {', '.join(found) if found else 'None'}"


def _turned(case: Declared) -> str:
    """Return the annotation, as a string of source code, of a tensor of the op declaration ``case`` with the dims of
    ``x`` reversed. If the declaration is variadic, only the last two dims are swapped.
    """
    dims = dims_of(case)
    return tensor(case, [*dims[:-2], *dims[:-3:-1]] if case.variadic else dims[::-1])


def return_annotation(case: Declared) -> str:
    """Return the return annotation of the op declaration ``case`` as a string of source code."""
    kinds = [a for _, a, _ in results(case)]
    if case.state == "returned":
        kinds = [tensor(case, dims_of(case)), *kinds]
    if case.state == "view":
        kinds = [_turned(case), *kinds]
    if not kinds:
        return "None"
    return kinds[0] if len(kinds) == 1 and not case.tuple_of_one else f"tuple[{', '.join(kinds)}]"


def keywords(case: Declared) -> str:
    """Return the keyword arguments that the op declaration ``case`` passes to ``@sl.op``, as a string of source code.
    Each of them has a comma in front.
    """
    dims, parts = dims_of(case), []
    if case.state in ("mutated", "returned", "mutated_optional"):
        parts.append('mutates="acc"')
    if case.state == "mutated_list":
        parts.append('mutates="accs"')
    names = [n for n, _, _ in results(case)]
    if case.state == "returned":
        parts.append(f"aliases={('acc', *[None] * len(names))!r}" if names else 'aliases="acc"')
    if case.state == "view":
        parts.append(f"aliases={('x', *[None] * len(names))!r}" if names else 'aliases="x"')
    if case.dynamic and not case.traced:  # a traced op asks its reference for sizes
        parts.append(f'bounds={{"m": "{dims[-1] if case.variadic else dims[0]}"}}')
    if case.requires and dims != ["*b"]:
        parts.append(f'requires="{dims[-1]} >= 1"')
    if len(names) > 1 and case.state not in ("returned", "view"):
        parts.append(f"outputs={tuple(names)!r}")
    if case.rule != "widest":
        parts.append(f"autocast={case.rule!r}")
    return "".join(f", {p}" for p in parts)


def reference(case: Declared) -> str:
    """Return the source code of the decorated function that declares the op of ``case`` and is its reference."""
    name = op_name(case)
    lines = [f'@sl.op("{NAMESPACE}::{name}"{keywords(case)})']
    lines += [f"def {name}({signature(case)}) -> {return_annotation(case)}:"]
    body = [*value_lines(case), *kept_line(case), *mutation_lines(case), returned_line(case)]
    return "\n".join([*lines, *(f"    {line}" for line in body)])


def op_name(case: Declared) -> str:
    """Return the name of the op of the declaration ``case``, which is the letter ``d`` and the seed."""
    return f"d{case.seed}"


def backward(case: Declared) -> str:
    """Return the source code of the gradient of the op declaration ``case``. Its operations can be differentiated
    again. Return an empty string if the declaration has no gradient.
    """
    if not (case.gradient and any(o in FLOATING for o in case.outs)) or case.mutates or case.state == "view":
        return ""
    made, names = results(case), [n for n, _, _ in results(case)]
    grads = "grad" if len(made) == 1 else "grads"
    body = [f"{', '.join(names)}{',' if len(names) > 1 else ''} = {grads}", "x = saved.x", "g = torch.zeros_like(x)"]
    body += _gathered(case)
    body += _chained(case)
    saves = [
        "x",
        *(
            n
            for t, n in (("second", "y"), ("index", "idx"), ("broadcast", "b"), ("tensors", "ts"), ("optional", "o"))
            if t in case.terms
        ),
    ]
    saves += ["at"] if case.dynamic else []
    lines = [f"@{op_name(case)}.backward(saves={tuple(saves)!r})", f"def _({grads}, saved, needs):"]
    return "\n".join([*lines, *(f"    {line}" for line in body)])


def _gathered(case: Declared) -> list[str]:
    """Return the lines of Python that compute ``g`` from the gradients of the results of the op declaration ``case``.

    ``g`` is the gradient of ``v``, the tensor of values from which the results are made.
    """
    half = "x.shape[-1]" if case.variadic else "x.shape[0]"
    halves = (f"[..., :{half}]", f"[..., {half}:]") if case.variadic else (f"[:{half}]", f"[{half}:]")
    put = "index_copy(-1, saved.at, kept)" if case.variadic else "index_put((saved.at,), kept)"
    parts = {
        "same": ["g = g + same"],
        "rows": ["g = g + rows[..., None]"],
        "turned": [f"g = g + turned.{_turn(case)}"],
        "twice": [f"g = g + twice{halves[0]} - twice{halves[1]}"],
        "total": ["g = g + total"],
        "kept": [f"g = g + torch.zeros_like(x).{put}"],
        "list": ["g = g + list[0] + list[1] * 2"],
        "perhaps": ["g = g + perhaps * 3 if x.shape[-1] > 1 else g"],
    }
    return [line for out in case.outs for line in parts.get(out, [])]


def _chained(case: Declared) -> list[str]:
    """Return the lines of Python that compute the gradients of the arguments of the op declaration ``case`` and return
    them as a dict.

    They start from ``g``, the gradient of ``v``, the tensor of values. Only the gradients that are needed are computed.
    """
    t = case.terms
    for_saved = {"second": "y", "index": "idx", "broadcast": "b", "tensors": "ts", "optional": "o"}
    lines = [f"{n} = saved.{n}" for term, n in for_saved.items() if term in t]
    lines += [f"{SCALARS[term][0]} = saved.{SCALARS[term][0]}" for term in t if term not in TENSOR_TERMS]
    if "text" in t:
        lines += ['if mode == "square":', *(f"    {line}" for line in value_lines(case)[:-1]), "    g = g * 2 * u"]
    lines += ["g = -g if flag else g"] if "bool" in t else []
    lines += ["found = {}"]
    lines += ["if needs.ts:", "    found['ts'] = [g for _ in ts]"] if "tensors" in t else []
    lines += ["if needs.o:", "    found['o'] = g.sum_to_size(o.shape)"] if "optional" in t else []
    lines += ["if needs.b:", "    found['b'] = g.sum_to_size(b.shape)"] if "broadcast" in t else []
    lines += ["g = g if maybe is None else g * maybe"] if "maybe" in t else []
    factors = {
        "float": "s",
        "ints": "(1 + sum(ks))",
        "floats": "(0.5 + sum(fs))",
        "pair": "pair[0]",
        "number": "number",
        "enum": "shade.value",
    }
    lines += [f"g = g * {factor}" for term, factor in factors.items() if term in t]
    if "second" in t:
        lines += ["if needs.y:", "    found['y'] = g * 2 * x", "if needs.x:", "    found['x'] = g * 2 * y"]
    else:
        lines += ["if needs.x:", "    found['x'] = g * 2"]
    return [*lines, "return found"]


def samples(case: Declared) -> str:
    """Return the source code of a function that builds sample arguments of the op of ``case``. Return an empty string
    if the op needs none.

    Only a template of an op with an index argument needs it. Shiplap tries a template on samples before it uses the
    template.
    """
    if "index" not in case.terms or case.kernel != "template":
        return ""
    dims = dims_of(case)
    shape = ", ".join('*sizes["b"]' if d == "*b" else f'sizes["{d}"]' for d in dims)
    made = []
    for name, annotation, _ in parameters(case):
        if name == "idx":
            made.append("torch.randint(-2, 3, shape[-1:], generator=rng)")
        elif name == "b":
            made.append(f'drawn((sizes["b_{dims[0]}"], *shape[1:]))')
        elif "Tensor" in annotation:
            made.append("drawn(shape[-1:])" if name == "o" else "drawn(shape)")
        elif name != "*":
            made.append(f'sizes["{name}"]')
    lines = [f"@{op_name(case)}.samples", "def _(rng, sizes, dtype, device):", f"    shape = ({shape},)"]
    lines += ["    def drawn(shape):", "        return torch.randn(shape, generator=rng).to(dtype)"]
    return "\n".join([*lines, f"    return ({', '.join(made)},)"])


FLAT = """
def flat_{name}(t):
    \"\"\"What a kernel sees that goes by the address alone.\"\"\"
    if t is None or not isinstance(t, Tensor):
        return [flat_{name}(e) for e in t] if isinstance(t, list) else t
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())
"""


def python_kernel(case: Declared, device: str) -> str:
    """Return the source code of the Python kernel of the op declaration ``case`` for ``device``.

    ``case.kernel`` selects one of three kinds. ``python`` returns its results. ``python_out`` writes them to given
    tensors. ``python_flat`` does so too, and reads its arguments as if they were contiguous.
    """
    name = op_name(case)
    out_style = case.kernel in ("python_out", "python_flat") and not case.traced and not case.dynamic and case.outs
    more = tuple(n for n, _, _ in results(case)) if out_style else ()
    if out_style and (len(more) == 1 or case.state == "returned"):
        more = ("out",) if len(more) == 1 else tuple(f"out{i}" for i in range(len(more)))
    if case.workspace:
        more = (*more, "workspace")
    body = []
    if case.kernel == "python_flat":
        named = [n for n, a, _ in parameters(case) if "Tensor" in a]
        body += [f"{n} = flat_{name}({n})" for n in named]
    body += [*value_lines(case), *kept_line(case), *mutation_lines(case)]
    if out_style:
        targets = [m for m in more if m != "workspace"]
        body += [f"{target}.copy_({e})" for target, (_, _, e) in zip(targets, results(case), strict=True)]
    else:
        body += [returned_line(case, kernel=True)]
    options = ', workspace="64"' if case.workspace else ""
    lines = [FLAT.format(name=name)] if case.kernel == "python_flat" else []
    lines += [f'@{name}.kernel("{device}"{options})', f"def _({signature(case, annotated=False, more=more)}):"]
    return "\n".join([*lines, *(f"    {line}" for line in body)])


HEAD = """from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.crossed.source import Shade
"""


def module_text(case: Declared, device: str = "cpu") -> str:
    """Return the source code of the Python module of the op declaration ``case``, with its op, gradient, samples and
    Python kernel for ``device``.

    Native kernels are added later, since they need a header of the op.
    """
    parts = [HEAD, reference(case), backward(case), samples(case)]
    if case.kernel in ("python", "python_out", "python_flat"):
        parts.append(python_kernel(case, device))
    return "\n\n".join(p for p in parts if p) + "\n"
