"""The catalogue of remedies: for each its preconditions, its edit, and what it changes besides the entry.

A remedy in this list is a proposal. ``shiplap doctor --try`` shows it only after a run of the edited program in which
its entry was gone and all results were the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shiplap.doctor import (
    edits,
    edits_in_front,
    edits_of_branches,
    edits_of_calls,
    edits_of_compilation,
    edits_of_draws,
    edits_of_effects,
    edits_of_functions,
    edits_of_parts,
    edits_of_selections,
    edits_of_shortcuts,
    edits_of_sizes,
    edits_of_states,
    edits_of_values,
    edits_of_versions,
)
from shiplap.doctor.causes import BREAK_CAUSES
from shiplap.doctor.diagnosis import Break, Recompile
from shiplap.doctor.edits import Editor


@dataclass(frozen=True)
class Remedy:
    """A remedy and its preconditions.

    Attributes:
        title: what it does, in the imperative.
        edit: the function that yields the edits.
        causes: the causes of breaks, or the kinds of variation of recompiles, for which it is tried. If empty, it is
            tried for all.
        reason, call: regular expressions that torch's first line and the call at fault have to match.
        own: whether the line has to be in the program's own files. Settings help wherever the line is.
        caveat: its effects that a comparison of results does not show.
        repeated: whether it is tried only where calls of one kind came more than once in the run.
        prints: whether the program has to print as many lines as before.
        silent: whether the program may print less than before, or other numbers.
        measures: whether results that vary by themselves, such as times, must not become 0.
        picks: whether it picks values with ``torch.where``, whose gradient for the side that is not picked is 0.
        witness: an editor after whose edit the program has to end in another way, or None. It makes the program raise
            where the remedy changes what is computed. Without such a call the run shows nothing about the remedy.
        parts: whether it leaves statements out of compiled code, of whose operations most have to stay.
    """

    id: str
    title: str
    edit: Editor
    causes: tuple[str, ...] = ()
    reason: str = ""
    call: str = ""
    own: bool = True
    caveat: str = ""
    repeated: bool = False
    prints: bool = False
    silent: bool = False
    measures: bool = False
    picks: bool = False
    witness: Editor | None = None
    parts: bool = False

    def fits(self, entry: Break | Recompile) -> bool:
        """Return whether the remedy can be tried on ``entry``, a break or recompile.

        Its cause, the owner of the code, torch's message, and the call or varied value have to match.
        """
        placed = not self.own or entry.owner == "yours"
        caused = not self.causes or entry.cause in self.causes
        return (
            placed and caused and bool(re.search(self.reason, entry.headline) and re.search(self.call, entry.subject))
        )


def _setting(
    id: str,
    setting: str,
    causes: tuple[str, ...],
    *,
    caveat: str = "",
    reason: str = "",
    call: str = "",
    silent: bool = False,
) -> Remedy:
    """Return the remedy with the id ``id`` that inserts the compiler setting ``setting``, a statement, into the
    program. ``causes``, ``caveat``, ``reason``, ``call`` and ``silent`` are its fields.
    """
    modules = re.findall(r"\((logging|warnings)\.", setting)
    editor = edits.add_setting(setting, *modules)
    return Remedy(id, f"set {setting}", editor, causes, reason, call, own=False, caveat=caveat, silent=silent)


_CONFIG = "torch._dynamo.config"
_REORDERED = f"{_CONFIG}.reorderable_logging_functions"
_TENSOR_PROPERTIES = ("dtype", "rank", "stride", "device")
_FROZEN = "the value is read once and stays the same in compiled code"
_SILENT = "the call does not run in compiled code"

# In the order in which they are tried: what keeps the program's code and all its effects comes first.
REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "torch_hint",
        "use the setting that torch names",
        edits.add_hinted_settings,
        ("item", "shape", "branch", "attribute", "counter", "parameter", "size", "small", "autograd", "tensor"),
        own=False,
    ),
    _setting("capture_scalars", f"{_CONFIG}.capture_scalar_outputs = True", ("item", "branch")),
    _setting("capture_sizes", f"{_CONFIG}.capture_dynamic_output_shape_ops = True", ("shape",)),
    _setting("trace_gradients", f"{_CONFIG}.trace_autograd_ops = True", ("autograd",)),
    _setting("trace_recurrent", f"{_CONFIG}.allow_rnn = True", ("tensor",), reason="RNN"),
    _setting("trace_classes", f"{_CONFIG}.enable_trace_load_build_class = True", (), reason="build_class"),
    _setting("trace_profiler", f"{_CONFIG}.capture_profiler_record_function = True", (), reason="profiler|record_func"),
    _setting("dynamic_ints", f"{_CONFIG}.allow_unspec_int_on_nn_module = True", ("attribute", "counter")),
    _setting(
        "dynamic_parameters",
        f"{_CONFIG}.force_parameter_static_shapes = False",
        ("parameter", "size"),
    ),
    Remedy(
        "reorder_print",
        "let it print behind the compiled part",
        edits.reorder_print,
        ("print",),
        own=False,
        call=r"^print$",
        caveat="it prints after the compiled part around it",
        prints=True,
    ),
    Remedy(
        "reorder_warnings",
        f"set {_REORDERED}.add(warnings.warn)",
        edits_of_calls.in_outermost_function(edits.add_setting(f"{_REORDERED}.add(warnings.warn)", "warnings")),
        ("print",),
        call=r"warn",
        caveat="it warns after the compiled part around it",
    ),
    Remedy(
        "call_later",
        "make the call behind the compiled part",
        edits_of_calls.call_later,
        ("print", "system", "foreign", "object", "length", "disabled", "other", "item"),
        own=False,
        caveat="the call is made after the compiled part around it, with what its arguments hold then",
        prints=True,
    ),
    Remedy(
        "effect_op",
        "make the call in an op, which the graph runs",
        edits_of_effects.effect_in_op,
        ("print", "system", "foreign", "object", "disabled", "other", "item", "numpy"),
        caveat="the op counts its calls in a tensor on the CPU, which keeps the function out of CUDA graphs",
        prints=True,
    ),
    Remedy(
        "update_later",
        "update the program's numbers behind the compiled part",
        edits_of_states.update_later,
        ("branch", "item"),
        caveat="the statements run after the compiled part around them",
    ),
    Remedy(
        "drop_marker",
        "remove the marker that breaks the graph",
        edits.drop_marker,
        ("disabled",),
        caveat="whoever put it there may have had a reason that these inputs do not show",
    ),
    Remedy("hoist_class", "define the class at the level of the module", edits.hoist_class, reason="build_class"),
    Remedy("by_position", "pass the arguments by position", edits_of_calls.pass_by_position, ("autograd_function",)),
    Remedy("keep_tensor", "keep the value a tensor", edits_of_values.keep_tensor, ("item", "branch")),
    Remedy(
        "join_values",
        "join the values with torch's logical functions",
        edits_of_values.join_values,
        ("branch", "item"),
        caveat="both values are computed in each call",
    ),
    Remedy(
        "keep_value",
        "keep the value where the program may leave it out",
        edits_of_shortcuts.keep_value,
        ("branch", "item"),
        caveat="what the value changes is computed in each call, also where it changes nothing",
        witness=edits_of_shortcuts.refuse_without_value,
    ),
    Remedy(
        "use_selection",
        "use the selection in each call, also if it is empty",
        edits_of_selections.use_selection,
        ("branch", "item", "shape"),
        caveat="what the condition kept away runs in each call, without any items",
        witness=edits_of_selections.refuse_no_selection,
    ),
    Remedy(
        "where",
        "compute both sides and pick with torch.where",
        edits_of_values.where_for_branch,
        ("branch", "item"),
        caveat="the side that is not picked is computed as well",
        picks=True,
    ),
    Remedy(
        "where_exit",
        "compute on and pick the early result with torch.where",
        edits_of_functions.where_for_exit,
        ("branch", "item"),
        caveat="what follows the early return is computed in each call",
        picks=True,
    ),
    Remedy(
        "where_break",
        "run all rounds of the loop and keep the values of the last live one with torch.where",
        edits_of_functions.where_for_break,
        ("branch", "item"),
        caveat="all rounds are computed in each call",
        picks=True,
    ),
    Remedy(
        "pick_values",
        "run both sides and pick each value with torch.where",
        edits_of_branches.pick_for_branch,
        ("branch", "item"),
        caveat="the side that is not picked is computed as well, and calls of it are made behind the compiled part",
        prints=True,
        picks=True,
    ),
    Remedy(
        "pick_rounds",
        "run the greatest number of rounds and pick the values of the last live one with torch.where",
        edits_of_branches.pick_for_loop,
        ("branch", "item"),
        caveat="all rounds are computed in each call",
        picks=True,
    ),
    Remedy("cond", "use torch.cond", edits_of_values.cond_for_branch, ("branch", "item")),
    Remedy(
        "while_loop",
        "use torch's while_loop",
        edits_of_values.loop_as_operator,
        ("branch", "item"),
        caveat="it is a prototype of torch",
    ),
    Remedy(
        "assert_async",
        "check it in the graph",
        edits_of_values.assert_on_device,
        ("branch", "item", "exception"),
        caveat="a failed check raises RuntimeError, on a GPU at the next synchronisation",
    ),
    Remedy(
        "condition_in_front",
        "evaluate the condition in front of the call, and compile a function of its own for each answer",
        edits_in_front.condition_in_front,
        ("branch", "item"),
        caveat="the condition is evaluated in front of each call, which waits for its value",
    ),
    Remedy(
        "draw_op",
        "draw the random number in an op",
        edits_of_draws.draw_as_op,
        ("system", "item", "branch", "numpy", "foreign", "object", "tensor", "shape", "other"),
        caveat="the number is a tensor, and where a branch depends on it, both sides are computed",
    ),
    Remedy(
        "draw_tensor",
        "draw the tensor in an op",
        edits_of_draws.draw_tensor_as_op,
        ("system", "object", "tensor", "other"),
        call=r"rand|[Gg]enerator",
        caveat="the op uses the generator of the module level that it finds when it runs",
    ),
    Remedy(
        "in_front",
        "make the call in front of the compiled function and pass its result",
        edits_in_front.compute_in_front,
        ("system", "foreign", "object", "numpy", "other", "item", "branch", "shape", "lock", "import", "tensor"),
        caveat="the call is made at the start of each call of the compiled function",
        prints=True,
    ),
    Remedy(
        "prepare_in_front",
        "run the statements that use no tensor in front of the compiled function and pass their results",
        edits_of_states.prepare_in_front,
        ("system", "foreign", "object", "numpy", "other", "item", "branch", "shape", "tensor"),
        caveat="the statements run at the start of each call of the compiled function",
        prints=True,
    ),
    Remedy(
        "declare",
        "declare the expression as an op",
        edits_of_values.declare_expression,
        ("foreign", "numpy", "object", "launcher", "tensor"),
        own=False,
        caveat="it has no gradient; bind a kernel to it with @op.kernel",
    ),
    Remedy(
        "dynamic_source",
        "let its sizes and numbers vary",
        edits.add_dynamic_source("dynamic_sources"),
        ("size", "value", "attribute", "counter"),
        own=False,
    ),
    Remedy(
        "dynamic",
        "compile with dynamic=True",
        edits_of_compilation.compile_dynamic,
        ("size", "small", "value", "stride", "attribute", "counter", "parameter"),
        own=False,
    ),
    Remedy(
        "dynamic_all",
        "compile with dynamic=True, parameters included",
        edits.together(
            edits.add_setting(f"{_CONFIG}.force_parameter_static_shapes = False"), edits_of_compilation.compile_dynamic
        ),
        ("size", "small", "parameter"),
        own=False,
    ),
    Remedy(
        "unbacked",
        "compile one version for 0, 1 and all other sizes and numbers",
        edits.add_dynamic_source("unbacked_sources"),
        ("small", "size", "attribute", "counter"),
        own=False,
    ),
    Remedy(
        "contiguous",
        "pass contiguous tensors",
        edits_of_calls.wrap_contiguous,
        ("stride",),
        own=False,
        caveat="tensors that are not contiguous are copied in each call, so that writes to them are lost",
    ),
    Remedy(
        "listed",
        "pass lists in place of iterators",
        edits_of_calls.wrap_listed,
        ("generator",),
        caveat="all items are made in front of the call",
        prints=True,
    ),
    Remedy(
        "first_call",
        "run the first call uncompiled, so that it creates what later calls find",
        edits_of_calls.wrap_first_call,
        ("lazy", "length", "counter"),
        own=False,
        caveat="the first call takes as long as without a compiler",
        repeated=True,
    ),
    Remedy(
        "versions",
        "compile a function of its own for each kind of call",
        edits_of_versions.compile_versions,
        (
            "optional",
            "lazy",
            "value",
            "dtype",
            "rank",
            "stride",
            "device",
            "type",
            "length",
            "grad",
            "mode",
            "attribute",
            "identity",
        ),
        own=False,
        caveat="as many versions are compiled as before; none counts against the limit of another",
        repeated=True,
    ),
    Remedy(
        "outcome_versions",
        "compile a function of its own for each outcome of the conditions on the number",
        edits.together(edits.add_dynamic_source("dynamic_sources"), edits_of_versions.compile_outcomes),
        ("counter", "attribute", "value"),
        caveat="the conditions are computed once more in front of each call",
    ),
    Remedy(
        "update_in_front",
        "update the program's numbers in front of the compiled function",
        edits_of_states.update_in_front,
        ("value", "attribute", "counter", "lazy", "branch", "item", "other"),
        caveat="the statements run at the start of each call of the compiled function, without a compiler",
    ),
    Remedy(
        "sizes_in_front",
        "make the call that depends on sizes in front of the compiled function and pass its result",
        edits_in_front.compute_sizes_in_front,
        ("size", "small", "length", "lazy", "attribute", "counter", "identity"),
        caveat="the call is made at the start of each call of the compiled function, without a compiler",
        prints=True,
    ),
    Remedy(
        "size_outcomes",
        "compile a function of its own for each outcome of the conditions on sizes",
        edits_of_sizes.compile_size_outcomes,
        ("size", "small"),
        caveat="the conditions are computed once more in front of each call",
    ),
    Remedy(
        "size_versions",
        "compile a function of its own for each size",
        edits_of_versions.compile_versions,
        ("size", "small"),
        own=False,
        caveat="each further size compiles a version, without a limit",
        repeated=True,
    ),
    Remedy(
        "repeated_calls",
        "compile for the kinds of calls that come again",
        edits_of_versions.compile_repeated,
        ("length", "small", "size", "attribute"),
        own=False,
        caveat="the first call of each kind takes as long as without a compiler",
        repeated=True,
    ),
    Remedy(
        "part",
        "compile the parts of the function beside it",
        edits_of_parts.compile_part,
        (*(c for c in BREAK_CAUSES if c != "recompiles"), "length", "attribute", "counter", "lazy", "identity"),
        own=False,
        caveat="the rest of the function runs without a compiler",
        prints=True,
        parts=True,
    ),
    Remedy(
        "eager_question",
        "ask it in eager mode only",
        edits.guard_predicate,
        reason="is_inference",
        caveat="compiled code takes the answer False",
    ),
    Remedy(
        "eager_context",
        "enter it in eager mode only",
        edits.guard_context,
        ("context",),
        call="catch_warnings|simplefilter|profile|nvtx|[Tt]imer|record|tqdm|[Pp]rogress",
        caveat=_SILENT.replace("call", "context manager"),
        silent=True,
    ),
    Remedy(
        "hoist_call",
        "call it once, when the module is imported",
        edits.hoist_call,
        ("foreign", "system", "object", "disabled"),
        call=r"^(os|sys|inspect|platform|importlib|shutil|pathlib|socket)\.",
        caveat=_FROZEN,
    ),
    Remedy(
        "hoist_import",
        "import it once, above the function",
        edits_of_functions.hoist_import,
        ("import",),
        caveat="it is imported when the program's module is, and not looked for again",
    ),
    Remedy(
        "constant",
        "let the compiler take its result as a constant",
        edits.assume_constant,
        ("foreign", "system", "object", "disabled", "import", "other"),
        call=r"^(os|posix|sys|inspect|platform|importlib|shutil|pathlib|socket|re)\.|signature|version|find_spec"
        r"|^import |^from .+ import ",
        caveat=_FROZEN,
    ),
    _setting(
        "ignore_logger",
        f"{_CONFIG}.ignore_logging_functions.add(logging.{{subject}})",
        ("print",),
        call=r"^Logger\.",
        caveat="no logger runs this method in compiled code",
        silent=True,
    ),
    Remedy(
        "eager_effect",
        "run it in eager mode only",
        edits.guard_effect,
        ("print", "system", "foreign", "object"),
        call=edits.EFFECT_NAME,
        caveat=_SILENT,
        silent=True,
    ),
    Remedy(
        "eager_caller",
        "make the call that leads here in eager mode only",
        edits.guard_caller,
        ("print", "system", "foreign", "object", "exception", "lock", "import", "other"),
        own=False,
        caveat=_SILENT,
        silent=True,
    ),
    Remedy(
        "eager_clock",
        "read the clock, and show the time, in eager mode only",
        edits_of_calls.guard_clock,
        ("system",),
        call=r"^time\.\w+$",
        caveat="the time is not shown in compiled code",
        measures=True,
        silent=True,
    ),
    _setting(
        "raise_limit",
        f"{_CONFIG}.recompile_limit = 64",
        ("recompiles",),
        caveat="each version is still compiled once",
    ),
)


def list_remedies(entry: Break | Recompile) -> list[Remedy]:
    """Return the remedies whose preconditions hold for ``entry``, a break or recompile, in the order in which they are
    tried.
    """
    return [r for r in REMEDIES if r.fits(entry)]
