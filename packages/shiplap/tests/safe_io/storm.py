"""Threads that call one op through every door while another one changes it; `python storm.py CHANGE SECONDS THREADS`.

The process ends with status 0 if every call returned the right values or the error that the change explains.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.kernels.native import binding
from shiplap.tuning import thaw
from shiplap_testing.build import compile_c

SOURCE = """
int twice(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  if (ctx->config_size != 1 || (ctx->config[0] != 1 && ctx->config[0] != 2)) return SL_INTERNAL;
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = 2 * ((const float*)x->data)[i];
  return SL_OK;
}
"""


def declare(library: Path | None, *, wide: bool = False) -> sl.Op:
    """``storm::twice``, with a C kernel if there is a library; ``wide`` is another schema of the same name."""
    if wide:

        @sl.op("storm::twice")
        def twice(x: Float[Tensor, "n"], by: int = 2, plus: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
            return by * x if plus is None else by * x + plus
    else:

        @sl.op("storm::twice")
        def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return 2 * x

    @twice.backward
    def gradient(grad, saved, needs):
        return {"x": 2 * grad}

    if library is not None and not wide:
        twice.kernel("cpu", sl.cabi(library, "twice"), configs=[{"tile": 1}, {"tile": 2}])
    return twice


class Storm:
    """One op, its callers and what went wrong."""

    def __init__(self, library: Path | None, seconds: float) -> None:
        self.library, self.op = library, declare(library)
        self.until, self.wrong, self.calls = time.monotonic() + seconds, list[str](), 0
        self.held = torch.ops.storm.twice.default

    def going(self) -> bool:
        return time.monotonic() < self.until and not self.wrong

    def call(self, seed: int) -> None:
        """Call through a door that is drawn, until the time is over."""
        rng, x = random.Random(seed), torch.arange(64.0) + seed
        doors = [self.through_op, self.through_torch, self.through_held, self.into, self.with_gradient, self.refused]
        while self.going():
            door = rng.choice(doors)
            try:
                made = door(x)
            except sl.ShiplapError as e:
                if not (e.id == "SL304" and door == self.with_gradient):  # declared again, and its gradient not yet
                    self.wrong.append(f"{door.__name__}: {e}")
            except BaseException as e:
                self.wrong.append(f"{door.__name__}: {type(e).__name__}: {e}")
            else:
                if not torch.equal(made, 2 * x):
                    self.wrong.append(f"{door.__name__}: wrong values")
            self.calls += 1

    def through_op(self, x: Tensor) -> Tensor:
        return self.op(x)

    def through_torch(self, x: Tensor) -> Tensor:
        return torch.ops.storm.twice(x)

    def through_held(self, x: Tensor) -> Tensor:
        return self.held(x)

    def into(self, x: Tensor) -> Tensor:
        return self.op.out(x, out=torch.empty_like(x))

    def with_gradient(self, x: Tensor) -> Tensor:
        leaf = torch.ones_like(x).requires_grad_()
        (grad,) = torch.autograd.grad((self.op(leaf) * x).sum(), leaf)
        return grad

    def refused(self, x: Tensor) -> Tensor:
        try:
            self.op(x[:, None])
        except sl.errors.ArgumentError:
            return 2 * x
        raise AssertionError("two dims were accepted")

    # --- what changes meanwhile ---------------------------------------------------------------------------------------

    def same(self) -> None:
        declare(self.library)

    def different(self) -> None:
        declare(self.library, wide=True)
        declare(self.library)

    def attach(self) -> None:
        binding.build(self.op)
        time.sleep(0.001)
        self.op.drop_native()

    def tune(self) -> None:
        if self.op.native is None:
            binding.build(self.op)
        key = ("cpu", *self.op.rule.key(self.op.bind([torch.zeros(64)])))
        for tile in (1, 2, 3):
            chosen = tuned_choices.ChoiceEntry(
                self.op.spec.name, self.op.identity, key, "twice", Config.of({"tile": tile})
            )
            tuned_choices.install_choice_entries([chosen])
        thaw()

    def everything(self) -> None:
        """Another schema seldom: its native code has to be compiled."""
        random.choices([self.same, self.attach, self.tune, self.different], [20, 20, 20, 1])[0]()


def main(change: str, seconds: float, threads: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    plain = declare(None)
    library = None
    if change != "python":
        compiler = os.environ.get("SHIPLAP_STORM_CC", "cc")  # tools/sanitize.py has another one
        library = compile_c(folder, "storm", {"twice": plain}, SOURCE, configs={"twice": ["tile"]}, compiler=compiler)
        binding.build(declare(library))  # compiled before the clock runs
    if change == "different":
        os.environ["SHIPLAP_NATIVE"] = "0"
    storm = Storm(library, seconds)
    change_it: Callable[[], None] = storm.same if change == "python" else getattr(storm, change)
    callers = [threading.Thread(target=storm.call, args=(seed,)) for seed in range(threads)]
    for caller in callers:
        caller.start()
    times = 0
    try:
        while storm.going():
            change_it()
            times += 1
    finally:
        storm.until = 0.0
        for caller in callers:
            caller.join()
    print(f"{change}: {storm.calls} calls, {times} changes")
    assert not storm.wrong, storm.wrong[:3]
    assert times > 1, times
    assert storm.calls > threads, storm.calls


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
