"""What a kernel gets that overrides nothing but the call itself, and the words for dtypes that it refuses."""

from types import SimpleNamespace

import pytest
import torch

from shiplap.declare.kernel import Kernel


class Doubled(Kernel):
    def __init__(self):
        """Take no op."""
        self.name, self.dtypes, self.condition = "doubled", (), None

    def run_call(self, call):
        return [value * 2 for value in call.args]


def test_a_kernel_that_overrides_its_call_alone():
    made, call = Doubled(), SimpleNamespace(args=[torch.ones(2)], dtypes={})
    assert (made.by_python, made.compiles, made.can_repeat, made.stays_in_python) == (True, False, False, False)
    outs, rerun = made.run_first_call(call)
    assert outs[0].tolist() == [2.0, 2.0]
    assert rerun is None
    assert made.fill_first_call(call, into := [torch.zeros(2)]) is None
    assert into[0].tolist() == [2.0, 2.0]
    with pytest.raises(NotImplementedError, match="Doubled doubled compiles nothing"):
        made.compile(call)


def test_why_a_kernel_refuses_a_call():
    made, call = Doubled(), SimpleNamespace(args=[1], dtypes={"T": torch.float32})
    assert made.why_refused(call) == ""
    made.dtypes = ("float16", "bfloat16")
    assert made.why_refused(call) == "it takes float16 and bfloat16, not torch.float32"
    made.dtypes = ("float32",)
    assert made.why_refused(call) == ""
    for verdict, words in ((True, ""), (False, "supports() returned False"), ("too small", "too small"), (1, 1)):
        made.condition = lambda value, verdict=verdict: verdict
        assert made.why_refused(call) == words
