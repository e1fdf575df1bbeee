"""The function or model that ``explain`` and ``rewrite`` compile, and the arguments of its call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shiplap.cli.target import import_home, split_target, unknown_name
from shiplap.errors import error

DEFAULT = "model"  # the name that is looked for where the target has none


def load_model(target: str, inputs: str) -> tuple[ModuleType, Any, tuple[Any, ...] | dict[str, Any]]:
    """Return (module, function or model, arguments) for ``target``, which is ``module[:name]`` or
    ``path/to/file.py[:name]``.

    The arguments are those that the module's function ``inputs`` returns. They are a dict if they are given by name,
    otherwise a tuple.

    Raises:
        ShiplapError: ``SL501`` or ``SL601`` if there is no such function or model, ``SL613`` if there is no function
            ``inputs``.
    """
    home, name = split_target(target)
    module = import_home(home or target)
    return module, _find_callable(module, name, home or target), _call_inputs_function(module, inputs, home or target)


def _find_callable(module: ModuleType, name: str, where: str) -> Any:
    """Return the function or model ``name`` of ``module``. If ``name`` is empty, return the one called ``model``.

    Raise ``SL501``, with the names of the module's functions and models, if there is none. A class is none. ``where``
    is the target, which the error names.
    """
    value = getattr(module, name or DEFAULT, None)
    if callable(value) and not isinstance(value, type):
        return value
    got = "" if name or value is not None else f"no name, and no {DEFAULT!r} in it"
    fix = "pass module:name or path/to/file.py:name, with the name of a function or a model there"
    if isinstance(value, type):
        got = f"{name or DEFAULT} is a class, of which there is no instance"
        fix = f"make an instance in the file, such as {DEFAULT} = {value.__name__}(), and pass its name"
    raise unknown_name(
        "a function or model",
        name or DEFAULT,
        _callable_names(module),
        where=where,
        value=value,
        got=got,
        fix=fix,
    )


def _callable_names(module: ModuleType) -> list[str]:
    """Return the names of the functions and models that ``module`` defines. A model counts even if its class is defined
    elsewhere.
    """
    from torch.nn import Module

    own = {n: v for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__}
    models = {n: v for n, v in vars(module).items() if isinstance(v, Module)}
    return [n for n, v in (models | own).items() if not isinstance(v, type) and not n.startswith("_")]


def _call_inputs_function(module: ModuleType, name: str, where: str) -> tuple[Any, ...] | dict[str, Any]:
    """Call the function ``name`` of ``module`` and return the arguments that it returns, as a tuple or a dict. A single
    value becomes a tuple. Raise ``SL613`` if there is no such function. ``where`` is the target, which the error names.
    """
    made = getattr(module, name, None)
    if not callable(made):
        raise error(
            "SL613",
            where=where,
            got=f"no function {name!r}",
            expected=f"def {name}(): return the arguments to compile for, a tuple or a dict of names",
            fix="define the function, or name another one with --inputs",
        )
    # The function is called once, so that its random values are the same for all runs.
    arguments = made()
    if isinstance(arguments, dict):
        return arguments
    return tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
