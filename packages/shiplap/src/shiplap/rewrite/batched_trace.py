"""Capture the programs of a proof several at a time, because one trace costs as much as the first of its calls.

Programs of fixed sizes share no node in one graph before autograd, since each has its own inputs. The graph can
therefore be separated into the graphs that single traces would return. If it cannot, or if a program cannot be traced
at all, each program is traced on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shiplap.rewrite.match import Level
from shiplap.rewrite.program import Program

if TYPE_CHECKING:
    from shiplap.torch_private.inductor_passes import CapturedGraph

MOST_TRACED_PROGRAMS = 24  # programs of one trace: what is captured after a first difference is captured in vain


def group_for_tracing(programs: Iterator[Program], level: Level) -> Iterator[list[Program]]:
    """Yield lists of at most 24 consecutive ``programs``. The graphs of the programs in a list can be captured in one
    trace at the stage ``level`` of compilation. A program is a function with example arguments.
    """
    held: list[Program] = []
    for program in programs:
        # Only neighbours share a trace, so that programs stay in the order of the rewrite.
        if held and not (len(held) < MOST_TRACED_PROGRAMS and _can_share_trace(held[-1], program, level)):
            yield held
            held = []
        held.append(program)
    if held:
        yield held


def _can_share_trace(first: Program, second: Program, level: Level) -> bool:
    """Return whether the graphs of two programs can be captured in one trace and separated afterwards. A program is a
    function with example arguments.

    This is possible only if ``level`` is ``"pre-grad"``, the stage before autograd, and both programs have fixed sizes.
    """
    # Autograd builds one backward for all results, and symbols of sizes are shared by inputs of equal size: either
    # would join the graphs of two programs.
    return level == "pre-grad" and not first.dynamic and not second.dynamic


def capture_program(program: Program, level: Level, train: bool) -> CapturedGraph:
    """Return the graph of ``program``, a function with example arguments, at the stage ``level`` of compilation.

    If ``train`` is true, the floating-point inputs require gradients, except those that ``program.constants`` lists. If
    it is false, no input does. Errors of torch's tracing are passed on.
    """
    from shiplap.torch_private.inductor_passes import capture_graph

    fn, tensors = program.of_tensors()
    return capture_graph(fn, program.leaves(tensors, train), level, dynamic=program.dynamic)


def record_calls(program: Program, level: Level) -> CapturedGraph | None:
    """Return the graph of the calls that ``program``, a function with example arguments, makes. The calls are recorded
    without Dynamo. Return None if ``program`` has symbolic sizes or ``level`` is not ``"pre-grad"``.

    Only the rewrites that ship use this function. A test compares the recorded calls of their programs with those that
    Dynamo writes.
    """
    from shiplap.torch_private.inductor_passes import record_captured

    # Only Dynamo makes symbols, and only AOTAutograd a graph behind autograd.
    if program.dynamic or level != "pre-grad":
        return None
    fn, tensors = program.of_tensors()
    return record_captured(fn, program.leaves(tensors, program.train))


def capture_together(programs: Sequence[Program], level: Level) -> list[CapturedGraph] | None:
    """Return one graph for each of ``programs``, all captured in one trace before autograd. A program is a function
    with example arguments. Return None if the trace fails or the graphs cannot be separated.
    """
    from shiplap.torch_private.inductor_passes import capture_graph

    parts = [p.of_tensors()[1] for p in programs]
    # The inputs of all programs stand in one list, so each program has a range of roles.
    ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    starts = [0, *ends[:-1]]
    all_tensors = [t for p, tensors in zip(programs, parts, strict=True) for t in p.leaves(tensors, p.train)]
    try:
        captured = capture_graph(_call_all_programs(programs), all_tensors, level, dynamic=False)
    except Exception:  # whose fault it is shows when each is captured alone
        return None
    owners = _owning_programs(captured, starts, ends)
    # Programs that share a node cannot be taken apart.
    return None if owners is None else [_split_off_program(captured, owners, i, starts[i]) for i in range(len(parts))]


def _call_all_programs(programs: Sequence[Program]) -> Callable[..., Any]:
    """Return a function that calls each of ``programs``, functions with example arguments, once. It returns a list of
    their results. Its arguments are the tensors of all programs, in the order of ``programs``.

    The code of the function is generated, because loops over arguments took a quarter of the time of a trace (measured
    on a CPU on 2026-11-26).
    """
    scope: dict[str, Any] = {}
    calls, number = [], 0
    for i, program in enumerate(programs):
        given = []
        for j, arg in enumerate(program.args):
            if isinstance(arg, Tensor):
                given.append(f"tensors[{number}]")
                number += 1
            else:
                given.append(f"argument_{i}_{j}")
                scope[given[-1]] = arg
        scope[f"program_{i}"] = program.fn
        calls.append(f"program_{i}({', '.join(given)})")
    # The text holds numbers and names made here, and nothing of the programs themselves.
    exec(compile(f"def together(*tensors):\n    return [{', '.join(calls)}]\n", "<programs>", "exec"), scope)
    together: Callable[..., Any] = scope["together"]
    return together


def _owning_programs(captured: CapturedGraph, starts: Sequence[int], ends: Sequence[int]) -> dict[Node, int] | None:
    """Return for each node of the joint graph ``captured`` the number of the program that it belongs to. Return None if
    a node belongs to no program or to several. The inputs of program ``i`` have the numbers from ``starts[i]`` up to
    ``ends[i]``, which is excluded.
    """
    owners: dict[Node, int] = {}
    for node in captured.graph.nodes:
        role = captured.roles.get(node)
        if isinstance(role, int):
            owners[node] = next(i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a <= role < b)
    nodes = [n for n in captured.graph.nodes if n.op != "output"]
    changed = True
    while changed:  # along reads in both directions: a constant is of the program that reads it
        changed = False
        for node in nodes:
            near = {owners[n] for n in (*node.all_input_nodes, *node.users, node) if n in owners}
            if len(near) > 1:
                return None
            if node not in owners and near:
                owners[node] = near.pop()
                changed = True
    return owners if all(n in owners for n in nodes) else None


def _split_off_program(captured: CapturedGraph, owners: dict[Node, int], number: int, start: int) -> CapturedGraph:
    """Return a copy of the part of ``captured`` that belongs to program ``number``. ``captured`` is the joint graph of
    several programs, and ``owners`` holds the number of the program of each node. The inputs of the program begin at
    ``start`` in the joint graph and at 0 in the copy.
    """
    graph, made, roles = Graph(), dict[Node, Node](), dict[Node, int | str]()
    for node in captured.graph.nodes:
        if owners.get(node) == number:
            made[node] = graph.node_copy(node, made.__getitem__)
            role = captured.roles.get(node)
            if isinstance(role, int):
                roles[made[node]] = role - start
    # The shared output lists the results of all programs; each piece gets only its own.
    output = next(n for n in captured.graph.nodes if n.op == "output")
    (results,) = output.args
    assert isinstance(results, (list, tuple))
    graph.output(tuple(made[r] for r in results if isinstance(r, Node) and owners.get(r) == number))
    # This gives the graph an owning module, from which its attributes are read.
    GraphModule(captured.graph.owning_module or {}, graph)
    return type(captured)(graph, roles)
