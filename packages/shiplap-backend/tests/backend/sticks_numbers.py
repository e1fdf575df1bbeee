"""Numbers beside float16 operands on the runtime sticks: prints whether each call is the CPU's, and ran as expected.

python sticks_numbers.py PROJECT
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as f

REASON = "value: a number that the dtype does not hold"
# float16 has three digits, from 6e-5 to 65504, and below that multiples of 6e-8.
LOST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x * 70000": lambda x: x * 70000.0,
    "70000 * x": lambda x: 70000 * x,
    "x * -1e300": lambda x: (x * 0) * -1e300,
    "x / 70000": lambda x: x / 70000.0,
    "x * 1e-9": lambda x: (x * 1024) * 1e-9,
    "x * 1e-5": lambda x: x * 1e-5,
    "x / 1e-9": lambda x: x * 0 / 1e-9,
    "x + 1e-9": lambda x: x * 0 + 1e-9,
    "x - 70000": lambda x: x * 1024 - 70000.0,
    "x *= 70000": lambda x: x.mul_(70000.0),
    "alpha": lambda x: torch.add(x, x * 1024, alpha=1e-9),
    "fill": lambda x: x.fill_(1e-9),
    "a mean of many": lambda x: x.reshape(-1)[:1].expand(70000).contiguous().mul_(1 / 1024).mean(),
    "eps of rows of zeros": lambda x: f.layer_norm(x * 0, (40,), eps=1e-12),
}
HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x * 65504": lambda x: x * 65504.0,
    "x / 3": lambda x: x / 3,
    "x * 0.1": lambda x: x * 0.1,
    "x * 6.2e-5": lambda x: x * 6.2e-5,
    "x * 2 ** -20": lambda x: x * 2.0**-20,  # a subnormal that is exact
    "x + 0": lambda x: x + 0.0,
    "x * inf": lambda x: x * float("inf"),
    "x * nan": lambda x: x * float("nan"),
    "x + True": lambda x: x + True,
    "a mean": lambda x: x.mean(),
    "eps of a layer": lambda x: f.layer_norm(x, (40,)),
}


def main(project: str) -> None:
    sys.path.insert(0, project)
    package = importlib.import_module("torch_mine")
    package.autoload()
    device = vars(torch)["mine"]
    torch.manual_seed(0)
    x = (torch.randn(7, 40) / 8).half()
    for name, call in (*LOST.items(), *HELD.items()):
        theirs, on_device = call(x.clone()), x.to("mine")
        device.reset_counters()
        ours = call(on_device)
        reasons = {why for calls in device.counters().values() for why in calls["fallback"]}
        try:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=4e-3, atol=1e-7, equal_nan=True)
            same = "equal"
        except AssertionError as e:
            same = f"other: {' '.join(str(e).split())}"
        ran = "as expected" if (REASON in reasons) == (name in LOST) else f"fallbacks: {reasons}"
        print(f"{name}: {same}, {ran}")


if __name__ == "__main__":
    main(sys.argv[1])
