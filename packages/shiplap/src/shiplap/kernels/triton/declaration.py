"""``sl.triton(kernel, grid=...)`` and programs of launches, as an author declares them, not yet bound to an op.

In addition to launches, a program may fill and sort parts of the workspace and name integers that several steps use. It
may choose by sizes what it launches (``when=``), and have errors of kernels reported late.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shiplap.cached_property import cached_property
from shiplap.declare.code_parts import AnyValue
from shiplap.declare.config import Configs
from shiplap.declare.kernel import Implementation, KernelTerms
from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.declare.spec import OpSpec
from shiplap.errors import error
from shiplap.kernels.triton.async_errors import LateErrors
from shiplap.kernels.triton.kernel import LaunchedKernel
from shiplap.kernels.triton.program import (
    OPTIONS,
    DeclaredFill,
    DeclaredLaunch,
    DeclaredSort,
    DeclaredStep,
    Grid,
    plain_function,
)
from shiplap.kernels.triton.specializations import ProgramSource


class TritonLaunches(Implementation, ProgramSource):
    """A series of launches and other steps that is not yet bound to an op. :func:`triton` and :func:`launch_program`
    return it.
    """

    native_configs = True

    def __init__(
        self,
        steps: Sequence[DeclaredStep],
        configs: Configs | None,
        values: Mapping[str, str] | None = None,
        errors: LateErrors | None = None,
    ) -> None:
        """Store the steps and configs of a program. ``values`` maps names of integers to expressions. ``errors`` holds
        the messages of errors that its kernels report after their launch.
        """
        self._steps, self.configs, self._values, self._errors = tuple(steps), configs, dict(values or {}), errors

    @property
    def steps(self) -> tuple[DeclaredStep, ...]:
        """The steps of the kernel as their author wrote them, in order. They are launches of Triton kernels, and fills
        and sorts of the workspace.
        """
        return self._steps

    @property
    def values(self) -> Mapping[str, str]:
        """The integers that the author has named for use in expressions of the steps, as a mapping from name to dim
        expression.
        """
        return self._values

    @property
    def errors(self) -> LateErrors | None:
        """The holder of the messages of late errors, or None if the kernels report none. Kernels report late errors on
        the device after their launch has returned.
        """
        return self._errors

    @property
    def launches(self) -> tuple[DeclaredLaunch, ...]:
        """The steps that launch a kernel, in order."""
        return tuple([step for step in self._steps if isinstance(step, DeclaredLaunch)])

    def also(self, step: DeclaredStep) -> TritonLaunches:
        """Return a new program with the steps of this one, followed by ``step``."""
        return TritonLaunches((*self._steps, step), self.configs, self._values, self._errors)

    def fill(self, offset: str, size: str, *, byte: int = 0, when: str = "") -> TritonLaunches:
        """Return a new program with the steps of this one, followed by a step that fills bytes of the workspace.

        The step sets ``size`` bytes, from the offset ``offset`` in bytes on, to ``byte`` (0 to 255). ``when`` is a
        condition as for :meth:`then`. If it is empty, each call runs the step.
        """
        return self.also(DeclaredFill(offset, size, byte, when))

    def sort(self, *, bits: str, count: str, keys: str, values: str, rows: str, when: str = "") -> TritonLaunches:
        """Return a new program with the steps of this one, followed by a stable ascending sort of integers in the
        workspace by torch.

        The step reads ``count`` integers of ``bits`` (16, 32 or 64) at the offset ``keys`` and writes them, sorted, to
        the offset ``values``. It writes the earlier position of each sorted integer to the offset ``rows``, as int64.
        Offsets are in bytes. ``when`` is a condition as for :meth:`then`. If it is empty, each call runs the step.
        """
        return self.also(DeclaredSort(bits, count, keys, values, rows, when))

    def then(
        self,
        kernel: Any,
        *,
        grid: Grid,
        arguments: Mapping[str, str | int | float | bool] | None = None,
        constants: Mapping[str, object] | None = None,
        scratch: Mapping[str, tuple[str, str]] | None = None,
        when: str = "",
        word: str = "",
        codes: Mapping[str, str] | None = None,
    ) -> TritonLaunches:
        """Return a new program with the steps of this one, followed by a launch of ``kernel`` on the same stream.

        Args:
            kernel: the function, as for :func:`triton`.
            grid: the number of programs, as for :func:`triton`.
            arguments: values of parameters, as for :func:`triton`.
            constants: compile-time values, as for :func:`triton`.
            scratch: pointers into the workspace, as for :func:`triton`.
            when: a condition on sizes and integers. If it does not hold, nothing is launched. If it is empty, each call
                launches the kernel.
            word: the parameter, a ``tl.int64``, that gets the address of the word of late errors.
            codes: for a parameter, the message of a late error whose code it gets.
        """
        # Raises SL619 at the declaration, where the author sees the line.
        plain_function(kernel)
        given = dict(arguments or {}), dict(constants or {}), dict(scratch or {})
        return self.also(DeclaredLaunch(kernel, grid, *given, when, word, dict(codes or {})))

    @property
    def name(self) -> str:
        """The name of the first Triton kernel. Reports and stored tuning choices name the whole series of launches by
        it.
        """
        return self.launches[0].name

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield pairs of a string and a value, from which the key of this series of launches in caches is computed.
        They hold the named integers and the steps in order, each with its arguments. The value is a kernel, the
        constants of a launch, or None.
        """
        yield f"program {self._values}", None
        for step in self._steps:
            if not isinstance(step, DeclaredLaunch):
                yield repr(step), None
                continue
            given = sorted(step.arguments.items()), sorted(step.scratch.items()), sorted(step.codes.items())
            yield f"launch {step.grid} {given} {step.when} {step.word}", step.kernel
            yield "constants", dict(sorted(step.constants.items()))

    @property
    def function(self) -> Callable[..., object]:
        """The Python function of the first kernel. It determines the module of the program."""
        return plain_function(self.launches[0].kernel)

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels. It does if the environment variable ``TRITON_INTERPRET`` was 1
        when Triton was imported.
        """
        return all(type(d.kernel).__name__ == "InterpretedFunction" for d in self.launches)

    def devices(self, device: str) -> tuple[str, ...]:
        """Return the device types on which a kernel bound for ``device`` runs. Interpreted kernels run also on
        the CPU.
        """
        return (device, "cpu") if self.interpreted and device != "cpu" else (device,)

    def bind(self, spec: OpSpec, terms: KernelTerms) -> LaunchedKernel:
        """Return the kernel for the op declared as ``spec``. Raise ``SL105``, ``SL618`` or ``SL619`` if a step cannot
        be run as declared. Nothing is compiled before the first call.
        """
        return LaunchedKernel(spec, terms, self)

    def keywords(self, spec: OpSpec) -> frozenset[str] | None:
        """Return the names that a config may have. They are parameters and local names of the kernels, and launch
        options such as ``num_warps``.
        """
        return frozenset({n for d in self.launches for n in plain_function(d.kernel).__code__.co_varnames} | {*OPTIONS})


class LateLaunches(Implementation, ProgramSource):
    """A series of launches that is defined in a module which is imported only when a call needs it.
    :func:`late_launches` returns it.
    """

    late = True

    def __init__(self, module: str, program: str) -> None:
        """Set the names of the module and of the program in it. The module is not imported."""
        self.module, self.program = module, program

    @cached_property
    def made(self) -> TritonLaunches:
        """The series of launches that the named module defines. The module is imported now. Raise ``SL619`` if the
        import fails.
        """
        try:
            program = vars(import_module(self.module))[self.program]
        except ImportError as e:
            raise error(
                "SL619",
                where=f"{self.module}.{self.program}",
                got=f"{type(e).__name__}: {e}",
                expected="Triton",
                fix="install what the import lacks, such as Triton: pip install triton",
            ) from e
        assert isinstance(program, TritonLaunches)
        return program

    @property
    def steps(self) -> tuple[DeclaredStep, ...]:
        """The steps as their author wrote them, in order. They are launches of Triton kernels, and fills and sorts of
        the workspace. Reading them imports the module.
        """
        return self.made.steps

    @property
    def values(self) -> Mapping[str, str]:
        """The integers that the author has named for use in expressions of the steps, as a mapping from name to dim
        expression. Reading them imports the module.
        """
        return self.made.values

    @property
    def errors(self) -> LateErrors | None:
        """The holder of the messages of late errors, or None if the kernels report none. Kernels report late errors on
        the device after their launch has returned. Reading the holder imports the module.
        """
        return self.made.errors

    @property
    def name(self) -> str:
        """The variable of the module that holds the series of launches. Reports and stored tuning choices name the
        series by it.
        """
        return self.program

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield one pair of a string and None, from which the key of this series of launches in caches is computed. The
        string holds the names of module and variable, and a digest of the Python files in the module's folder. The
        module is not imported.
        """
        yield f"triton {self.module} {self.program} {_files_beside(self.module)}", None

    def bind(self, spec: OpSpec, terms: KernelTerms) -> LaunchedKernel:
        """Return the kernel for the op declared as ``spec``. The module is not imported before the first call."""
        return LaunchedKernel(spec, terms, self)


@cache
def _files_beside(module: str) -> str:
    """Return a digest, 16 hexadecimal digits, of the contents of the Python files in the folder of ``module``. The
    module is not imported.
    """
    # The package is looked up, since a look-up of the module itself would import the package around it.
    about = find_spec(module.rpartition(".")[0])
    folders = about.submodule_search_locations if about is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def late_launches(module: str, program: str) -> LateLaunches:
    """Return the program (:func:`launch_program`) named ``program`` in ``module``, for ``op.kernel("cuda", ...)``.

    The module is imported when the first call on CUDA needs it. Importing Triton takes time, and Triton may be missing
    on a machine without CUDA. The tensors of the program are made contiguous.

    Example:
        >>> plan.kernel("cuda", late_launches("mylib.cuda.tables", "PLAN"), workspace="8 * n")
    """
    return LateLaunches(module, program)


def launch_program(
    *, values: Mapping[str, str] | None = None, errors: LateErrors | None = None, configs: Configs | None = None
) -> TritonLaunches:
    """Return a program without steps. Its methods ``then``, ``fill`` and ``sort`` add steps.

    Args:
        values: integers by name, as dim expressions of sizes, integer arguments and earlier values. The expressions of
            all steps may use them. A comparison has the value 1 or 0.
        errors: the holder of the messages of late errors, whose codes ``then`` passes to kernels.
        configs: the configs, as for :func:`triton`.

    Example:
        >>> program = launch_program(values={"tiles": "cdiv(n, 128)"}).fill("0", "4 * tiles")
    """
    return TritonLaunches((), configs, values, errors)


@with_checked_arguments
def triton(
    kernel: Any,
    *,
    grid: Grid,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    constants: Mapping[str, object] | None = None,
    scratch: Mapping[str, tuple[str, str]] | None = None,
    configs: Configs | None = None,
) -> TritonLaunches:
    """Return a ``@triton.jit`` function as a kernel for ``op.kernel("cuda", ...)``.

    A parameter of the kernel gets its value by its name. The value is the tensor argument or output of that name (``x``
    or ``x_ptr``), the scalar argument, the size (``n``), or a property of a tensor (``numel_x``, ``size_x_0``,
    ``stride_x_1``). A tensor may have any strides if the kernel takes every stride of it. All other tensors are made
    contiguous.

    Args:
        kernel: the function. It must not be autotuned, since ``configs`` takes that part.
        grid: the number of programs, as one to three dim expressions such as ``"cdiv(n, BLOCK)"``.
        arguments: for parameters of other names, the tensor, the scalar, the dim expression or the number.
        constants: fixed values of ``tl.constexpr`` parameters, and of ``num_warps``, ``num_stages`` and ``maxnreg``.
        scratch: parameters that point into the workspace, each with an element type and an offset in bytes, as in
            ``{"sums_ptr": ("float32", "0")}``.
        configs: the values among which ``sl.tune`` chooses, as for ``op.kernel(..., configs=)``.

    Raises:
        LaunchError: ``SL618`` for a parameter without a value, or ``SL619`` for a function that no launcher can launch,
            when the kernel is bound.

    Example:
        >>> softmax.kernel("cuda", sl.triton(softmax_kernel, grid="n", arguments={"BLOCK": "pow2ceil(m)"}))
    """
    return TritonLaunches((), configs).then(
        kernel, grid=grid, arguments=arguments, constants=constants, scratch=scratch
    )
