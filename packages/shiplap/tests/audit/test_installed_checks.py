"""Single checks of ``shiplap audit --installed``, on ops and functions that are right or wrong in one way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shiplap.audit.installed import checks, engine
from shiplap.audit.installed.jobs import Job
from shiplap.audit.installed.python_function import PythonFunction


def test_a_size_that_depends_on_data_may_be_any_outside_of_a_trace():
    def fake(lengths, traced):
        symbol = traced and lengths.device.type != "meta"
        return lengths.new_empty(torch.library.get_ctx().new_dynamic_size() if symbol else 0)

    for name, traced in (("traced", True), ("untraced", False)):
        torch.library.define(f"repeat_ops::{name}", "(Tensor lengths) -> Tensor")
        torch.library.impl(f"repeat_ops::{name}", "CPU", lambda lengths: torch.arange(int(lengths.sum())))
        torch.library.register_fake(f"repeat_ops::{name}", partial(fake, traced=traced))
    ops = torch.ops.repeat_ops
    with pytest.raises(checks.NotApplicable, match="depend on data"):
        checks.check_fake(ops.traced.default, lambda: {"lengths": torch.tensor([1, 2])})
    assert "(0,)" in checks.check_fake(ops.untraced.default, lambda: {"lengths": torch.tensor([1, 2])})


def test_memory_of_an_argument_is_not_that_of_a_result():
    def make():
        fills = torch.are_deterministic_algorithms_enabled()
        return {"x": torch.full((3,), float("nan") if fills else 1.0)}

    assert checks.check_uninitialized(PythonFunction(lambda x: x * 2), make) == ""


def test_an_offset_too_many_that_changes_nothing_is_counted_apart():
    def pooled(values, tables, offsets, strict):
        """Return one sum for each of the bags of each table."""
        count = len(tables) - 1
        if strict and (len(offsets) - 1) % count:
            raise ValueError("offsets have to be one more than the bags of all tables")
        bags = count * ((len(offsets) - 1) // count)
        return torch.stack([values[offsets[bag] : offsets[bag + 1]].sum() for bag in range(bags)])

    def make():
        return {"values": torch.ones(6), "tables": torch.tensor([0, 3, 6]), "offsets": torch.tensor([0, 1, 3, 4, 6])}

    checks.check_surplus(PythonFunction(partial(pooled, strict=True)), make)
    with pytest.raises(checks.MissingRegistration, match="an offset too many is taken and ignored"):
        checks.check_surplus(PythonFunction(partial(pooled, strict=False)), make)


@pytest.mark.parametrize(("key", "kind"), [("CompositeImplicitAutograd", "skipped"), ("CPU", "looked")])
def test_what_an_op_that_torch_takes_apart_returns_may_share_memory(key, kind):
    torch.library.define(f"view_ops::same_{kind}", "(Tensor x) -> Tensor")
    torch.library.impl(f"view_ops::same_{kind}", key, lambda x: x.view(-1))
    op = getattr(torch.ops.view_ops, f"same_{kind}").default
    event = engine._run_check(op, Job("alias", {"x": "torch.ones(2)"}, "found by a search"))
    assert (event["kind"], "shares the memory of x" in event.get("problem", "")) == (kind, kind == "looked")
