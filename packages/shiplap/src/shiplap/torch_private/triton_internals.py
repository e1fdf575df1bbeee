"""Triton: the assembler that it uses, the cache keys of its launches, and its interpreter for Inductor's code.

The assembler is torch's own from the first kernel on, as it is part of Triton's cache key. Inductor selects torch's
assembler when it compiles a kernel. A process that launched kernels before any graph compiled these with Triton's own
assembler, and the next process, which began with a graph, compiled all of them again: 7 s of the first call of a SpUNet
(H200, torch 2.11, Triton 3.6, November 2026).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

# --- the assembler ----------------------------------------------------------------------------------------------------


_CHOSEN, _CACHE_FOLDER = "TRITON_PTXAS_PATH", "TRITON_CACHE_DIR"


@cache
def use_torch_assembler() -> None:
    """Set the environment variable by which Triton finds its assembler to torch's own ``ptxas``, unless the user has
    set it.

    Inductor does the same. Call this function before Triton compiles a kernel of Shiplap. Inductor's own function is
    not called, because importing its module takes longer than the start of an eager program.
    """
    if torch.version.cuda is None or _CHOSEN in os.environ:
        return
    # Wheels of torch for CUDA contain the assembler. A build from source need not.
    assembler = Path(torch.__file__).absolute().parent / "bin" / "ptxas"
    if assembler.is_file() and os.access(assembler, os.X_OK):
        os.environ[_CHOSEN] = str(assembler)


# --- what each process does before its first kernel -------------------------------------------------------------------


@contextmanager
def files_in(folder: str, variable: str) -> Iterator[None]:
    """Return a context manager in whose body temporary files lie in ``folder``, which the environment variable
    ``variable`` names as the cache of a compiler.
    """
    before = tempfile.tempdir, os.environ.get(variable)
    tempfile.tempdir = os.environ[variable] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop(variable, None)
        os.environ |= {variable: before[1]} if before[1] is not None else {}


def prepare_triton(folder: str) -> None:
    """Let Triton do what each process does before its first kernel, for this process and those that it forks. Do
    nothing if there is no GPU of CUDA. The driver of the GPU is not used if torch counts GPUs without it.

    Triton hashes its own library of 400 MB, and compiles the C module by which it calls the driver, which is kept in
    ``folder`` (Triton 3.6).
    """
    from triton.runtime import cache, driver

    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    with files_in(folder, _CACHE_FOLDER):
        cache.triton_key()
        _ = driver.active


# --- cache keys of launches, for kernels that are compiled without a launch -------------------------------------------


_UNREAD = "triton", "math", "copy"  # modules that Triton's keys do not look into


def settle_cache_key(kernel: Any) -> None:
    """Compute the cache key of the Triton ``kernel`` so that it is the same in every process, whichever kernel was
    launched first.

    Triton's key of a function includes the globals of those functions that it calls whose own key was computed before
    (Triton 3.6 and 3.7). If two kernels share a function, the key of the second would therefore depend on whether the
    first was launched. With another key, a kernel is compiled again. Here the keys of called functions are always
    computed first, from the innermost on.
    """
    _settle_called_keys(kernel, set())


def _settle_called_keys(kernel: Any, begun: set[int]) -> None:
    """Compute the cache keys of the Triton functions that ``kernel`` calls, from the innermost on. ``begun`` holds the
    ids of kernels that were begun.
    """
    function, known = getattr(kernel, "fn", None), getattr(kernel, "hash", "")
    settled = isinstance(known, str) and not known.startswith("recursion:")  # which is: another thread is at it
    if settled or id(kernel) in begun or not isinstance(function, FunctionType):
        return
    # Functions may call each other in a circle.
    begun.add(id(kernel))
    for called in _called_kernels(function):
        _settle_called_keys(called, begun)
        try:
            _ = called.cache_key
        except Exception:  # Triton raises the error if the kernel really calls it
            with suppress(AttributeError):
                called.hash = None


def _called_kernels(function: FunctionType) -> Iterator[Any]:
    """Yield the Triton functions that ``function`` may call. They are looked for among its captured variables, and
    under the names in its code. The names are looked up in its globals and in the modules among these globals and
    captured variables.
    """
    names, cells = function.__code__.co_names, function.__closure__ or ()
    named, entered = [function.__globals__.get(name) for name in names], set[str]()
    for cell in cells:
        with suppress(ValueError):  # it is empty
            named.append(cell.cell_contents)
    for value in named:  # which grows
        if isinstance(value, ModuleType):
            if value.__name__ not in entered and value.__name__.partition(".")[0] not in _UNREAD:
                entered.add(value.__name__)  # modules may name each other
                named += [vars(value).get(name) for name in names]
        elif isinstance(getattr(value, "fn", None), FunctionType) and hasattr(type(value), "cache_key"):
            yield value


def triton_attributes(
    kernel: Any,
    backend: Any,
    signature: Mapping[str, str],
    constants: Mapping[Any, object],
    attributes: Mapping[Any, Any],
) -> dict[Any, Any]:
    """Return the attributes of a kernel's arguments, such as divisibility by 16, in the form in which Triton itself
    passes them to its compiler. They are part of the cache key.

    ``signature`` has the types by parameter. ``constants`` and ``attributes`` are keyed by position. Triton 3.7 also
    lists constants, with empty attributes. Triton 3.6 lists only the other arguments. The cache key of ``kernel`` is
    computed first.
    """
    settle_cache_key(kernel)
    special = [
        (kind, constants[(at,)] if kind == "constexpr" else _specialisation_mark(attributes.get((at,))))
        for at, kind in enumerate(signature.values())
    ]
    values = {name: constants.get((at,)) for at, name in enumerate(signature)}
    try:
        *_, packed = kernel._pack_args(backend, {}, values, special, {})
    except AttributeError:
        return dict(attributes)
    return dict(packed)


def _specialisation_mark(attribute: object) -> str | None:
    """Return the mark of Triton's binder for an argument. It is ``"D"`` for a multiple of 16, an empty string for
    another number, and None if Triton does not check it.
    """
    return None if attribute is None else "D" if attribute else ""


# --- the interpreter --------------------------------------------------------------------------------------------------
#
# It runs the Triton code that Inductor generates, in a process of its own. Inductor renders, fuses and launches as for
# a GPU. Its decorators and its loader of sources are replaced for the rest of the process: start_interpreter does so.


launches: list[str] = []  # names of the kernels that have run
edit: list[Callable[[str], str] | None] = [None]  # source of a template's kernel → source: a defect to be found

_casts_lock = threading.Lock()
_corrected = [0]  # launches that run now with right casts
_own_methods: list[Any] = []  # the interpreter's function that is replaced meanwhile


@contextmanager
def correct_interpreted_casts() -> Iterator[None]:
    """Make Triton's interpreter convert numbers to and from bfloat16 as torch does, take a scalar for an int as in
    ``range``, and take a scalar condition for a mask, inside the ``with`` block.

    Its own cast cuts digits off, damages subnormal numbers, and takes the bits of a bfloat16 for an integer if the
    other dtype is not float32. A kernel casts in this way whenever it stores wider values into a bfloat16 tensor. Until
    Triton 3.6 it makes an int of an array with one element, which NumPy refuses from 2.5 on. It makes integers of a
    condition that it broadcasts to a block, and refuses a mask of integers from Triton 3.9 on. Several threads may be
    inside at the same time. The interpreter's own functions are back after the last one.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    with _casts_lock:
        _corrected[0] += 1
        builder.cast_impl = partial(_cast_as_torch, builder)  # of this object: the method of its class stays
        builder.create_splat = partial(_splat_condition, builder)
        if _corrected[0] == 1 and _lacks_index():
            _own_methods.append(interpreter._patch_lang_tensor)
            interpreter._patch_lang_tensor = partial(_patch_with_index, _own_methods[0])
    try:
        yield
    finally:
        with _casts_lock:
            _corrected[0] -= 1
            if not _corrected[0]:
                del builder.cast_impl, builder.create_splat
                if _own_methods:
                    interpreter._patch_lang_tensor = _own_methods.pop()


@cache
def _lacks_index() -> bool:
    """Return whether Triton's interpreter takes a scalar for an int in a way that NumPy refuses from 2.5 on."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def _patch_with_index(patch: Any, tensor: Any, scope: Any) -> None:
    """Call ``patch(tensor, scope)``, by which the interpreter gives Triton's class ``tensor`` its methods until the end
    of ``scope``. Then replace the method by which a scalar is taken for an int.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def _splat_condition(builder: Any, block_type: Any, scalar: Any) -> Any:
    """Return the interpreter's value ``scalar`` as a block of ``block_type``. A block of conditions stays one."""
    block = type(builder).create_splat(builder, block_type, scalar)
    block.data = block.data.astype(bool) if scalar.data.dtype == bool else block.data
    return block


def _cast_as_torch(builder: Any, src: Any, dst_type: Any) -> Any:
    """Return the interpreter's value ``src`` as ``dst_type``, converted as torch does if one of both is bfloat16. All
    other casts are those of the interpreter's ``builder``.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    old, new = src.dtype.scalar, dst_type.scalar
    wide = numpy.asarray(src.data)
    if old == tl.bfloat16 and new != tl.bfloat16:
        # The upper half of a float32 with the same value.
        wide = (wide.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(wide.astype(interpreter._get_np_dtype(new)), new)
    if new != tl.bfloat16 or not (old.is_int() or old in (tl.float16, tl.float32, tl.float64)):
        return type(builder).cast_impl(builder, src, dst_type)
    with numpy.errstate(over="ignore"):  # of a float64 that becomes infinite
        rounded = torch.from_numpy(numpy.array(wide, numpy.float32)).bfloat16()
    return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(numpy.uint16), new)


BLOCK = 32  # of generated pointwise kernels and reductions: the interpreter runs each block by itself


def _tanh(x: Any) -> Any:
    """Return ``tanh(x)`` for Triton's interpreter. It is computed without an overflow for large numbers."""
    import triton.language as tl

    shrunk = tl.exp(tl.abs(x) * -2.0)
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


def _nearbyint(x: Any) -> Any:
    """Return ``x`` rounded to the nearest integer for Triton's interpreter. Halves are rounded to the even one."""
    import triton.language as tl

    rounded = tl.floor(x + 0.5)
    odd = rounded - tl.floor(rounded * 0.5) * 2.0
    even = rounded - tl.where(rounded - x == 0.5, odd, 0.0)
    # From 2 ** 23 on each float32 is an integer, and the sum above would round.
    return tl.where(tl.abs(x) < (1 << 23), even, x)


LIBDEVICE_FUNCTIONS = {"tanh": _tanh, "nearbyint": _nearbyint, "rint": _nearbyint}


class _Libdevice:
    """The module that replaces Triton's ``libdevice`` in the interpreter. It has those functions that Triton's language
    has, and those that GELU and int8 need.
    """

    def __getattr__(self, name: str) -> Any:
        """Return the function that replaces ``libdevice.<name>``, from ``tl.math``, ``tl`` or a table in this module.

        Raise ``NotImplementedError`` if there is none.
        """
        import triton.language as tl

        function = getattr(tl.math, name, None) or getattr(tl, name, None) or LIBDEVICE_FUNCTIONS.get(name)
        if function is None:
            raise NotImplementedError(f"libdevice.{name} cannot be interpreted")
        return function


class InterpretedKernel:
    """A kernel in place of the one that Inductor's decorators return. It has the methods by which Inductor launches a
    kernel, and runs in Triton's interpreter.
    """

    def __init__(self, kind: str, fn: Any, meta: dict[str, Any]) -> None:
        """Wrap a generated Triton kernel ``fn`` of Inductor's ``kind``, such as ``template``, with its metadata."""
        self.kind, self.fn, self.meta = kind, fn, meta
        self.inductor_meta: dict[str, Any] = {}
        self.with_bandwidth_info, self.launchers = False, [SimpleNamespace(n_regs=None)]
        fn.fn.__globals__["libdevice"] = _Libdevice()

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since an interpreted kernel is not compiled."""

    def run(self, *args: Any, stream: Any = None, benchmark_run: bool = False, **kwargs: Any) -> None:
        """Launch the kernel once in Triton's interpreter. If ``benchmark_run`` is true, the launch is not added to
        ``launches``. ``stream`` has no effect. Raise ``NotImplementedError`` for bfloat16, since the interpreter
        multiplies its bit patterns.
        """
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in args):
            raise NotImplementedError("bf16 is wrong in Triton's interpreter")
        # Launches that only measure are no launches of the program.
        if not benchmark_run:
            launches.append(self.fn.fn.__name__)
        if self.kind == "template":  # the last three arguments are the grid
            self.fn[tuple(int(g) for g in args[-3:])](*args[:-3])
            return
        if self.kind == "user_autotune":  # so are they here, and numbers that Triton specialises on are passed, too
            constants = [n for n, p in signature(self.fn.fn).parameters.items() if "constexpr" in str(p.annotation)]
            names = [n for n in self.meta["signature"] if n not in constants]
            given = dict(zip(names, args[:-3], strict=True)) | {n: self.meta["constants"][n] for n in constants}
            self.fn[tuple(int(g) for g in args[-3:])](**given)
            return
        names = [n for n, kind in self.meta["signature"].items() if kind != "constexpr"]
        numel = {n: v for n, v in zip(names, args, strict=False) if n.endswith("numel")}
        blocks = {b: BLOCK for b in ("XBLOCK", "YBLOCK", "R0_BLOCK") if b in self.fn.arg_names}
        grid = [-(-int(numel[f"{axis}numel"]) // BLOCK) if f"{axis}numel" in numel else 1 for axis in "xyz"]
        self.fn[tuple(grid)](*args, **blocks)


def _make_decorator(kind: str) -> Callable[..., Any]:
    """Return the replacement for one of Inductor's decorators of Triton kernels. ``kind`` names it, such as
    ``pointwise``. The decorated kernel runs in Triton's interpreter.
    """

    def factory(*args: Any, **kwargs: Any) -> Callable[[Any], InterpretedKernel]:
        """Return a decorator that wraps a generated kernel to run in Triton's interpreter. Of the arguments, which are
        those of Inductor's own decorator, only ``triton_meta`` is used.
        """
        return lambda fn: InterpretedKernel(kind, fn, kwargs.get("triton_meta", {}))

    return factory


def _load_interpreted(self: Any, name: str, source: str, device_str: str = "cuda", **kwargs: Any) -> InterpretedKernel:
    """Return the kernel ``name`` of a generated ``source``, loaded to run in Triton's interpreter.

    The source of a template is first passed through the function in ``edit``, a variable of this module, if one is set.
    """
    from torch._inductor.codecache import PyCodeCache

    change = edit[0]
    if change is not None and "_tem_" in name:
        source = change(source)
    kernel: InterpretedKernel = getattr(PyCodeCache.load(source), name)
    return kernel


class InterpreterTarget:
    """The driver object that Triton asks for its device and stream before it launches a kernel."""

    is_active = classmethod(lambda cls: True)

    def get_current_target(self) -> Any:
        """Return a CUDA target of compute capability 9.0, for which Inductor generates code."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return 0, the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return 0 for any device, since the interpreter has no streams."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU, on which the interpreter runs."""
        return torch.device("cpu")


def imported_before() -> bool:
    """Return whether Triton was imported without its interpreter. Its functions can then no longer be interpreted."""
    return "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"


def start_interpreter() -> None:
    """Make this process run Triton code in Triton's interpreter, and make Inductor generate Triton code for the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_heuristics as heuristics
    from torch._inductor.async_compile import AsyncCompile
    from triton.runtime.driver import driver

    active: Any = driver
    active.set_active(InterpreterTarget())
    config: Any = inductor
    # Worker processes would not have these replacements, so everything is compiled in this process.
    config.cpu_backend, config.compile_threads, config.force_disable_caches = "triton", 1, True
    for kind in ("template", "pointwise", "reduction", "persistent_reduction", "user_autotune"):
        setattr(heuristics, kind, _make_decorator(kind))
    compiler: Any = AsyncCompile
    compiler.triton = _load_interpreted
