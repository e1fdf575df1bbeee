"""Kernels of crossed declarations in native code: C, CUDA C++, C++ templates of Inductor and Triton.

C and CUDA C++ share one body: a loop over the elements of ``x``, in double precision, with every tensor read by its
strides. On a GPU one thread runs it; nobody measures it.
"""

from __future__ import annotations

from typing import Any

from shiplap_testing.crossed.declared import TEMPLATE_TERMS, TENSOR_TERMS, TRITON_TERMS, Declared
from shiplap_testing.crossed.source import op_name, results

PRELUDE = r"""
#include <math.h>
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
    t, lines = case.terms, ["double v = load_at(&x, i, 0) * 2;"]
    lines += ["v *= load_at(&y, i, 0);"] if "second" in t else []
    lines += ["v *= s;"] if "float" in t else []
    lines += ["v *= 1 + ks;"] if "ints" in t else []
    lines += ["v *= 0.5 + fs;"] if "floats" in t else []
    lines += ["v = v * pair_0 - pair_1;"] if "pair" in t else []
    lines += ["v += load_at(&b, i, 0);"] if "broadcast" in t else []
    lines += ["if (o.there) v += load_at(&o, i, rank - 1);"] if "optional" in t else []
    lines += ["v += load_at(&idx, i, rank - 1);"] if "index" in t else []
    lines += ["v += k;"] if "int" in t else []
    lines += ["v = flag ? -v : v;"] if "bool" in t else []
    lines += ["v = mode ? v * v : v;"] if "text" in t else []
    return lines


def _stores(case: Declared) -> list[str]:
    if case.mutates:
        stores = ["if (acc.there) save_at(&acc, i, 0, load_at(&acc, i, 0) + v);"]
    else:
        stores = []
    forms = {
        "same": ["save_at(&R_same, i, 0, v);"],
        "rows": [
            "if (i[rank - 1] == 0) row = 0;",
            "row += v;",
            "if (i[rank - 1] == x.shape[rank - 1] - 1) save_at(&R_rows, i, 0, row);",
        ],
        "turned": ["for (int d = 0; d < rank; ++d) j[d] = i[rank - 1 - d];", "save_at(&R_turned, j, 0, v);"],
        "twice": [
            "for (int d = 0; d < rank; ++d) j[d] = i[d];",
            "save_at(&R_twice, j, 0, v);",
            "j[0] += x.shape[0];",
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


def c_function(case: Declared, spec: Any) -> str:
    """The kernel of ``case`` as a C or CUDA C++ function. ``spec`` says in which order its parameters come."""
    from shiplap.codegen import c_prototype

    name, shown = op_name(case), c_prototype(spec)
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
    if case.kernel == "cuda":
        run = _launch(name, passed, extents)
    else:
        run = f"{name}_body({', '.join([*passed, *extents])});\n  return SL_OK;"
    check = (
        f"if ({' || '.join(f'!{t}' for t in _required(spec))}) return SL_INVALID_ARGUMENT;" if _required(spec) else ""
    )
    c_linkage = 'extern "C" ' if case.kernel == "cuda" else ""
    return f"{body}\n{c_linkage}int {name}({prototype_text}) {{\n  {check}\n  {run}\n}}\n"


def _required(spec: Any) -> list[str]:
    return [a.name for a in spec.tensors if not a.optional]


def _zeroed(case: Declared) -> str:
    """Sums over no element are zero, though the loop does not come to them."""
    lines = []
    for out, kind in (("rows", "rows"), ("count", "count")):
        if out in case.outs:
            lines.append(
                f"{{ int64_t all = 1; for (int d = 0; d < R_{kind}.rank; ++d) all *= R_{kind}.shape[d]; "
                f"for (int64_t n = 0; n < all; ++n) save(&R_{kind}, n, 0); }}"
            )
    return "\n  ".join(lines)


def _launch(name: str, passed: list[str], extents: list[str]) -> str:
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
    """Why this generator writes no C++ template for ``case``."""
    if case.rank != 2 or case.variadic or case.outs != ("same",) or case.state != "pure":
        return "a template is written for one result like x, a matrix"
    if more := set(case.terms) - set(TEMPLATE_TERMS):
        return f"a template has no {', '.join(sorted(more))}"
    return ""


def template_text(case: Declared) -> str:
    t = case.terms
    lines = ['float v = {{index("x", "m", "n")}} * 2;']
    lines += ['v *= {{index("y", "m", "n")}};'] if "second" in t else []
    lines += ["v *= {{S}};"] if "float" in t else []
    lines += ["v *= 1 + ({{KS_SUM}});"] if "ints" in t else []
    lines += ["v = v * {{PAIR_0}} - {{PAIR_1}};"] if "pair" in t else []
    lines += ['v += {{index("b", "(B_ROWS == 1 ? 0 : m)", "n")}};'] if "broadcast" in t else []
    lines += ['{% if HAS_O %}v += {{index("o", "n")}};{% endif %}'] if "optional" in t else []
    lines += ['v += {{index("idx", "n")}};'] if "index" in t else []
    lines += ["v += {{K}};"] if "int" in t else []
    lines += ["{% if FLAG %}v = -v;{% endif %}"] if "bool" in t else []
    lines += ['{% if MODE == "square" %}v = v * v;{% endif %}'] if "text" in t else []
    body = "\n                ".join(lines).replace(
        "({{KS_SUM}})", "({{KS_0}} + {{KS_1}}{% if KS_2 is defined %} + {{KS_2}}{% endif %})"
    )
    rows = 'const int64_t B_ROWS = {{size("b", 0)}};' if "broadcast" in t else ""
    return f"""{{{{header()}}}}
extern "C"
{{{{def_kernel()}}}}
{{
    const int64_t M = {{{{size("out", 0)}}}}, N = {{{{size("out", 1)}}}};
    {rows}
    for (int64_t m0 = 0; m0 < M; m0 += {{{{BM}}}})
    for (int64_t n0 = 0; n0 < N; n0 += {{{{BN}}}}) {{
        const int64_t m1 = std::min(m0 + int64_t({{{{BM}}}}), M), n1 = std::min(n0 + int64_t({{{{BN}}}}), N);
        {{{{tile("t", BM, BN)}}}}
        for (int64_t m = m0; m < m1; ++m)
            for (int64_t n = n0; n < n1; ++n) {{
                {body}
                t[(m - m0) * {{{{BN}}}} + (n - n0)] = v;
            }}
        {{{{store_output("t", ("m0", "m1"), ("n0", "n1"))}}}}
    }}
}}
"""


def triton_unable(case: Declared) -> str:
    """Why this generator writes no Triton kernel for ``case``."""
    if case.variadic or case.outs != ("same",) or case.state != "pure":
        return "a Triton kernel is written for one result like x"
    if more := set(case.terms) - set(TRITON_TERMS):
        return f"a Triton kernel has no {', '.join(sorted(more))}"
    return ""


def triton_text(case: Declared, device: str) -> str:
    """The kernel, and the line that binds it: elements in the order of a contiguous tensor."""
    t, name = case.terms, op_name(case)
    tensors = [n for term, n in (("second", "y"), ("index", "idx"), ("optional", "o")) if term in t]
    scalars = [n for term, n in (("float", "s"), ("int", "k")) if term in t]
    parameters = ["x", *tensors, "out", *scalars, "numel_x", f"size_x_{case.rank - 1}", "BLOCK: tl.constexpr"]
    last = f"at % size_x_{case.rank - 1}"
    wide = ".to(tl.float32)" if case.dtype == "bfloat16" else ""
    lines = [f"v = tl.load(x + at, mask=inside){wide} * 2"]
    lines += ["v = v * tl.load(y + at, mask=inside)"] if "second" in t else []
    lines += ["v = v * s"] if "float" in t else []
    lines += ["if o is not None:", f"    v = v + tl.load(o + {last}, mask=inside)"] if "optional" in t else []
    lines += [f"v = v + tl.load(idx + {last}, mask=inside)"] if "index" in t else []
    lines += ["v = v + k"] if "int" in t else []
    body = "\n".join(f"    {line}" for line in lines)
    grid = "*".join(["n", "c", "h", "w"][: case.rank])
    return f"""import triton
import triton.language as tl


@triton.jit
def {name}_kernel({", ".join(parameters)}):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel_x
{body}
    tl.store(out + at, v, mask=inside)


{name}.kernel("{device}", sl.triton({name}_kernel, grid="cdiv({grid}, BLOCK)", constants={{"BLOCK": 16}}))
"""
