"""The causes of graph breaks: torch's several hundred messages, sorted into causes that have a remedy of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shiplap.doctor.diagnosis import SourcePlace
from shiplap.doctor.places import imported_from, innermost_relevant, is_function_disabled, statement_at


@dataclass(frozen=True)
class BreakMessage:
    """A message of torch about a graph break. It is split into its first line (``reason``), its explanation, its hints,
    its debug context, and its id in torch's registry of graph breaks. ``skipped`` is true if torch could not resume
    after the break, so that the function runs uncompiled.
    """

    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    context: str = ""
    registry: str = ""
    skipped: bool = False


@dataclass(frozen=True)
class BreakCause:
    """A cause of graph breaks with an id and a title. ``why`` explains it for readers who do not know the compiler, and
    ``fix`` names the remedy.
    """

    id: str
    title: str
    why: str
    fix: str


BREAK_CAUSES: dict[str, BreakCause] = {
    c.id: c
    for c in (
        BreakCause(
            "item",
            "a tensor's value becomes a Python number",
            "A graph holds tensors; a number known only once they are computed ends it, and waits for the device.",
            "keep it a tensor; if it is a size, put what needs it into one @sl.op and give the size a bound (bounds=)",
        ),
        BreakCause(
            "branch",
            "Python control flow on a tensor's value",
            "Which way `if`, `while` or `assert` goes is known only at run time, so the graph ends in front of it.",
            "compute both sides and pick with torch.where, use torch.cond, or move the decision into one @sl.op",
        ),
        BreakCause(
            "shape",
            "the size of a result depends on values",
            "Without a bound for the size the compiler will not keep the operation in the graph unless it is told to.",
            "put it into one @sl.op whose output dim has a bound (bounds=), and let the compiler keep such ops",
        ),
        BreakCause(
            "foreign",
            "a compiled function that torch cannot see into",
            "pybind11, Cython, SWIG and ctypes functions are opaque; undeclared, nothing says what they return.",
            "declare the call with @sl.op and bind the function as its kernel: then it is a node of the graph",
        ),
        BreakCause(
            "launcher",
            "a kernel launcher that is a Python object",
            "Dynamo traces plain calls of triton.jit kernels; a class around them is an object that it cannot follow.",
            "declare the computation with @sl.op and bind the launcher as its kernel",
        ),
        BreakCause(
            "numpy",
            "NumPy inside the compiled region",
            "Only the part of NumPy that torch re-implements is traced; arrays from elsewhere leave the graph.",
            "write it in torch, or declare it with @sl.op and bind the NumPy function as a CPU kernel",
        ),
        BreakCause(
            "print",
            "output for a person: print, logging or warnings",
            "It has to happen in order with the rest of the program, so the graph is cut around it.",
            "move it out of the compiled function, or guard it with `if not torch.compiler.is_compiling():`",
        ),
        BreakCause(
            "system",
            "the outside world: files, clocks, random numbers, the operating system",
            "Its result is no function of the inputs, so it is not traced.",
            "do it outside the compiled function and pass the result in as an argument",
        ),
        BreakCause(
            "disabled",
            "a break that somebody put there",
            "torch.compiler.disable, graph_break() or torch's own list of skipped functions asks for it.",
            "remove the marker; if it hides an opaque call, declare that call with @sl.op instead",
        ),
        BreakCause(
            "autograd_function",
            "a torch.autograd.Function that is not traced",
            "Dynamo traces forward and backward of it, but not every use of ctx and not every signature.",
            "declare forward and gradient as one op: @sl.op and @op.backward replace the Function",
        ),
        BreakCause(
            "autograd",
            "gradients inside the compiled region",
            "backward(), requires_grad and hooks change the autograd graph while it is being traced.",
            "take gradients outside the compiled function; for a gradient of its own give the op @op.backward",
        ),
        BreakCause(
            "context",
            "a context manager that is not traced",
            "Its enter and exit would have to be replayed around each half of the graph.",
            "enter it outside the compiled function",
        ),
        BreakCause(
            "generator",
            "a generator or iterator that is not traced",
            "Half-consumed iterators cannot be carried across a graph.",
            "turn it into a list before the compiled function, or loop over range()",
        ),
        BreakCause(
            "fake",
            "an op without a working fake kernel",
            "The compiler runs ops on tensors without data to learn shapes; this one cannot, or failed.",
            "declare the op with @sl.op (or sl.adopt): its fake follows from the declaration; then `shiplap audit` it",
        ),
        BreakCause(
            "recompiles",
            "too many versions of one function",
            "After that many recompiles torch gives up and runs the function uncompiled. See the recompiles below.",
            "remove the recompiles of this function that are listed below",
        ),
        BreakCause(
            "exception",
            "an exception that leaves the compiled region",
            "Raised while tracing and not caught inside: often a library's own check, or how it leaves a special case.",
            "move the check that raises in front of the compiled function",
        ),
        BreakCause(
            "tensor",
            "a kind of tensor, or a method of it, that is not traced",
            "Subclasses, sparse and nested tensors and methods that change a tensor's storage are supported in part.",
            "convert to a plain tensor before the compiled function, or put the operation into one @sl.op",
        ),
        BreakCause(
            "question",
            "a question about inference mode",
            "The answer is a property of the call, not of the code, and torch does not guard on it.",
            "decide it outside the compiled function, or ask it in eager mode only",
        ),
        BreakCause(
            "class",
            "a class that is defined while the function runs",
            "Its body would run at each call; a class at the level of the module exists before the first.",
            "define the class at the level of the module",
        ),
        BreakCause(
            "address",
            "a tensor's address as a number",
            "A graph has no addresses: each call may put its tensors elsewhere.",
            "leave it to the kernel that needs it, or decide it before the compiled function is called",
        ),
        BreakCause(
            "lock",
            "a lock, or another means between threads",
            "Compiled code holds no locks: where one is needed is known to the caller alone.",
            "take the lock around the call of the compiled function",
        ),
        BreakCause(
            "import",
            "an import that fails while the function runs",
            "An import that raises ends the graph, even if the program catches the exception.",
            "import it at the level of the module, and let the function read whether that succeeded",
        ),
        BreakCause(
            "higher_order",
            "a function handed to torch.cond, scan, vmap or the like",
            "What such an operator calls has to be one graph, without side effects or tensors from outside.",
            "give it a pure function of tensors; what it reads has to be passed in as an operand",
        ),
        BreakCause(
            "object",
            "a Python object or construct that is not traced",
            "Its class lives in C, or it uses a part of Python that Dynamo does not follow.",
            "pass its tensors and numbers as arguments, or put the call into one @sl.op",
        ),
        BreakCause(
            "other",
            "something else that is not traced",
            "Torch's own explanation and hints say what.",
            "follow torch's hints; what cannot be traced but returns tensors can become one @sl.op",
        ),
    )
}

CauseRule = tuple[str, str, str]

# First match wins. (cause, pattern of torch's first line, pattern of its debug context; both must be found.)
CAUSE_RULES: tuple[CauseRule, ...] = (
    ("recompiles", r"recompile limit exceeded", ""),
    ("launcher", r"triton|tma_descriptor", ""),
    ("launcher", "", r"\((JITFunction|Autotuner|Heuristics|KernelInterface|\w*Triton\w*)\)"),
    ("tensor", "", r"qualname: _VariableFunctionsClass\.(sparse|_?nested)_"),
    ("foreign", "", r"_FuncPtr|CFunctionType|builtin_function_or_method\)|cython_func|nb_(func|method)|CPUDispatcher"),
    ("print", r"logging\.Logger|reorder a debugging function", ""),
    ("print", "", r"UserDefinedObjectVariable\((_csv\.)?writer\)|SummaryWriter|\bRun\b.*\blog\b|tqdm"),
    ("print", "", r"^builtin print\b|module: (_?warnings|logging)\b"),
    ("import", r"^Import failure", ""),
    ("system", "", r"^builtin (open|input)\b|qualname: (System)?Random\."),
    ("system", "", r"module: (posix|nt|os|sys|gc|time|_datetime|_io|_?random|_thread|_?socket|select)\b"),
    ("system", r"random\.Random|torch\.Generator|^Call to a time function", ""),
    ("system", "", r"Generator\b|module: torch\.random\b"),
    ("autograd_function", r"autograd\.Function|autograd_function|AutogradFunctionContext|[Cc]ustom (jvp|vjp)", ""),
    ("autograd", r"backward\(\)|autograd|requires_grad|grad_fn|[Bb]ackwards? hook|[Tt]ensor hook|retain_grad", ""),
    ("question", r"is_inference|is_inference_mode", ""),
    ("class", r"__build_class__|LOAD_BUILD_CLASS", ""),
    ("lock", "", r"\b_?R?[Ll]ock\b|threading|Semaphore"),
    ("lock", r"R?Lock.* context manager", ""),
    ("branch", r"[Dd]ata-dependent (branching|assertion)|assert with non-string|infinite loop", ""),
    ("item", r"Tensor\.item\(\)|Tensor\.tolist\(\)|index\(Tensor\)|Data pointer (comparison|truth)", ""),
    ("item", r"^sort with non-constant keys", ""),
    ("item", r"[Dd]ata dependent operator", r"_local_scalar_dense|item|tolist|equal"),
    ("branch", r"[Dd]ata dependent operator|GuardOnDataDependent", ""),
    ("item", r"data-dependent expression", ""),
    ("shape", r"[Dd]ynamic shape operator|data-dependent output shape|Dynamic slicing|wrap unbacked SymInt", ""),
    ("numpy", r"numpy|ndarray", ""),
    ("numpy", "", r"\(ufunc\)|<ufunc|^(call_method|var_getattr) NumpyNdarray|^numpy function"),
    ("disabled", r"graph_break\(\)|skip_frame\(\)|step_unsupported|compiler\.disable|Forced graph break", ""),
    ("foreign", r"marked as skipped", r"likely a C extension or builtin|Builtin"),
    ("disabled", r"marked as skipped", ""),
    ("item", r"BUILD_STRING type error", ""),
    # A number that is drawn while the graph runs, or a scalar of NumPy.
    ("other", r"builtin op on tensor arguments", r"UnspecializedPython"),
    ("context", r"[Cc]ontext ?[Mm]anager|contextlib|escaped from compiled region|GenericContextWrapping", ""),
    ("generator", r"C-implemented special method", r"__(iter|next)__"),
    ("generator", r"generator|next\(\) call|[Ii]terat|itertools|tp_iter|\biter\(|SEND with bad type", ""),
    ("foreign", r"C/C\+\+|C-implemented|Untraceable C|not implemented in python|C extensions|C method descriptor", ""),
    ("fake", r"[Ff]ake ?[Tt]ensor|PT2-compliant|op packet|making fake|fake_fn|no meta kernel|real value from", ""),
    ("exception", r"[Oo]bserved exception|from user code|Failed to raise", ""),
    ("foreign", r"Failed to trace builtin", ""),
    ("higher_order", r"HOP\b|[Hh]igher ?[Oo]rder|torch\.(cond|while_loop|scan|map|associative_scan)\b|functor", ""),
    ("higher_order", r"invoke_subgraph|[Ss]trict.(mode|trace)|nonstrict|leaf_function|wrap_with|_delegate", ""),
    ("higher_order", r"torch\.switch|flex_gemm", ""),
    ("tensor", r"[Tt]ensor subclass|as_subclass|NestedTensor|nested_tensor|sparse|nn\.Parameter|out=|RNN", ""),
    ("tensor", r"[Tt]ensor (method|comparison|device)|Tensor\.\w+ ?(op|\()|non-Tensor|on tensor|dtype mismatch", ""),
    ("tensor", r"SymInt|[Ss]ym(Node|bolic)|COW tensor|Tensor\.data|torch\.Size element", ""),
    ("object", r"[Uu]ser-?[Dd]efined|__\w+__|[Uu]nsupported (method|function) call|hash|repr|_impl|TorchScript", ""),
    ("object", r"[Oo]bject|attribute|[Rr]econstruct|Not a Python constant|Failed to convert args|nn\.Module", ""),
    ("object", r"(get|has)attr|is(instance|subclass)\(|\bid\(|deepcopy|functools|dataclass|dict|keys|super", ""),
    ("object", r"bytecode|[Cc]omprehension|handler|BUILD_|LOAD_|namedtuple|python_type|cell|variable|missing \w+", ""),
    ("object", r"bytes|bytearray|SimpleNamespace|richcompare|length_hint|deque|setattr|ContextVar|missing_\w+", ""),
)


def classify_message(message: BreakMessage) -> str:
    """Return the key in ``BREAK_CAUSES`` of the cause of a graph break, found from torch's message. The rules
    ``CAUSE_RULES`` are tried in order. Return ``"other"`` if none matches.
    """
    # The first rule that matches decides, so that their order matters.
    for cause, reason, context in CAUSE_RULES:
        if re.search(reason, message.reason) and re.search(context, message.context):
            return cause
    return "other"


def classify_break(message: BreakMessage, place: SourcePlace) -> str:
    """Return the key in ``BREAK_CAUSES`` of the cause of a graph break, found from torch's message.

    If the message fits no specific cause, the source line ``place`` is examined as well. If it contains ``.data_ptr(``,
    the cause is ``"address"``. A number that NumPy or Python draws and a date are of the cause ``"system"``, though
    torch's message is about a tensor, or only says that a call or an object is not supported. A hook that
    writes to an object is of the cause ``"autograd"``. Where a number is not known that decides about an ``if`` or
    about the rounds of a loop, the cause is ``"branch"``.
    """
    cause = classify_message(message)
    if cause == "item" and "data-dependent expression" in message.reason:
        return "branch" if isinstance(statement_at(place), ast.If | ast.For | ast.While) else cause
    if cause in ("item", "other") and re.search(r"\b(np|numpy)\.random\.|(?<![\w.])random\.\w+\(", place.code):
        return "system"
    if cause == "higher_order" and re.search(r"\.register_\w*hook\(", place.code):
        return "autograd"
    if cause in ("object", "other") and re.search(r"\b(datetime|date)\.(now|today|utcnow)\(", place.code):
        return "system"
    return "address" if cause in ("exception", "object", "other") and ".data_ptr(" in place.code else cause


def owner_of_break(cause: str, message: BreakMessage, stack: Sequence[SourcePlace]) -> str:
    """Return whose code breaks the graph.

    It is ``"yours"`` for the user's program, the name of an installed package, or ``"torch"`` for torch's own code.
    ``cause`` is a key of ``BREAK_CAUSES``. ``stack`` has the source lines of the calls that led to the break, from the
    outermost on.
    """
    at = innermost_relevant(stack)
    if at is None:
        return "yours"
    if cause == "disabled" and (match := re.search(r"<function ([\w.<>]+) at|qualname: ([\w.<>]+)", _text(message))):
        # The line that calls a marked function may be yours, but its marker need not be.
        name = (match[1] or match[2]).rpartition(".")[2]
        files = dict.fromkeys(p.file for p in stack if not p.package)
        if any(is_function_disabled(file, name) for file in files):
            return "yours"
        module = re.search(r"module: ([\w.]+)", message.context)
        package = (module[1] if module else imported_from(at.file, name)).partition(".")[0]
        return package or at.package or "yours"
    # The compiler's own frames and its replacements for Python's built-ins are nobody's code.
    own = [p for p in stack if p.package != "python" and not re.search(r"/torch/(_dynamo|_functorch)/", p.file)]
    if own and own[-1].package == "torch" and not own[-1].file.endswith("/nn/modules/module.py"):
        return "torch"
    return at.package or "yours"


def _text(message: BreakMessage) -> str:
    """Return the explanation and the context of torch's message as one string. They name the function at fault."""
    return f"{message.explanation}\n{message.context}"


def name_culprit(cause: str, message: BreakMessage, place: SourcePlace) -> str:
    """Return the name of the kernel or call that breaks the graph, found from torch's message and the source line
    ``place``. If neither shows a name, return the source code of the statement, cut to 60 characters. ``cause`` is a
    key of ``BREAK_CAUSES``, and says for which calls the line is searched.
    """
    # The debug context names the callee more surely than the source line, so its formats are tried first.
    if match := re.search(r"module: ([\w.]+), qualname: ([\w.<>]+)", message.context):
        return f"{match[1]}.{match[2]}"
    if match := re.match(r"builtin (\w+)|Called `([\w.]+)\(\)`", message.context):
        return match[1] or match[2]
    if match := re.match(r"method: <(\w+) .*?>\.(\w+)", message.context):
        return f"{match[1]}.{match[2]}"
    if match := re.match(r"call_method UserDefinedClassVariable\(<class '([\w.]+)'>\) __new__", message.context):
        return match[1]
    if match := re.match(r"call_method UserDefinedObjectVariable\((\w+)\) ([^\W_]\w*)", message.context):
        return f"{match[1]}.{match[2]}"
    if cause in _CALLS_OF_CAUSE or cause in ("foreign", "launcher", "numpy", "object", "fake"):
        call = find_call_at(place, cause)
        if call is not None:
            return _shorten_text(ast.unparse(call.func if isinstance(call, ast.Call) else call))
    # The source line comes first: it has the user's own spelling of the call.
    if match := re.search(r"aten\.[\w.]+", message.context):
        return match[0]
    if match := re.search(r"<(?:function|class) '?([\w.<>]+)", message.context):
        return match[1]
    return _shorten_text(_statement_header(place))


def _statement_header(place: SourcePlace) -> str:
    """Return the source code of the statement at the line ``place`` without its body, such as ``if x.sum() > 0``."""
    match statement_at(place):
        case ast.If(test=test):
            return f"if {ast.unparse(test)}"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}"
        case ast.Assert(test=test):
            return f"assert {ast.unparse(test)}"
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return f"with {', '.join(map(ast.unparse, items))}"
        case ast.For(iter=source):
            return f"for ... in {ast.unparse(source)}"
    return place.code.rstrip(":")


def _shorten_text(text: str, limit: int = 60) -> str:
    """Return ``text`` on one line. If it is longer than ``limit`` characters, it is cut to that length and ends in
    ``...``.
    """
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# What a line of each cause usually calls, the surest sign first.
_CALLS_OF_CAUSE: dict[str, tuple[str, ...]] = {
    "item": (
        r"\.(item|tolist|data_ptr)$",
        r"^(int|float|bool)$",
        r"\.(is_nonzero|equal|allclose)$",
        r"^sorted$|\.sort$",
        r"^(np|numpy)\.|torch\.(split|arange)$",
        r"^(len|range|max|min|sum)$",
        r"\.(split|repeat|expand|view|new_zeros|all|any)$",
    ),
    "shape": (r"(nonzero|unique|unique_consecutive|masked_select|where|argwhere|repeat_interleave|bincount|one_hot)$",),
    "disabled": (r"(graph_break|skip_frame|step_unsupported)$",),
    "system": (r"\brandom\.\w+$", r"\.(now|today|utcnow)$"),
    "autograd": (r"\.(backward|requires_grad_|retain_grad|register_hook|grad)$",),
    "autograd_function": (r"\.apply$|\.(mark_dirty|save_for_backward|set_materialize_grads)$",),
}


def find_call_at(place: SourcePlace, cause: str) -> ast.expr | None:
    """Return the syntax node of the call on the line of ``place`` that fits ``cause``, or of a subscript such as
    ``x[mask]``. Return None if there is neither, or if the source code cannot be read.
    """
    node = statement_at(place)
    if node is None:
        return None
    on_line = [n for n in _own_expressions(node) if n.lineno <= place.line <= (n.end_lineno or n.lineno)]
    calls = [n for n in on_line if isinstance(n, ast.Call)]
    signs = _CALLS_OF_CAUSE.get(cause)
    if signs is None:
        return _innermost_call(calls)
    # Signs in the outer loop: a surer sign elsewhere on the line wins over a weaker one in front of it.
    matching = (call for sign in signs for call in calls if re.search(sign, ast.unparse(call.func)))
    subscripts = [n for n in on_line if isinstance(n, ast.Subscript)] if cause in ("item", "shape") else []
    # An index of a list of modules becomes a number. What is read has a size by values, and what is written has not.
    called = [c.func for c in calls] if cause == "item" else []
    subscripts.sort(key=lambda n: (n not in called, not isinstance(n.ctx, ast.Load)))
    return next(matching, None) or next(iter(subscripts), None)


def _innermost_call(calls: list[ast.Call]) -> ast.Call | None:
    """Return the most deeply nested call among ``calls``, since it runs first. Return None if there are no calls.

    Functions of torch and conversions such as ``.numpy()`` are left out if there are other calls.
    """
    plain = [c for c in calls if not re.match(r"torch\.|.*\.(numpy|detach|cpu|contiguous)$", ast.unparse(c.func))]
    # ast.walk is breadth first, so the last call is the innermost.
    return plain[-1] if plain else (calls[-1] if calls else None)


def _own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of the statement ``node`` without its body. An expression comes before the expressions
    inside it. The bodies of ``if``, ``for`` and ``with`` are left out.
    """
    # Statements in the body have lines of their own, and a break there is reported at those.
    own = [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt | ast.excepthandler)]
    for child in own:
        yield from (n for n in ast.walk(child) if isinstance(n, ast.expr))
