"""Generated launches of Triton kernels without a GPU. Run by test_launched.py, in a process of its own.

Triton's compiler makes cubins for Hopper; a driver that has no device (fake_cuda.c) takes the launches that the
generated C++ asks of it, and gives each to Triton's interpreter with the very values that the driver got. So what the
op returns is right only where grid, order, types and addresses of the arguments are.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap.kernels.triton.kernel import LaunchedKernel
from shiplap.kernels.triton.specializations import LaunchedForm
from shiplap.kernels.triton.specialize import LaunchNumbers, form_of_key, specialization_key, with_constants
from shiplap.torch_private.triton_internals import triton_attributes
from shiplap_headers import include_dir
from shiplap_testing import hopper

sys.path.insert(0, str(Path(__file__).parent))
import launched_programs

HERE = Path(__file__).parent
REAL_DRIVER = "the driver of a GPU is loaded, so that no other one can take its place"
HOME = Path(tempfile.mkdtemp())
CC = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC"]
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_void_p)


@triton.jit(do_not_specialize=["shift"])
def scaled(x_ptr, bias, out_ptr, m, stride_x_0, stride_x_1, a, shift, flag, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < m
    y = tl.load(x_ptr + row * stride_x_0 + column * stride_x_1, mask=inside) * a + shift
    if bias is not None:
        y += tl.load(bias + column, mask=inside)
    if TWICE:
        y *= 2
    y = tl.where(flag, -y, y)
    tl.store(out_ptr + row * m + column, y, mask=inside)


@triton.jit
def squares(x, sums, n: tl.int64, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(sums + at, value * value, mask=at < n)


@triton.jit
def reverse(sums, out, n, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + n - 1 - at, tl.load(sums + at, mask=at < n), mask=at < n)


@triton.jit
def slope(grad_ptr, out, numel_grad, a, flag, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(grad_ptr + at, mask=at < numel_grad) * a * 2
    tl.store(out + at, tl.where(flag, -value, value), mask=at < numel_grad)


@sl.op("launched::affine")
def affine(
    x: Float[Tensor, "n m"], bias: Float[Tensor, "m"] | None = None, a: float = 2.0, shift: int = 0, flag: bool = False
) -> Float[Tensor, "n m"]:
    y = x * a + shift
    y = (y if bias is None else y + bias) * 2
    return -y if flag else y


@sl.op("launched::affine_x", outputs=("grad_x",))
def affine_x(grad: Float[Tensor, "n m"], a: float, flag: bool) -> Float[Tensor, "n m"]:
    return grad * (-2 * a if flag else 2 * a)


affine.backward(affine_x)


@sl.op("launched::turned")
def turned(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return (x * x).flip(0)


AFFINE = sl.triton(
    scaled,
    grid=("n", "cdiv(m, BLOCK)"),
    constants={"TWICE": True},
    configs=[{"BLOCK": 32, "num_warps": 1}, {"BLOCK": 64, "num_warps": 2}],
)
SLOPE = sl.triton(
    slope, grid="cdiv(numel_grad, WIDTH)", arguments={"out": "grad_x"}, constants={"WIDTH": 64, "num_warps": 1}
)
WORKSPACE = {"sums": ("float32", "0")}
TURNED = sl.triton(squares, grid="cdiv(n, WIDTH)", arguments={"WIDTH": "min(pow2ceil(n), 64)"}, scratch=WORKSPACE).then(
    reverse, grid="cdiv(n, WIDTH)", constants={"WIDTH": 32, "num_warps": 1}, scratch=WORKSPACE
)


def compiled(name: str, source: str, compiler: str, *flags: str) -> Path:
    library = HOME / f"lib{name}.so"
    text = HOME / f"{name}.{'c' if compiler == 'cc' else 'cpp'}"
    text.write_text(source)
    subprocess.run([compiler, *CC, *flags, f"-I{include_dir()}", "-o", library, text], check=True)
    return library


def generated(op: Any, workspace: str | None = None, *flags: str) -> tuple[LaunchedKernel, ctypes.CDLL]:
    """The C function of the op's kernel, alone in a library and connected with Triton's compiler."""
    (kernel,) = op.native_kernels("cuda")
    text = f'#include "shiplap/triton.h"\n{kernel.native.source()}'
    path = compiled(op.spec.opname, text, "c++", "-std=c++20", "-fwrapv", "-fvisibility=hidden", *flags)
    library = ctypes.CDLL(str(path))
    kernel.native.connect(library)
    space = kernel.space
    configs = {"configs": [dict(c.items) for c in space.fixed]} if space is not None else {}
    function = sl.cabi(path, kernel.native.symbol, strided=kernel.native.strided, without_signature=True)
    op.kernel("cpu", function, workspace=workspace, **configs)
    assert isinstance(kernel, LaunchedKernel)
    return kernel, library


class Device:
    """The listener of the fake driver: what was launched, and who computes."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver, self.launches, self.kernels = driver, list[tuple[str, list[int]]](), dict[str, Any]()
        self.alone = threading.Lock()  # Triton's interpreter is one for all threads
        self.callback = LISTENER(self.launched)
        driver.fake_listen(self.callback)

    def launched(self, name: bytes, numbers: Any, stream: int | None, parameters: int) -> None:
        row = list(numbers[:7])
        with self.alone:
            self.launches.append((name.decode(), row))
            self.kernels[name.decode()](tuple(row[:3]), parameters)


def value_at(parameters: int, index: int, kind: type[Any]) -> Any:
    address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[index]
    return kind.from_address(address).value


class Memory:
    """An address that the interpreter takes for a tensor's."""

    def __init__(self, address: int, dtype: torch.dtype, numel: int) -> None:
        self.address, self.dtype, self.numel = address, dtype, numel

    def view(self) -> Tensor:
        size = self.numel * self.dtype.itemsize
        return torch.frombuffer((ctypes.c_char * size).from_address(self.address), dtype=self.dtype)


TYPES = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "u1": ctypes.c_uint8,
}  # the interpreter takes no bool


def interpreter(kernel: LaunchedKernel, number: int) -> Callable[[tuple[int, ...], int], None]:
    """Runs launch ``number`` on the values that the driver got, read by the types of the form of the current call."""
    jitted = kernel.native.declared[number].kernel

    def run(grid: tuple[int, ...], parameters: int) -> None:
        form = form_of_key(kernel.native.launches[number], current[jitted.fn.__name__], kernel.native.configs, {})
        values, index = [], 0
        for i, (_, type) in enumerate(form.signature.items()):
            if type == "constexpr":
                values.append(form.constants[(i,)])
                continue
            if type.startswith("*"):
                kind = {"*i32": torch.int32, "*i64": torch.int64}.get(type, torch.float32)
                values.append(Memory(value_at(parameters, index, ctypes.c_int64), kind, LARGEST).view())
            else:
                values.append(value_at(parameters, index, TYPES[type]))
            index += 1
        InterpretedFunction(jitted.fn)[grid](*values)

    return run


LARGEST = 1  # elements that the interpreter may see behind an address: an over-estimate, since it masks
current: dict[str, tuple[int, ...]] = {}  # by the name of a kernel the key of the call


def agreement(kernel: LaunchedKernel, op: Any, args: tuple[Any, ...]) -> list[str]:
    """Where the form of our key is not what Triton's own binder finds for the same arguments."""
    call = op.bind(op.spec.complete(args))
    variant = kernel.variant_for_call(call)
    assert isinstance(variant, LaunchedKernel)
    made = {o.name: torch.empty(1) for o in op.spec.outputs}
    inputs, _ = variant._pack(call.args)
    numbers = LaunchNumbers(call.env, {a.name: t for a, t in zip(op.spec.tensors, inputs, strict=True)} | made)
    wrong = []
    for declared, launch in zip(variant.native.declared, variant.native.launches, strict=True):
        key = specialization_key(launch, numbers, variant.config_values)
        current[declared.name] = key
        mine = form_of_key(launch, key, variant.native.configs, {})
        own = with_constants(launch, numbers, variant.config_values)
        values = [variant._value(p, own, torch.empty(1 << 20, dtype=torch.uint8)) for p in launch.parameters]
        _, _, _, backend, binder = declared.kernel.device_caches[0]
        bound, special, options = binder(*values)
        _, *theirs = declared.kernel._pack_args(backend, {}, bound, special, options)
        # Those of Triton 3.6 have no constants.
        attributes = triton_attributes(declared.kernel, backend, mine.signature, mine.constants, mine.attributes)
        if [mine.signature, mine.constants, attributes] != theirs:
            wrong.append(f"{declared.name} {args}: {mine} is not {theirs}")
    return wrong


def ahead(kernel: LaunchedKernel, op: Any, args: tuple[Any, ...]) -> list[bool]:
    """Whether what Triton compiles for a launch of its own is, byte for byte, what is compiled for ours."""
    call = op.bind(op.spec.complete(args))
    variant = kernel.variant_for_call(call)
    assert isinstance(variant, LaunchedKernel)
    before = [set(d.kernel.device_caches[0][0]) for d in kernel.native.declared]
    variant.compile(call)
    same = []
    for declared, known, cubin in zip(kernel.native.declared, before, variant.compile_for(call, 90), strict=True):
        cache = declared.kernel.device_caches[0][0]
        (new,) = set(cache) - known
        same.append(cache[new].asm["cubin"] == cubin.image)
    return same


def refusal(op: Any, *args: Any) -> str:
    try:
        with torch.no_grad():
            op(*args)
    except sl.ShiplapError as e:
        return f"{e.id} {e.got}"
    return "nothing"


def right(op: Any, args: tuple[Any, ...]) -> bool:
    want = op.reference(*args)
    with torch.no_grad():
        got = op(*args)
    return bool(got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-6))


def named(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_name, frame.f_code.co_filename


def trained(device: Device, kernels: dict[Any, LaunchedKernel]) -> dict[str, Any]:
    """Forward and backward of ``affine``, whose gradient has native code: what was launched, and by which Python."""
    out: dict[str, Any] = {}
    binding.build(affine_x)
    x, grad = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    out["disagreements"] = agreement(kernels[affine], affine, (x.detach(), None, 3.0, 1, True))
    out["disagreements"] += agreement(kernels[affine_x], affine_x, (grad, 3.0, True))
    for _ in range(2):  # the second time everything is warm
        first, calls = len(device.launches), list[tuple[str, str]]()
        y = affine(x, None, 3.0, 1, True)
        sys.setprofile(lambda frame, event, of, into=calls: into.append(named(frame)) if event == "call" else None)
        torch.autograd.backward(y, grad)
        sys.setprofile(None)
        out["launches"] = [name for name, _ in device.launches[first:]]
    names = [name for name, file in calls if "shiplap" in file or "launched::" in file]
    out["frames"] = names[: names.index("launched")]  # ours, up to the driver
    want = torch.autograd.grad(affine.reference(x, None, 3.0, 1, True), x, 2 * grad)[0]
    out["right"] = bool(torch.allclose(x.grad, want))
    return out


def programs(device: Device) -> dict[str, Any]:
    """A program with branches, a fill, a sort and late errors: its values, what was launched, what it tells."""
    op = launched_programs.ordered
    op.kernel("cuda", launched_programs.ORDER, workspace=launched_programs.ROOM)
    home = Path(torch.__file__).parent
    stable, linked = "-DTORCH_TARGET_VERSION=0x020b000000000000", ("-Wl,--no-as-needed", "-ltorch_cpu")
    flags = (stable, "-isystem", str(home / "include"), f"-L{home / 'lib'}", *linked, f"-Wl,-rpath,{home / 'lib'}")
    kernel, _ = generated(op, launched_programs.ROOM, *flags)
    for number, name in enumerate(("few", "keyed", "written")):
        device.kernels[name] = interpreter(kernel, number)
    out: dict[str, Any] = {"wrong": [], "launches": {}}

    def call(x: Tensor, most: int) -> Tensor:
        numbers = kernel._numbers(op.bind((x, most)), x, torch.empty_like(x))
        for number, launch in kernel.native.taken(numbers):
            current[kernel.native.declared[number].name] = specialization_key(launch, numbers, {})
        result: Tensor = op(x, most)
        return result

    for n in (0, 1, 5, 100):
        for most in (1, 2, 3, 50):
            x, first = torch.randint(0, 9, (n,), dtype=torch.int32), len(device.launches)
            if not torch.equal(call(x, most), op.reference(x, most)):
                out["wrong"].append([n, most])
            out["launches"][f"{n} {most}"] = " ".join(name for name, _ in device.launches[first:])
    x = torch.arange(40, dtype=torch.int32)
    x[17] = -3
    bad = call(x, 1)
    out["kept"] = torch.equal(bad, op.reference(x, 1))
    out["told"] = [launched_programs.told(lambda: call(x.abs(), 1)) for _ in range(2)]
    library = compiled("late", launched_programs.ALONE, "c++", "-std=c++20", "-fwrapv", "-fvisibility=hidden")
    out["alone"] = launched_programs.alone(ctypes.CDLL(str(library)))
    return out


def packed(kernel: LaunchedKernel, driver: ctypes.CDLL, x: Tensor) -> dict[str, Any]:
    """The function with its cubins inside, where nobody compiles: as in a program without Python."""
    text = f'#include "shiplap/triton.h"\n{kernel.native.source(packed=True)}'
    path = compiled("carrying", text, "c++", "-std=c++20", "-fwrapv", "-fvisibility=hidden")

    @sl.op("launched::alone")
    def alone(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return (x * x).flip(0)

    alone.kernel("cpu", sl.cabi(path, kernel.native.symbol, without_signature=True), workspace="4 * n")
    before, out = driver.fake_loads(), {}
    threads = [threading.Thread(target=alone, args=(x,)) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    out["right"] = right(alone, (x,))
    out["loads"] = driver.fake_loads() - before
    out["unknown"] = refusal(alone, torch.randn(5))
    driver.fake_architecture(80)
    out["other device"] = refusal(alone, torch.randn(3))
    driver.fake_architecture(90)
    return out


def main() -> None:
    global LARGEST
    # Of two libraries of one name, the loader takes the one that came first.
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        sys.exit(REAL_DRIVER)
    hopper.pretend()
    driver = ctypes.CDLL(str(compiled("cuda", (HERE / "fake_cuda.c").read_text(), "cc", "-Wl,-soname,libcuda.so.1")))
    device = Device(driver)
    affine.kernel("cuda", AFFINE)
    affine_x.kernel("cuda", SLOPE)
    turned.kernel("cuda", TURNED, workspace="4 * n")
    kernels, libraries = dict[Any, LaunchedKernel](), dict[Any, ctypes.CDLL]()
    for op, workspace in ((affine, None), (affine_x, None), (turned, "4 * n")):
        kernels[op], libraries[op] = generated(op, workspace)
    device.kernels = {
        "scaled": interpreter(kernels[affine], 0),
        "slope": interpreter(kernels[affine_x], 0),
        "squares": interpreter(kernels[turned], 0),
        "reverse": interpreter(kernels[turned], 1),
    }
    base = torch.randn(40, 200)
    LARGEST = base.numel() - 200
    cases: list[tuple[Any, ...]] = [(affine, base[:3, :n].contiguous()) for n in (1, 16, 17, 100)]
    cases += [
        (affine, base[:5, :32], base[0, :32].clone(), 3.0),
        (affine, base[:16, 1:50].t(), None, 1.0, 1),
        (affine, base[:2, ::3], None, 0.5, 16, True),
        (affine, base[:2, :16].clone(), None, 1.0, 2**33),
        (affine, base[1:2, 3:36]),
        (turned, base.view(-1)[4:104]),  # an address that is a multiple of 16 alone
        *((turned, base.view(-1)[:n]) for n in (1, 16, 100)),
    ]
    expected: set[tuple[str, tuple[int, ...]]] = set()
    results: dict[str, Any] = {"wrong": [], "disagreements": []}
    results["same"] = [ahead(kernels[op], op, tuple(args)) for op, *args in (cases[0], cases[4], cases[-1])]
    for op, *args in cases:
        results["disagreements"] += agreement(kernels[op], op, tuple(args))
        expected |= {(name, current[name]) for name in (d.name for d in kernels[op].native.declared)}
        if not right(op, tuple(args)):
            results["wrong"].append(f"{op.spec.name} {[tuple(a.shape) if isinstance(a, Tensor) else a for a in args]}")
    keys = {(k.native.declared[number].name, key) for k in kernels.values() for number, _, key in k.native.cubins}
    results["keys"] = [len(keys - expected), len(expected - keys)]
    results["launches"], results["loads"] = len(device.launches), driver.fake_loads()
    results["forms"] = sum(len(kernel.native.cubins) for kernel in kernels.values())
    results["threads"] = sorted({row[3] for _, row in device.launches})
    results["contexts"] = driver.fake_contexts()

    results["trained"] = trained(device, kernels)
    launches, loads = len(device.launches), driver.fake_loads()

    def compile_again(*args: object) -> None:
        raise AssertionError("a warm call asks nobody")

    for kernel in kernels.values():
        kernel.native.compile = compile_again  # type: ignore[method-assign, assignment]
    agreement(kernels[affine], affine, (base[:3, :16].contiguous(),))
    with torch.no_grad():
        affine(base[:3, :16].contiguous())
        affine(base[:0])
    results["warm"] = [len(device.launches) - launches, driver.fake_loads() - loads]
    results["uncompiled"] = refusal(affine, base[:3, :16].double())
    results["grid"] = refusal(affine, base[:1, :1].expand(1, 32 * 65536))
    driver.fake_fail(700)
    results["failing"] = refusal(affine, base[:3, :16].contiguous())
    driver.fake_fail(0)
    form = kernels[affine].native
    redeclared = LaunchedForm(affine.spec, form.symbol, AFFINE, form.configs)
    redeclared.connect(libraries[affine])
    results["declared again"] = [right(affine, (base[:3, :16].contiguous(),)), len(redeclared.cubins)]
    results["programs"] = programs(device)
    results["packed"] = packed(kernels[turned], driver, base.view(-1)[:100])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
