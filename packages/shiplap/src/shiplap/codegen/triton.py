"""Triton templates as text, with their helpers, and a renderer that turns a template into a plain Triton kernel.

Inductor renders the same sources in compiled graphs, with fused neighbours (``shiplap.inductor``). Here nothing is
fused. Sizes and strides are arguments of the kernel, so that one kernel is used for all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from shiplap.declare.spec import OpSpec

if TYPE_CHECKING:
    from jinja2 import Template

PRELUDE = r"""
{%- macro swizzle(pid, tiles_m, tiles_n, group) %}
    # Programs that share rows run together, so that what one loads the next one finds in the cache.
    _width = {{group}} * {{tiles_n}}
    _first = ({{pid}} // _width) * {{group}}
    _rows = tl.minimum({{tiles_m}} - _first, {{group}})
    tile_m = _first + ({{pid}} % _width) % _rows
    tile_n = ({{pid}} % _width) // _rows
{%- endmacro %}
"""
# Replaced after rendering, when the parameters that the body uses are known.
HEAD = "<the signature and what is known at compile time>"
UNALIGNED = "do_not_specialize_on_alignment"  # a variable that a template may set, with Triton's name for it
WORD = re.compile(r"[A-Za-z_]\w*")
DESCRIBED = re.compile(r"make_tensor_descriptor\(\s*(\w+)")


def triton_source(source: str, arguments: Iterable[str]) -> str:
    """Return the source code of a Triton template for Inductor, with the helper macros of Shiplap before it. In
    ``source``, each ``def_kernel()`` gets the names ``arguments``, which are the tensors present in the call in
    declared order.
    """
    named = ", ".join(f'"{name}"' for name in arguments)
    return PRELUDE.strip() + "\n" + source.replace("def_kernel()", f"def_kernel({named})")


def template_constants(
    spec: OpSpec, values: Sequence[Any], plain: Callable[[Any], Any] = lambda v: v
) -> dict[str, Any]:
    """Return the compile-time constants of one call by the names that a template uses.

    The names are ``HAS_BIAS`` for an optional tensor ``bias``, ``STRIDE_0`` for the first item of a list ``stride``,
    and the name in capitals for any other scalar. ``values`` are the arguments in schema order. ``plain`` converts a
    scalar, for example a symbolic one to a number. By default scalars stay as they are.
    """
    facts: dict[str, Any] = {}
    for arg, value in zip(spec.args, values, strict=True):
        name = arg.name.upper()
        if arg.tensor is not None:
            if arg.optional:
                facts[f"HAS_{name}"] = value is not None
        elif isinstance(value, (list, tuple)):
            facts |= {f"{name}_{i}": plain(v) for i, v in enumerate(value)}
        else:
            facts[name] = plain(value)
    return facts


@dataclass(frozen=True)
class RenderedKernel:
    """A rendered Triton kernel. ``text`` is the source code of its function, which is called ``name``.

    The parameters of the function are ``tensors``, then the output, then ``numbers``. Each of ``numbers`` is a tuple
    ``("size" | "stride", tensor, axis)``, with None as the tensor for the output. The function makes tensor descriptors
    of the tensors in ``described``. Triton must not compile a form for multiples of 16 of the parameters ``unaligned``.
    """

    name: str
    text: str = field(repr=False)
    tensors: tuple[str, ...]
    described: tuple[str, ...]
    numbers: tuple[tuple[str, str | None, int], ...]
    unaligned: tuple[str, ...]


def render_kernel(
    source: str, name: str, ranks: Mapping[str, int], out_rank: int, known: Mapping[str, Any], wide: bool
) -> RenderedKernel:
    """Return the template ``source`` rendered as a Triton kernel called ``name``. Its code does not depend on Inductor.

    ``ranks`` has the rank of each input by name, and ``out_rank`` is the rank of the output. ``known`` has the
    compile-time values, tensor properties and scalars by name. If ``wide`` is true, offsets have 64 bits, and otherwise
    32 bits. Inputs that the rendered code does not mention are not parameters.

    Raises:
        jinja2.TemplateError, KeyError, ValueError: the template uses an undefined name.
    """
    # The writer collects the sizes and strides that the text uses while it is rendered.
    writer = _Writer(dict(ranks), out_rank, wide)
    # The helpers have the names and parameters of Inductor's own, so that one source serves both renderers.
    helpers = {n: getattr(writer, n) for n in ("def_kernel", "size", "stride", "load_input", "store_output")}
    known = {**known, "INDEX_DTYPE": f"tl.int{64 if wide else 32}"}
    template = _parse_template(triton_source(source, ranks)).make_module({**known, **helpers})
    body = str(template)
    # Parameters that the text does not use are left out: Triton specialises a kernel on each parameter.
    words = set(WORD.findall(body))
    values = [f"    {n}: tl.constexpr = {_literal_text(n, v)}" for n, v in known.items() if n in words]
    tensors = tuple(n for n in ranks if n in words)
    parameters = [*tensors, "out_ptr", *(_parameter_name(*n) for n in writer.numbers)]
    head = "\n".join([f"def {name}({', '.join(parameters)}):", *values])
    described = tuple(dict.fromkeys(DESCRIBED.findall(body)))
    text, unaligned = body.replace(HEAD, head).strip() + "\n", getattr(template, UNALIGNED, ())
    return RenderedKernel(name, text, tensors, described, tuple(writer.numbers), tuple(unaligned))


@cache
def _parse_template(source: str) -> Template:
    """Return ``source`` as a Jinja2 template. An undefined name in it raises an error when it is rendered, as in
    Inductor.
    """
    from jinja2 import Environment, StrictUndefined

    return Environment(undefined=StrictUndefined, autoescape=False).from_string(source)


class _Writer:
    """The helper functions that a template calls while it is rendered. ``numbers`` collects the sizes and strides that
    the template uses, as keys in the order of first use. ``ranks`` has the rank of each tensor, and ``wide`` states
    whether offsets have 64 bits.
    """

    def __init__(self, ranks: dict[str, int], out_rank: int, wide: bool) -> None:
        """Start a rendering for inputs with the ranks ``ranks`` by name, and an output of the rank ``out_rank``. If
        ``wide`` is true, offsets have 64 bits, and otherwise 32 bits.
        """
        self.ranks: dict[str | None, int] = {None: out_rank}
        self.ranks.update(ranks)
        self.wide = wide
        self.numbers: dict[tuple[str, str | None, int], None] = {}

    def def_kernel(self, *arguments: str) -> str:
        """Return a placeholder for the ``def`` line of the kernel. It is replaced after the body is rendered, when the
        parameters that the body uses are known. ``arguments`` is ignored.
        """
        return HEAD

    def size(self, name: str | None, index: int) -> str:
        """Return the Triton expression of the size of the dim ``index`` of the tensor ``name``. ``name`` is an argument
        of the op. For the output, it is None, or ``out`` if no input has this name.
        """
        return self._wide(self._number("size", self._named(name), index))

    def stride(self, name: str | None, index: int | None = None) -> str:
        """Return the Triton expression of the stride of the dim ``index`` of the tensor ``name``. If ``index`` is None,
        return the strides of all dims, separated by commas.

        ``name`` is an argument of the op. For the output, it is None, or ``out`` if no input has this name.
        """
        name = self._named(name)
        if index is None:
            return ", ".join(self.stride(name, axis) for axis in range(self.ranks[name]))
        return self._wide(self._number("stride", name, index))

    def _named(self, name: str | None) -> str | None:
        """Return None if ``name`` is ``out`` and no input has this name, since the template then means the output.
        Otherwise return ``name``.
        """
        return None if name == "out" and name not in self.ranks else name

    def load_input(
        self,
        input_name: str,
        output_name: str,
        indices: Sequence[str],
        mask: str | None = None,
        other: float | None = 0.0,
        indent_width: int = 4,
        index_shape: Sequence[str] | None = None,
    ) -> str:
        """Return the Triton statement that loads elements of ``input_name`` at ``indices`` and assigns them to
        ``output_name``.

        ``mask`` is a Triton expression. Elements where it is false get the value ``other``. If it is None, all elements
        are loaded. ``index_shape`` is the shape to which the offsets are broadcast, or None. The parameters are those
        of ``load_input`` in Inductor's templates. ``indent_width`` is ignored, since the statement is one line.
        """
        masked = f", mask={mask}, other={other}" if mask else ""
        return f"{output_name} = tl.load({input_name} + {self._offset(input_name, indices, index_shape)}{masked})"

    def store_output(
        self,
        indices: Sequence[str],
        val: str,
        mask: str | None = None,
        indent_width: int = 4,
        val_shape: Sequence[str] | None = None,
    ) -> str:
        """Return the Triton statement that stores ``val`` at ``indices`` of the output where ``mask`` is true. If
        ``mask`` is None, all elements are stored. ``val`` and the offsets are broadcast to ``val_shape`` if that is
        given.

        The parameters are those of ``store_output`` in Inductor's templates. ``indent_width`` is ignored, since the
        statement is one line.
        """
        value = _broadcast_value(val, val_shape)
        return f"tl.store(out_ptr + {self._offset(None, indices, val_shape)}, {value}, mask={mask})"

    def _offset(self, name: str | None, indices: Sequence[str], shape: Sequence[str] | None) -> str:
        """Return the Triton expression of the offset in elements of the element ``indices`` of the tensor ``name``. If
        ``name`` is None, the tensor is the output, which is contiguous. The expression is broadcast to ``shape`` if
        that is given. Raise ``ValueError`` for a wrong number of indices.
        """
        # With too few indices the offset would be that of another element.
        if len(indices) != self.ranks[name]:
            raise ValueError(f"{len(indices)} indices for {self.ranks[name]} dims of {name or 'the output'}")
        terms = []
        for axis, index in enumerate(indices):
            adjacent = name is None and axis == len(indices) - 1  # outputs are contiguous
            place = self._wide(f"({index})")
            terms.append(place if adjacent else f"{place} * {self._number('stride', name, axis)}")
        return _broadcast_value(" + ".join(terms) or "0", shape)

    def _wide(self, value: str) -> str:
        """Return the Triton expression ``value``. If offsets have 64 bits, it is cast to int64."""
        return f"tl.cast({value}, tl.int64)" if self.wide else value

    def _number(self, kind: str, name: str | None, axis: int) -> str:
        """Return the name of the parameter for the size or stride, as ``kind`` states, of the dim ``axis`` of the
        tensor ``name``. Add it to ``numbers``, so that it becomes a parameter of the kernel. If ``name`` is None, the
        tensor is the output.
        """
        number = (kind, name, range(self.ranks[name])[axis])
        # A dict keeps the order of first use, which is the order of the parameters.
        self.numbers[number] = None
        return _parameter_name(*number)


def _parameter_name(kind: str, name: str | None, axis: int) -> str:
    """Return the name of the parameter for a size or stride, such as ``stride_x_1``. ``kind`` is ``size`` or
    ``stride``, and ``axis`` is the dim. If ``name`` is None, the tensor is the output.
    """
    return f"{kind}_{name or 'out'}_{axis}"


def _broadcast_value(value: str, shape: Sequence[str] | None) -> str:
    """Return the Triton expression ``value``, broadcast to ``shape``. If ``shape`` is None or empty, return ``value``
    in parentheses.
    """
    return f"tl.broadcast_to({value}, ({', '.join(map(str, shape))},))" if shape else f"({value})"


def _literal_text(name: str, value: Any) -> str:
    """Return the constant ``value`` as Triton source code, with quotes around a string. Infinities and NaN become
    expressions such as ``float("inf")``. If ``name`` is ``INDEX_DTYPE``, ``value`` is the name of a dtype such as
    ``tl.int32`` and is not quoted.
    """
    if name == "INDEX_DTYPE":
        return str(value)
    # Python prints infinities and NaN as names that no Triton function defines.
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
