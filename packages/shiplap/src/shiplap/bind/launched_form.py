"""The generated function behind an ``sl.triton`` kernel, and the forms of its Triton kernels that this process has."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

from shiplap.bind import shipped
from shiplap.bind.header import signature
from shiplap.bind.program import OPTIONS, Declared, read_launch, strided
from shiplap.bind.specialise import Form, Key, compile_form, read_key
from shiplap.codegen.launcher import Cubin, launcher_source
from shiplap.errors import ShiplapError
from shiplap.op import registry
from shiplap.op.native import NativeForm
from shiplap.op.spec import OpSpec

__all__ = ["LaunchedForm"]


class LaunchedForm(NativeForm):
    """The generated function, and the forms of its kernels that this process has compiled.

    Attributes:
        cubins: by launch, architecture and key.
    """

    generated: ClassVar[bool] = True

    def __init__(self, spec: OpSpec, symbol: str, declared: tuple[Declared, ...], configs: tuple[str, ...]) -> None:
        self.spec, self.declared, self.configs = spec, declared, configs
        self.launches = tuple(read_launch(spec, each, configs) for each in self.declared)
        super().__init__(Path(), symbol, strided(spec, self.launches), 1, signature(spec, configs))
        self.cubins: dict[tuple[int, int, Key], Cubin] = {}
        self.bindings: list[ctypes.CDLL] = []

    def source(self, packed: bool = False) -> str:
        cubins = list(self.cubins.values()) if packed else ()
        return launcher_source(self.spec, self.symbol, self.launches, self.configs, cubins)

    def missing(self) -> str:
        lacking = set(range(len(self.launches))) - {number for number, _, _ in self.cubins}
        return f"no cubin of {', '.join(self.declared[number].name for number in sorted(lacking))}" if lacking else ""

    def compile(self, number: int, target: int, key: Key) -> Cubin:
        """The form of launch ``number`` for an architecture (90) and a key without a device.

        It is looked for once: in the package of the op, then asked of Triton's compiler.
        """
        at = number, target, key
        if at not in self.cubins:
            kernel, form, op = self.declared[number].kernel, self.read(number, key), registry.find(self.spec.name)
            came = shipped.find(op, kernel, form, number, key, target) if op is not None else None
            self.cubins[at] = came or compile_form(kernel, form, number, key, target)
        return self.cubins[at]

    def read(self, number: int, key: Key) -> Form:
        """What a key of launch ``number`` stands for."""
        options = {name: v for name, v in self.declared[number].constants.items() if name in OPTIONS}
        return read_key(self.launches[number], key, self.configs, options)

    def compiled(self) -> list[tuple[Any, Form, Cubin]]:
        """Each form that this process has, with its kernel."""
        return [(self.declared[n].kernel, self.read(n, key), cubin) for (n, _, key), cubin in self.cubins.items()]

    def connect(self, binding: ctypes.CDLL) -> None:
        """From now on what ``binding`` lacks is compiled here."""
        if any(each is binding for each in self.bindings):
            return
        self.bindings = [*self.bindings, binding]
        add = binding[f"{self.symbol}_add"]
        add.restype = ctypes.c_char_p

        def missing(number: int, target: int, key: Any, keys: int, message: Any, size: int) -> int:
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
            ctypes.memmove(message, raw, len(raw))
            return int(bool(text))

        callback = _COMPILER(missing)
        _kept.append(callback)
        binding[f"{self.symbol}_compiler"](callback, ctypes.c_int64(len(_kept)))


_kept: list[Any] = []  # what C code holds the address of, as long as this process lives
_COMPILER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
