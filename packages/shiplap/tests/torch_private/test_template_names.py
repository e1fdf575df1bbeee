"""Names of variables in the source of a template, and functions of a GPU in the interpreter."""

from __future__ import annotations

import pytest
import sympy

from shiplap_testing.forked import interpreted


def test_ranges_may_use_names_that_sympy_has_for_something_else() -> None:
    """``N``, ``S``, ``E`` and ``I`` are a function, the singletons, a constant and the imaginary unit there."""
    from torch._inductor.codegen.cpp_template_kernel import parse_expr_with_index_symbols

    from shiplap.torch_private.inductor_templates import rename_sympy_names

    aliases, ranges = rename_sympy_names([("0", "N"), ("m0", "beta + S * 2"), ("E", "I"), ("n0", "n1")])
    assert aliases.count("const auto ") == 5
    for name in ("N", "S", "E", "I", "beta"):
        assert f"const auto {name}_of_template = {name};" in aliases
    parsed = [parse_expr_with_index_symbols(text) for pair in ranges for text in pair]
    assert {str(s) for p in parsed for s in p.free_symbols} >= {"N_of_template", "S_of_template", "m0", "n1"}
    assert all(isinstance(s, sympy.Symbol) for p in parsed for s in p.free_symbols)
    assert rename_sympy_names([("m0", "m1")]) == ("", [("m0", "m1")])


SCRIPT = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from shiplap.torch_private.triton_internals import _Libdevice
libdevice = _Libdevice()

@triton.jit
def kernel(x, tanh, near, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(tanh + at, libdevice.tanh(value), mask=at < n)
    tl.store(near + at, libdevice.nearbyint(value), mask=at < n)

x = torch.cat([torch.linspace(-40, 40, 801), torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 8388609.0, -1e30, 1e-30])])
tanh, near = torch.empty_like(x), torch.empty_like(x)
kernel[(1,)](x, tanh, near, x.numel(), BLOCK=1024)
torch.testing.assert_close(tanh, x.tanh(), rtol=1e-5, atol=1e-6)
torch.testing.assert_close(near, x.round(), rtol=0, atol=0)
print("equal")
"""


def test_the_interpreter_has_the_functions_of_gelu_and_of_int8() -> None:
    pytest.importorskip("triton")
    done = interpreted("-c", SCRIPT)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]
