"""The output of Inductor for a function: fused groups, the reasons why it did not fuse, and the generated code.

The module reads two sources: a pass after fusion that changes nothing, and the log artifacts ``fusion`` and
``output_code``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._inductor import config
from torch._inductor.virtualized import V

from shiplap.torch_private import listen_to_logger
from shiplap.torch_private.graph_nodes import operator_name
from shiplap.torch_private.inductor_lowering import without_graph_caches

FUSION, CODE = "torch._inductor.scheduler.__fusion", "torch._inductor.codecache.__output_code"
TRIAL = "shiplap_trial"  # graphs that `lowering.write_graph` compiles inside another compilation
DISPATCH = tuple(
    str(Path(__file__).parents[1] / part) for part in ("dispatch", "torch_private")
)  # frames between the user's call of an op and torch
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
CALLED = re.compile(r"^\s*(?:buf\d+ = )?(?P<name>[\w.]+?)(?:\.run)?\((?P<args>.*)\)(?:\s+#.*)?;?$", re.MULTILINE)
NAMED = re.compile(r"^(\w+) = in_code\((torch\.ops\.[\w.]+)\)$", re.MULTILINE)  # torch_private/inductor_lowering.py


@dataclass(frozen=True)
class NodeOrigin:
    """A node of the traced graph. ``node`` is its name, ``operator`` its ATen or declared operator, and ``where`` the
    user's line as ``file:line``, or empty.
    """

    node: str
    operator: str
    where: str


@dataclass(frozen=True)
class FusedGroup:
    """Operations that share a kernel.

    ``ops`` are their names, and ``origins`` the nodes of the traced graph from which they come. ``kind`` is
    ``template``, ``extern`` (a call of a library) or ``generated``. ``reduces`` is true if one of them is a reduction.
    ``reads`` and ``writes`` are the names of buffers. ``kernel`` is the name of the kernel in the generated code, or
    empty.
    """

    ops: tuple[str, ...]
    kind: str
    reduces: bool
    origins: tuple[NodeOrigin, ...]
    reads: frozenset[str]
    writes: tuple[str, ...]
    kernel: str = ""


@dataclass
class ReportedGraph:
    """One compiled graph, with the groups of operations that share a kernel and the generated code. ``refused`` maps a
    pair of operations, as Inductor names them, to the last reason why they were not fused.
    """

    groups: list[FusedGroup] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    code: str = ""

    def groups_with_kernel_names(self) -> list[FusedGroup]:
        """Return the fused groups of the graph, each with its kernel's name in the generated code.

        A group is a set of nodes that became one kernel or call. The name is empty if it is not found in the code.
        """
        return [FusedGroup(**{**vars(g), "kernel": name}) for g, name in zip(self.groups, self._kernels(), strict=True)]

    def _kernels(self) -> list[str]:
        """Return the name of each group's kernel, in the order of the groups. It is the name in the first call of the
        generated code that mentions a buffer which the group writes. It is an empty string if there is no such call.
        """
        ops: dict[str, str] = dict(NAMED.findall(self.code))
        each = [(str(m["name"]), set(re.findall(r"\w+", m[0]))) for m in CALLED.finditer(self.code)]
        calls = [(ops.get(name, name), words) for name, words in each]
        own = {m[1] for m in re.finditer(r"^(\w+) = async_compile\.", self.code, re.MULTILINE)}
        calls = [c for c in calls if c[0] in own or c[0].startswith(("extern_kernels.", "torch.ops.", "aten."))]
        return [next((name for name, words in calls if words & set(g.writes)), "") for g in self.groups]


@contextmanager
def observe_graphs() -> Iterator[list[ReportedGraph]]:
    """Return a context that yields a list, to which a ``ReportedGraph`` is appended for each graph that Inductor
    compiles.

    A ``ReportedGraph`` has the fused groups and the generated code of a graph. Inside the context, torch takes no graph
    from its caches, so that every graph is compiled.
    """
    graphs: list[ReportedGraph] = []
    pending: dict[tuple[str, str], str] = {}

    def after_fusion(nodes: list[Any]) -> list[Any]:
        """Append the report of a graph to the list, and return its fused scheduler ``nodes`` unchanged.

        Graphs that Shiplap compiles only to measure a candidate kernel are left out.
        """
        # Trials compile graphs of their own inside the compilation that is observed.
        if not _is_trial_graph():
            graphs.append(ReportedGraph(_fused_groups(nodes), dict(pending)))
            pending.clear()
        return nodes

    def log(record: logging.LogRecord) -> None:
        """Handle a log record of Inductor. Store the code of the last graph, or the reason why two nodes were not
        fused. Ignore a record that has neither.
        """
        if _is_trial_graph():
            return
        if record.name == CODE:
            _, opened, code = record.getMessage().partition("Output code: \n")
            if opened and graphs:
                graphs[-1].code = code
        elif not isinstance(why := record.msg, str) and hasattr(why, "reason"):  # WhyNoFuse: a value, not yet text
            pending[why.name1, why.name2] = why.reason % why.args

    watched = config.patch(_post_fusion_custom_pass=after_fusion)
    with without_graph_caches(), watched, listen_to_logger(FUSION, log), listen_to_logger(CODE, log):
        yield graphs


def _is_trial_graph() -> bool:
    """Return whether the graph being compiled is a trial. A trial is compiled inside another compilation to measure a
    candidate kernel.
    """
    return getattr(V.graph, "name", None) == TRIAL


def _fused_groups(nodes: list[Any]) -> list[FusedGroup]:
    """Return one description for each kernel or call into which Inductor has fused the scheduler's ``nodes``."""
    fused = [n for n in nodes if type(n).__name__ != "NopKernelSchedulerNode"]
    makers = {getattr(p.node, "origin_node", None): n for n in fused for p in n.get_nodes()}
    return [_describe_group(n, makers) for n in fused]


def _describe_group(fused: Any, makers: dict[Any, Any]) -> FusedGroup:
    """Return the description of the scheduler node ``fused``. It has its kind, operators, and buffers that are read and
    written.

    ``makers`` maps a traced node to the kernel that computes it, since origins also name nodes that are only read.
    """
    parts = list(fused.get_nodes())
    order = {n: i for i, n in enumerate(V.graph.graph.nodes)}
    origins = {o: None for p in parts for o in (p.node.origins if p.node is not None else ())}
    inside = [o for o in origins if o.op == "call_function" and makers.get(o, fused) is fused]
    kind = "template" if fused.is_template() else "extern" if all(p.is_extern() for p in parts) else "generated"
    writes = tuple(dict.fromkeys(name for p in parts for name in p.get_buffer_names()))
    reads = frozenset(d.name for p in parts for d in p.read_writes.reads) - set(writes)
    named = tuple(_describe_origin(o, kind) for o in sorted(inside, key=lambda o: order.get(o, len(order))))
    reduces = any(p.is_reduction() for p in parts)
    return FusedGroup(tuple(p.get_name() for p in parts), kind, reduces, named, reads, writes)


def _describe_origin(node: Any, kind: str) -> NodeOrigin:
    """Return the name, the operator and the user's line of the traced node ``node`` of a group of the kind ``kind``.

    The operator of a library call is the one that is called. That of a generated loop is the user's operator that the
    loop computes.
    """
    operator = node.target if kind == "extern" else node.meta.get("original_aten") or node.target
    frames = [f for f in FRAME.findall(node.meta.get("stack_trace") or "") if not f[0].startswith(DISPATCH)]
    return NodeOrigin(node.name, operator_name(operator), ":".join(frames[-1]) if frames else "")
