"""Expressions that make the objects of a recorded call again."""

from __future__ import annotations

import enum
import importlib
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shiplap.audit.installed.tensors import with_attributes
from shiplap.scaffold.calls import make_dispatched_call
from shiplap.scaffold.object_sources import source_of

NAMES = {
    **{"torch": torch, "inf": float("inf"), "nan": float("nan")},
    **{"import_module": importlib.import_module, "with_attributes": with_attributes},
}


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Options:
    level: Level
    factor: float = float("inf")
    names: tuple[str, ...] = ("a",)
    inner: Any = None


class Slots:
    __slots__ = ("x",)


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Closes:
    def __init__(self) -> None:
        self.handle = 3

    def __del__(self) -> None:
        pass


class Raises:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "value",
    [
        *(True, 3, -0.5, float("inf"), 1j, "text", None, torch.bfloat16, torch.device("cpu"), torch.channels_last),
        *(Mode.READ, Mode.READ | Mode.WRITE, Mode(0)),
        *(Level.LOW, np.float64(0.25), np.int32(7), {"a": [1, (2.0, "b")], 3: {4}}),
        *(Options(Level.LOW, inner=Options(Level.LOW)), Options, torch.sin, torch.nn.functional.relu, np.add, len),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_expression_makes_an_equal_object(value):
    source = source_of(value)
    assert source is not None
    made = eval(source, dict(NAMES))
    assert made == value
    assert type(made) is type(value)


def test_an_expression_keeps_the_dtype_and_the_shape_of_an_array():
    for array in (np.zeros((0, 3), np.int16), np.array([[1.5, float("nan")]], np.float32), np.array(2, np.uint8)):
        source = source_of(array)
        assert source is not None
        made = eval(source, dict(NAMES))
        assert (made.dtype, made.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.ones(2), [torch.ones(2)], torch.nn.Identity(), Options(Level.LOW, inner=torch.ones(1)), lambda x: x),
        *(Closes(), [0] * 1000, dict.fromkeys(range(1000)), [["text"] * 200] * 200),
        *(Slots(), Raises(), threading.Lock(), np.zeros(1000), SimpleNamespace(x=1), torch.Generator()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_no_expression_makes_has_none(value):
    assert source_of(value) is None


def test_an_object_that_holds_itself_has_no_expression():
    options: dict[str, Any] = {}
    options["self"] = options
    assert source_of(options) is None


def test_a_call_of_an_op_has_plain_numbers():
    schema = torch.ops.aten.leaky_relu.default._schema
    for given in (np.float64(0.5), Level.LOW, True):
        recorded = make_dispatched_call(schema, (torch.ones(2), given), {}, [None]).arguments["negative_slope"]
        assert (recorded, type(recorded)) in ((0.5, float), (1, int), (True, bool))
