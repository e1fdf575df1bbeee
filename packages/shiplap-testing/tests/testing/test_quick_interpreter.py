"""Triton's interpreter as tests use it does what Triton's does, with less of a search."""

import json
from pathlib import Path

import pytest

from shiplap_testing.forked import interpreted

triton = pytest.importorskip("triton")
OF_TRITON = Path(triton.__file__).parent / "runtime" / "interpreter.py"

PROGRAM = """
import inspect, json, runpy, sys
from pathlib import Path
import torch, triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

def patched():
    class Scope(list):
        def set_attr(self, part, name, value): self.append(f"{part.__name__}.{name}")
    scope = Scope()
    for part in (tl, tl.core, tl.core.tensor, tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(part, None, scope)
    return sorted(scope)

scalars = [t for t in vars(tl).values() if type(t) is tl.dtype and t.name not in ("void", "int1")]
types = [tl.int1, *scalars, *map(tl.pointer_type, scalars), *(tl.block_type(t, [4, 8]) for t in scalars)]
types.append(tl.block_type(tl.pointer_type(tl.float32), [4]))

def numpy_types():
    def one(t):
        try: return str(interpreter._get_np_dtype(t))
        except KeyError: return "none"
    return [f"{t}: {one(t)}" for t in types]

@triton.jit
def twice(x): return x + x

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(x_ptr + at, twice(twice(tl.maximum(x, 1))) + tl.sum(x), mask=at < n)

def ran():
    seen = 0
    def counted(*args):
        nonlocal seen
        seen += 1
        return given(*args)
    given, inspect.getmembers = inspect.getmembers, counted
    x = torch.arange(5, dtype=torch.float32)
    kernel[(1,)](x, 5, BLOCK=8)
    inspect.getmembers = given
    return x.tolist(), seen, patched()

@triton.jit
def integers(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(x_ptr + at, x + y)
    tl.store(y_ptr + at, (x * y) - 3)

def wrapped():
    seen, given = [], TritonSemantic.device_assert
    TritonSemantic.device_assert = lambda self, cond, msg, mask: seen.append(msg) or given(self, cond, msg, mask)
    x, y = (torch.tensor(values, dtype=torch.int32) for values in ([2**31 - 1, -2**31, 7, 2**30], [1, -1, 5, 4]))
    integers[(1,)](x, y, BLOCK=4)
    TritonSemantic.device_assert = given
    return x.tolist(), y.tolist(), len(seen)

print(json.dumps([interpreter._patch_builtin.__module__, patched(), numpy_types(), ran(), wrapped()]))
"""
FROM_SOURCE = """
import triton.runtime.interpreter as interpreter
for name, function in list(vars(interpreter).items()):
    if name in ("_patch_builtin", "_get_np_dtype"):  # Triton's own, from its source
        exec(compile(function_of(name), interpreter.__file__, "exec"), vars(interpreter))
interpreter.interpreter_builder.options = interpreter.InterpreterOptions()
"""
SOURCE = """
import ast
def function_of(name):
    import triton.runtime.interpreter as interpreter
    tree = ast.parse(open(interpreter.__file__).read())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return tree
"""


@pytest.mark.skipif(
    "def _patch_builtin(pkg, builder, scope" not in OF_TRITON.read_text(), reason="a Triton that is left as it is"
)
def test_what_is_replaced_and_computed_is_the_same(tmp_path):
    (tmp_path / "quick.py").write_text(PROGRAM)  # a kernel needs its source in a file
    (tmp_path / "plain.py").write_text(SOURCE + FROM_SOURCE + PROGRAM)
    (quick, *told_by_quick), (plain, *told_by_plain) = (told(tmp_path / name) for name in ("quick.py", "plain.py"))
    assert (quick, plain) != (plain, plain), "the quick one is in use"
    (*same, (values, searches, left), quick_sums), (*wanted, (right, more, also), sums) = told_by_quick, told_by_plain
    assert same == wanted
    assert len(same[0]) > 100
    assert values == right == [14.0, 14.0, 18.0, 22.0, 26.0]
    assert left == also, "of what was replaced, as much is there again"
    assert searches == 0 < more
    (*numbers, conditions), (*wrapped, computed) = quick_sums, sums
    assert numbers == wrapped == [[-(2**31), 2**31 - 1, 12, 2**30 + 4], [2**31 - 4, -(2**31) - 3 + 2**32, 32, -3]]
    assert conditions == 0 < computed


def told(script):
    done = interpreted(script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
