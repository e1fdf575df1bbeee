"""A process of its own for tests/rewrite/test_cache.py: one model, compiled twice over, with variants of a rewrite."""

import json
import sys

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import shiplap as sl


def helper(x):
    return x * HOW["factor"]


HOW = {"factor": 1.0}


class UserPass(CustomGraphPass):
    ran = 0

    def __call__(self, graph):
        UserPass.ran += 1

    def uuid(self):
        return "the user's"


def pattern(x, w):
    return torch.relu(F.linear(x, w))


def replacement(x, w):
    return helper(torch.mm(x, w.t()).clamp_min(0))


def edited(x, w):
    return helper(torch.mm(x, w.t()).clamp(min=0))


def main(level: str, variant: str, user: str) -> None:
    by = edited if variant == "edited" else replacement
    where = ["x.shape[0] == 5"] if variant == "guarded" else []
    made = sl.rewrite(pattern, by, name="relu_linear", level=level, where=where,
                      samples=lambda: [(torch.randn(5, 3), torch.randn(7, 3))])  # fmt: skip
    scope = sl.rewrites(made)
    place = {
        "pre-grad": "pre_grad_custom_pass",
        "joint": "joint_custom_pre_pass",
        "post-grad": "post_grad_custom_pre_pass",
    }
    options = scope.options(**({place[level]: UserPass()} if user == "user" else {}))
    counters.clear()
    x, w = torch.randn(5, 3), torch.randn(7, 3, requires_grad=True)
    y = torch.compile(pattern, options=options)(x, w)
    y.sum().backward()
    torch.testing.assert_close(y, pattern(x, w))
    print(json.dumps({
        "matches": len(scope.matches), "user": UserPass.ran,
        "fx": [counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]],
        "aot": [counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]],
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:4])
