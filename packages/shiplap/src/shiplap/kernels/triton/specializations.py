"""The generated function behind an ``sl.triton`` kernel, and the forms of its Triton kernels that this process has."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from shiplap.cached_property import cached_property
from shiplap.codegen.launcher import Cubin, KernelLaunch, LaunchProgram, launcher_source
from shiplap.declare.native_interface import NativeForm
from shiplap.declare.spec import OpSpec
from shiplap.dispatch import registry
from shiplap.errors import ShiplapError
from shiplap.kernels.c.header import prototype_signature
from shiplap.kernels.triton import prebuilt
from shiplap.kernels.triton.async_errors import LateErrors
from shiplap.kernels.triton.program import OPTIONS, DeclaredLaunch, DeclaredStep, read_program, strided_launch_tensors
from shiplap.kernels.triton.specialize import Key, SpecializedForm, compile_form, form_of_key


class ProgramSource(ABC):
    """A Triton program as its author declared it. It has steps, which are launches, fills and sorts, and named
    integers.

    Attributes:
        late: whether the steps are in a module that is imported only when a call needs them. Such a module is imported
            only on a machine with CUDA.
    """

    late: ClassVar[bool] = False

    @property
    def function(self) -> Callable[..., object] | None:
        """The Python function of a kernel, which determines the module of the program. This base class has None."""
        return None

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels instead of the GPU. This base class has False."""
        return False

    @property
    @abstractmethod
    def steps(self) -> tuple[DeclaredStep, ...]:
        """The launches, fills and sorts of the program as their author wrote them, in order."""

    @property
    @abstractmethod
    def values(self) -> Mapping[str, str]:
        """The named integers of the program, as a mapping from name to dim expression."""

    @property
    @abstractmethod
    def errors(self) -> LateErrors | None:
        """The holder of the messages of late errors, or None if the kernels report none."""


class LaunchedForm(NativeForm):
    """The generated C++ function of a Triton program, and the kernels that this process has compiled for it.

    Attributes:
        cubins: the compiled kernels by number of launch, architecture and key.
    """

    generated: ClassVar[bool] = True

    def __init__(self, spec: OpSpec, symbol: str, program: ProgramSource, configs: tuple[str, ...]) -> None:
        """Set the program of an op, the symbol of its generated function and the names of its config. No kernel is
        compiled yet.
        """
        self.spec, self.given, self.configs = spec, program, configs
        # Reading the launches would import the module.
        any_strides = frozenset[str]() if program.late else strided_launch_tensors(spec, self.launches)
        super().__init__(Path(), symbol, any_strides, 1, prototype_signature(spec, configs))
        self.cubins: dict[tuple[int, int, Key], Cubin] = {}
        self.bindings: list[ctypes.CDLL] = []

    @cached_property
    def program(self) -> LaunchProgram:
        """The program that the generated C++ runs, namely the author's launches, fills and sorts with their expressions
        parsed. Raise ``SL618`` or ``SL619`` if a step cannot be launched.
        """
        return read_program(self.spec, self.given.steps, self.configs, self.given.values, self.given.errors)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """The launches of the program, without its other steps."""
        return self.program.launches

    @cached_property
    def declared(self) -> tuple[DeclaredLaunch, ...]:
        """The launches of the program as their author wrote them, in order."""
        return tuple([step for step in self.given.steps if isinstance(step, DeclaredLaunch)])

    def taken(self, numbers: Mapping[str, Any]) -> list[tuple[int, KernelLaunch]]:
        """Return those launches whose condition holds for ``numbers``, the sizes and integers of a call. Each is a pair
        of its number among all launches and the launch.
        """
        return [(i, each) for i, each in enumerate(self.launches) if each.when is None or each.when(numbers)]

    @property
    def wanted(self) -> bool:
        """Whether this machine can run the kernel, so that native code is worth building. It can if there is a CUDA
        device, or if the program is not in a module that is imported late.
        """
        return not self.given.late or torch.cuda.is_available()

    def source(self, packed: bool = False) -> str:
        """Return the C++ source of the generated function. If ``packed`` is true, it includes all cubins (compiled GPU
        code) that this process has. Otherwise it includes none.
        """
        cubins = list(self.cubins.values()) if packed else ()
        return launcher_source(self.spec, self.symbol, self.program, self.configs, cubins)

    def missing(self) -> str:
        """Return a message that names the launches which every call makes and for which no kernel is compiled. Return
        an empty string if there are none.
        """
        always = {number for number, launch in enumerate(self.launches) if launch.when is None}
        lacking = (always or {0}) - {number for number, _, _ in self.cubins}
        if not always and self.cubins:  # which of them a call launches depends on its sizes
            return ""
        return f"no cubin of {', '.join(self.declared[number].name for number in sorted(lacking))}" if lacking else ""

    def holds(self, config: tuple[int, ...]) -> bool:
        """Return whether this process has compiled a kernel of the program for the config values ``config``."""
        return any(key[: len(config)] == config for _, _, key in self.cubins)

    def compile(self, number: int, target: int, key: Key) -> Cubin:
        """Return the compiled kernel of launch ``number`` for the GPU architecture ``target``, such as 90 for compute
        capability 9.0. ``key`` holds the properties of its arguments as integers. No device is needed.

        The kernel comes from the package of the op, or else from Triton's compiler. It is stored for later requests.
        """
        at = number, target, key
        if at not in self.cubins:
            kernel, form, op = (
                self.declared[number].kernel,
                self.read(number, key),
                registry.find_declared_op(self.spec.name),
            )
            came = prebuilt.find_prebuilt_form(op, kernel, form, number, key, target) if op is not None else None
            self.cubins[at] = came or compile_form(kernel, form, number, key, target)
        return self.cubins[at]

    def read(self, number: int, key: Key) -> SpecializedForm:
        """Return the input of Triton's compiler for launch ``number``, namely types, constants, attributes and options.
        ``key`` describes the arguments as integers.
        """
        options = {name: v for name, v in self.declared[number].constants.items() if name in OPTIONS}
        return form_of_key(self.launches[number], key, self.configs, options)

    def compiled(self) -> list[tuple[Any, SpecializedForm, Cubin]]:
        """Return a list with a tuple (Triton kernel, form, cubin) for each kernel that this process has compiled. The
        form holds the types, constants and options for which the kernel was compiled.
        """
        return [(self.declared[n].kernel, self.read(n, key), cubin) for (n, _, key), cubin in self.cubins.items()]

    def connect(self, binding: ctypes.CDLL) -> None:
        """Connect the C++ library ``binding`` with this process. For kernels that it lacks, the library then calls
        Triton's compiler in this process. Errors that its kernels report on the device are raised in this process, too.
        """
        if any(each is binding for each in self.bindings):
            return
        self.bindings = [*self.bindings, binding]
        add = binding[f"{self.symbol}_add"]
        add.restype = ctypes.c_char_p

        def missing(number: int, target: int, key: Any, keys: int, message: Any, size: int) -> int:
            """Compile launch ``number`` for the GPU architecture ``target`` and add the kernel to the library. Return 0
            on success.

            The ``keys`` integers at the address ``key`` describe the arguments of the launch. If the kernel cannot be
            compiled, write the error's message to the address ``message``, which has ``size`` bytes, and return 1.
            """
            try:
                values = tuple(key[:keys])
                cubin = self.compile(number, target, values[1:])
                array = (ctypes.c_int64 * keys)(*values)
                image, name = ctypes.c_char_p(cubin.image), cubin.name.encode()
                where = ctypes.c_uint64(number), array, ctypes.c_uint64(keys)
                what = image, name, ctypes.c_uint32(cubin.threads), ctypes.c_uint32(cubin.shared)
                text = add(*where, *what).decode(errors="replace")
            except BaseException as e:  # nothing may pass through C
                text = str(e) if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
            raw = text.encode(errors="replace")[: size - 1] + b"\0"
            # C++ owns the buffer of the message.
            ctypes.memmove(message, raw, len(raw))
            return int(bool(text))

        callback = _COMPILER(missing)
        # C++ keeps only the address, so Python must keep the object.
        _c_callbacks.append(callback)
        if self.given.errors is not None:
            binding[f"{self.symbol}_late"](_make_error_teller(self.given.errors))
        binding[f"{self.symbol}_compiler"](callback, ctypes.c_int64(len(_c_callbacks)))


def _make_error_teller(errors: LateErrors) -> Any:
    """Return a C function that returns the address of a device's error word. If the word holds an error, the function
    clears the word and writes the error's message to a buffer of its caller.
    """

    def tell(device: int, message: Any, size: int) -> int:
        """Return the address of the error word of CUDA device ``device``, or 0 if it has none because of an unexpected
        error. If the word holds an error, write its message to the address ``message``, which has ``size`` bytes.
        Otherwise write an empty string.
        """
        place, text = torch.device("cuda", device), ""
        try:
            address = errors.address(place)
            errors.poll(place)
        except ShiplapError as e:
            text = f"{e.got}, in an earlier call of {e.where}"
        except BaseException as e:  # nothing may pass through C
            address, text = 0, f"{type(e).__name__}: {e}"
        raw = text.encode(errors="replace")[: size - 1] + b"\0"
        ctypes.memmove(message, raw, len(raw))
        return address

    callback = _TELLER(tell)
    # C would call freed memory if Python no longer referred to the callback.
    _c_callbacks.append(callback)
    return callback


_c_callbacks: list[Any] = []  # what C code holds the address of, as long as this process lives
_TELLER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64)
_COMPILER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
