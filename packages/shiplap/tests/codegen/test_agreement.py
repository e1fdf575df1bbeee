"""Random declarations and calls: what is printed as C++ and as Python says the same of each, word for word.

The C++ is compiled without torch, over a tensor of this test's own, so that hundreds of calls take one short compile.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from types import FunctionType

import pytest
import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.codegen.plan import step_statements
from shiplap.declare.signature import read_spec
from shiplap.dtypes import of
from shiplap.plan import CallPlan
from shiplap_headers import include_dir
from shiplap_testing.effort import sampled

CLASSES = {"Float": Float, "Int32": Int32, "Shaped": Shaped}
TOKENS = ["a", "b", "c", "3", "_", "2*a", "a+b", "k", "cdiv(b,2)", "a-1", "b//k", "ks[0]"]
DIMS = [{}, {}, {"c": "a * k"}, {"c": "b // k"}, {"d": "max(a, b)"}, {"d": "prod(ks)"}, {"d": "a % k"}]
REQUIRES = [(), ("k >= 1",), ("k % 2 == 0 and k > 0",), ("p > 0.5",), ("min(ks) >= 1",), ("mode == 'x'", "ks[1] < 3")]
REALS = [0.1, 1e-5, -1e22, 3.0, float("inf"), float("nan"), -0.0, 123456789.125, 1e16, 1e-4]
OUTPUTS = ["a", "a+1", "a-2", "3", "k"]
SEED, DECLARATIONS, CALLS = 20261122, (16, 60), 150

TENSOR = """
#include "shiplap/base.h"
namespace shiplap {
struct Raw { int64_t dim, dtype, device, data; int64_t sizes[8], strides[8]; };
class Tensor {
 public:
  explicit Tensor(const Raw* raw) : raw_(raw) {}
  explicit operator bool() const { return raw_ != nullptr; }
  int64_t dim() const { return raw_->dim; }
  const int64_t* sizes() const { return raw_->sizes; }
  const int64_t* strides() const { return raw_->strides; }
  int32_t dtype() const { return static_cast<int32_t>(raw_->dtype); }
  int32_t device_type() const { return static_cast<int32_t>(raw_->device); }
  int32_t device_index() const { return -1; }
  void* data() const { return reinterpret_cast<void*>(raw_->data); }
  bool is_contiguous() const {
    int64_t step = 1;
    for (int64_t axis = dim() - 1; axis >= 0; --axis) {
      if (sizes()[axis] == 0) return true;
    }
    for (int64_t axis = dim() - 1; axis >= 0; --axis) {
      if (sizes()[axis] != 1 && strides()[axis] != step) return false;
      step *= sizes()[axis];
    }
    return true;
  }
 private:
  const Raw* raw_;
};
inline std::string device_name(Device device) { return device.type == 0 ? "cpu" : "meta"; }
inline DLDevice dl_device_of(int32_t) { return {1, 0}; }
inline decltype(DLDevice::device_type) dl_device(int32_t) { return {}; }
}  // namespace shiplap
#include "shiplap/checks.h"
using namespace shiplap;
static std::string text;
"""


class Raw(ctypes.Structure):
    _fields_ = (
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("data", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    )


def raw(t: Tensor | None):
    if t is None:
        return None
    view = Raw(t.dim(), of(t.dtype, "test").number, 0 if t.device.type == "cpu" else 14, t.data_ptr())
    view.sizes[: t.dim()], view.strides[: t.dim()] = t.shape, t.stride()
    return ctypes.byref(view)


def declare(rng: random.Random, number: int) -> CallPlan | None:
    """A random declaration that the library admits and C++ can carry."""
    tensors = [
        (rng.choice(["Float", "Float", "Int32", "Shaped"]), rng.choices(TOKENS, k=rng.randrange(4))) for _ in "123"
    ]
    optional = [False, rng.random() < 0.4, rng.random() < 0.4]
    rng.shuffle(optional)
    annotations = {}
    for i, (kind, tokens) in enumerate(tensors):
        annotation = CLASSES[kind][Tensor, " ".join(tokens)]
        annotations[f"x{i}"] = annotation | None if optional[i] else annotation
    annotations |= {"k": int, "ks": list[int], "p": float, "on": bool, "mode": str}
    annotations["return"] = CLASSES[tensors[0][0]][Tensor, " ".join(rng.choices(OUTPUTS, k=2))]
    code = compile(f"def fn({', '.join(k for k in annotations if k != 'return')}): ...", "fuzz", "exec")
    fn = FunctionType(code.co_consts[0], globals(), "fn")
    fn.__annotations__ = annotations
    required = [f"x{i}" for i in range(3) if not optional[i]]
    try:
        spec = read_spec(
            f"fuzz::op{number}",
            fn,
            dims=rng.choice(DIMS),
            bounds={},
            requires=rng.choice(REQUIRES),
            mutates=rng.choice([(), (), (rng.choice(required),)]),
            contiguous=rng.choice([(), (f"x{rng.randrange(3)}",)]),
            outputs=(),
            autocast=None,
        )
    except sl.ShiplapError:
        return None
    return CallPlan(spec)


def draw_call(rng: random.Random, plan: CallPlan) -> tuple[tuple, Tensor, Tensor | None]:
    """Arguments that mostly fit, an output and a workspace."""
    env = {n: rng.randrange(4) for n in "abcd"} | {
        "k": rng.randrange(4),
        "ks": [rng.randrange(1, 4) for _ in range(rng.randrange(4))],
    }
    made: list[Tensor | None] = []

    def size(dim) -> int:
        try:
            value = dim.size if dim.kind == "fixed" else dim.expr(env) if dim.expr else env.get(dim.text, 2)
        except (ArithmeticError, LookupError, ValueError):
            value = 1
        return max(0, value + (rng.random() < 0.06))

    for arg in plan.spec.tensors:
        if arg.optional and rng.random() < 0.4:
            made.append(None)
        elif made and made[0] is not None and rng.random() < 0.1:
            made.append(made[0])
        else:
            shape = [size(d) for d in arg.tensor.dims] + [2] * (rng.random() < 0.04)
            concrete = arg.tensor.concrete
            dtype = (
                torch.int32
                if concrete and rng.random() < 0.9
                else rng.choice([torch.float32] * 8 + [torch.float64, torch.int8])
            )
            device = "meta" if rng.random() < 0.04 else "cpu"
            t = torch.zeros(shape, dtype=dtype, device=device)
            if t.dim() > 1 and rng.random() < 0.3:
                t = t.mT.contiguous().mT if rng.random() < 0.5 or not t.shape[0] else t[:1].expand(t.shape)
            made.append(t)
    scalars = (env["k"], env["ks"], rng.choice(REALS), rng.random() < 0.5, rng.choice(["x", "größe", ""]))
    wanted = [size(d) for d in plan.spec.outputs[0].tensor.dims]
    out = torch.zeros(wanted, dtype=rng.choice([torch.float32, torch.float32, torch.int32]))
    if rng.random() < 0.2 and out.dim() == 2:
        out = out.mT.contiguous().mT
    if rng.random() < 0.1 and made[0] is not None:
        out = made[0]
    scratch = rng.choice([None, torch.zeros(64, dtype=torch.uint8), torch.zeros(4), out])
    return (*made, *scalars), out, scratch


def in_python(plan: CallPlan, args, out, scratch) -> str:
    try:
        call = plan.quick(*args)
        plan.outputs.check(call, (out,))
        with torch.no_grad():
            plan.outputs.check_memory(call, (out,), scratch)
        if scratch is not None:
            plan.outputs.check_scratch(call, scratch)
    except sl.ShiplapError as e:
        return str(e)
    return ""


def function(plan: CallPlan, number: int) -> str:
    outputs = plan.outputs
    steps = step_statements((*plan.arguments, *plan.sharing, *outputs.measured, *outputs.fitting, *outputs.disjoint))
    body = "\n    ".join([*steps, "if (scratch) {", *step_statements(outputs.scratch), "}"])
    return f"""extern "C" const char* check_{number}(const Raw* r0, const Raw* r1, const Raw* r2, int64_t a_k,
    const int64_t* ks, int64_t n, double a_p, bool a_on, const char* mode, const Raw* r_out, const Raw* r_scratch) {{
  const List a_ks(ks, ks + n);
  const std::string a_mode = mode;
  const Tensor t_x0(r0), t_x1(r1), t_x2(r2), t_out(r_out), scratch(r_scratch);
  try {{
    {body}
  }} catch (const std::exception& e) {{
    text = e.what();
    return text.c_str();
  }}
  return "";
}}
"""


@pytest.fixture(scope="module", params=sampled(DECLARATIONS, long=[str(DECLARATIONS[-1])]))
def compiled(request, tmp_path_factory):
    """Declarations, and the library that checks their calls."""
    rng, plans = random.Random(SEED), list[CallPlan]()
    while len(plans) < request.param:
        if (plan := declare(rng, len(plans))) is not None:
            plans.append(plan)
    folder = tmp_path_factory.mktemp("agreement")
    source, library = folder / "checks.cpp", folder / "checks.so"
    source.write_text(TENSOR + "\n".join(function(plan, i) for i, plan in enumerate(plans)))
    command = [
        "c++",
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-I",
        str(include_dir()),
        "-o",
        str(library),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return rng, plans, ctypes.CDLL(str(library))


def test_the_printers_agree(compiled):
    rng, plans, library = compiled
    p, i, d, s, b = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p, ctypes.c_bool
    seen: dict[str, int] = {}
    for number, plan in enumerate(plans):
        check = getattr(library, f"check_{number}")
        check.restype = ctypes.c_char_p
        check.argtypes = [p, p, p, i, p, i, d, b, s, p, p]
        for _ in range(CALLS):
            args, out, scratch = draw_call(rng, plan)
            *tensors, k, ks, real, on, mode = args
            list_ = (ctypes.c_int64 * max(1, len(ks)))(*ks)
            messages = check(
                *map(raw, tensors), k, list_, len(ks), real, on, mode.encode(), raw(out), raw(scratch)
            ).decode()
            assert messages == in_python(plan, args, out, scratch), plan.source()
            seen[messages[:5]] = seen.get(messages[:5], 0) + 1
    wanted = {"", "SL201", "SL202", "SL203", "SL204", "SL205", "SL206", "SL207", "SL208", "SL210", "SL212", "SL213"}
    assert wanted <= seen.keys(), seen
    assert seen[""] >= 20, seen
