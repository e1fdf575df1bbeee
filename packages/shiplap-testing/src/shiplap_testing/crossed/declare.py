"""Crossed declarations made: modules written and imported, kernels attached, their libraries compiled."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shiplap.kernels.c.library import source_libraries
from shiplap.sampling.run import suppress_warnings
from shiplap_testing.build import compile_c
from shiplap_testing.crossed.calls import one_line, refusal_id
from shiplap_testing.crossed.declared import NATIVE, Declared
from shiplap_testing.crossed.faults import plant
from shiplap_testing.crossed.native_source import (
    PRELUDE,
    SUMS,
    c_function,
    template_text,
    template_unable,
    triton_template_grid,
    triton_template_text,
    triton_unable,
)
from shiplap_testing.crossed.source import module_text, op_name
from shiplap_testing.crossed.triton_source import triton_text


class Made:
    """The ops of a batch of op declarations, and the reasons why some ops, kernels or bindings are missing. Each
    attribute is a mapping from the seed of a declaration.
    """

    def __init__(self) -> None:
        """Create an object without ops.

        ``ops`` maps seeds of declarations to ops. The other attributes map seeds to reasons. ``refused`` says why a
        kernel was refused, ``unbound`` why a native binding was refused, ``raised`` why the declaration failed, and
        ``unwritten`` why no kernel was written.
        """
        self.ops: dict[int, Any] = {}
        self.refused: dict[int, str] = {}
        self.unbound: dict[int, str] = {}  # no native binding
        self.raised: dict[int, str] = {}
        self.unwritten: dict[int, str] = {}


def declare(cases: Sequence[Declared], folder: Path, device: str = "cpu") -> Made:
    """Declare the ops of the declarations ``cases`` with their kernels for ``device``, and return the ops, with the
    reasons why some ops, kernels or bindings are missing.

    Files are written to ``folder``. All C kernels with one kind of binding share a library. An exception in one
    declaration does not stop the others.
    """
    made = Made()
    for case in cases:
        try:
            with suppress_warnings():
                made.ops[case.seed] = declare_one(case, folder, device, made)
        except Exception as e:
            where = made.refused if refusal_id(e) else made.raised
            where[case.seed] = (
                f"{refusal_id(e)}: {one_line(e)}" if refusal_id(e) else f"{type(e).__name__}: {one_line(e)}"
            )
    for binding in ("python", "native", "packaged"):
        _compile([c for c in cases if c.binding == binding and c.seed in made.ops], made, folder, device, binding)
    return made


def declare_one(case: Declared, folder: Path, device: str, made: Made) -> Any:
    """Write the Python module of the op declaration ``case`` into ``folder``, import it, and return the op.

    A kernel in C, C++ or CUDA for ``device`` is bound to the op. If the kernel is refused or cannot be written, the
    reason is added to ``made``.
    """
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
            text += "\n\n" + _template(case, folder, device)
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
        try:
            _bind_native(case, op, folder, device)
        except Exception as e:
            if not refusal_id(e):
                raise
            made.refused[case.seed] = f"{refusal_id(e)}: {one_line(e)}"
    return op


def _template(case: Declared, folder: Path, device: str) -> str:
    """Write the template of the op declaration ``case`` for ``device`` into ``folder``. Return the line of Python that
    binds it to the op.

    A template is kernel source code with placeholders that Inductor compiles and fuses.
    """
    name = op_name(case)
    language, given = "cpp", 'configs=[{"BN": 16}]'
    if device == "cuda":
        language, given = "triton", f'configs=[{{"BLOCK": 16}}], grid={triton_template_grid(case)}'
    source = triton_template_text(case) if device == "cuda" else template_text(case)
    (folder / f"{name}.{language}.jinja").write_text(plant(case, source))
    return f'{name}.template("{device}", "{name}.{language}.jinja", {given})\n'


def _bind_native(case: Declared, op: Any, folder: Path, device: str) -> None:
    """Bind the kernel of the op declaration ``case`` for ``device`` to ``op``.

    The kernel is in C, C++ or CUDA C++. Its library in ``folder`` is compiled later, by :func:`_compile`.
    """
    import shiplap as sl

    name = op_name(case)
    strided = [a.name for a in op.spec.tensors] if case.kernel in ("c_strided", "cuda") else []
    library = folder / f"libcrossed_{case.binding}.so"
    options = {"align": 16} if case.kernel == "c_aligned" else {}
    keywords: dict[str, Any] = {}
    if case.workspace or (case.dynamic and device == "cuda"):
        keywords["workspace"] = "64"
    if case.kernel == "source":
        code = PRELUDE + SUMS + plant(case, c_function(case, op.spec, device))
        op.kernel(device, sl.source(symbol=name, code=code, language="cuda" if device == "cuda" else "c++"), **keywords)
        return
    op.kernel(device, sl.cabi(library, name, strided=strided, **options), **keywords)
    if case.kernel == "chosen":  # tried first: it serves the call, or leaves it to the other one
        other = "float32" if case.dtype == "float64" else "float64"
        dtypes = (case.dtype if case.seed % 2 or case.annotation != "Float" else other,)
        op.kernel(device, sl.cabi(library, f"{name}_first"), dtypes=dtypes, **keywords)


def _compile(cases: Sequence[Declared], made: Made, folder: Path, device: str, binding: str) -> None:
    """Compile the C kernels of ``cases`` for ``device`` into one library in ``folder``.

    Declarations without a C kernel are left out. Unless ``binding`` is ``python``, native bindings are built as well.
    If one is refused or fails, the reason is added to ``made``.
    """
    native = [c for c in cases if c.kernel in NATIVE and c.seed not in made.refused]
    symbols = {op_name(c): c for c in native if c.kernel != "source"}
    symbols |= {f"{op_name(c)}_first": c for c in native if c.kernel == "chosen"}
    if symbols:
        written = [plant(c, c_function(c, made.ops[c.seed].spec, device, symbol)) for symbol, c in symbols.items()]
        ops = {symbol: made.ops[c.seed] for symbol, c in symbols.items()}
        compiler = "nvcc" if device == "cuda" else "cc"
        compile_c(folder, f"crossed_{binding}", ops, "".join([PRELUDE, SUMS, *written]), compiler=compiler)
    for library in source_libraries.values():
        if library.op in {made.ops[c.seed].spec.name for c in native if c.kernel == "source"}:
            library.compile()
    if binding == "python":
        return
    from shiplap.kernels.native import binding as bindings

    for case in native:
        try:
            with suppress_warnings():
                bindings.build(made.ops[case.seed])
        except Exception as e:
            if id := refusal_id(e):
                made.unbound[case.seed] = f"{id}: {one_line(e)}"
            else:
                made.raised[case.seed] = f"{type(e).__name__}: {one_line(e)}"
