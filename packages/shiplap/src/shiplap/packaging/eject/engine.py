"""``eject(ops, folder)``: declared ops as plain sources of torch, which need Shiplap no longer.

The C++ of the ejected ops is a library by torch's stable ABI, printed from the same plan as the native bindings.
The tests of the ejected ops read small arguments as data, or call the builder of samples that the op declares.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap import safe_io
from shiplap.codegen.environment import render_source
from shiplap.codegen.native import SCALAR, NativeOp, describe_op
from shiplap.declare.cpp_expression import quote_cpp
from shiplap.declare.kernel import Kernel
from shiplap.declare.schema import public_schema, schema_text
from shiplap.dispatch import AdoptedOp, Op
from shiplap.dispatch.python_kernel import PythonKernel
from shiplap.dispatch.registration import core_overload_name
from shiplap.errors import ShiplapError, error, writing
from shiplap.kernels.c.declaration import CKernel
from shiplap.kernels.c.header import header_text
from shiplap.kernels.c.library import locate_library, source_libraries
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE
from shiplap.kernels.native.build_plan import bound_native_kernel
from shiplap.kernels.native.source_library import INCLUDES, SUFFIX, SourceLibrary, gencode_flag
from shiplap.kernels.triton.kernel import LaunchedKernel
from shiplap.packaging.eject.copied_source import CannotCopy, SourceCopy
from shiplap.packaging.eject.printed_op import PrintedOp, literal, usable_kernels
from shiplap.plan.rules import GRADIENTS_ENABLED
from shiplap.sampling.case import SampleCase
from shiplap.sampling.run import reference_error
from shiplap.sampling.samples import Samples

RESERVED = ("support", "build")  # modules of an ejected package
TAKEN_OVER = "the op itself, which only calls what it adopted: call that in its place"


@dataclass
class EjectedPackage:
    """The sources of ops, in memory, that need torch and not Shiplap.

    Attributes:
        files: the contents of files, by path in the folder.
        copies: the files that are copied unchanged, by path in the folder.
        ops: the names of the ops, including those that the given ops call.
        lost: for each op, the features of its declaration that its ejected source lacks.
    """

    files: dict[str, str]
    copies: dict[str, Path]
    ops: tuple[str, ...]
    lost: dict[str, list[str]] = field(default_factory=dict)

    def write(self, folder: Path, force: bool = False) -> list[str]:
        """Write all files below ``folder`` and return their paths relative to it, sorted.

        If one of the files exists and ``force`` is false, raise ``SL602`` and write nothing. If ``force`` is true,
        existing files are replaced. Raise ``SL602`` also if a file cannot be written.
        """
        paths = {**self.files, **self.copies}
        # All are looked at before the first is written.
        there = [name for name in sorted(paths) if (folder / name).exists()]
        if there and not force:
            raise error(
                "SL602",
                where=str(folder / there[0]),
                what="the file already exists",
                got=f"{len(there)} files that would be overwritten",
                expected="a new folder",
                fix="pass --force, or another folder",
            )
        with writing(folder, "the folder", "a writable folder"):
            for name, text in self.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                safe_io.write_text(folder / name, text)
            for name, source in self.copies.items():
                safe_io.copy_whole(source, folder / name)
        return sorted(paths)


def eject(ops: Iterable[Op], package: str, *, lossy: bool = False) -> EjectedPackage:
    """Return the source code of a Python package ``package`` that defines ``ops`` with torch and without Shiplap.

    Ops that other ops call are included. Kernels in C, C++ and CUDA C++ become a library that uses torch's stable ABI.
    Python and Triton kernels become functions that ``torch.library`` registers.

    Args:
        ops: declared ops.
        package: the name of the package, which its tests import.
        lossy: whether to eject ops that lose templates or choices among configs. If it is false, such ops are refused.

    Raises:
        ShippingError: ``SL323``, which names each op that cannot be ejected, with the reason.
        CommandError: ``SL613`` for a package name that Python does not import.
    """
    if not package.isidentifier() or keyword.iskeyword(package):
        raise error(
            "SL613", where=f"the folder {package!r}", got="no name of a Python package", expected="an identifier"
        )
    ops = list(dict.fromkeys(ops))
    # What is adopted does without Shiplap already: its own library registers it.
    wanted = [op for op in ops if not isinstance(op, AdoptedOp) and op.adoption is None]
    if not wanted:
        raise error("SL323", where=package, got="no op", expected="declared ops", fix="pass ops that sl.op declares")
    refused: dict[str, str] = {}
    copy, printed, natives, rows = (
        SourceCopy(dict.fromkeys(RESERVED, package) | {"torch": torch}),
        list[PrintedOp](),
        list[NativeKernel](),
        {},
    )
    queue, seen = list(wanted), set[str]()
    while queue:
        op = queue.pop(0)
        if op.spec.name in seen:
            continue
        seen.add(op.spec.name)
        if reason := _why_not_ejected(op, lossy):
            refused[op.spec.name] = reason
            continue
        try:
            on = [d for d in ("cpu", "cuda") if native_kernel(op, d) is not None]
            natives += [read_native_kernel(op, device) for device in on]
            name = copy.op_name(op, _variable_of(op))
            made = PrintedOp(op, name, copy, on)
            made.print()
            rows[name] = describe_cases(op, copy, op.gradient is not None and not op.spec.mutated)
            printed.append(made)
        except CannotCopy as e:
            refused[op.spec.name] = str(e)
        except ShiplapError as e:
            refused[op.spec.name] = f"{e.id} {e.what}: {e.got}"
        # Copied code may call further ops.
        queue += [other for other in copy.ops.values() if other.spec.name not in seen]
    if refused:
        raise error(
            "SL323",
            where=package,
            got="\n".join(f"{name}: {reason}" for name, reason in refused.items()),
            expected="ops whose parts all have a plain form",
        )
    native = print_native_part(package, natives) if natives else NativePart()
    lost = {each.spec.name: losses for each in printed if (losses := _losses(each.op))}
    lost |= {op.spec.name: [TAKEN_OVER] for op in ops if op.adoption is not None}
    names = tuple(each.spec.name for each in printed)
    files = {
        "__init__.py": _module_text(package, copy, printed, bool(natives)),
        "support.py": render_source("support.py.jinja", package="shiplap.packaging"),
        "README.md": _readme_text(package, names, lost, bool(natives)),
        "tests/test_ops.py": _tests_text(package),
        "tests/cases.json": _json_text(rows),
        **native.files,
    }
    return EjectedPackage(files, native.copies, names, lost)


def _variable_of(op: Op) -> str:
    """Return the name of the module variable that holds an op, or an empty string if there is none."""
    # Copied code calls the op by this name.
    module = sys.modules.get(op.reference.__module__)
    return next((name for name, value in vars(module).items() if value is op), "") if module is not None else ""


def _why_not_ejected(op: Op, lossy: bool) -> str:
    """Return the reason why ``op`` cannot be ejected (written as source code that does without Shiplap), or an
    empty string if it can.

    If ``lossy`` is true, the ejected op may lose its templates or the choice among its tuned configs. Otherwise such a
    loss is a reason.
    """
    spec = op.spec
    if isinstance(op, AdoptedOp) or op.adoption is not None:
        return "it is adopted, and an op that is ejected calls it: call what it adopted there"
    if spec.enumerated or spec.single_tuple:
        return "its calls take members of an Enum" if spec.enumerated else "it returns a tuple of one"
    if objects := [a.name for a in spec.args if a.cls is not None]:
        return f"its argument {objects[0]} is an object"
    if taken := [a.name for a in spec.args if a.name in _generated_names(op)]:
        return f"an argument is called {taken[0]}, as something in the generated code is"
    if any(a.keyword_only and a.tensor is not None for a in spec.args) and op.gradient is not None:
        return "it has a gradient and a keyword-only tensor, which torch.library.register_autograd does not take"
    if not lossy and (losses := [*_template_losses(op), *_choice_losses(op)]):
        return f"{losses[0]} (--accept-loss ejects it without)"
    for device in op.kernels:
        if reason := _why_not_printed(usable_kernels(op, device)):
            return reason
    return ""


def _generated_names(op: Op) -> set[str]:
    """Return the names of variables in the generated functions of ``op``. Those functions also have the op's own
    parameters, so no argument may have such a name.
    """
    spec = op.spec
    found = {*RESERVED, "torch", "math", "kind", "device_type", *(f"{p}_{a.name}" for p in "ct" for a in spec.tensors)}
    found |= set() if spec.traced else {"device"}
    # Parameters of the functions that register_autograd takes.
    found |= {"ctx", "output"} if op.gradient is not None else set()
    found |= {"made"} if spec.returned else set()
    found |= {"result"} if spec.mutated else set()
    workspaces = any(k.workspace is not None for kernels in op.kernels.values() for k in kernels)
    return found | ({"scratch", "w_threads", "w_itemsize"} if workspaces else set())


def _why_not_printed(kernels: Sequence[Kernel]) -> str:
    """Return the reason why the kernels of one device cannot be ejected, or an empty string if they can. The
    sequence ``kernels`` is in the order in which they are tried.
    """
    for index, kernel in enumerate(kernels):
        if not isinstance(kernel, (PythonKernel, LaunchedKernel, CKernel)):
            return f"its kernel {kernel.name} is a {type(kernel).__name__}, which has no plain form"
        if isinstance(kernel, CKernel):
            if index:
                return f"its kernel {kernel.name} is a C function that is tried after one of Python"
            return "" if kernel.supports is None else f"its kernel {kernel.name} is a C function with supports="
        # Choosing a config for a call needs the table of choices.
        if kernel.space is not None and kernel.space.static is None:
            return f"the default config of its kernel {kernel.name} depends on sizes"
        # It takes every call, so the kernels behind it never run.
        if kernel.supports is None and not kernel.dtypes:
            return ""
    return ""


def _template_losses(op: Op) -> list[str]:
    """Return a list with one message that names the templates of ``op``. The ejected source does not have templates. If
    the op has no templates, the list is empty.
    """
    names = [t.name for templates in op.templates.values() for t in templates]
    return [f"it has the template {', '.join(names)}, which only Shiplap's lowering renders"] if names else []


def _choice_losses(op: Op) -> list[str]:
    """Return a list with a message for each kernel of ``op`` that has several configs to tune among. The ejected source
    contains only one of them.
    """
    spaces = [(k, k.space) for device in op.kernels for k in op.native_kernels(device) if k.space is not None]
    chosen = [k.name for k, space in spaces if space.derived is not None or len(space.fixed) > 1]
    return [f"its kernel {name} is chosen among configs by tuning" for name in dict.fromkeys(chosen)]


def _losses(op: Op) -> list[str]:
    """Return a list with a message for each feature that ``op`` loses when it is ejected, such as templates."""
    found = [*_template_losses(op), *_choice_losses(op)]
    if op.shardings is not None:
        found.append("rules for DTensor")
    if op.batching:
        found.append("several calls as one under vmap")
    for device in op.kernels:
        kernels = op.native_kernels(device)
        if kernels and isinstance(kernels[0], CKernel) and kernels[0].dtypes:
            found.append(f"other dtypes than {', '.join(kernels[0].dtypes)} on {device}, which the reference served")
    return found


def _module_text(package: str, copy: SourceCopy, printed: Sequence[PrintedOp], native: bool) -> str:
    """Return the source code of the ``__init__.py`` of an ejected package. It holds copied code, the functions of each
    op, and the registrations with torch.

    If ``native`` is true, it also loads the package's C++ library. Otherwise the package has none.
    """
    spaces = list(dict.fromkeys(each.spec.namespace for each in printed))
    names = ", ".join(f"{each.spec.name}" for each in printed)
    functions = [text for each in printed for text in each.functions]
    own = {each.op: each.name for each in printed}
    aliases = [f"{name} = {own[op]}" for name, op in copy.ops.items() if own[op] != name]
    imports = sorted({"import torch", *copy.imports}, key=lambda line: (line.startswith("from"), line))
    head = [
        f'"""The ops {names}, registered with torch. Ejected from their declarations by Shiplap."""',
        "from __future__ import annotations",
        "\n".join(imports),
        "from . import build, support" if native else "from . import support",
    ]
    parts = [
        "\n\n".join(head),
        *copy.blocks,
        *functions,
        "# " + "-" * 4 + " registered with torch " + "-" * 88,
        *(["build.load()"] if native else []),
        # A fragment, since other packages may define ops in the same namespace.
        "\n".join(f'_{space} = torch.library.Library("{space}", "FRAGMENT")' for space in spaces),
        *("\n".join(each.registrations) for each in printed),
        *(["\n".join(aliases)] if aliases else []),
    ]
    return "\n\n\n".join(parts) + "\n"


def _tests_text(package: str) -> str:
    """Return the Python source of the tests of an ejected package called ``package``."""
    return render_source("ejected_tests.py.jinja", package="shiplap.packaging").replace("@package@", package)


def _json_text(rows: dict[str, dict[str, Any]]) -> str:
    """Return the test cases of the ops as a string of JSON, with one case per line. ``rows`` maps each op's name to the
    data of its tests.
    """
    ops = []
    for name, row in rows.items():
        fields = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in row.items() if k != "cases"]
        cases = ",\n   ".join(map(json.dumps, row["cases"]))
        ops.append(f" {json.dumps(name)}: {{\n" + ",\n".join([*fields, f'  "cases": [\n   {cases}\n  ]']) + "\n }")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def _readme_text(package: str, names: Sequence[str], lost: dict[str, list[str]], native: bool) -> str:
    """Return the README of an ejected package as a string of Markdown. ``names`` are its ops, and ``lost`` holds, for
    each op, the features that it has lost. If ``native`` is true, the package has a C++ part, which the README
    describes, too.
    """
    lines = [f"# {package}", "", "Plain sources of torch ops. Nothing here needs Shiplap.", ""]
    lines += [f"* `import {package}` registers {', '.join(f'`{n}`' for n in names)}."]
    lines += [
        f"* `python -m {package}.build` compiles the C++ ahead of time; the first import compiles it otherwise."
    ] * native
    lines += [f"* `pytest {package}` compares each op with its reference, eager and compiled, and runs opcheck.", ""]
    if lost:
        lines += ["## What the declared ops had and these do not have", ""]
        lines += [f"* `{name}`: {'; '.join(losses)}." for name, losses in lost.items()]
    return "\n".join(lines).rstrip() + "\n"


REFUSAL = re.compile(r'\brefuse\("SL\d+", ')  # ids of a catalogue that ejected code does not have


@dataclass
class NativePart:
    """The C++ files of a package, and the libraries that its ``build.py`` compiles.

    ``files`` holds the contents of files, and ``copies`` the files that are copied unchanged, both by path in the
    package. ``units`` describes the kernel libraries to compile, by file name. ``libraries`` describes the libraries of
    torch ops to compile.
    """

    files: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    libraries: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class NativeKernel:
    """A C function that implements ``op`` on the device type ``device``. ``code`` holds the data from which the C++
    that calls it is generated. ``file`` is the name of the library that contains it.
    """

    op: Op
    device: str
    code: NativeOp
    file: str

    @property
    def symbol(self) -> str:
        """The name of the C function that implements the op."""
        return self.code.symbol


def native_kernel(op: Op, device: str) -> CKernel | None:
    """Return the kernel that is tried first for calls of an op on a device if it is a C function. Otherwise return
    None.
    """
    kernels = op.native_kernels(device)
    return kernels[0] if kernels and isinstance(kernels[0], CKernel) else None


def read_native_kernel(op: Op, device: str) -> NativeKernel:
    """Return the C function that implements ``op`` on ``device``, with the data from which the C++ that calls it is
    generated. Raise ``CannotCopy`` if generated C++ cannot call it.
    """
    try:
        code, form = bound_native_kernel(op, device)
        # The result is not needed here. The call raises if generated C++ cannot call the kernel.
        describe_op(code, op.spec.stem)
        library = source_libraries.get(form.library)
        if library is None:
            # This raises if the library is missing.
            locate_library(form.library)
    except ShiplapError as e:
        raise CannotCopy(f"{e.what}: {e.got}") from None
    name = f"lib{code.symbol}.so" if library is not None else form.library.name
    return NativeKernel(op, device, code, name)


def print_native_part(package: str, kernels: Sequence[NativeKernel]) -> NativePart:
    """Return the C++ part of a package. It holds the sources of the package's libraries of torch ops and the script
    that compiles them.

    Nothing is compiled or written.
    """
    part = NativePart()
    for kernel in kernels:
        _add_kernel(part, kernel)
    for name in _headers_behind("shiplap/native.h"):
        part.copies[f"csrc/{name}"] = INCLUDE / name
    ops = list(dict.fromkeys(k.op for k in kernels))
    on_cpu = [k for k in kernels if k.device == "cpu"]
    # Also where no kernel is on the CPU, since it defines the schemas.
    _add_library(part, "ops", on_cpu, ops)
    # Apart, so that the package works on a machine without CUDA.
    if on_cuda := [k for k in kernels if k.device == "cuda"]:
        _add_library(part, "ops_cuda", on_cuda, [])
    target = next(flag for flag in FLAGS if flag.startswith("-DTORCH"))
    part.files["build.py"] = render_source(
        "ejected_build.py.jinja",
        package="shiplap.packaging",
        **{"units": list(part.units.values()), "libraries": part.libraries, "target": target},
    ).replace("@package@", package)
    return part


def _add_library(part: NativePart, name: str, kernels: Sequence[NativeKernel], defined: Sequence[Op]) -> None:
    """Add to ``part`` the C++ source of the library ``name``. The library implements the ops of ``kernels`` and defines
    the schemas of ``defined``.
    """
    described = []
    for kernel in kernels:
        values = describe_op(kernel.code, kernel.op.spec.stem)
        # The ejected op registers its gradients itself, so there is no Python to ask about them.
        deferrals = [d for d in values["deferrals"] if GRADIENTS_ENABLED not in d.condition]
        printed = {k: [REFUSAL.sub("reject(", line) for line in values[k]] for k in ("checks", "allocated", "packed")}
        printed |= {k: [REFUSAL.sub("reject(", line) for line in values[k]] for k in ("workspace", "within")}
        described.append({**values, **printed, "deferrals": deferrals})
    schemas: dict[str, list[str]] = {}
    for op in defined:
        spec, core = op.spec, core_overload_name(op.spec)
        texts = [public_schema(spec, spec.opname)] if spec.returned else []
        schemas.setdefault(spec.namespace, []).extend(map(quote_cpp, [*texts, schema_text(spec, core)]))
    implementations: dict[str, list[tuple[str, str]]] = {}
    for kernel in kernels:
        row = core_overload_name(kernel.op.spec), kernel.op.spec.stem
        implementations.setdefault(kernel.op.spec.namespace, []).append(row)
    part.files[f"csrc/{name}.cpp"] = render_source(
        "ejected_ops.cpp.jinja",
        package="shiplap.packaging",
        names=[k.op.spec.name for k in kernels] or [op.spec.name for op in defined],
        cuda=name == "ops_cuda",
        headers=[f"{k.symbol}/declaration.h" for k in kernels],
        ops=described,
        scalar_types=SCALAR,
        schemas=schemas,
        implementations=implementations,
    )
    files = list(dict.fromkeys(k.file for k in kernels))
    part.libraries.append({"file": f"lib{name}.so", "source": f"{name}.cpp", "kernels": files})


def _add_kernel(part: NativePart, kernel: NativeKernel) -> None:
    """Add to ``part`` the sources and the header of a kernel. If the kernel came without sources, add the kernel's
    library instead. Raise ``CannotCopy`` if a source lies outside its folder.
    """
    native, spec = kernel.code, kernel.op.spec
    configs = {native.symbol: native.space.names} if native.space is not None else None
    folder = f"csrc/{native.symbol}"
    # The command that wrote the header is not part of an ejected package.
    part.files[f"{folder}/declaration.h"] = header_text({native.symbol: spec}, native.symbol, configs).replace(
        "Generated by `shiplap header", "Generated from the declaration of `"
    )
    form = kernel.op.native_kernels(kernel.device)[0].native
    assert form is not None
    library = source_libraries.get(form.library)
    if not isinstance(library, SourceLibrary):
        part.copies[f"lib/{kernel.file}"] = locate_library(form.library)
        return
    sources = []
    for text in library.texts:
        name = text.name if text.path is not None else f"code{SUFFIX[text.language]}"
        # The file would be written outside of the package.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CannotCopy(f"its source includes {name}, which lies outside of its folder")
        part.files[f"{folder}/{name}"] = text.content
        sources += [name] if text.language else []
    part.units[kernel.file] = {
        "file": kernel.file,
        "sources": sources,
        "folder": native.symbol,
        "flags": list(library.flags),
        "link": list(library.libraries),
        "architectures": [gencode_flag(name) for name in library.architectures],
    }


def _headers_behind(name: str) -> list[str]:
    """Return the names of the header ``name`` of Shiplap and of all headers that it includes, directly or through
    others, sorted.
    """
    found, queue = [name], [name]
    while queue:
        for other in INCLUDES.findall((INCLUDE / queue.pop()).read_text()):
            if other not in found and (INCLUDE / other).is_file():
                found.append(other)
                queue.append(other)
    return sorted(found)


# The number of cases of an op, and the seed by which they are drawn.
CASES, SEED = 6, 0
MOST_ELEMENTS = 4096  # of a case, since they are written as numbers


def describe_cases(op: Op, copy: SourceCopy, gradient: bool) -> dict[str, Any]:
    """Return the data that the tests of an ejected op read, as values for JSON. These are the names of its arguments,
    the names of its functions, such as the reference, and test cases.

    ``gradient`` states whether the tests compare gradients. Raise ``CannotCopy`` if the function that draws samples has
    no source to copy.
    """
    spec = op.spec
    named = [a.name for a in spec.args]
    surrogate = op.gradient.surrogate if op.gradient is not None else None
    row: dict[str, Any] = {
        "names": named,
        "positional": sum(not a.keyword_only for a in spec.args),
        "reference": f"{spec.stem}_reference",
        "surrogate": copy.function(surrogate, f"{spec.stem}_surrogate") if surrogate else f"{spec.stem}_reference",
        "gradient": gradient,
        # Random numbers, and results in any order, cannot be compared element by element.
        "compared": not spec.draws and not spec.unordered,
    }
    if op.sampler is None:
        return row | {
            "cases": [{"args": [_argument_as_json(v) for v in case.args]} for case in islice(_cases(op), CASES)]
        }
    row["samples"] = copy.function(inspect.unwrap(op.sampler), f"{spec.stem}_samples")
    row["defaults"] = [_argument_as_json(a.default) if a.has_default else None for a in spec.args]
    return row | {"cases": [_builder_sizes(op, case) for case in islice(_cases(op), 2)]}


def _cases(op: Op) -> Iterator[SampleCase]:
    """Yield small samples that the op's kernels and its reference accept. Usual sizes come first, followed by absent
    arguments, other scalars, and unusual sizes such as 0 and 1.
    """
    samples = Samples(op, SEED)
    taken = {d for kernels in op.kernels.values() for k in kernels for d in k.dtypes}
    for case in chain(samples.plain(), samples.grown(1), samples.optionals(), samples.scalars(), samples.edges()):
        dtypes = {str(t.dtype).removeprefix("torch.") for t in _tensors(case.args)}
        floats = {d for d in dtypes if getattr(torch, d).is_floating_point}
        # The kernels would refuse other dtypes, and the tests would compare the reference with itself. The reference
        # may refuse unusual sizes, such as an index into a table without rows.
        fits = case.numel <= MOST_ELEMENTS and (not taken or floats <= taken)
        if fits and not reference_error(op, case.args):
            yield case


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among ``values`` and in the lists among them, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _builder_sizes(op: Op, case: SampleCase) -> dict[str, Any]:
    """Return the sizes, the scalars and the dtype with which the op's sample builder makes ``case``, as values for
    JSON.
    """
    floats = [n for n in dict(case.recipe.dtypes).values() if getattr(torch, n).is_floating_point]
    recipe = {**{a.name: a.default for a in op.spec.scalars if a.has_default}, **dict(case.recipe.scalars)}
    sizes = {**recipe, **case.env, **dict(case.recipe.sizes), "absent": []}
    kept = {k: list(v) if isinstance(v, tuple) else v for k, v in sizes.items()}
    plain = {k: v for k, v in kept.items() if isinstance(v, (bool, int, float, str, list, type(None)))}
    return {"sizes": plain, "dtype": floats[0] if floats else "float32"}


def _argument_as_json(value: Any) -> Any:
    """Return an argument of a test case as a value for JSON. A tensor becomes a dict of its dtype, shape and data. A
    bool, an int, a str and None are returned unchanged. Any other value becomes a dict with its Python expression.
    Lists are converted item by item.
    """
    if isinstance(value, (list, tuple)):
        return [_argument_as_json(v) for v in value]
    if isinstance(value, Tensor):
        flat = value.detach().contiguous()
        # JSON has no complex numbers, and a double holds every narrower floating-point number.
        data = torch.view_as_real(flat) if flat.is_complex() else flat.double() if flat.is_floating_point() else flat
        kind = str(value.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(value.shape), "data": data.reshape(-1).tolist()}
    if isinstance(value, (bool, int, str, type(None))):
        return value
    return {"other": literal(value)}
