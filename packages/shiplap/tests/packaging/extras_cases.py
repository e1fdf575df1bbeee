"""A wheel with a C op and a Triton op, where nothing can be compiled. Run by test_extras.py, in a process of its own.

The driver is the one of ``tests/kernels/triton/fake_cuda.c``: it takes cubins and launches, and computes nothing.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from typing import Any

driver = ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
import triton  # noqa: E402

from shiplap.kernels.triton import kernel as launched  # noqa: E402
from shiplap_testing import hopper  # noqa: E402

LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_void_p)
seen: list[tuple[str, int, list[int]]] = []


def listen(name: bytes, numbers: Any, stream: int | None, parameters: int) -> None:
    places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
    seen.append((name.decode(), int(numbers[0]), [ctypes.c_int64.from_address(places[i] or 0).value for i in range(3)]))


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("Triton's compiler is asked")


def main() -> None:
    hopper.pretend()
    assert not [name for name in ("c++", "g++", "cc", "gcc", "clang") if shutil.which(name)]
    triton.compile = refuse
    listener = LISTENER(listen)
    driver.fake_listen(listener)
    target = [90]
    launched.device_architecture = lambda device: target[0]
    import shipped_extras as package

    x = torch.randn(5)
    results: dict[str, Any] = {"double": [], "arguments": []}
    for _ in range(3):
        results["double"].append(torch.equal(package.double(x), x * 2))
    results["native"] = list(package.double.native.devices)
    (kernel,) = package.triple.native_kernels("cuda")
    for size in (64, 65, 48):
        given = torch.randn(size)
        (out,) = kernel.run_call(package.triple.bind((given,)))
        results["arguments"].append(
            seen[-1][2][:2] == [given.data_ptr(), out.data_ptr()] and seen[-1][2][2] % 2**32 == size
        )
    results["launches"] = [[name, blocks] for name, blocks, _ in seen]
    results["loads"] = driver.fake_loads()
    target[0] = 80
    driver.fake_architecture(80)
    (key, *_) = {key for _, _, key in kernel.native.cubins}
    try:
        kernel.native.compile(0, 80, key)
    except AssertionError as e:
        results["other device"] = f"{type(e).__name__}: {e}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
