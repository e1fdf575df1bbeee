"""A template as data, which is kernel source with hooks into which Inductor fuses neighbouring operations.

The package ``inductor`` lowers a template in a compiled graph. A Triton template also runs eager calls, rendered with
empty hooks (``kernels/triton/template_kernel.py``). A function of PyTorch may take the place of a file. It is traced
into the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TypeAlias, TypedDict

from torch import Tensor

from shiplap.declare.choices import gives_result
from shiplap.declare.code_digest import code_digest
from shiplap.declare.code_parts import AnyValue, HasCode
from shiplap.declare.config import Configs, Values
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Env, Size, Supports
from shiplap.errors import error
from shiplap_headers import include_dir

LANGUAGES = {".triton.jinja": "triton", ".cpp.jinja": "cpp"}
# Includes are resolved by ourselves, so that the digest of a template covers the included text.
INCLUDE = re.compile(r"""\{%-? include "([\w./]+)" -?%\}""")
# Inductor knows sizes by how their names begin, and would take such an index for one.
INDICES = re.compile(r"""(?:load_input\(\s*"\w+",\s*"\w+",|store_output\()\s*\(([^()]*)\)""")
# Inductor names its symbols so, and would take such an index for one.
SIZE = re.compile(r'"((?:s|u|ps|zuf)\w*)"', re.IGNORECASE)
# Variables of the code that Inductor writes into a kernel for its neighbours, which would overwrite the template's.
INDUCTORS = re.compile(r"(?<!\.)\b(tmp\d+|xindex|xmask|ks\d+|in_ptr\d+|out_ptr\d+)\b")
Grid: TypeAlias = Callable[..., tuple[Size, Size, Size]]  # of sizes, config and a ceiling division: programs
Traced: TypeAlias = Callable[..., Tensor]  # of all arguments of the op, as the reference
TableMaker: TypeAlias = Callable[..., Tensor]  # of sizes and scalars


class TemplateKeywords(TypedDict, total=False):
    """The keywords of ``Op.template``.

    Attributes:
        configs: the values of the compile-time parameters, the default first.
        grid: ``grid(sizes, config, cdiv)`` returns the number of programs along three axes. Only Triton templates have
            it.
        tables: lookup tables that are computed on the host, ``{name: fn(sizes)}``. Each becomes an input of the kernel.
        innermost: for an argument, the dim that must have stride 1, as in ``{"b": "k"}``.
        supports: ``supports(sizes, dtypes, config)`` returns True, or the reason why the template cannot be used.
        split_k: ``split_k(sizes, config)`` returns the number of partial sums into which the kernel splits the
            reduction. If it is above 1 (``SPLIT_K`` in the template), the kernel stores each partial sum in float32
            under the first index of ``store_output``. Shiplap adds the partial sums after the kernel. Only Triton
            templates have it.
        fuses: ``fuses(sizes)`` returns whether fusing neighbours into the kernel is faster than running them after it.
        default: False restricts the template to calls for which a measurement has chosen it.
        name: the name of the template. The default is that of the file.
    """

    name: str | None
    configs: Configs
    grid: Grid | None
    tables: Mapping[str, TableMaker] | None
    innermost: Mapping[str, str] | None
    supports: Supports | None
    split_k: Callable[..., int] | None
    fuses: Callable[..., bool] | None
    default: bool


@dataclass(frozen=True)
class Template(HasCode):
    """A templated kernel of an op for the device type ``device``. ``source`` is the source of the kernel in the
    language ``language``. For a template that is a function of PyTorch, ``source`` is empty and ``function`` is that
    function. :class:`TemplateKeywords` documents the other fields.
    """

    name: str
    device: str
    language: str
    source: str = field(repr=False)  # empty for a function
    configs: tuple[Values, ...] | Callable[..., Iterable[Values]]
    grid: Grid | None = None
    tables: tuple[tuple[str, TableMaker], ...] = ()
    innermost: tuple[tuple[str, str], ...] = ()
    supports: Supports | None = None
    split_k: Callable[..., int] | None = None
    fuses: Callable[..., bool] | None = None
    default: bool = True
    function: Traced | None = None

    @property
    def identity(self) -> str:
        """A digest of the template's source, its configs (compile-time values) and the code of all its functions."""
        return code_digest(self)

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield ``(text, value)`` for what the code of the template depends on, for digests. This is the source with
        included files, the configs, and the functions.
        """
        yield repr((self.language, self.source, self.innermost, self.default)), None
        yield "configs", self.configs
        yield "functions", (self.grid, self.supports, self.split_k, self.fuses, self.function, self.tables)

    def candidates(self, env: Env) -> tuple[Values, ...]:
        """Return the compile-time configs to consider for the sizes and scalars ``env``, the default first."""
        return tuple(self.each_candidate(env))

    def each_candidate(self, env: Env) -> Iterable[Values]:
        """Return the configs of :meth:`candidates`, which may be made one by one while they are read."""
        return self.configs(env) if callable(self.configs) else self.configs


def read_template(
    spec: OpSpec,
    home: str,
    device: str,
    source: str | Traced,
    *,
    name: str | None = None,
    configs: Configs = ({},),
    grid: Grid | None = None,
    tables: Mapping[str, TableMaker] | None = None,
    innermost: Mapping[str, str] | None = None,
    supports: Supports | None = None,
    split_k: Callable[..., int] | None = None,
    fuses: Callable[..., bool] | None = None,
    default: bool = True,
) -> Template:
    """Return the template in the file ``source`` (``*.triton.jinja``, ``*.cpp.jinja``) beside ``home``, the path of a
    Python file. If ``source`` is a function of PyTorch, return a template of that function. The keywords are those of
    :class:`TemplateKeywords`. Raise ``SL114`` if the template cannot be used.
    """
    # Inductor compiles a function of PyTorch itself, so that it has no source file.
    if callable(source):
        called, language, text, function = source.__name__, "torch", "", gives_result(spec, source)
        where = f"{spec.name}, template {called!r}"
    else:
        where, function = f"{spec.name}, template {source!r}", None
        called, language, text = _read_template_file(Path(home), source, where)
    template = Template(
        name or called,
        device.partition(":")[0],
        language,
        text,
        configs if callable(configs) else tuple(dict(c) for c in configs),
        grid,
        tuple((tables or {}).items()),
        tuple((innermost or {}).items()),
        supports,
        split_k,
        fuses,
        default,
        function,
    )
    _check_template_fits(spec, template, where)
    if function is not None:
        _check_traced(spec, template, function, where)
    return template


def _read_template_file(home: Path, source: str, where: str) -> tuple[str, str, str]:
    """Return ``(name, language, text)`` of the template file ``source`` beside ``home``. Raise ``SL114`` for an unknown
    suffix or a missing file.
    """
    language = next((kind for suffix, kind in LANGUAGES.items() if source.endswith(suffix)), "")
    path = home.parent / source
    if not language:
        raise error("SL114", where=where, got=f"file name {source!r}", expected=" or ".join(f"*{s}" for s in LANGUAGES))
    if not path.is_file():
        raise error("SL114", where=where, got="no such file", expected=f"a file beside {home.name}")
    return path.name.split(".")[0], language, _resolve_includes(path, where)


def _check_traced(spec: OpSpec, template: Template, function: Traced, where: str) -> None:
    """Raise ``SL114`` for a PyTorch function given as a template if its parameters differ from the reference's. Raise
    it also for keywords that only a template with kernel source can have.
    """
    wanted, taken = [a.name for a in spec.args], list(signature(function).parameters)
    if taken != wanted:
        raise error(
            "SL114", where=where, got=f"a function of {', '.join(taken)}", expected=f"a function of {', '.join(wanted)}"
        )
    given = {
        "grid=": template.grid,
        "tables=": template.tables,
        "innermost=": template.innermost,
        "split_k=": template.split_k,
        "fuses=": template.fuses,
        "configs=": template.configs != ({},),
    }
    if extra := [name for name, value in given.items() if value]:
        raise error("SL114", where=where, got=f"{extra[0]} of a function", expected="supports=, default= or name= only")


def _check_template_fits(spec: OpSpec, template: Template, where: str) -> None:
    """Raise ``SL114`` if the op or the template is not one that Inductor can lower.

    The op must have one output of a size that its arguments determine, write to no argument and take no list of
    tensors. The template must have configs, keywords that fit its language, dims that exist in ``innermost=``, and
    names that Inductor does not use.
    """
    # Inductor's templates store one output, whose size is known before the launch.
    if len(spec.outputs) != 1 or spec.dynamic or spec.mutated or any(a.many for a in spec.args):
        raise error(
            "SL114",
            where=where,
            got=f"{len(spec.outputs)} outputs, {len(spec.mutated)} mutated arguments",
            expected="one output of fixed size, no mutated argument, no tensor list",
        )
    triton = template.language == "triton"
    _check_functions(template, where)
    if triton and template.grid is None:
        raise error("SL114", where=where, got="no grid", expected="grid=lambda sizes, config, cdiv: (programs, 1, 1)")
    indices = " ".join(INDICES.findall(template.source)) if triton else ""
    if triton and (taken := SIZE.search(indices) or INDUCTORS.search(template.source)):
        raise error(
            "SL114",
            where=where,
            got=f"the name {taken[1]!r}",
            fix="rename the index or the variable",
            expected="indices that do not begin with s, u or ps, and no tmp0, xindex or ks0: Inductor has such names",
        )
    for argument, dim in template.innermost:
        tensor = next((a.tensor for a in spec.tensors if a.name == argument), None)
        if tensor is None or dim not in [d.text for d in tensor.dims]:
            raise error("SL114", where=where, got=f"innermost={{{argument!r}: {dim!r}}}", expected="an argument's dim")
    if not triton and template.split_k is not None:
        raise error("SL114", where=where, got="split_k= in C++", expected="a Triton template, or no split_k=")
    if not template.configs:
        raise error("SL114", where=where, got="no configs", expected="at least one, the default first")


def _check_functions(template: Template, where: str) -> None:
    """Raise ``SL114`` if a keyword of the template that must be a function of sizes, such as ``grid=``, cannot be
    called.
    """
    given: dict[str, tuple[object, str]] = {
        "grid=": (template.grid, "sizes, config, cdiv"),
        "supports=": (template.supports, "sizes, dtypes, config"),
        "split_k=": (template.split_k, "sizes, config"),
        "fuses=": (template.fuses, "sizes"),
    }
    given |= {f"tables[{name!r}]": (build, "sizes") for name, build in template.tables}
    for what, (value, of) in given.items():
        if value is not None and not callable(value):
            fix = f"write {what} as a function, lambda {of}: ..."
            raise error("SL114", where=where, got=f"{what} {value!r}", expected=f"a function of ({of})", fix=fix)


def _resolve_includes(path: Path, where: str) -> str:
    """Return the text of ``path`` with each ``{% include "file" %}`` replaced by the content of that file, so that
    digests cover it.

    An included file is searched for beside ``path`` first, then among the headers that Shiplap ships.
    """

    def read(match: re.Match[str]) -> str:
        """Return the content of the file that the include directive ``match`` names. It is looked for beside the
        template, then in the folder of Shiplap's headers. Raise ``SL114`` if neither has the file.
        """
        for folder in (path.parent, include_dir()):
            if (folder / match[1]).is_file():
                return (folder / match[1]).read_text(encoding="utf-8")
        raise error("SL114", where=where, got=f"{match[0]}: no such file", expected=f"a file beside {path.name}")

    return INCLUDE.sub(read, path.read_text(encoding="utf-8"))
