"""The C header of declared ops, and the signatures by which a library proves that it was built against it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from shiplap.codegen import c_prototype, render_source
from shiplap.declare.schema import schema_text
from shiplap.declare.spec import OpSpec
from shiplap.dispatch.op import Op
from shiplap.errors import error


def prototype_signature(spec: OpSpec, parameters: Sequence[str] = ()) -> str:
    """Return a digest, 16 hexadecimal digits, of the C prototype that a kernel of the op ``spec`` must have. It covers
    ``parameters``, the names of the kernel's config. A library contains the digest of the declaration for which it was
    built.
    """
    text = ", ".join([*(str(p) for p in c_prototype(spec)), *(f"config {name}" for name in parameters)])
    return hashlib.sha256(f"{spec.name}({text})".encode()).hexdigest()[:16]


def bound_symbols(ops: Iterable[Op]) -> dict[str, OpSpec]:
    """Return a mapping from C symbol to declaration for all C ABI kernels of ``ops``. Kernels whose C++ Shiplap
    generates are left out. Raise ``SL403`` if kernels of two ops have the same symbol.
    """
    specs: dict[str, OpSpec] = {}
    for op in ops:
        for kernel in (k for kernels in op.kernels.values() for k in kernels):
            form = kernel.native
            # Generated functions are in the binding and need no header.
            symbol = form.symbol if form is not None and not form.generated else ""
            if symbol and specs.setdefault(symbol, op.spec) != op.spec:
                raise error(
                    "SL403",
                    where=symbol,
                    got=f"bound to {op.spec.name}",
                    expected=specs[symbol].name,
                    fix="give each op a C function of its own",
                )
    return specs


def config_names_by_symbol(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return a mapping from C symbol to the names of the config, for each C ABI kernel of ``ops`` that has a config.
    Kernels whose C++ Shiplap generates are left out.
    """
    kernels = [k for op in ops for kernels in op.kernels.values() for k in kernels if k.space is not None]
    bound = [(k.native, k.space) for k in kernels if k.native is not None and k.space is not None]
    return {form.symbol: space.names for form, space in bound if not form.generated}


def header_text(symbols: Mapping[str, OpSpec], target: str, configs: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the source code of the C header with one prototype per symbol.

    ``target`` is the argument of ``shiplap header``. ``configs`` holds, by symbol, the names of the compile-time values
    of a kernel. The header defines their indices into ``ctx->config``. If ``configs`` is None, no kernel has such
    values.
    """
    guard = "".join(c if c.isalnum() else "_" for c in target).upper() + "_KERNELS_H_"
    # A C name cannot begin with a digit, a file's name can.
    guard = f"_{guard}" if guard[0].isdigit() else guard
    kernels = [
        {
            "symbol": symbol,
            "summary": "\n * ".join(wrap(_comment_block(spec.doc.partition("\n\n")[0] or spec.name), 117)),
            "lines": [_comment_block(line) for line in _declaration_lines(spec)],
            "signature": prototype_signature(spec, (configs or {}).get(symbol, ())),
            "configs": [f"{symbol}_{name}".upper() for name in (configs or {}).get(symbol, ())],
            "parameters": c_prototype(spec),
        }
        for symbol, spec in symbols.items()
    ]
    return render_source("kernels.h.jinja", target=_comment_block(target), guard=guard, kernels=kernels)


def _comment_block(text: str) -> str:
    """Return ``text`` with a blank inside each ``/*`` and ``*/``, so that a C comment can contain it."""
    # A text of a declaration must not end the comment that it stands in.
    return text.replace("*/", "* /").replace("/*", "/ *")


def _declaration_lines(spec: OpSpec) -> list[str]:
    """Return the lines of the comment above a prototype, without comment signs. They hold the schema, the tensor types,
    the relations of sizes and the preconditions of the op.
    """
    lines = [f"{spec.namespace}::{schema_text(spec)}"]
    lines += [f"{a.name}: {a.tensor}{' or NULL' if a.optional else ''}" for a in spec.tensors]
    lines += [f"{o.name}: {o.tensor} (output)" for o in spec.outputs]
    lines += [f"{name} = {expr}" for name, expr in spec.dims]
    lines += [f"{name} <= {expr}" for name, expr in spec.bounds]
    return lines + [f"requires {expr}" for expr in spec.requires]
