"""The runner of a program under trial: call compiled functions on recorded inputs, and compare their results.

It runs in the user's own interpreter as a script, ``python probe.py SPEC PROGRAM...``, and imports torch alone.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import json
import math
import os
import random
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Calls that are compared, and the bytes of tensors that a recording may hold. What lies beyond is not compared.
MAX_CALLS = 64
# The recording of calls is held in memory and written to disk.
MAX_BYTES = 1 << 30
_MAX_DEPTH = 8
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
# The frames of observed calls have names that start so. The number of the call of torch.compile follows.
OBSERVED = "observed_call_"


class Probe:
    """The state of one run of a program whose compiled functions are observed.

    ``spec`` has the keys ``mode`` (``"record"``, ``"compare"`` or ``"time"``), ``recording``, ``result``, ``eager``,
    ``uncompiled`` and ``ignored``. ``recording`` and ``result`` are paths of files. ``eager`` says whether
    ``torch.compile`` uses its eager backend, and ``uncompiled`` whether compiled functions run eagerly. ``ignored``
    names Python values that are not compared, since they vary by themselves.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Start without any observed call. ``spec`` has the mode and the paths of results."""
        self.spec = spec
        self.calls: list[dict[str, Any]] = []
        self.times: dict[str, list[float]] = {}
        self.differences: list[str] = []
        # Python values that differ: a clock's reading differs in a second run of the unchanged program, too.
        self.unstable: list[str] = []
        # Of these the ones that are not measured any more.
        self.zeroed: list[str] = []
        self.counts = {"outputs": 0, "gradients": 0, "calls": 0}
        # The number of observed calls by compiled function, which ``code_name`` names.
        self.called: dict[str, int] = {}
        # Where the program calls torch.compile, by the name of the frames in which the compiled function is called.
        self.sites: dict[str, tuple[str, int, int]] = {}
        self.bytes = 0
        self.active = threading.local()

    def patch_compile(self, torch: ModuleType) -> None:
        """Replace ``torch.compile`` by a wrapper. Calls of the functions that the wrapper compiles are timed, recorded
        or compared with recorded ones, as ``self.spec["mode"]`` says.

        Unless the mode is ``time``, also seed the random generators once, in this call.
        """
        # torch.compile is only replaced after torch's import, and before any module of the program uses it.
        original = torch.compile
        if self.spec["mode"] != "time":
            seed_generators(torch)
        if self.spec["mode"] == "compare":
            self.calls = torch.load(self.spec["recording"], weights_only=False)

        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            """Return ``model`` compiled by torch's own function. Calls of the result are timed, recorded or compared.
            If ``model`` is None, return a decorator.
            """
            site = calling_site(str(Path(str(torch.__file__)).parent))
            return compile_at(site, model, options) if model is not None else lambda fn: compile_at(site, fn, options)

        def compile_at(site: tuple[str, int, int], model: Any, options: dict[str, Any]) -> Any:
            """Return ``model`` compiled by torch's own function with ``options``. ``site`` is where the program calls
            ``torch.compile``.
            """
            # The eager backend breaks graphs where each backend does, and generates no code.
            if self.spec.get("eager"):
                options = {k: v for k, v in options.items() if k not in ("mode", "options")} | {"backend": "eager"}
            compiled = original(model, **options)
            # The module itself stays, since the program may read its attributes.
            if isinstance(compiled, torch.nn.Module):
                compiled.forward = self._wrap(torch, compiled.forward, model, site)
                return compiled
            return self._wrap(torch, compiled, model, site)

        vars(torch)["compile"] = compile
        if self.spec.get("uncompiled"):
            torch.compiler.set_stance("force_eager")

    def _wrap(
        self, torch: ModuleType, compiled: Callable[..., Any], model: Any, site: tuple[str, int, int]
    ) -> Callable[..., Any]:
        """Return a function with the parameters and the results of ``compiled``, which was compiled from ``model`` at
        ``site``, a file, line and column. Its calls are timed, recorded or compared, unless they are inside another
        observed call or are traced.
        """
        owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
        module = isinstance(owner, torch.nn.Module)
        name = type(owner).__qualname__ if module else getattr(model, "__qualname__", None) or type(model).__qualname__
        code = code_name(model.forward if isinstance(model, torch.nn.Module) else model)

        def call(*args: Any, **kwargs: Any) -> Any:
            """Return the result of ``compiled`` of the enclosing function. The call is timed, recorded or compared,
            unless it is inside another observed call or is traced.
            """
            # Inner calls are part of the outer one, whose results are compared.
            if getattr(self.active, "depth", 0) or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            self.active.depth = 1
            self.called[code] = self.called.get(code, 0) + 1
            try:
                return self._observe(torch, name, compiled, owner, args, kwargs)
            finally:
                self.active.depth = 0

        # Torch's trace has the names of the frames around a compilation, which so tell who asked for it.
        frame = f"{OBSERVED}{len(self.sites)}"
        self.sites[frame] = site
        call.__code__ = call.__code__.replace(co_name=frame)
        return functools.wraps(compiled)(call)

    def _observe(
        self, torch: ModuleType, name: str, compiled: Callable[..., Any], owner: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call ``compiled(*args, **kwargs)`` and return its result. The mode in ``spec`` determines how the call is
        observed.

        The call is timed, or recorded with its inputs and results, or repeated on recorded inputs and compared with
        recorded results. An exception counts as a result. ``name`` is the name of the function, and ``owner`` the
        module to which it belongs, or None.
        """
        if self.spec["mode"] == "time":
            start = time.perf_counter()
            result = compiled(*args, **kwargs)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.times.setdefault(name, []).append(time.perf_counter() - start)
            return result
        number = self.counts["calls"]
        self.counts["calls"] += 1
        # The recording is held in memory until the program ends.
        if number >= MAX_CALLS or self.bytes > MAX_BYTES:
            return compiled(*args, **kwargs)
        keep = self._prepare(torch, name, number, list(find_leaves(torch, (args, kwargs, owner))))
        try:
            result = compiled(*args, **kwargs)
        except Exception as e:
            # The program may catch it, and a remedy must not change it either.
            keep({"outputs": [], "state": [], "gradients": [], "raised": type(e).__name__})
            raise
        keep(self._results(torch, result, (args, kwargs, owner)))
        return result

    def _prepare(
        self, torch: ModuleType, name: str, number: int, given: list[tuple[str, Any]]
    ) -> Callable[[dict[str, Any]], None]:
        """Return a function that stores the results of a call, or compares them with the recorded ones.

        In a comparison, first copy the recorded values into ``given``, the named inputs of the call. The returned
        function also gives the random generators the state that they had behind the recorded call: what is drawn in
        front of the next call is then the same as before, also where an edit has moved it out of the call. ``name`` is
        the name of the called function, and ``number`` the number of earlier calls.
        """
        if self.spec["mode"] == "record":
            made = {"name": name, "inputs": self._copies(torch, given)}
            return lambda results: self.calls.append(made | results | {"rng": rng_state(torch)})
        if number >= len(self.calls) or self.calls[number]["name"] != name:
            self.differences.append(f"call {number + 1} is one of {name}, which the program did not make before")
            return lambda results: None
        known = self.calls[number]
        restore_inputs(torch, given, known["inputs"])

        def compare(results: dict[str, Any]) -> None:
            """Compare ``results`` with the recorded ones, and restore the random generators. What a call draws besides
            would change the results of later calls in the program itself.
            """
            self._compare(torch, f"{name}, call {number + 1}", known, results)
            if drawn := drawn_otherwise(torch, known["rng"]):
                drawn = f"{name}, call {number + 1}: the state of the random generator of {drawn}"
                self._note_difference(torch, drawn, "", "other", "differs behind it")
            restore_rng(torch, known["rng"])

        return compare

    def _copies(self, torch: ModuleType, leaves: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return a list of ``leaves``, which are named tensors and simple values, with copies of the tensors. Add the
        bytes of the tensors to the attribute ``bytes``.
        """
        copies = []
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.bytes += leaf.numel() * leaf.element_size()
                # The program may write to the tensor afterwards.
                leaf = leaf.detach().clone()
            copies.append((path, leaf if isinstance(leaf, torch.Tensor) else plain_value(leaf)))
        return copies

    def _results(self, torch: ModuleType, result: Any, given: Any) -> dict[str, Any]:
        """Return copies of the results of a call, each as a list of names and values.

        They are its return value ``result`` (key ``outputs``), its arguments ``given`` after the call (key ``state``),
        and the gradients (key ``gradients``), which are None if autograd fails.
        """
        outputs = list(find_leaves(torch, result))
        return {
            "outputs": self._copies(torch, outputs),
            "state": self._copies(torch, find_leaves(torch, given)),
            "gradients": gradients(torch, [t for _, t in outputs if isinstance(t, torch.Tensor)]),
        }

    def _compare(self, torch: ModuleType, where: str, known: dict[str, Any], found: dict[str, Any]) -> None:
        """Append a text to ``differences`` for each result in ``found`` that differs from the recorded result in
        ``known``. ``where`` names the call in the text.
        """
        raised, before = (results.get("raised", "no exception") for results in (found, known))
        if raised != before:
            self.differences.append(f"{where}: it raises {raised} instead of {before}")
            return
        for kind in ("outputs", "state", "gradients"):
            expected, got = known[kind], found[kind]
            if expected is None or got is None:
                if (expected is None) != (got is None):
                    self.differences.append(f"{where}: the gradients can be taken in one of the two runs only")
                continue
            if kind != "state" and [p for p, _ in expected] != [p for p, _ in got]:
                self.differences.append(f"{where}: it has other {kind}")
                continue
            values = dict(got)
            for path, value in expected:
                # Python state may be rearranged, but each tensor that both runs know has to agree.
                if path in values and (reason := difference(torch, value, values[path])):
                    self._note_difference(torch, f"{where}: {kind} {path or 'value'}", value, values[path], reason)
            if kind != "state":
                self.counts[kind] += sum(isinstance(v, torch.Tensor) for _, v in expected)

    def _note_difference(self, torch: ModuleType, name: str, value: Any, found: Any, reason: str) -> None:
        """Record that the value ``name`` is ``found`` in this run and was ``value`` in the recorded one. ``reason``
        says how they differ.

        The name is added to ``differences``. If it is no tensor, it is added to ``unstable`` as well. If it is also one
        of the values that the comparison ignores, it is left out of ``differences``, and added to ``zeroed`` if it
        became 0.
        """
        if not isinstance(value, torch.Tensor) and type(value) is type(found):
            self.unstable.append(name)
            if name in self.spec.get("ignored", ()):
                self.zeroed += [name] if value and found == 0 else []
                return
        self.differences.append(f"{name} {reason}")

    def finish(self, torch: ModuleType | None) -> None:
        """Write times and differences as JSON to the result file that ``spec`` names.

        If calls were recorded, they are written, too. If calls were compared, their number is compared with that of the
        recording.
        """
        if self.spec["mode"] == "record" and torch is not None:
            torch.save(self.calls, self.spec["recording"])
        if self.spec["mode"] == "compare" and self.counts["calls"] < len(self.calls):
            self.differences.append(f"{self.counts['calls']} calls instead of {len(self.calls)}")
        report = {
            "times": self.times,
            "differences": self.differences,
            "unstable": self.unstable,
            "zeroed": self.zeroed,
            "counts": self.counts,
            "called": self.called,
            "sites": self.sites,
        }
        Path(self.spec["result"]).write_text(json.dumps(report))


def calling_site(torch_folder: str) -> tuple[str, int, int]:
    """Return ``(file, line, column)`` of the innermost call in the stack outside of this file and ``torch_folder``,
    the folder of torch. The column counts bytes from 0 on, and is -1 where Python does not know it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((__file__, torch_folder + os.sep)):
        frame = frame.f_back
    # The position of each instruction, of two bytes each.
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    at = frame.f_lineno if line is None else line
    return frame.f_code.co_filename, at, -1 if column is None else column


def code_name(fn: Callable[..., Any]) -> str:
    """Return ``file:line:name`` of the code of a function, with the name of the file alone and the first line of the
    definition or its decorators. Return an empty string for a callable without code.
    """
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_name}" if code else ""


def find_leaves(
    torch: ModuleType, value: Any, path: str = "", depth: int = 0, seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` of the tensors and simple values in nested containers, modules and objects with
    attributes.

    The path is the argument ``path``, followed by the keys and attribute names that lead to the leaf. ``depth`` and
    ``seen`` are for recursive calls. They hold the depth of nesting and the ids of the objects that were visited.
    """
    seen = set() if seen is None else seen
    if isinstance(value, (torch.Tensor, *_SIMPLE)):
        yield path, value
        return
    if id(value) in seen or depth > _MAX_DEPTH or (callable(value) and not isinstance(value, torch.nn.Module)):
        return
    # Objects may refer to each other in a circle.
    seen.add(id(value))
    if isinstance(value, dict):
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    elif isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return
    else:
        children = vars(value).items()
    for key, child in list(children):
        yield from find_leaves(torch, child, f"{path}.{key}" if path else str(key), depth + 1, seen)


def plain_value(value: Any) -> Any:
    """Return ``value``, a simple value, as an object of Python's own type. For example, a member of an ``IntEnum``
    becomes an int.

    A class of the program cannot be read from a recording before the program has defined it.
    """
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, str):  # the constructor of str would call __str__, which returns the name of an enum's member
        return str.__str__(value)
    kind: Callable[[Any], Any] = next(t for t in _SIMPLE if isinstance(value, t))
    return kind(value)


def seed_generators(torch: ModuleType) -> None:
    """Seed the random generators of torch, Python and NumPy. Each run then draws the same parameters."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def rng_state(torch: ModuleType) -> dict[str, Any]:
    """Return a dict with the states of the random generators of torch, Python, NumPy and CUDA. A generator is left out
    if NumPy is not imported or CUDA is not in use.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def drawn_otherwise(torch: ModuleType, recorded: dict[str, Any]) -> str:
    """Return the name of a random generator whose state differs from the one in ``recorded``, a result of
    :func:`rng_state`. Return an empty string if there is none.
    """
    now = rng_state(torch)
    # NumPy's state is a tuple that holds an array, and CUDA has a tensor for each device.
    return next((name for name in recorded if comparable_state(now.get(name)) != comparable_state(recorded[name])), "")


def comparable_state(state: Any) -> Any:
    """Return the state of a random generator as a value that can be compared by ``==``."""
    if isinstance(state, list | tuple):
        return [comparable_state(each) for each in state]
    return state.tolist() if hasattr(state, "tolist") else state


def restore_rng(torch: ModuleType, state: dict[str, Any]) -> None:
    """Set the random generators of torch, Python, NumPy and CUDA to the states that :func:`rng_state` returned. A
    generator without a recorded state is left unchanged. ``torch`` is the module, which this file does not import
    itself.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def restore_inputs(torch: ModuleType, given: list[tuple[str, Any]], recorded: list[tuple[str, Any]]) -> None:
    """Copy the values in ``recorded`` into the tensors in ``given`` that have the same names. A tensor is left
    unchanged if its size or dtype differs from that of the recorded tensor, or if there is none of its name.
    """
    values = dict(recorded)
    with torch.no_grad():
        for path, tensor in given:
            value = values.get(path)
            if not isinstance(tensor, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if tensor.shape == value.shape and tensor.dtype == value.dtype and not torch.equal(tensor, value):
                tensor.copy_(value)


def gradients(torch: ModuleType, outputs: list[Any]) -> list[tuple[str, Any]] | None:
    """Return ``(name, gradient)`` of all leaf tensors of autograd on which ``outputs`` depend, or None if autograd
    fails.

    A gradient is None if autograd does not reach the leaf. The gradients of the outputs are random numbers from a fixed
    seed.
    """
    targets = [t for t in outputs if t.requires_grad and t.is_floating_point()]
    leaves = find_graph_leaves(targets)
    if not targets or not leaves:
        return []
    # A generator of its own leaves the program's random numbers as they are.
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) for t in targets]
    try:
        taken = torch.autograd.grad(targets, leaves, seeds, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return None
    # The order in which a graph reaches its leaves is no property of the program, so they are named by their values.
    named = sorted((leaf_name(leaf), i, grad) for i, (leaf, grad) in enumerate(zip(leaves, taken, strict=True)))
    return [(f"{name} #{place}", grad) for place, (name, _, grad) in enumerate(named)]


def find_graph_leaves(targets: list[Any]) -> list[Any]:
    """Return the leaf tensors at the ends of the autograd graphs of ``targets``."""
    todo, seen, leaves = [t.grad_fn for t in targets], set(), {}
    for target in targets:
        # An output that is a leaf itself has no graph.
        if target.grad_fn is None:
            leaves[id(target)] = target
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        todo += [each for each, _ in node.next_functions]
    return list(leaves.values())


def leaf_name(leaf: Any) -> str:
    """Return a name for a tensor, made of its shape and a digest of its values. Tensors of two runs with equal values
    have equal names.
    """
    digest = hashlib.sha256(leaf.detach().double().cpu().numpy().tobytes()).hexdigest()[:12]
    return f"of {tuple(leaf.shape)} {digest}"


def difference(torch: ModuleType, expected: Any, got: Any) -> str:
    """Return in words how ``got``, a tensor or a simple value, differs from ``expected``. Return an empty string if
    they agree.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(expected) is not type(got):
            return f"is of type {type(got).__name__} instead of {type(expected).__name__}"
        # NaN is unequal to itself, and two of them agree here.
        if isinstance(expected, float):
            same = math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-7) or (expected != expected and got != got)
            return "" if same else f"is {got} instead of {expected}"
        return "" if expected == got else f"is {str(got)[:60]} instead of {str(expected)[:60]}"
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError as e:
        return "differs: " + " ".join(str(e).split())[:200]
    return ""


class _TorchFinder(importlib.abc.MetaPathFinder):
    """An import finder that calls ``then`` at the end of the import of torch."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        """Store ``then``, a function that is called with the module torch after its import."""
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return, once, the import spec of torch with a loader that calls ``then`` after the import. Return None for
        any other module. ``path`` and ``target`` are ignored.
        """
        if name != "torch":
            return None
        # Python searches for torch again below, and must not come back here.
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            """Run the code of torch's module ``module``, then call ``then`` of the finder with it."""
            execute(module)
            self.then(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def run_program(arguments: list[str], paths: list[str]) -> None:
    """Run the program ``script.py ...`` or ``-m module ...`` in ``arguments`` in this process, as Python does. The
    folders ``paths`` come first on the module search path.
    """
    module = arguments[0] == "-m"
    program, rest = (arguments[1], arguments[2:]) if module else (arguments[0], arguments[1:])
    # Python has put the folder of this file first, where the folder of the program belongs.
    sys.path[:1] = paths
    sys.argv = [program, *rest]
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    vars(main).update(__file__=program, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)


def run(spec: dict[str, Any], arguments: list[str]) -> None:
    """Run the program in ``arguments`` with the calls of its compiled functions timed, recorded or compared, as
    ``spec`` says.

    The result file is written even if the program raises an error. ``spec`` is explained in ``Probe``.
    """
    probe = Probe(spec)
    sys.meta_path.insert(0, _TorchFinder(probe.patch_compile))
    parent = os.getpid()
    try:
        run_program(arguments, spec["paths"])
    finally:
        if os.getpid() == parent:  # a forked child has its own end
            probe.finish(sys.modules.get("torch"))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
