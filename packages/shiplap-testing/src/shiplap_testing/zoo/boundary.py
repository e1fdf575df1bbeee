"""C ABI kernels and their error paths: what leaves the function when a value is wrong, and what stays behind.

Each gathers ``x[index]``; all are right for every index that is one.
"""

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

import shiplap as sl
from shiplap_testing.build import compile_c
from shiplap_testing.folder import temporary
from shiplap_testing.zoo.specimen import Specimen

SPECIMENS: list[Specimen] = []
SOUND: list[Specimen] = []
SAYS: dict[str, str] = {}  # specimen → what the finding says
_folder = temporary("zoo")

HEAD = "int {name}(const sl_context* ctx, const DLTensor* x, const DLTensor* index, DLTensor* out)"
CPP = """
#include <stdexcept>
#include <vector>
static int gather(const DLTensor* x, const DLTensor* index, DLTensor* out) {
  auto in = static_cast<const float*>(x->data);
  auto at = static_cast<const int32_t*>(index->data);
  auto to = static_cast<float*>(out->data);
  const std::vector<float> copy(in, in + x->shape[0]);
  for (int64_t i = 0; i < index->shape[0]; ++i) to[i] = copy.at(static_cast<size_t>(at[i]));
  return SL_OK;
}
"""
C = """
#include <stdlib.h>
HEAD {
  const float* in = x->data; const int32_t* at = index->data; float* to = out->data;
  SETUP
  for (int64_t i = 0; i < index->shape[0]; ++i) {
    CHECK
    to[i] = in[at[i]];
  }
  RELEASE
  return SL_OK;
}"""
# Volatile, so that the compiler does not leave an allocation out that nothing reads.
ROOM = "float* volatile room = malloc(4096);"
RANGE = 'if (at[i] < 0 || at[i] >= x->shape[0]) { snprintf(ctx->error, ctx->error_size, "row %d", at[i]); '


def library(name, body, compiler="cc"):
    """Declare the op ``zoo_boundary::<name>``, which returns the elements of ``x`` at ``index``. Compile the source
    code ``body`` with ``compiler``, ``"cc"`` or ``"c++"``. Return the op with the C function ``name`` as its kernel.
    """

    def reference(x: Float32[Tensor, "n"], index: Int32[Tensor, "m"]) -> Float32[Tensor, "m"]:
        """Return the elements of ``x`` at ``index``, as the reference for the op's C kernel."""
        return x[index.long()]

    # The op has the name of its function.
    reference.__name__ = reference.__qualname__ = name
    op = sl.op(f"zoo_boundary::{name}")(reference)
    text = body.replace("HEAD", ('extern "C" ' if compiler == "c++" else "") + HEAD.format(name=name))
    op.kernel("cpu", sl.cabi(compile_c(_folder, name, {name: op}, text, compiler=compiler), name))

    @op.samples
    def _(rng, sizes, dtype, device):
        """Return sample arguments of the op, which are a tensor of random numbers and random indices into it. There are
        no indices if there are no numbers.
        """
        n, m = sizes["n"], sizes["m"]
        rows = torch.randint(0, max(n, 1), (m if n else 0,), generator=rng, dtype=torch.int32)
        return torch.randn(n, generator=rng), rows

    return op


def c(name, setup="", check="", release=""):
    """Return an op of ``library`` with a kernel in C. ``setup``, ``check`` and ``release`` are C statements. The kernel
    runs ``setup`` before the loop over indices, ``check`` for each index and ``release`` after the loop.
    """
    return library(name, C.replace("SETUP", setup).replace("CHECK", check).replace("RELEASE", release))


def bad(name, op, says):
    """Add the broken op ``op`` under ``name`` to ``SPECIMENS``, the ops on which the audit is tested. The audit's check
    ``c_abi`` must fail on it with a finding that contains the string ``says``.
    """
    SPECIMENS.append(Specimen(name, op, frozenset({"c_abi"})))
    SAYS[name] = says


bad(
    "C++: exception leaves the C function",
    library("throws", CPP + "HEAD { return gather(x, index, out); }", "c++"),
    "index full of -1: std::out_of_range leaves the C function",
)
bad("C: index used without a check", c("unchecked_index"), "the process dies of SIGSEGV")
bad(
    "C: memory lost on the error path",
    c("leaks", ROOM, RANGE + "return SL_INVALID_ARGUMENT; } room[0] = in[0];", "free(room);"),
    "returns status 1 and leaves 41",
)
bad(
    "C: file left open on the error path",
    c(
        "keeps_file",
        'FILE* file = fopen("/dev/null", "r");',
        RANGE + "return SL_INVALID_ARGUMENT; }",
        "if (file) fclose(file);",
    ),
    "an open file",
)

SOUND.append(
    Specimen(
        "C++: exceptions become a status",
        library(
            "catches",
            CPP
            + """
HEAD {
  try {
    return gather(x, index, out);
  } catch (const std::exception& e) {
    snprintf(ctx->error, ctx->error_size, "%s", e.what());
    return SL_INVALID_ARGUMENT;
  }
}""",
            "c++",
        ),
    )
)
SOUND.append(
    Specimen(
        "C: every path releases",
        c("releases", ROOM, RANGE + "free(room); return SL_INVALID_ARGUMENT; } room[0] = in[0];", "free(room);"),
    )
)
