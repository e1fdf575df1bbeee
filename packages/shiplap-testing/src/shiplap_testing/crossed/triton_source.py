"""Triton kernels of crossed declarations: elements in the order of a contiguous tensor, a block of them a program."""

from __future__ import annotations

from shiplap_testing.crossed.arguments import rank_of
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.source import dims_of, op_name, results


def _triton_outs(case: Declared) -> list[str]:
    """Return the names of the output parameters of the Triton kernel of the op declaration ``case``. The only output is
    named ``out``. Several outputs have the names of the results, or ``out0``, ``out1`` and so on if the op returns an
    argument as well.
    """
    names = [n for n, _, _ in results(case)]
    if len(names) == 1:
        return ["out"]
    return [f"out{i}" for i in range(len(names))] if case.state == "returned" else names


def _triton_element(case: Declared) -> list[str]:
    """Return the lines of Triton that compute ``v``, the value for element ``at`` of contiguous tensors, from the terms
    of the op declaration ``case``. A term, such as ``second``, is a factor or summand of the value.
    """
    t = case.terms
    wide = ".to(tl.float32)" if case.dtype == "bfloat16" else ""
    count = 2 if case.omitted and case.defaults else 3
    lines = [f"e = tl.load(x + at, mask=inside, other=0){wide}", "v = e * 2"]
    lines += ["v = v * tl.load(y + at, mask=inside, other=0)"] if "second" in t else []
    lines += ["v = v * s"] if "float" in t else []
    lines += [f"v = v * (1 + {' + '.join(f'ks{i}' for i in range(count))})"] if "ints" in t else []
    lines += ["v = v * pair0 - pair1"] if "pair" in t else []
    lines += ["v = v * shade"] if "enum" in t else []
    lines += ["v = v + tl.load(b + at % numel_b, mask=inside, other=0)"] if "broadcast" in t else []
    optional = ["if o is not None:", "    v = v + tl.load(o + at % last, mask=inside, other=0)"]
    lines += optional if "optional" in t else []
    lines += ["v = v + tl.load(idx + at % last, mask=inside, other=0)"] if "index" in t else []
    lines += ["v = v + k"] if "int" in t else []
    lines += ["if flag:", "    v = -v"] if "bool" in t else []
    return lines


def _triton_stores(case: Declared) -> list[str]:
    """Return the lines of Triton that store ``v``, the value for element ``at``, in the results of the op declaration
    ``case``.

    Results with one element for each row are left out, since :func:`_triton_rows` computes them. The lines also add
    ``v`` to the argument to which the op writes, if there is one.
    """
    rank = rank_of(case)
    lines = ["tl.store(acc + at, tl.load(acc + at, mask=inside, other=0) + v, mask=inside)"] if case.mutates else []
    lines = ["if acc is not None:", *(f"    {line}" for line in lines)] if case.state == "mutated_optional" else lines
    turned = list(range(rank))[::-1]
    if case.variadic:
        turned = [*range(rank - 2), rank - 1, rank - 2]
    place, step = [], ""
    for d in reversed(turned):
        place.append(f"i{d}{step}")
        step += f" * size_x_{d}"
    twice = ("at // last * 2 * last + at % last", "last") if case.variadic else ("at", "numel_x")
    stores = {
        "same": ["tl.store({} + at, v, mask=inside)"],
        "mask": ["tl.store({} + at, e > 0, mask=inside)"],
        "twice": [
            f"tl.store({{}} + {twice[0]}, v, mask=inside)",
            f"tl.store({{}} + {twice[0]} + {twice[1]}, -v, mask=inside)",
        ],
        "turned": [
            "rest = at",
            *(
                line
                for d in reversed(range(rank))
                for line in (f"i{d} = rest % size_x_{d}", f"rest = rest // size_x_{d}")
            ),
            f"tl.store({{}} + {' + '.join(place)}, v, mask=inside)",
        ],
        "total": ["sum_of_all += tl.where(inside, v, 0).to(tl.float64)"],
    }
    for out, name in zip(case.outs, _triton_outs(case), strict=True):
        lines += [line.format(name) for line in stores.get(out, [])]
    return lines


def _rounded(case: Declared) -> str:
    """Return the source code that converts a sum before it is stored as a result of the op declaration ``case``. For
    bfloat16 it converts to float32, since the interpreter stores no float64 as bfloat16. For other dtypes it is an
    empty string.
    """
    return ".to(tl.float32)" if case.dtype == "bfloat16" else ""


def _triton_rows(case: Declared) -> list[str]:
    """Return the lines of Triton that compute, in loops over rows, those results of the op declaration ``case`` that
    have one element for each row.
    """
    kinds = {"rows": ("float64", "v"), "count": ("int64", "(e > 0)")}
    lines = []
    for out, name in zip(case.outs, _triton_outs(case), strict=True):
        if out in kinds:
            kind, value = kinds[out]
            lines += [f"for row in range(0, numel_{name}):", f"    held = tl.zeros((BLOCK,), tl.{kind})"]
            lines += ["    for begin in range(0, last, BLOCK):", "        column = begin + tl.arange(0, BLOCK)"]
            lines += ["        inside = column < last", "        at = row * last + column"]
            lines += [f"        {line}" for line in _triton_element(case)]
            lines += [
                f"        held += tl.where(inside, {value}, 0).to(tl.{kind})",
                f"    tl.store({name} + row, tl.sum(held){_rounded(case)})",
            ]
    return lines


def triton_text(case: Declared, device: str) -> str:
    """Return the source code of the Triton kernel of the op declaration ``case`` and of its binding for ``device``.

    Each program of the kernel computes a block of elements. If a result is a sum or count, one program computes all
    elements.
    """
    t, name, outs = case.terms, op_name(case), _triton_outs(case)
    tensors = [n for term, n in (("second", "y"), ("index", "idx"), ("broadcast", "b"), ("optional", "o")) if term in t]
    scalars = [n for term, n in (("float", "s"), ("int", "k"), ("bool", "flag"), ("enum", "shade")) if term in t]
    rows, last = _triton_rows(case), dims_of(case)[-1]
    given = {"last": "numel_x" if last.startswith("*") else last}
    given |= {f"ks{i}": f"ks[{i}]" for i in range(2 if case.omitted and case.defaults else 3)} if "ints" in t else {}
    given |= {"pair0": "pair[0]", "pair1": "pair[1]"} if "pair" in t else {}
    sizes = [f"size_x_{d}" for d in range(rank_of(case))] if "turned" in case.outs else []
    sizes += ["numel_b"] if "broadcast" in t else []
    sizes += [f"numel_{n}" for out, n in zip(case.outs, outs, strict=True) if out in ("rows", "count")]
    state = ["acc"] if case.mutates else []
    parameters = ["x", *tensors, *state, *outs, *scalars, "numel_x", *sizes, *given, "BLOCK: tl.constexpr"]
    body = [*_triton_element(case), *_triton_stores(case)]
    reads = ["at = block * BLOCK + tl.arange(0, BLOCK)", "inside = at < numel_x", *body]
    if "total" in case.outs or rows:
        total = outs[case.outs.index("total")] if "total" in case.outs else ""
        lines = ["sum_of_all = tl.zeros((BLOCK,), tl.float64)"] if total else []
        lines += ["for block in range(0, tl.cdiv(numel_x, BLOCK)):", *(f"    {line}" for line in reads)]
        lines += [f"tl.store({total}, tl.sum(sum_of_all){_rounded(case)})"] if total else []
        lines, grid = [*lines, *rows], "1"
    else:
        lines, grid = ["block = tl.program_id(0)", *reads], '"cdiv(numel_x, BLOCK)"'
    shown = "\n    ".join(lines)
    workspace = ', workspace="64"' if case.workspace else ""
    return f"""import triton
import triton.language as tl


@triton.jit
def {name}_kernel({", ".join(parameters)}):
    {shown}


launches = sl.triton({name}_kernel, grid={grid}, arguments={given!r}, constants={{"BLOCK": 16}})
{name}.kernel("{device}", launches{workspace})
"""
