"""C libraries that keep state between calls: the shadow on the CPU of what goes wrong on the GPU.

SlideSparse's own repository had all of them: a workspace of the process, replaced when a larger one is needed; a
plan cache filled at the first call of a shape; error texts in thread-local memory. Each is right when
called from one thread.
"""

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap_testing.build import compile_c
from shiplap_testing.folder import temporary
from shiplap_testing.zoo.specimen import Specimen

V = Float32[Tensor, "n"]
SPECIMENS: list[Specimen] = []
STATELESS: list[Specimen] = []
NAMES: dict[str, tuple[str, ...]] = {}  # specimen → symbols that the finding names
_folder = temporary("zoo")


def library(name, body, compiler="cc"):
    """Declare the op ``zoo_c::<name>``, which returns ``2 * x``. Compile the source code ``body`` with ``compiler``,
    ``"cc"`` or ``"c++"``. Return the op with the C function ``name`` as its kernel.
    """

    def reference(x: V) -> V:
        """Return ``2 * x``, as the reference of the op. The op's C kernel is compared with it."""
        return x * 2

    # The op has the name of its function.
    reference.__name__ = reference.__qualname__ = name
    op = sl.op(f"zoo_c::{name}")(reference)
    head = 'extern "C" ' if compiler == "c++" else ""
    text = body.replace("KERNEL", f"{head}int {name}(const sl_context* ctx, const DLTensor* x, DLTensor* out)")
    op.kernel("cpu", sl.cabi(compile_c(_folder, name, {name: op}, text, compiler=compiler), name))
    return op


def bad(name, op, *symbols):
    """Add the broken op ``op`` under ``name`` to ``SPECIMENS``, the ops on which the audit is tested. The audit's check
    ``stateless`` must fail on it with a finding that names ``symbols``, which are variables in the kernel's C code.
    """
    SPECIMENS.append(Specimen(name, op, frozenset({"stateless"})))
    NAMES[name] = symbols


LOOP = "for (int64_t i = 0; i < x->shape[0]; ++i)"

bad(
    "C: workspace of the process",
    library(
        "static_workspace",
        f"""
#include <stdlib.h>
static float* workspace;
static int64_t workspace_size;
KERNEL {{
  const float* in = x->data; float* to = out->data;
  if (workspace_size < x->shape[0]) {{
    free(workspace);                     // a graph, or another thread, may still use it
    workspace = malloc((workspace_size = x->shape[0]) * sizeof(float));
  }}
  {LOOP} workspace[i] = in[i] * 2;
  {LOOP} to[i] = workspace[i];
  return SL_OK;
}}""",
    ),
    "workspace",
    "workspace_size",
)

bad(
    "C: thread-local error text",
    library(
        "thread_error",
        f"""
static _Thread_local char last_error[1024];
const char* thread_error_last(void) {{ return last_error; }}
KERNEL {{
  const float* in = x->data; float* to = out->data;
  if (x->ndim != 1) {{ snprintf(last_error, sizeof last_error, "rank %d", x->ndim); return SL_INVALID_ARGUMENT; }}
  {LOOP} to[i] = in[i] * 2;
  return SL_OK;
}}""",
    ),
    "last_error",
)

bad(
    "C: plan cache in a static array",
    library(
        "static_plans",
        f"""
struct plan {{ int64_t n; float factor; }};
KERNEL {{
  static struct plan plans[64];
  const float* in = x->data; float* to = out->data;
  struct plan* p = &plans[x->shape[0] % 64];
  if (p->n != x->shape[0]) {{ p->factor = 2; p->n = x->shape[0]; }}
  {LOOP} to[i] = in[i] * p->factor;
  return SL_OK;
}}""",
    ),
    "plans",
)

bad(
    "C++: plan cache in a std::map",
    library(
        "map_plans",
        f"""
#include <map>
KERNEL {{
  static std::map<int64_t, float> cache;
  auto in = static_cast<const float*>(x->data);
  auto to = static_cast<float*>(out->data);
  float factor = cache.try_emplace(x->shape[0], 2.0f).first->second;
  {LOOP} to[i] = in[i] * factor;
  return SL_OK;
}}""",
        "c++",
    ),
    "cache",
)

STATELESS.append(
    Specimen(
        "C++: tables that are constant, virtual functions, exceptions",
        library(
            "constants",
            f"""
#include <stdexcept>
#include <string>
struct factor {{ virtual ~factor() = default; virtual float value() const = 0; }};
struct two : factor {{ float value() const override {{ return 2; }} }};
static const char* const names[] = {{"one", "two"}};
static const float table[] = {{1, 2}};
KERNEL {{
  auto in = static_cast<const float*>(x->data);
  auto to = static_cast<float*>(out->data);
  two f;
  const factor& virtually = f;
  try {{
    if (x->ndim != 1) throw std::invalid_argument(std::string(names[x->ndim & 1]));
  }} catch (const std::exception& e) {{
    snprintf(ctx->error, ctx->error_size, "%s", e.what());
    return SL_INVALID_ARGUMENT;
  }}
  {LOOP} to[i] = in[i] * virtually.value() * table[1] / table[1];
  return SL_OK;
}}""",
            "c++",
        ),
    )
)

# In Python the same faults show in values, when the cache has too few keys.

_plans: dict[int, Tensor] = {}


@sl.op("zoo_c::python_plans")
def python_plans(x: V, a: float = 1.0) -> V:
    """Return ``x * a``. The kernel of the op uses the ``a`` of the first call with the same length of ``x``."""
    return x * a


@python_plans.kernel("cpu")
def _(x, a, *, out):
    """Write ``x * a`` to ``out``. This function has a defect on purpose. It uses the ``a`` of the first call with the
    same length of ``x``.
    """
    plan = _plans.setdefault(len(x), torch.full_like(x, a))
    torch.mul(x, plan, out=out)


SPECIMENS.append(Specimen("plan cache keyed by the size alone", python_plans, frozenset({"numerics"})))
