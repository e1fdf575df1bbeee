"""A process of its own for test_scope.py: one product, compiled and differentiated, by one variant after another."""

import json
import sys

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import shiplap as sl


class UserPass(CustomGraphPass):
    ran = 0

    def __call__(self, graph):
        UserPass.ran += 1

    def uuid(self):
        return "the user's"


def helper(y):
    return y.view(HOW["shape"])


HOW = {"shape": (5, 7)}


def pattern(x, w):
    return F.linear(x, w)


def plain(x, w):
    return helper(torch.mm(x, w.t()))


def edited(x, w):
    return helper(torch.mm(x, w.T))


def compiled(by) -> dict:
    """What one variant did: places, runs of the user's pass, hits and misses of both caches."""
    made = sl.rewrite(pattern, by, name="product", samples=lambda: [(torch.randn(5, 3), torch.randn(7, 3))])
    scope = sl.rewrites(made)
    torch._dynamo.reset()
    counters.clear()
    UserPass.ran = 0
    x, w = torch.randn(5, 3), torch.randn(7, 3, requires_grad=True)
    y = torch.compile(pattern, options=scope.options(pre_grad_custom_pass=UserPass()))(x, w)
    y.sum().backward()
    torch.testing.assert_close(y, pattern(x, w))
    counts = {
        g: [counters[g][f"{n}_cache_{how}"] for how in ("hit", "miss")]
        for g, n in (("inductor", "fxgraph"), ("aot_autograd", "autograd"))
    }
    return {
        "matches": len(scope.matches),
        "user": UserPass.ran,
        "fx": counts["inductor"],
        "aot": counts["aot_autograd"],
    }


if __name__ == "__main__":
    print(json.dumps([compiled(globals()[name]) for name in sys.argv[1:]]))
