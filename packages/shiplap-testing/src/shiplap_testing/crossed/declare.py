"""Crossed declarations made: modules written and imported, kernels attached, their libraries compiled."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shiplap.sampling.run import suppress_warnings
from shiplap_testing.build import compile_c
from shiplap_testing.crossed.declared import NATIVE, Declared
from shiplap_testing.crossed.faults import plant
from shiplap_testing.crossed.native_source import (
    PRELUDE,
    SUMS,
    c_function,
    template_text,
    template_unable,
    triton_text,
    triton_unable,
)
from shiplap_testing.crossed.source import module_text, op_name
from shiplap_testing.crossed.ways import _short, refusal_id


class Made:
    """Declared ops by seed; what was refused when they were declared, and what was not written for them."""

    def __init__(self) -> None:
        self.ops: dict[int, Any] = {}
        self.refused: dict[int, str] = {}
        self.unbound: dict[int, str] = {}  # no native binding
        self.raised: dict[int, str] = {}
        self.unwritten: dict[int, str] = {}


def declare(cases: Sequence[Declared], folder: Path, device: str = "cpu") -> Made:
    """Declare every case in ``folder``, a library for all C kernels of a binding."""
    made = Made()
    for case in cases:
        try:
            with suppress_warnings():
                made.ops[case.seed] = declare_one(case, folder, device, made)
        except Exception as e:
            where = made.refused if refusal_id(e) else made.raised
            where[case.seed] = f"{refusal_id(e)}: {_short(e)}" if refusal_id(e) else f"{type(e).__name__}: {_short(e)}"
    for binding in ("python", "native", "packaged"):
        _compile([c for c in cases if c.binding == binding and c.seed in made.ops], made, folder, device, binding)
    return made


def declare_one(case: Declared, folder: Path, device: str, made: Made) -> Any:
    text = module_text(case, device)
    name = op_name(case)
    if case.kernel == "triton":
        if why := triton_unable(case):
            made.unwritten[case.seed] = why
        else:
            text += "\n\n" + triton_text(case, device)
    if case.kernel == "template":
        if why := template_unable(case):
            made.unwritten[case.seed] = why
        else:
            (folder / f"{name}.cpp.jinja").write_text(plant(case, template_text(case)))
            text += f'\n\n{name}.template("{device}", "{name}.cpp.jinja", configs=[{{"BM": 4, "BN": 16}}])\n'
    path = folder / f"crossed_{name}.py"
    path.write_text(plant(case, text))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    op = getattr(module, name)
    if case.kernel in NATIVE:
        import shiplap as sl

        strided = [a.name for a in op.spec.tensors] if case.kernel in ("c_strided", "cuda") else []
        library = folder / f"libcrossed_{case.binding}.so"
        options = {"align": 16} if case.kernel == "c_aligned" else {}
        keywords = {"workspace": "64"} if case.workspace or (case.dynamic and case.kernel == "cuda") else {}
        try:
            op.kernel(device, sl.cabi(library, name, strided=strided, **options), **keywords)
        except Exception as e:
            if not refusal_id(e):
                raise
            made.refused[case.seed] = f"{refusal_id(e)}: {_short(e)}"
    return op


def _compile(cases: Sequence[Declared], made: Made, folder: Path, device: str, binding: str) -> None:
    """Compile the C kernels of ``cases`` into one library, and bind them."""
    native = [c for c in cases if c.kernel in NATIVE and c.seed not in made.refused]
    if not native:
        return
    body = PRELUDE + SUMS + "".join(plant(c, c_function(c, made.ops[c.seed].spec)) for c in native)
    ops = {op_name(c): made.ops[c.seed] for c in native}
    compile_c(folder, f"crossed_{binding}", ops, body, compiler="nvcc" if device == "cuda" else "cc")
    if binding == "python":
        return
    from shiplap.kernels.native import binding as bindings

    for case in native:
        try:
            with suppress_warnings():
                bindings.build(made.ops[case.seed])
        except Exception as e:
            if id := refusal_id(e):
                made.unbound[case.seed] = f"{id}: {_short(e)}"
            else:
                made.raised[case.seed] = f"{type(e).__name__}: {_short(e)}"
