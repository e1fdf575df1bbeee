"""``explain`` returns the kernels of a compiled function, the candidates of its templates, and what was not fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shiplap.declare.keyword_values import require_callable
from shiplap.dispatch import registry
from shiplap.errors import error
from shiplap.inductor.fusion_choice import FusionChoice, watch_fusion_choices
from shiplap.render.lines import Line, count_phrase, line, relative_place, row, value_json
from shiplap.torch_private import reset_compiler

if TYPE_CHECKING:
    from shiplap.torch_private.inductor_report import FusedGroup, ReportedGraph

# The start of Inductor's text -> its meaning for a template's author. Seen on torch 2.11, 2.13 and 2.15.
MEANING = {
    "memory deps did not match": "it reads other elements than the one it writes: a transpose, a broadcast, a shift",
    "no shared data": "it reads other elements than the one it writes: a transpose, a broadcast, a shift",
    "numel/rnumel mismatch": "it has another shape, so its loops are not those of the store",
    "nodes numel": "it has another shape, so its loops are not those of the store",
    "template has no allowed prologue inputs": "only a Triton template with load_input() takes a producer in",
    "prologue fusion only supported for TritonTemplates": "C++ templates take no producer in",
    "prologue fusion not implemented for kernel": "the template reads this argument with tl.load, not load_input()",
    "prologue fusion that must be upcast to fp32": "it computes in float32, and the template's tiles are of 16 bits",
    "prologue fusion will not increase amount of bytes": "it reads more bytes than it writes; every tile would again",
    "template prologue can only fuse nodes with a single use": "somebody else reads this producer's result, too",
    "template prologue can only fuse functional pointwise": "only pointwise producers go into a load",
    "fusion for buffer explicit disabled": "fusion is switched off for this op (shiplap.inductor.switches)",
    "intermediate nodes between": "another kernel has to run between the two",
    "node2 is extern or nop": "it is a call of a whole kernel, which has no loops to fuse",
}
REDUCTION = "it reduces; only pointwise neighbours go into a template's store"
SILENT = "Inductor gave no reason"


@dataclass(frozen=True)
class UnfusedNeighbour:
    """A separate kernel that reads the output of a template's kernel, or writes an input of it.

    ``kernel`` is its name, and ``operators`` are its operators. ``side`` is ``"before"`` or ``"after"`` the template's
    kernel. ``reason`` is Inductor's text why they were not fused. ``meaning`` explains that text, or is empty.
    """

    kernel: str
    operators: tuple[str, ...]
    side: str
    reason: str
    meaning: str = ""

    def lines(self) -> Iterator[Line]:
        """Yield the printed lines of this kernel. They hold its name, its operators, Inductor's reason against the
        fusion, and the meaning of that reason.
        """
        meaning = f"\n{self.meaning}" if self.meaning else ""
        kernel = f"{self.kernel} ({', '.join(self.operators)}), which runs {self.side} it"
        yield from row("outside", f"{kernel}\nInductor: {self.reason}{meaning}", "yellow")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of a compiled graph.

    Attributes:
        name: the name in the generated code, or an empty string if no kernel is called (for a view or a constant).
        kind: ``"template"``, ``"extern"`` (a library or an opaque op) or ``"generated"`` (Inductor's own loops).
        operators: the declared ops (``ns::name``) and ATen operators in the kernel, in graph order, without duplicates.
        nodes: the nodes of the traced graph in the kernel.
        where: the lines of source that the nodes come from.
        graph: the number of the compiled graph.
        fusion_choices: the choice of a candidate for each declared op with templates in the kernel.
        unfused: the neighbours of a template that were not fused, and the reasons.
    """

    name: str
    kind: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    where: tuple[str, ...]
    graph: int = 0
    fusion_choices: tuple[FusionChoice, ...] = ()
    unfused: tuple[UnfusedNeighbour, ...] = ()

    def lines(self, number: int, several_graphs: bool) -> Iterator[Line]:
        """Yield the printed lines of this kernel, which is listed under ``number``. They hold its name, kind,
        operators, source lines, choices of candidates, and the neighbours that were not fused.

        If ``several_graphs`` is true, the first line also names the graph.
        """
        graph = f"  graph {self.graph + 1}" if several_graphs else ""
        yield line(f"{number}. {self.name or 'no kernel'}", "bold", (f"  {self.kind}{graph}", "dim"))
        yield from row("inside", ", ".join(self.operators))
        yield from row("from", ", ".join(map(relative_place, self.where)))
        for choice in self.fusion_choices:
            yield from choice.lines()
        for neighbour in self.unfused:
            yield from neighbour.lines()
        yield line()


@dataclass(frozen=True)
class Explanation:
    """A description of a function as it was compiled.

    ``target`` is the name of the function. ``kernels`` are the kernels of all graphs. ``fusion_choices`` holds all
    choices of candidates, including those for calls that no longer have a kernel. ``source`` holds the generated code,
    one string for each graph.
    """

    target: str
    kernels: tuple[CompiledKernel, ...]
    fusion_choices: tuple[FusionChoice, ...]
    source: tuple[str, ...]

    @property
    def graphs(self) -> int:
        """The number of graphs that were compiled for the function."""
        return len(self.source)

    @property
    def ok(self) -> bool:
        """Whether no tested candidate has the status ``wrong``, ``broken`` or ``dropped``."""
        return not any(v.status in ("wrong", "broken", "dropped") for d in self.fusion_choices for v in d.verdicts)

    @property
    def summary(self) -> str:
        """The number of kernels, in all and of each kind, in one line such as ``2 kernels in 1 graph: 1 template, 1
        generated``.
        """
        kinds = [k.kind for k in self.kernels]
        listed = ", ".join(f"{kinds.count(k)} {k}" for k in ("template", "extern", "generated") if k in kinds)
        return f"{count_phrase(len(kinds), 'kernel')} in {count_phrase(self.graphs, 'graph')}" + (
            f": {listed}" if listed else ""
        )

    def lines(self) -> Iterator[Line]:
        """Yield the printed lines. They hold each kernel, then the choices of calls that no longer have a kernel, then
        the summary.
        """
        for number, kernel in enumerate(self.kernels, 1):
            yield from kernel.lines(number, several_graphs=self.graphs > 1)
        # By identity: two layers may have equal choices.
        listed = {id(choice) for kernel in self.kernels for choice in kernel.fusion_choices}
        for choice in self.fusion_choices:
            if id(choice) not in listed:
                yield from choice.lines()
                yield line()
        yield line(self.summary, "bold")

    def as_json(self, facts: Mapping[str, str], source: bool = False) -> dict[str, Any]:
        """Return the explanation as one dict of JSON values. It holds ``facts`` about the machine, the fields of the
        explanation, ``ok``, ``summary`` and ``graphs``. If ``source`` is true, it also holds the generated code.
        Otherwise the code is left out.
        """
        value = value_json(self, facts, ok=self.ok, summary=self.summary, graphs=self.graphs)
        if not source:
            del value["source"]
        return value


def explain(fn: Callable[..., Any], *args: Any, **options: Any) -> Explanation:
    """Compile ``fn`` for ``args``, run it once, and return the kernels of its compiled graphs with their operators.

    The compilation is fresh. No cache is read or written, and code compiled before in this process is forgotten. If
    arguments require gradients, the forward graph is explained.

    Args:
        fn: a function or module that is not compiled.
        args: the arguments of the call.
        options: the options of ``torch.compile``, such as ``mode="max-autotune"``, ``dynamic=True`` or
            ``options={...}``.

    Raises:
        ShiplapError: ``SL702`` if nothing of ``fn`` was compiled.

    Example:
        >>> import torch, shiplap as sl
        >>> print(sl.explain(lambda x: torch.relu(x + 1), torch.ones(8)).summary)
        1 kernel in 1 graph: 1 generated
    """
    from shiplap.torch_private.inductor_report import observe_graphs

    require_callable("sl.explain()", fn)
    # A function that is compiled already would run its cached code, and nothing would be observed.
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    target = getattr(fn, "__qualname__", type(fn).__name__)
    reset_compiler()
    made: list[tuple[int, FusionChoice]] = []
    with observe_graphs() as graphs, watch_fusion_choices(lambda d: made.append((len(graphs), d))):
        try:
            torch.compile(fn, **options)(*args)
        finally:
            # The code was compiled while it was observed, with caches off. A later call of the user compiles normally.
            reset_compiler()
    if not graphs:
        raise error(
            "SL702",
            where=target,
            got="no graph reached Inductor",
            expected="a function of tensors that torch.compile can take",
            fix="run 'shiplap doctor' on a program that calls it",
        )
    kernels = tuple(
        k for n, graph in enumerate(graphs) for k in _explain_kernels(n, graph, [d for g, d in made if g == n])
    )
    return Explanation(target, kernels, tuple(d for _, d in made), tuple(g.code for g in graphs))


def _explain_kernels(number: int, graph: ReportedGraph, made: Sequence[FusionChoice]) -> Iterator[CompiledKernel]:
    """Yield the kernels of the compiled graph ``graph``, whose number is ``number``, in their order. ``made`` holds the
    choices of candidates for calls in this graph. Each kernel gets the choices for its own calls.
    """
    groups = graph.groups_with_kernel_names()
    for group in groups:
        nodes = tuple(o.node for o in group.origins)
        yield CompiledKernel(
            group.kernel,
            group.kind,
            _declared_operator_names(group),
            nodes,
            _source_lines(group),
            number,
            tuple(d for d in made if d.node in nodes),
            tuple(_unfused_neighbours(graph, groups, group)) if group.kind == "template" else (),
        )


def _declared_operator_names(group: FusedGroup) -> tuple[str, ...]:
    """Return the names of the operators of one kernel without duplicates. A declared op has the name that the user
    declared. Its registered name may differ, since an op that is declared again with another schema gets a number.
    """
    # The part below autograd is the overload that appears in a compiled graph.
    known = {_schema_name(op.below_autograd): op.spec.name for op in registry.declared_op_list()}
    return tuple(dict.fromkeys(known.get(o.operator, o.operator) for o in group.origins))


def _schema_name(overload: Any) -> str:
    """Return the name of an operator overload with its namespace, such as ``aten::add``. The name of the overload, such
    as ``Tensor``, is left out.
    """
    return str(overload._schema.name)


def _source_lines(group: FusedGroup) -> tuple[str, ...]:
    """Return the lines of the user's source, as ``file:line`` without duplicates, from which the operators of one
    kernel come.
    """
    return tuple(dict.fromkeys(o.where for o in group.origins if o.where))


def _unfused_neighbours(
    graph: ReportedGraph, groups: Sequence[FusedGroup], template: FusedGroup
) -> Iterator[UnfusedNeighbour]:
    """Yield each kernel of ``groups`` that writes an input of the kernel ``template`` or reads its output. Such a
    kernel was not fused with it, and Inductor's reason is included.
    """
    for other in groups:
        before, after = template.reads & set(other.writes), other.reads & set(template.writes)
        # A kernel without a buffer in common is no neighbour.
        if other is template or not (before or after):
            continue
        reason = _last_refusal(graph, *((other, template) if before else (template, other)))
        yield UnfusedNeighbour(
            other.kernel,
            _declared_operator_names(other),
            "before" if before else "after",
            reason or SILENT,
            _explain_refusal(reason, other),
        )


def _last_refusal(graph: ReportedGraph, first: FusedGroup, second: FusedGroup) -> str:
    """Return Inductor's last reason for not fusing any part of the kernel ``first`` with any part of ``second``, which
    runs later. Return an empty string if Inductor gave no reason.
    """
    logged = ""
    # Inductor tries pairs several times while it fuses. The last reason is the one that held at the end.
    for (a, b), reason in graph.refused.items():
        if _fused_parts(a) <= set(first.ops) and _fused_parts(b) <= set(second.ops):
            logged = reason
    return logged


def _fused_parts(name: str) -> set[str]:
    """Return the operation names in ``name``, the name of a fused node, which Inductor joins as ``op0_op1``."""
    return set(name.split("_"))


def _explain_refusal(reason: str, other: FusedGroup) -> str:
    """Return an explanation of ``reason``, Inductor's text why it did not fuse a template with the kernel ``other``.
    Return an empty string if there is no explanation.
    """
    # Inductor gives this reason for several causes, of which a reduction is the one that can be seen here.
    if reason.startswith("template epilogue not satisfied"):
        return REDUCTION if other.reduces else "the template's store does not admit it"
    return next((text for start, text in MEANING.items() if reason.startswith(start)), "")
