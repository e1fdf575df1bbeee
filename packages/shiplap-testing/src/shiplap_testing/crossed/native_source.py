"""Kernels of crossed declarations in native code: C, CUDA C++, and templates of Inductor in C++ and Triton.

C and CUDA C++ share one body: a loop over the elements of ``x``, in double precision, with every tensor read by its
strides. On a GPU one thread runs it, since its time is not measured.
"""

from __future__ import annotations

import re
from typing import Any

from shiplap_testing.crossed.arguments import rank_of
from shiplap_testing.crossed.declared import (
    TEMPLATE_OUTS,
    TEMPLATE_TERMS,
    TENSOR_TERMS,
    TRITON_OUTS,
    TRITON_TERMS,
    Declared,
)
from shiplap_testing.crossed.source import dims_of, op_name, results

PRELUDE = r"""
#include <math.h>
#include <stdio.h>
#include <string.h>
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define SL_BODY __device__ static
#define SL_RUN __global__ static
static int concluded(const sl_context* ctx, cudaError_t status) {
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s: %s", cudaGetErrorName(status), cudaGetErrorString(status));
  return SL_INTERNAL;
}
#else
#define SL_BODY __attribute__((unused)) static
#define SL_RUN static
#endif

typedef struct { char* data; int there, rank, code, bits; int64_t shape[8], strides[8]; } View;

static View view_of(const DLTensor* t) {
  View v;
  memset(&v, 0, sizeof v);
  if (!t) return v;
  v.there = 1; v.data = (char*)t->data + t->byte_offset; v.rank = t->ndim;
  v.code = t->dtype.code; v.bits = t->dtype.bits;
  for (int d = 0; d < t->ndim && d < 8; ++d) { v.shape[d] = t->shape[d]; v.strides[d] = t->strides[d]; }
  return v;
}

/* Where the element `i` is; `from` is the dim of `i` that the first one of the tensor lies along. */
SL_BODY int64_t place(const View* t, const int64_t* i, int from) {
  int64_t at = 0;
  for (int d = 0; d < t->rank; ++d) at += (t->shape[d] == 1 ? 0 : i[from + d]) * t->strides[d];
  return at;
}

SL_BODY double load(const View* t, int64_t at) {
  if (t->code == 2 && t->bits == 32) return ((const float*)t->data)[at];
  if (t->code == 2 && t->bits == 64) return ((const double*)t->data)[at];
  if (t->code == 4) {
    uint32_t word = (uint32_t)((const uint16_t*)t->data)[at] << 16; float f;
    memcpy(&f, &word, 4);
    return f;
  }
  if (t->bits == 64) return (double)((const int64_t*)t->data)[at];
  return ((const uint8_t*)t->data)[at];
}

SL_BODY void save(const View* t, int64_t at, double value) {
  if (t->code == 2 && t->bits == 32) ((float*)t->data)[at] = (float)value;
  else if (t->code == 2 && t->bits == 64) ((double*)t->data)[at] = value;
  else if (t->code == 4) {
    float f = (float)value; uint32_t word; memcpy(&word, &f, 4);
    ((uint16_t*)t->data)[at] = (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  } else if (t->bits == 64) ((int64_t*)t->data)[at] = (int64_t)value;
  else ((uint8_t*)t->data)[at] = value != 0;
}

SL_BODY double load_at(const View* t, const int64_t* i, int from) { return load(t, place(t, i, from)); }
SL_BODY void save_at(const View* t, const int64_t* i, int from, double value) { save(t, place(t, i, from), value); }
"""


def _value(case: Declared) -> list[str]:
    """Return the lines of C that compute ``v``, the value for one element of ``x``, from the terms of the op
    declaration ``case``. A term, such as ``second``, is a factor or summand of the value.
    """
    t, lines = case.terms, ["double v = load_at(&x, i, 0) * 2;"]
    lines += ["v *= load_at(&y, i, 0);"] if "second" in t else []
    lines += ["v *= s;"] if "float" in t else []
    lines += ["v *= 1 + ks;"] if "ints" in t else []
    lines += ["v *= 0.5 + fs;"] if "floats" in t else []
    lines += ["v = v * pair_0 - pair_1;"] if "pair" in t else []
    lines += ["v += high ? 1 : 2;"] if "literal" in t else []
    lines += ["v *= (double)shade;"] if "enum" in t else []
    lines += ["v += load_at(&b, i, 0);"] if "broadcast" in t else []
    lines += ["if (o.there) v += load_at(&o, i, rank - 1);"] if "optional" in t else []
    lines += ["v += load_at(&idx, i, rank - 1);"] if "index" in t else []
    lines += ["v += k;"] if "int" in t else []
    lines += ["v = flag ? -v : v;"] if "bool" in t else []
    lines += ["v = mode ? v * v : v;"] if "text" in t else []
    return lines


def _stores(case: Declared) -> list[str]:
    """Return the lines of C that store ``v`` in the results of the op declaration ``case``.

    ``v`` is the value for one element of ``x``. The lines also add ``v`` to the argument to which the op writes, if
    there is one.
    """
    if case.mutates:
        stores = ["if (acc.there) save_at(&acc, i, 0, load_at(&acc, i, 0) + v);"]
    else:
        stores = []
    along = "rank - 1" if case.variadic else "0"
    forms = {
        "same": ["save_at(&R_same, i, 0, v);"],
        "rows": [
            "if (i[rank - 1] == 0) row = 0;",
            "row += v;",
            "if (i[rank - 1] == x.shape[rank - 1] - 1) save_at(&R_rows, i, 0, row);",
        ],
        "turned": [
            f"for (int d = 0; d < rank; ++d) j[d] = i[{'d' if case.variadic else 'rank - 1 - d'}];",
            *(["j[rank - 1] = i[rank - 2]; j[rank - 2] = i[rank - 1];"] if case.variadic else []),
            "save_at(&R_turned, j, 0, v);",
        ],
        "twice": [
            "for (int d = 0; d < rank; ++d) j[d] = i[d];",
            "save_at(&R_twice, j, 0, v);",
            f"j[{along}] += x.shape[{along}];",
            "save_at(&R_twice, j, 0, -v);",
        ],
        "count": [
            "if (i[rank - 1] == 0) positive = 0;",
            "positive += load_at(&x, i, 0) > 0;",
            "if (i[rank - 1] == x.shape[rank - 1] - 1) save_at(&R_count, i, 0, (double)positive);",
        ],
        "mask": ["save_at(&R_mask, i, 0, load_at(&x, i, 0) > 0);"],
        "total": ["total += v;"],
        "kept": [
            "for (int d = 0; d < rank; ++d) j[d] = i[d];",
            "j[rank - 1] = column[i[rank - 1]];",
            "if (j[rank - 1] >= 0) save_at(&R_kept, j, 0, v);",
        ]
        if case.variadic
        else [
            "if (first) keep = load_at(&x, i, 0) > 0;",
            "if (first && keep) { j[0] = kept; save_at(&R_at, j, 0, (double)i[0]); ++kept; }",
            "if (keep) { for (int d = 0; d < rank; ++d) j[d] = i[d]; j[0] = kept - 1; save_at(&R_kept, j, 0, v); }",
        ],
    }
    return [*stores, *(line for out in case.outs for line in forms[out])]


# term → parameters of the body, and what the C function passes for its own
_PASSED = {
    "float": [("double s", "s")],
    "int": [("int64_t k", "k")],
    "bool": [("int flag", "flag")],
    "text": [("int mode", 'strcmp(mode, "square") == 0')],
    "ints": [("double ks", "sum_of_ints(ks, ks_len)")],
    "floats": [("double fs", "sum_of_floats(fs, fs_len)")],
    "literal": [("int high", 'strcmp(level, "high") == 0')],
    "enum": [("int64_t shade", "shade")],
    "pair": [("double pair_0", "(double)pair[0]"), ("double pair_1", "(double)pair[1]")],
}
SUMS = """
__attribute__((unused)) static double sum_of_ints(const int64_t* t, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += (double)t[i];
  return s;
}
__attribute__((unused)) static double sum_of_floats(const double* t, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += t[i];
  return s;
}
"""


# Which columns have a positive element, and where each of them goes.
_COLUMNS = """
  int64_t column[64] = {0};
  for (int64_t n = 0; n < count; ++n) {
    int64_t rest = n;
    for (int d = rank - 1; d >= 0; --d) { i[d] = rest % x.shape[d]; rest /= x.shape[d]; }
    if (load_at(&x, i, 0) > 0) column[i[rank - 1]] = 1;
  }
  for (int64_t c = 0; c < x.shape[rank - 1]; ++c) {
    if (column[c]) save(&R_at, kept, (double)c);
    column[c] = column[c] ? kept++ : -1;
  }
"""


def c_function(case: Declared, spec: Any, device: str = "cpu", name: str = "") -> str:
    """Return the source code of the kernel of the op declaration ``case``. It is in C, or in CUDA C++ if ``device`` is
    ``cuda``.

    The kernel is a function ``name``, or with the name of the op if ``name`` is empty. Its parameters have the order of
    ``spec``, the declared signature.
    """
    from shiplap.codegen import c_prototype

    name, shown = name or op_name(case), c_prototype(spec)
    tensors = [a.name for a in spec.tensors]
    outs = [n for n, _, _ in results(case)]
    given = {o.name: p.name for o, p in zip(spec.outputs, [p for p in shown if p.role == "output"], strict=True)}
    scalars = [part for term in case.terms if term not in TENSOR_TERMS for part in _PASSED[term]]
    body_parameters = [f"View {t}" for t in tensors] + [f"View R_{o}" for o in outs] + [p for p, _ in scalars]
    body_parameters += ["int64_t* extent"] if case.dynamic else []
    passed = [f"view_of({t})" for t in tensors]
    passed += [f"view_of({given[o.name]})" for o in spec.outputs] + [e for _, e in scalars]
    loop = "\n      ".join(
        ["int first = 1;", "for (int d = 1; d < rank; ++d) first = first && i[d] == 0;", *_value(case), *_stores(case)]
    )
    after = ["save(&R_total, 0, total);"] if "total" in case.outs else []
    after += ["*extent = kept;"] if case.dynamic else []
    zero = _zeroed(case)
    body = f"""
SL_RUN void {name}_body({", ".join(body_parameters)}) {{
  const int rank = x.rank;
  int64_t i[8] = {{0}}, j[8] = {{0}}, count = 1, kept = 0, positive = 0;
  int keep = 0;
  double row = 0, total = 0;
  (void)j; (void)kept; (void)positive; (void)keep; (void)row; (void)total;
  for (int d = 0; d < rank; ++d) count *= x.shape[d];
  {zero}
  {_COLUMNS if case.dynamic and case.variadic else ""}
  for (int64_t n = 0; n < count; ++n) {{
      int64_t rest = n;
      for (int d = rank - 1; d >= 0; --d) {{ i[d] = rest % x.shape[d]; rest /= x.shape[d]; }}
      {loop}
      (void)first; (void)v;
  }}
  {" ".join(after)}
}}
"""
    prototype_text = ", ".join(["const sl_context* ctx", *(str(p) for p in shown)])
    extents = [p.name for p in shown if p.role == "extent"]
    if device == "cuda":
        run = _launch(name, passed, extents)
    else:
        run = f"{name}_body({', '.join([*passed, *extents])});\n  return SL_OK;"
    absent = [f"!{a.name}" for a in spec.tensors if not a.optional]
    check = f"if ({' || '.join(absent)}) return SL_INVALID_ARGUMENT;" if absent else ""
    # C++ would give the function another symbol.
    c_linkage = 'extern "C" ' if device == "cuda" or case.kernel == "source" else ""
    return f"{body}\n{c_linkage}int {name}({prototype_text}) {{\n  {check}\n  {run}\n}}\n"


def _zeroed(case: Declared) -> str:
    """Return lines of C that set all row sums and counts among the results of the op declaration ``case`` to zero, as
    one string. A loop over elements would not write the result of a row without elements.
    """
    lines = []
    for out, kind in (("rows", "rows"), ("count", "count")):
        if out in case.outs:
            lines.append(
                f"{{ int64_t all = 1; for (int d = 0; d < R_{kind}.rank; ++d) all *= R_{kind}.shape[d]; "
                f"for (int64_t n = 0; n < all; ++n) save(&R_{kind}, n, 0); }}"
            )
    return "\n  ".join(lines)


def _launch(name: str, passed: list[str], extents: list[str]) -> str:
    """Return the lines of CUDA C++ that launch the kernel ``name`` with the argument expressions ``passed`` and return
    a status.

    ``extents`` may name a pointer to host memory. The size of a result that the kernel counts on the GPU is then copied
    there.
    """
    if not extents:
        launch = f"{name}_body<<<1, 1, 0, (cudaStream_t)ctx->stream>>>({', '.join(passed)});"
        return f"{launch}\n  return concluded(ctx, cudaGetLastError());"
    return (
        f"int64_t* counted = (int64_t*)ctx->workspace;\n  cudaStream_t stream = (cudaStream_t)ctx->stream;\n"
        f"  {name}_body<<<1, 1, 0, stream>>>({', '.join([*passed, 'counted'])});\n"
        f"  const cudaError_t copied = cudaMemcpyAsync({extents[0]}, counted, 8, cudaMemcpyDeviceToHost, stream);\n"
        "  return concluded(ctx, copied ? copied : cudaStreamSynchronize(stream));"
    )


# --- templates and Triton: what they can have of a declaration -----------------------------------------------------


def template_unable(case: Declared) -> str:
    """Return the reason why no C++ or Triton template can be written for the op declaration ``case``. Return an empty
    string if one can be written.
    """
    if len(case.outs) != 1 or case.outs[0] not in TEMPLATE_OUTS or case.state != "pure":
        return f"a template is written for one result of {', '.join(TEMPLATE_OUTS)}"
    if more := set(case.terms) - set(TEMPLATE_TERMS):
        return f"a template has no {', '.join(sorted(more))}"
    return ""


class _Places:
    """The names of indices in the source code of a template, which computes each element of its only result from an
    element of ``x``.

    ``outs`` are the names of the indices into the result, and ``at`` those of the indices into ``x``. ``before`` are
    lines of source code that compute the indices into ``x``. If the result sums rows, the last index into ``x`` is
    ``c``, the variable of a loop.
    """

    def __init__(self, case: Declared, *, typed: str, size: str) -> None:
        """Choose names for the indices into the result of the op declaration ``case``, and for those into ``x``.
        ``typed`` is the string in front of the declaration of a variable, and ``size`` is a format string for the size
        of a dim of ``x``.
        """
        rank, (out,) = rank_of(case), case.outs
        reduced = out in ("rows", "count")
        self.outs = [f"i{d}" for d in range(rank - reduced)]
        self.at = [*self.outs, "c"] if reduced else list(self.outs)
        self.before: list[str] = []
        if out == "turned" and case.variadic:
            self.at[-2:] = self.at[:-3:-1]
        elif out == "turned":
            self.at.reverse()
        elif out == "twice":
            along = rank - 1 if case.variadic else 0
            self.before.append(f"{typed}half_at = i{along} % {size.format(along)}")
            self.at[along] = "half_at"
            self.along = along


def _template_value(case: Declared, load: str, end: str) -> list[str]:
    """Return the lines of a template that compute ``v``, the value for one element of ``x``, from the terms of the op
    declaration ``case``. A term, such as ``second``, is a factor or summand of the value.

    ``load`` is a format string for the expression that reads an element of a tensor, and ``end`` is the string that
    ends a statement.
    """
    t = case.terms
    rank = rank_of(case)
    at = [f"@{d}" for d in range(rank)]
    several = "{{KS_0}} + {{KS_1}}{% if KS_2 is defined %} + {{KS_2}}{% endif %}"
    reals = "{{FS_0}}{% if FS_1 is defined %} + {{FS_1}}{% endif %}"
    b_at = ["@0 % B_ROWS", *at[1:]]
    lines = ["v *= " + load.format("y", ", ".join(f'"{i}"' for i in at))] if "second" in t else []
    lines += ["v *= {{S}}"] if "float" in t else []
    lines += [f"v *= 1 + ({several})"] if "ints" in t else []
    lines += [f"v *= 0.5 + ({reals})"] if "floats" in t else []
    lines += ["v = v * {{PAIR_0}} - {{PAIR_1}}"] if "pair" in t else []
    lines += ["v *= {{NUMBER}}"] if "number" in t else []
    lines += ["{% if MAYBE is not none %}v *= {{MAYBE}}{{END}}{% endif %}"] if "maybe" in t else []
    one = '{% if DTYPE|string == "torch.float32" %}1{% else %}2{% endif %}'
    lines += [f"v += {one}{{{{END}}}}"] if "dtype" in t else []
    lines += ['{% if LEVEL == "high" %}v += 1{{END}}{% else %}v += 2{{END}}{% endif %}'] if "literal" in t else []
    lines += ["v *= {{SHADE}}"] if "enum" in t else []
    lines += ["v += " + load.format("b", ", ".join(f'"{i}"' for i in b_at))] if "broadcast" in t else []
    last = f'"{at[-1]}"'
    lines += ["{% if HAS_O %}v += " + load.format("o", last) + "{{END}}{% endif %}"] if "optional" in t else []
    lines += ["v += " + load.format("idx", last)] if "index" in t else []
    lines += ["v += {{K}}"] if "int" in t else []
    lines += ["{% if FLAG %}v = -v{{END}}{% endif %}"] if "bool" in t else []
    lines += ['{% if MODE == "square" %}v = v * v{{END}}{% endif %}'] if "text" in t else []
    return [(line if "{% if" in line and "{{END}}" in line else line + end).replace("{{END}}", end) for line in lines]


def template_text(case: Declared) -> str:
    """Return the source code of the C++ template of the op declaration ``case``, which computes tiles of the last two
    dims of the result. A template is a kernel with placeholders that Inductor compiles and fuses.
    """
    places = _Places(case, typed="const int64_t ", size='{{{{size("x", {})}}}}')
    (out,) = case.outs
    at, real = places.at, "double" if case.dtype == "float64" else "float"
    value = _template_value(case, '{{{{index("{}", {})}}}}', ";")
    value = [f'{real} v = {{{{index("x", ' + ", ".join(f'"{i}"' for i in at) + ")}}", *value]
    value[0] += {"mask": ";", "count": " > 0;"}.get(out, " * 2;")
    value = value[:1] if out in ("mask", "count") else value
    for d in range(len(at)):
        value = [line.replace(f"@{d}", at[d]) for line in value]
    value += {
        "twice": [f"if ({places.outs[getattr(places, 'along', 0)]} != half_at) v = -v;"],
        "mask": ["v = v > 0;"],
    }.get(out, [])
    body = [*(f"{line};" for line in places.before), *value]
    if out in ("rows", "count"):
        columns = f'{{{{size("x", {len(at) - 1})}}}}'
        body = [f"{real} r = 0;", f"for (int64_t c = 0; c < {columns}; ++c) {{", *body, "r += v;", "}"]
    else:
        body.append(f"const {real} r = v;")
    *outer, inner = places.outs
    wide = ', dtype="float64"' if case.dtype == "float64" else ""
    rows = 'const int64_t B_ROWS = {{size("b", 0)}};' if "broadcast" in case.terms else ""
    sized = [f'const int64_t S{d} = {{{{size("out", {d})}}}};' for d in range(len(places.outs))]
    split = [f"const int64_t {i} = rest % S{d}; rest /= S{d};" for d, i in reversed([*enumerate(outer)])]
    tile, ranges = (
        (f'tile("t", 1, BN{wide})', '("m0", "m1"), ("n0", "n1")') if outer else (f'tile("t", BN{wide})', '("n0", "n1")')
    )
    nl = "\n        "
    return f"""{{{{header()}}}}
extern "C"
{{{{def_kernel()}}}}
{{
    {nl.join([*sized, rows])}
    const int64_t M = {" * ".join(f"S{d}" for d in range(len(outer))) or "1"}, N = S{len(outer)};
    for (int64_t m0 = 0; m0 < M; ++m0)
    for (int64_t n0 = 0; n0 < N; n0 += {{{{BN}}}}) {{
        const int64_t m1 = m0 + 1, n1 = std::min(n0 + int64_t({{{{BN}}}}), N);
        int64_t rest = m0;
        {nl.join(split)}
        {{{{{tile}}}}}
        for (int64_t {inner} = n0; {inner} < n1; ++{inner}) {{
        {nl.join(body)}
            t[{inner} - n0] = r;
        }}
        (void)m1; (void)rest;
        {{{{store_output("t", {ranges})}}}}
    }}
}}
"""


def triton_template_text(case: Declared) -> str:
    """Return the source code of the Triton template of the op declaration ``case``, in which each lane computes one
    element of the result. A template is a kernel with placeholders that Inductor compiles and fuses.
    """
    places = _Places(case, typed="", size='{{{{size("x", {})}}}}')
    (out,) = case.outs
    at = places.at
    wide = ".to(tl.float32)" if case.dtype == "bfloat16" else ""

    def load(name: str, indices: list[str]) -> str:
        """Return the Triton expression that loads the element of the tensor ``name`` at the index expressions
        ``indices``.
        """
        steps = " + ".join(f'({i}) * {{{{stride("{name}", {d})}}}}' for d, i in enumerate(indices))
        return f"tl.load({name} + {steps or '0'}, mask=mask, other=0)"

    value = [f"v = {load('x', at)}{wide}", *_triton_value(case, at, load)]
    value[0] += {"mask": "", "count": " > 0"}.get(out, " * 2")
    value = value[:1] if out in ("mask", "count") else value
    value += {"twice": [f"v = tl.where({places.outs[getattr(places, 'along', 0)]} != half_at, -v, v)"]}.get(out, [])
    value += ["v = v > 0"] if out == "mask" else []
    lines = [*places.before, *value]
    if out in ("rows", "count"):
        kind = "int64" if out == "count" else "float64" if case.dtype == "float64" else "float32"
        columns = f'{{{{size("x", {len(at) - 1})}}}}'
        lines = [f"r = tl.zeros((BLOCK,), tl.{kind})", f"for c in range(0, {columns}):"]
        lines += [f"    {line}" for line in [*value, f"r += v.to(tl.{kind})"]]
    else:
        lines.append("r = v")
    split = [
        f"i{d} = rest % {{{{size('out', {d})}}}}\n    rest = rest // {{{{size('out', {d})}}}}"
        for d in range(len(places.outs))
    ]
    total = " * ".join(f'{{{{size("out", {d})}}}}' for d in range(len(places.outs)))
    rows = 'B_ROWS = {{size("b", 0)}}' if "broadcast" in case.terms else ""
    shown = ", ".join(f'"{i}"' for i in places.outs)
    nl = "\n    "
    return f"""{{{{def_kernel()}}}}
    {rows}
    at = tl.program_id(0).to(INDEX_DTYPE) * BLOCK + tl.arange(0, BLOCK)
    mask = at < {total}
    rest = at
    {nl.join(reversed(split))}
    {nl.join(lines)}
    {{{{store_output(({shown},), "r", "mask", val_shape=("BLOCK",))}}}}
"""


def _triton_value(case: Declared, at: list[str], load: Any) -> list[str]:
    """Return the lines of Triton that compute ``v``, the value for one element of ``x``, from the terms of the op
    declaration ``case``. A term, such as ``second``, is a factor or summand of the value.

    ``at`` are the names of the indices of the element. ``load(name, indices)`` returns the expression that loads an
    element of a tensor.
    """
    lines = _template_value(case, "<{}|{}>", "")
    for d in range(len(at)):
        lines = [line.replace(f"@{d}", at[d]) for line in lines]

    def written(found: re.Match[str]) -> str:
        """Return the Triton expression that replaces the match ``found``. The match is a placeholder such as ``<y|i0,
        i1>`` with the name of a tensor and its indices.
        """
        return str(load(found[1], [i.strip().strip('"') for i in found[2].split(",")]))

    return [re.sub(r"<(\w+)\|([^>]*)>", written, line) for line in lines]


def triton_template_grid(case: Declared) -> str:
    """Return the Python source code of the grid function of the Triton template of the op declaration ``case``, a
    lambda. The grid has at least one program for each ``BLOCK`` elements of the result.
    """
    dims = [d for d in dims_of(case) if not d.startswith("*")]
    counts = [f"sizes[{d!r}]" for d in (dims[:-1] if case.outs[0] in ("rows", "count") else dims)]
    counts += ["18"] if case.variadic else []  # no argument has more rows: lanes beyond them are masked
    counts += ["2"] if case.outs == ("twice",) else []
    return f"lambda sizes, config, cdiv: (cdiv({' * '.join(counts)}, config['BLOCK']), 1, 1)"


def triton_unable(case: Declared) -> str:
    """Return the reason why no Triton kernel can be written for the op declaration ``case``. Return an empty string if
    one can be written.
    """
    if set(case.outs) - set(TRITON_OUTS) or case.state in ("mutated_list", "view"):
        return f"a Triton kernel is written for {', '.join(TRITON_OUTS)}"
    if more := set(case.terms) - set(TRITON_TERMS):
        return f"a Triton kernel has no {', '.join(sorted(more))}"
    return ""
