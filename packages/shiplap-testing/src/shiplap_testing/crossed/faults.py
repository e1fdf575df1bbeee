"""Faults that are planted into a crossed declaration, to show that a crossed run finds what it looks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shiplap_testing.crossed.declared import Declared


@dataclass(frozen=True)
class Fault:
    """A fault that is planted into the source code of a declaration or its kernel. In the source code of ``case``, the
    string ``text`` is replaced by ``wrong``. ``way`` names how the op must be called for the fault to show, such as
    ``eager``.
    """

    case: Declared
    text: str
    wrong: str
    way: str


FAULTS: dict[str, Fault] = {
    # A kernel in C that takes any strides, and goes through a tensor as if it were contiguous.
    "stride": Fault(
        Declared(0, kernel="c_strided", terms=("second",), layouts=("transposed",), gradient=False),
        "v *= load_at(&y, i, 0);",
        "v *= load(&y, n);",
        "eager",
    ),
    # A loop that leaves out what does not fill a tile.
    "tail": Fault(Declared(0, kernel="c", sizes="tile", gradient=False), "n < count;", "n < count / 16 * 16;", "eager"),
    # The argument is written to in a copy.
    "mutation": Fault(
        Declared(0, state="mutated", outs=("rows",), gradient=False, kernel="python_out"),
        "    acc.add_(v)\n    out.copy_",
        "    acc.add(v)\n    out.copy_",
        "eager",
    ),
    # The gradient forgets a factor.
    "gradient": Fault(Declared(0, terms=("second", "float")), "    g = g * s\n", "", "eager"),
    # A fake that makes another result than the op: the reference looks at what it is run with.
    "fake": Fault(
        Declared(0, outs=("perhaps",), gradient=False, ways=("fake",)),
        "return (v * 3 if x.shape[-1] > 1 else None)\n",
        "return (v * 3 if type(x) is Tensor else None)\n",
        "fake",
    ),
    # The process ends, or never comes back.
    "crash": Fault(
        Declared(0, kernel="python_out", gradient=False), "    out.copy_(v)", "    __import__('os').abort()", "eager"
    ),
    "hang": Fault(
        Declared(0, kernel="python_out", gradient=False),
        "    out.copy_(v)",
        "    __import__('time').sleep(999)",
        "eager",
    ),
}
WRONG_VALUES = ("stride", "tail", "mutation", "gradient", "fake")


def plant(case: Declared, text: str) -> str:
    """Return ``text``, the source code of a declaration or a kernel, with the fault of the op declaration ``case``
    planted. If ``case`` has no fault, or its fault is in other source code, return ``text`` unchanged.
    """
    if not case.fault:
        return text
    fault = FAULTS[case.fault]
    return text.replace(fault.text, fault.wrong)


def faulty(name: str, seed: int) -> Declared:
    """Return the op declaration with the planted fault ``name`` and the seed ``seed``."""
    return replace(FAULTS[name].case, seed=seed, fault=name)
