"""Whose an op is: namespaces of torch, names of Python, and kernels that another package attaches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.errors import ShiplapError, ShiplapNotice


def declare(name: str) -> Any:
    @sl.op(name)
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    return twice


@pytest.mark.parametrize("name", ["a::__init__", "a::name", "a::_dir", "__file__::f", "import_module::f", "a::f.op"])
def test_attributes_of_torch_ops_are_no_names(name: str) -> None:
    with pytest.raises(ShiplapError) as e:
        declare(name)
    assert (e.value.id, e.value.got) == ("SL101", name)


@pytest.mark.parametrize("namespace", ["aten", "prims", "c10d", "quantized", "mkldnn", "_c10d_functional", "torch"])
def test_namespaces_of_torch_are_refused(namespace: str) -> None:
    with pytest.raises(ShiplapError) as e:
        declare(f"{namespace}::twice")
    assert (e.value.id, e.value.expected) == ("SL101", "a namespace of your own")


KERNEL = "@op.kernel('cpu')\ndef mine(x):\n    return x + x\n"
GRADIENT = "@op.backward(once_differentiable=True)\ndef mine(grad, saved, needs):\n    return {'x': grad * 2}\n"


def attach(author: str, op: Any, program: str = KERNEL) -> list[str]:
    """Attach a kernel in a module of the package ``author``. Return the notices."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        exec(compile(program, f"{author}.py", "exec"), {"op": op, "__name__": f"{author}.kernels"})
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
    return [str(w.message) for w in given if issubclass(w.category, ShiplapNotice)]


def test_a_kernel_of_another_package_is_named_with_both_packages() -> None:
    op = declare("ownership::foreign")
    owner = __name__.partition(".")[0]
    said = f"stranger attaches a kernel for cpu to ownership::foreign, which {owner} declares"
    assert attach("stranger", op) == [f"{said}: calls may run code of stranger"]


def test_a_gradient_of_another_package_is_named_with_both_packages() -> None:
    op = declare("ownership::foreign_gradient")
    op.kernel("cpu", lambda x: x + x)
    owner = __name__.partition(".")[0]
    said = f"stranger attaches a gradient to ownership::foreign_gradient, which {owner} declares"
    assert attach("stranger", op, GRADIENT) == [f"{said}: calls may run code of stranger"]


@pytest.mark.parametrize("author", [__name__.partition(".")[0], "__main__"])
def test_a_kernel_of_the_owner_or_of_the_program_is_not_named(author: str) -> None:
    assert attach(author, declare(f"ownership::own_{author.strip('_')}")) == []
