"""Floats that ``torch.export`` has fixed in a program, although they follow from sizes that vary."""

from __future__ import annotations

import ast
import re

import torch

from shiplap.errors import error
from shiplap.torch_private.symbolic_sizes import guards_of_program


def refuse_fixed_floats(program: torch.export.ExportedProgram, where: str) -> None:
    """Raise ``SL324`` if a float in ``program`` follows from a size that varies and was fixed to its value in the
    example. The program itself checks it before it runs, but a file that is made of the program does not.

    ``where`` is the file that is to be written.
    """
    fixed = [re.sub(r"L\['(\w+)'\]", r"\1", guard) for guard in guards_of_program(program) if _fixes_float(guard)]
    if fixed:
        raise error("SL324", where=where, got=fixed[0], expected="a program that is right for all sizes it admits")


def _fixes_float(guard: str) -> bool:
    """Return whether a guard, a Python expression, requires that a float computed from sizes has one certain value."""
    tree = ast.parse(guard, mode="eval").body
    if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq)):
        return False
    sides = (tree.left, tree.comparators[0])
    numbers = [side for side in sides if isinstance(side, ast.Constant)]
    computed = [side for side in sides if not isinstance(side, ast.Constant)]
    # Integers may be compared with a number in a program that is right for many sizes, as in ``n // (n // 4) == 4``.
    return len(numbers) == len(computed) == 1 and (
        isinstance(numbers[0].value, float) or any(isinstance(part, ast.Div) for part in ast.walk(computed[0]))
    )
