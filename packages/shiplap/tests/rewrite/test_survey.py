"""What rewrites saved: each measured on top of those before it, in the order in which they apply."""

import io

import torch
import torch.nn.functional as F
from rich.console import Console

import shiplap as sl
from shiplap.render.lines import print_lines
from shiplap.rewrite.survey import _largest_difference, survey_rewrites

X, W, U = torch.randn(5, 3), torch.randn(7, 3), torch.randn(2, 7, 4)


def model(x, w, u):
    return torch.bmm(F.linear(x, w).expand(2, 5, 7), u)  # no loops are generated: nothing is compiled by a C++ compiler


def test_steps_add_up_to_the_whole():
    late = sl.rewrite(
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.mm(x, w.t()).clone(),
        name="late",
        level="post-grad",
        samples=lambda: [(X, W)],
    )
    early = sl.rewrite(
        lambda a, b: torch.bmm(a, b),
        lambda a, b: torch.matmul(a, b),
        name="early",
        samples=lambda: [(torch.randn(2, 5, 7), U)],
    )
    never = sl.rewrite(lambda x: x.erf(), lambda x: torch.erf(x) * 1, name="never", samples=lambda: [(X,)])
    messages = []
    surveyed = survey_rewrites(model, (X, W, U), [late, never, early], say=messages.append)
    assert surveyed.measured is not None
    first, second = surveyed.measured.steps
    assert (first.rewrite, second.rewrite) == ("early", "late")  # as levels follow each other
    assert first.seconds[0] == surveyed.measured.seconds[0]
    assert first.seconds[1] == second.seconds[0]
    assert second.seconds[1] == surveyed.measured.seconds[1]
    assert (first.kernels[0], second.kernels[1]) == surveyed.measured.kernels
    assert min(*first.seconds, second.seconds[1]) > 0
    assert surveyed.step("never") is None
    assert messages == [
        "proving the rewrites",
        "compiling with them",
        "compiling without",
        "compiling with early, too",
        "measuring",
    ]
    out = io.StringIO()
    print_lines(surveyed.lines(), Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(
        f"late (post-grad): 1 matched, 0 near; {second.kernels[0]} -> {second.kernels[1]} kernels, "
    )
    assert "never (pre-grad): 0 matched, 0 near" in lines


def test_results_that_are_not_finite_are_compared_too():
    nan, inf = float("nan"), float("inf")
    for got, expected, disjoint in (
        ([1.0, nan, inf], [1.0, nan, inf], 0.0),
        ([2.5, nan], [2.0, nan], 0.25),
        ([1.0, nan], [1.0, 2.0], inf),
        ([1.0, 2.0], [1.0, nan], inf),
        ([inf], [-inf], inf),
        ([nan, 1.0], [inf, 1.0], inf),
    ):
        assert _largest_difference([torch.tensor(got)], [torch.tensor(expected)]) == disjoint, (got, expected)
