"""``triton_launcher(kernel)[grid](...)``, a Triton launch without the binder that Triton runs before each launch.

Triton itself makes the first launch of each specialisation. The compiled kernel that it returns is stored under a key
of everything on which Triton specialises. Later launches call the launcher of that kernel directly. Triton itself makes
launches with arguments that the key cannot hold, such as hooks, descriptors and tuples, and all launches of another
version of Triton. Nothing of Triton is replaced.
"""

from __future__ import annotations

import inspect
import keyword
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shiplap.declare.generated_code import define_function
from shiplap.errors import notice
from shiplap.torch_private.triton_internals import settle_cache_key, use_torch_assembler

VERIFIED_TRITON = ("3.6", "3.7")  # releases whose launchers and specialisation rules this module was read against
LIMIT = 4096  # specialisations kept: a kernel with a number of its own for each call must not fill the memory
_TENSORS: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)  # a subclass may lie about its pointer


@dataclass(frozen=True)
class TritonRuntime:
    """The parts of Triton that a launch uses.

    ``device`` returns the index of the current device, and ``stream`` returns the current stream of a device. ``knobs``
    are Triton's settings. ``chain`` is the class of Triton's lists of hooks. ``plain`` holds the class of Triton's
    dtypes, which may be constants of a launch.
    """

    device: Callable[[], int]
    stream: Callable[[int], int]
    knobs: Any
    chain: type
    plain: tuple[type, ...] = ()


def triton_launcher(kernel: Any) -> Launcher:
    """Return a launcher for ``kernel``, a ``@triton.jit`` function. ``launcher[grid](*args)`` finds the compiled kernel
    for the arguments faster than Triton does.

    Use it in Python functions that launch kernels for an op (``@op.kernel("cuda")``). Arguments, results and errors are
    those of ``kernel[grid](...)``. The kernel is launched on the current stream of the current device. Launches are
    safe in CUDA graphs.

    Example:
        >>> launch = triton_launcher(scale_kernel)
        >>> @scale.kernel("cuda")
        ... def _(x, k, *, out):
        ...     launch[(cdiv(x.numel(), 1024),)](x, out, x.numel(), k, BLOCK=1024)
    """
    return Launcher(kernel)


class Launcher:
    """The launcher that :func:`triton_launcher` returns. ``fn`` is the Python function of the kernel, so that digests
    of an op's sources include its code.
    """

    def __init__(self, kernel: Any) -> None:
        """Set the Triton kernel and its names. No launch function has been generated yet."""
        self.kernel = kernel
        self.fn = getattr(kernel, "fn", None)
        self.__module__ = getattr(kernel, "__module__", __name__)
        self.__qualname__ = getattr(kernel, "__qualname__", type(kernel).__qualname__)
        self.compiled_by_key: dict[tuple[Any, ...], Any] = {}
        self.hash: Any = None  # of the source that all of `compiled_by_key` was compiled from
        self._launch: Callable[..., Any] | None = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the function that launches the kernel with ``grid``. It takes the kernel's arguments."""
        return partial(self._launch or self._prepare(), grid)

    def compile(self, grid: Any, *args: Any, **options: Any) -> None:
        """Compile the kernel that ``self[grid](*args, **options)`` would launch, without launching it. Any thread may
        call this method. Meta tensors are accepted.
        """
        use_torch_assembler()
        # Otherwise the key depends on what was launched before, and Triton compiles the kernel again.
        settle_cache_key(self.kernel)
        self.kernel.warmup(*args, grid=grid, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``TypeError``, since a kernel is launched with a grid, as in ``launcher[grid](...)``."""
        raise TypeError(f"{self.__qualname__} is launched with a grid: launcher[grid](...)")

    def remember(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Store ``compiled``, the kernel that Triton's own launch returned, for later launches with the same ``key``.
        The key holds properties of the arguments. Do nothing if the kernel's source is unknown. If the source has
        changed, drop all earlier kernels.
        """
        source = getattr(self.kernel, "hash", None)
        if not isinstance(source, str) or source.startswith("recursion:"):  # being computed by another thread
            return
        if source is not self.hash or len(self.compiled_by_key) >= LIMIT:
            self.compiled_by_key, self.hash = {}, source
        # A kernel that is still being compiled by another thread has no function yet.
        if not hasattr(compiled, "result") and all(hasattr(compiled, n) for n in _COMPILED_ATTRIBUTES):
            self.compiled_by_key[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)

    def _prepare(self) -> Callable[..., Any]:
        """Return the function ``launch(grid, *args)`` that runs ``self[grid](*args)``, and store it for later calls. It
        is generated for the kernel's parameters. If that is not possible, issue a notice and return Triton's own
        launch.
        """
        # Before the first compilation, so that Triton uses the assembler that Inductor uses.
        use_torch_assembler()
        settle_cache_key(self.kernel)
        reason, runtime = _unsupported_reason(self.kernel), None
        if not reason:
            try:
                runtime = _triton_runtime()
            except (ImportError, AttributeError) as e:
                reason = f"{type(e).__name__}: {e}"
        if runtime is None:
            name = self.__qualname__
            notice(f"triton {name} {reason}", f"Triton kernel {name} is launched the ordinary way: {reason}")
            kernel = self.kernel
            self._launch = lambda grid, *args, **kwargs: kernel[grid](*args, **kwargs)
        else:
            scope = {
                "_self": self,
                "_kernel": self.kernel,
                "_device_of": runtime.device,
                "_stream_of": runtime.stream,
                "_runtime": runtime.knobs.runtime,
                "_compilation": runtime.knobs.compilation,
                "_Chain": runtime.chain,
                "_Tensor": _TENSORS[0],
                "_Parameter": _TENSORS[-1],
                "_absent": object(),
                "_PLAIN": frozenset((*_SELF_EQUAL_TYPES, *runtime.plain)),
                "_fits": struct.Struct("i" * sum(map(_is_unspecialised, self.kernel.params))).pack,
                "_Unfit": struct.error,
                **_parameter_defaults(self.kernel),
            }
            lines = _launcher_lines(self.kernel)
            self._launch = define_function("launch", lines, f"launch {self.__qualname__}", scope)
        return self._launch


_SELF_EQUAL_TYPES = (
    bool,
    int,
    str,
    type(None),
    torch.dtype,
)  # constexpr values that equal themselves only, given their type
_COMPILED_ATTRIBUTES = ("run", "function", "packed_metadata")
_KERNEL_ATTRIBUTES = ("signature", "params", "hash", "used_global_vals", "pre_run_hooks", "debug")
_PARAMETER_ATTRIBUTES = ("is_constexpr", "do_not_specialize", "annotation_type")


def _unsupported_reason(kernel: Any) -> str:
    """Return the reason why only Triton itself can launch ``kernel``. Return an empty string if a generated function
    can launch it.
    """
    missing = [name for name in _KERNEL_ATTRIBUTES if not hasattr(kernel, name)]
    if missing:
        return f"{type(kernel).__name__} has no {', '.join(missing)}"
    missing = [name for name in _PARAMETER_ATTRIBUTES for about in kernel.params[:1] if not hasattr(about, name)]
    if missing:
        return f"a {type(kernel.params[0]).__name__} without {', '.join(missing)}"
    names = list(kernel.signature.parameters)
    kinds = {p.kind for p in kernel.signature.parameters.values()} - {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    # The generated function uses these names itself.
    taken = [n for n in names if keyword.iskeyword(n) or n.startswith("_") or n in _GENERATED_CODE_BUILTINS]
    if kinds or taken or len(names) != len(kernel.params):
        return f"a signature with {', '.join(taken) or 'other than plain parameters'}"
    return ""


_GENERATED_CODE_BUILTINS = {
    "type",
    "float",
    "int",
    "bool",
    "len",
    "callable",
    "tuple",
    "sorted",
    "getattr",
}  # by what is generated


def is_verified(version: str) -> bool:
    """Return whether the launchers and specialisation rules of this version of Triton were verified for this module."""
    return ".".join(version.split(".")[:2]) in VERIFIED_TRITON


def _triton_runtime() -> TritonRuntime:
    """Return the parts of the installed Triton that a launch uses. Raise ``ImportError`` if the version of Triton or
    its backend is not verified.
    """
    import triton
    import triton.language
    from triton import knobs
    from triton.runtime import driver

    if not is_verified(triton.__version__):
        raise ImportError(f"Triton {triton.__version__}, verified are {' and '.join(VERIFIED_TRITON)}")
    active: Any = driver.active
    if active.get_current_target().backend != "cuda":
        raise ImportError(f"the backend {active.get_current_target().backend}, which specialises on more")
    # Looked up now, so that a Triton without them is noticed before a launch.
    for name in ("debug", "launch_enter_hook", "launch_exit_hook"):
        getattr(knobs.runtime, name)
    plain = (triton.language.dtype,)
    return TritonRuntime(active.get_current_device, active.get_current_stream, knobs, knobs.HookChain, plain)


def _parameter_defaults(kernel: Any) -> dict[str, Any]:
    """Return a mapping to the default values of the kernel's parameters. Its keys are the names that the generated code
    uses, such as ``_default_x``.
    """
    empty = inspect.Parameter.empty
    return {f"_default_{n}": p.default for n, p in kernel.signature.parameters.items() if p.default is not empty}


def _launcher_lines(kernel: Any) -> list[str]:
    """Return the source lines of ``launch(grid, <the kernel's parameters>, **options)``. This function looks up the
    compiled kernel by a key and launches it.

    The key has two values for each parameter on which Triton specialises. The first is the type or dtype, so that
    values of different types never compare equal. All other parameters have one value together. Names of the generated
    code start with an underscore.
    """
    parameters = kernel.signature.parameters
    names = list(parameters)
    empty = inspect.Parameter.empty
    declared = ", ".join(n if p.default is empty else f"{n}=_default_{n}" for n, p in parameters.items())
    ordinary = f"_kernel[_grid]({', '.join(names)}, **_options)"
    bound, entries = _bound_parameter_source(dict(zip(names, kernel.params, strict=True)), ordinary)
    lines = [f"def launch(_grid, {declared}, **_options):", *bound]
    lines += [
        "    _device = _device_of()",
        f"    _key = ({entries}_free, _device, _kernel.debug, _runtime.debug, _compilation.instrumentation_mode)",
        "    if _options:",  # in the order in which they are written, which a call site does not change
        "        _key += tuple(_options.items())",
        "        for _n, _v in _options.items():",
        "            if type(_v) is not int:",
        f"                if type(_v) not in _PLAIN: return {ordinary}",
        "                _key += ((_n, type(_v)),)",
        f"    if _kernel.pre_run_hooks or getattr(_runtime, 'add_stages_inspection_hook', None): return {ordinary}",
        "    _hook = _runtime.launch_enter_hook",
        f"    if _hook is not None and (type(_hook) is not _Chain or _hook.calls): return {ordinary}",
        "    _hook = _runtime.launch_exit_hook",
        f"    if _hook is not None and (type(_hook) is not _Chain or _hook.calls): return {ordinary}",
        "    if _kernel.used_global_vals:",
        "        for (_n, _), (_found, _scope) in _kernel.used_global_vals.items():",
        f"            if _scope.get(_n, _absent) != _found: return {ordinary}",  # Triton says which one has changed
        "    _found = _self.compiled_by_key.get(_key) if _kernel.hash is _self.hash else None",
        "    if _found is None:",
        f"        _found = {ordinary}",
        "        _self.remember(_key, _found)",
        "        return _found",
        f"    if callable(_grid): _grid = _grid({{{', '.join(f'{n!r}: {n}' for n in names)}}})",
        "    _n = len(_grid)",
        "    _found[0](_grid[0], _grid[1] if _n > 1 else 1, _grid[2] if _n > 2 else 1, _stream_of(_device), _found[1],",
        f"              _found[2], None, None, None, {', '.join(f'_v_{n}' for n in names)})",
        "    return _found[3]",
    ]
    return lines


def _bound_parameter_source(parameters: dict[str, Any], ordinary: str) -> tuple[list[str], str]:
    """Return source lines and an expression for the key of a launch of a Triton kernel with these ``parameters``. The
    lines compute the value of each parameter and the values that the key has for it. The expression lists the values of
    the key. ``ordinary`` is the source of a call of Triton's own launch.
    """
    free = [n for n, p in parameters.items() if _is_unspecialised(p)]
    # Their value is passed on and is no part of the key.
    fixed = [n for n, p in parameters.items() if p.do_not_specialize and _is_integer_annotation(p)]
    lines, entries = [f"    _v_{n} = {n}" for n in fixed] + _unspecialised_parameters(free, ordinary), ""
    for name, about in parameters.items():
        if name not in free and name not in fixed:
            lines += (
                _constant_key_source(name, ordinary) if about.is_constexpr else _argument_key_source(name, ordinary)
            )
            entries += f"_k_{name}, _l_{name}, "
    return lines, entries


def _is_integer_annotation(about: Any) -> bool:
    """Return whether the parameter that Triton describes by ``about`` is annotated as an integer of fixed width."""
    return about.annotation_type in ("i32", "i64")


def _is_unspecialised(about: Any) -> bool:
    """Return whether the parameter that Triton describes by ``about`` is declared as not specialised. Return False for
    a compile-time value and for an annotated parameter.
    """
    return about.do_not_specialize and not about.is_constexpr and not about.annotation_type


def _unspecialised_parameters(names: list[str], ordinary: str) -> list[str]:
    """Return the source lines that compute the values of the parameters ``names``, on which Triton does not specialise,
    and ``_free``, their common entry in the key of a launch. ``_free`` is None if all of them are 32-bit ints.
    Otherwise it is a tuple with two values for each parameter, see :func:`_argument_key_source`. ``ordinary`` is the
    source of a call of Triton's own launch, for other types.
    """
    if not names:
        return ["    _free = None"]
    each = [line for n in names for line in _argument_key_source(n, ordinary)]
    return [
        "    try:",
        f"        if not (int is {' is '.join(f'type({n})' for n in names)}): raise _Unfit",
        # ``_fits`` packs 32-bit ints by ``struct``, and ``_Unfit`` is the error of ``struct`` for a wider one.
        f"        _fits({', '.join(names)})",
        f"        {', '.join(f'_v_{n}' for n in names)}, _free = {', '.join(names)}, None",
        "    except _Unfit:",
        *(f"    {line}" for line in each),
        f"        _free = ({''.join(f'_k_{n}, _l_{n}, ' for n in names)})",
    ]


def _argument_key_source(a: str, ordinary: str) -> list[str]:
    """Return the source lines that compute the value of the kernel's parameter ``a`` and its two values in the key of a
    launch. ``ordinary`` is the source of a call of Triton's own launch, for values of other types.

    Triton specialises tensors on dtype and alignment. It specialises integers on width, divisibility by 16 and equality
    to 1, and other values on their type.
    """
    # Exact types, since a bool is an instance of int, and Triton has another type for it.
    return [
        f"    _k_{a} = type({a})",
        f"    if (_k_{a} is _Tensor or _k_{a} is _Parameter) and {a}.is_cuda:",
        f"        _v_{a} = {a}.data_ptr()",
        f"        _k_{a}, _l_{a} = {a}.dtype, not _v_{a} & 15",
        f"    elif _k_{a} is int and -0x8000000000000000 <= {a} <= 0xffffffffffffffff:",
        f"        _v_{a} = {a}",
        f"        _l_{a} = 1 if {a} == 1 else (0 if {a} & 15 else 16) + (",
        f"            0 if -0x80000000 <= {a} <= 0x7fffffff else 32 if {a} <= 0x7fffffffffffffff else 64)",
        f"    elif {a} is None or _k_{a} is float or _k_{a} is bool:",
        f"        _v_{a}, _l_{a} = {a}, None",
        f"    else: return {ordinary}",
    ]


def _constant_key_source(a: str, ordinary: str) -> list[str]:
    """Return the source lines that compute the value of the compile-time parameter ``a`` and what the key has for it,
    its type and value. A float is a string in the key, since -0.0 and 0.0 compare equal. ``ordinary`` is the source of
    a call of Triton's own launch, for other types.
    """
    return [
        f"    _v_{a}, _k_{a}, _l_{a} = {a}, type({a}), {a}",
        # Equal floats may differ: NaN is unequal to itself, and -0.0 equals 0.0.
        f"    if _k_{a} is float: _l_{a} = {a}.hex()",
        f"    elif _k_{a} not in _PLAIN: return {ordinary}",
    ]
