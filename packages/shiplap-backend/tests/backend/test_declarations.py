"""What torch declares, from three sources that must agree: torchgen's model, the wheel's header, the dispatcher."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shiplap.torch_private.aten_operators import aten_declarations, has_kernel


def header_rows() -> Iterator[dict[str, str]]:
    """Yield a dict with ``declaration``, ``schema``, ``dispatch`` and ``default`` for each operator in the installed
    torch's ``RegistrationDeclarations.h``.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "RegistrationDeclarations.h"
    for line in header.read_text(encoding="utf-8").splitlines():
        declaration, mark, comment = line.rpartition("// {")
        if mark and declaration:
            yield {"declaration": declaration.strip(), **json.loads("{" + comment)}


def registered_schemas() -> dict[str, str]:
    """Return a mapping from ``base.overload`` to the schema as a string, for each ``aten`` operator that is registered
    with the dispatcher now. The overload's name is left out if it is empty.
    """
    by_name = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            name = schema.name.removeprefix("aten::")
            by_name[f"{name}.{schema.overload_name}" if schema.overload_name else name] = str(schema)
    return by_name


def has_cpu_kernel(name: str) -> bool:
    """Return whether a kernel of the ATen overload ``name`` is registered for strided CPU tensors. The kernel of a
    composite operator does not count.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"))


def _name(row: dict[str, str]) -> str:
    return row["schema"].removeprefix("aten::").partition("(")[0]


@pytest.fixture(scope="module")
def owed() -> list[str]:
    """What the header says a backend must register."""
    return [_name(r) for r in header_rows() if r["dispatch"] == "True" and r["default"] == "False"]


def test_every_row_of_the_header_is_a_declaration_by_name_not_by_place() -> None:
    rows = {_name(r): r["schema"].removeprefix("aten::") for r in header_rows()}
    assert rows == {name: d.schema for name, d in aten_declarations().items()}


def test_the_dispatcher_has_every_declared_schema() -> None:
    registered = registered_schemas()
    assert aten_declarations().keys() <= registered.keys()
    for name in ("add.out", "mm.out", "cat.out", "native_layer_norm"):
        ours = torch._C.parse_schema(f"aten::{aten_declarations()[name].schema}")
        assert str(ours) == registered[name]


def test_only_owed_overloads_lack_a_kernel(owed: list[str]) -> None:
    """A process that loaded a device has kernels of its own; the ones that nobody but it can have are owed."""
    lacking = {n for n in aten_declarations() if not has_kernel(n, "MTIA")}
    assert lacking <= set(owed)
    assert len(lacking) > 0.9 * len(owed)


def test_owed_with_a_cpu_kernel_is_what_the_dispatcher_says(owed: list[str]) -> None:
    ours = {n for n in owed if aten_declarations()[n].cpu}
    assert ours == {n for n in owed if has_cpu_kernel(n)}
    assert 600 < len(ours) < 750


def test_out_overloads_are_found_by_kind_not_by_name() -> None:
    assert aten_declarations()["max.dim_max"].kind == "out"
    assert [a.name for a in aten_declarations()["max.dim_max"].outs] == ["max", "max_values"]
    unnamed = [
        d.name for d in aten_declarations().values() if d.kind == "out" and "out" not in d.name.partition(".")[2]
    ]
    assert len(unnamed) > 50


def test_structured_groups_know_whom_they_serve() -> None:
    add = aten_declarations()["add.out"]
    assert add.structured is not None
    assert add.structured.cls == "at::meta::structured_add_Tensor"
    assert add.structured.iterator
    assert add.group == ("add.Tensor", "add_.Tensor")
    mm = aten_declarations()["mm.out"].structured
    assert mm is not None
    assert not mm.iterator
