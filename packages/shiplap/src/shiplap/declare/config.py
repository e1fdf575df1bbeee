"""``Config``, the values of a kernel's compile-time parameters, and ``Space``, the configs that a kernel declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shiplap.declare.code_parts import AnyValue, HasCode
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Env, Scalar
from shiplap.errors import error

Values: TypeAlias = Mapping[str, Scalar]  # of a config, by name
Derived: TypeAlias = Callable[[Env], Iterable[Values]]  # the configs for a call, from its sizes and scalars
Configs: TypeAlias = Iterable[Values] | Callable[..., Iterable[Values]]  # as it is declared
Default: TypeAlias = Values | Callable[..., Values]
Prior: TypeAlias = Callable[..., float]


@dataclass(frozen=True)
class Config:
    """Values of compile-time parameters. ``items`` holds pairs of a name and a value, sorted by name so that equal
    configs compare equal. A kernel without parameters has the empty config.
    """

    items: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, values: Values) -> Config:
        """Return the config with the values of a dict, sorted by name."""
        return cls(tuple(sorted(values.items())))

    def as_dict(self) -> dict[str, Scalar]:
        """Return the values of the config as a dict by name."""
        return dict(self.items)

    def label(self, kernel: str) -> str:
        """Return the name of ``kernel`` with the compile-time values of this config, such as ``tiled(BLOCK=64)``. If
        there are no values, return only the name.
        """
        return f"{kernel}({self})" if self.items else kernel

    def __str__(self) -> str:
        """Return the values as text, such as ``BLOCK=64, STAGES=2``."""
        return ", ".join(f"{k}={v}" for k, v in self.items)


NO_CONFIG = Config()


@dataclass(frozen=True)
class Space(HasCode):
    """The configs, sets of compile-time values, that ``configs=`` declares for a kernel.

    ``fixed`` lists them. ``derived`` computes them from sizes instead, or is None. ``chosen`` is the default config, a
    function that returns it, or None. ``prior(env, config)`` estimates a time, by which tuning ranks the configs.
    ``where`` is the place in errors. ``keywords`` are the names that a config may have, or None for any. ``native``
    states whether C code reads the values.
    """

    fixed: tuple[Config, ...] = ()
    derived: Derived | None = None
    chosen: Config | Callable[[Env], Values] | None = None
    prior: Prior | None = None
    where: str = ""
    keywords: frozenset[str] | None = None
    native: bool = False  # a C ABI kernel: integers only, and the same names in every config

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield ``(text, value)`` for what determines the configs that run. The text lists the configs and the default.
        The value holds the functions that return, choose or rank configs.
        """
        yield (
            "|".join([*(f"[{c}]" for c in self.fixed), "" if callable(self.chosen) else f"default {self.chosen}"]),
            None,
        )
        yield "configs", (self.derived, self.chosen if callable(self.chosen) else None, self.prior)

    @property
    def names(self) -> tuple[str, ...]:
        """The sorted names of the compile-time parameters. A C kernel reads the values in this order. The tuple is
        empty if the configs depend on sizes.
        """
        return tuple(name for name, _ in self.fixed[0].items) if self.fixed else ()

    @property
    def static(self) -> Config | None:
        """The config (compile-time values) of a call without a tuned choice. It is None if it depends on the sizes of
        the call.
        """
        if callable(self.chosen) or not self.fixed:
            return None
        return self.chosen or self.fixed[0]

    def configs(self, env: Env) -> tuple[Config, ...]:
        """Return all configs (compile-time values) that tuning may choose from for a call with the sizes and scalars
        ``env``. The default comes first, and there are no duplicates. Raise ``SL116`` if there is none.
        """
        configs = self.fixed or tuple(
            _read_config(self.where, c, self.keywords) for c in (self.derived or _no_prior)(env)
        )
        default = self.default(env) if self.chosen is not None else configs[0] if configs else None
        if default is None:
            raise error("SL116", where=self.where, got=f"no config for {dict(env)}", expected="at least one config")
        return (default, *(c for c in dict.fromkeys(configs) if c != default))

    def declared(self, config: Config) -> Config | None:
        """Return the declared config that equals ``config``, if it is listed or a constant default. Return None
        otherwise. The declared config has values of the declared types. A config that was read from a file may have
        other types, such as ``true`` for 1.
        """
        chosen = (self.chosen,) if isinstance(self.chosen, Config) else ()
        return next((c for c in (*self.fixed, *chosen) if c == config), None)

    @property
    def depends(self) -> bool:
        """Whether the configs, or the default among them, depend on the sizes of a call."""
        return self.derived is not None or callable(self.chosen)

    def default(self, env: Env) -> Config:
        """Return the config of a call without a tuned choice, for the sizes ``env``. It is the declared default, or
        else the first config.
        """
        if isinstance(self.chosen, Config):
            return self.chosen
        if self.chosen is not None:
            return _read_config(self.where, self.chosen(env), self.keywords)
        return self.fixed[0] if self.fixed else self.configs(env)[0]


def _no_prior(env: Env) -> Sequence[Values]:
    """Return an empty tuple of configs, whatever ``env`` holds. This function takes the place of the function of
    configs in a kernel that declares none.
    """
    return ()


def read_space(
    spec: OpSpec,
    name: str,
    configs: Configs | None,
    default: Default | None,
    prior: Prior | None,
    *,
    keywords: frozenset[str] | None = None,
    native: bool = False,
) -> Space | None:
    """Return the declared ``configs=`` (sets of compile-time values), ``default=`` and ``prior=`` of the kernel
    ``name`` as a ``Space``. Return None if there are no configs. Raise ``SL116`` if one of these keywords is invalid.

    ``keywords`` are the names that a config may have, or None for any. If ``native`` is true, C code reads the values
    of a config. They must then be integers, and all configs must have the same names.
    """
    where = f"{spec.name}, kernel {name}"
    if configs is None:
        if default is not None or prior is not None:
            raise error("SL116", where=where, got="default= or prior= alone", expected="configs=")
        return None
    derived = configs if callable(configs) else None
    fixed = () if callable(configs) else tuple(_read_config(where, c, keywords) for c in configs)
    if not (fixed or derived):
        raise error("SL116", where=where, got="an empty list", expected="at least one config")
    chosen = default if default is None or callable(default) else _read_config(where, default, keywords)
    if native:
        _require_c_configs(where, fixed, chosen)
    # Equal configs would be measured twice.
    return Space(tuple(dict.fromkeys(fixed)), derived, chosen, prior, where, keywords, native)


def _require_c_configs(where: str, fixed: tuple[Config, ...], chosen: Config | Callable[[Env], Values] | None) -> None:
    """Raise ``SL116`` unless ``fixed``, all configs of a C kernel, and its default ``chosen``, if there is one, hold
    integers under the same names. Raise it also if ``fixed`` is empty, since the C code reads the values by position.
    """
    if not fixed:
        raise error("SL116", where=where, got="a function", expected="a list: a C kernel's header names its parameters")
    names = [n for n, _ in fixed[0].items]
    for config in (*fixed, *([chosen] if isinstance(chosen, Config) else [])):
        if [n for n, _ in config.items] != names or not all(isinstance(v, int) for _, v in config.items):
            raise error("SL116", where=where, got=str(config), expected=f"integers for {', '.join(names)}")


def _read_config(where: str, values: Values, keywords: frozenset[str] | None) -> Config:
    """Return a config from a dict of names and values. Raise ``SL116`` if a name is not in ``keywords``, or if a name
    or value has a type that a config cannot have.
    """
    if not isinstance(values, Mapping) or not values or not all(isinstance(k, str) for k in values):
        fix = "write each config as a dict, with num_warps and num_stages beside the parameters of the kernel: "
        fix += 'configs=[{"BLOCK": 64, "num_warps": 4}]'
        raise error("SL116", where=where, got=repr(values), expected="a dict of names and values", fix=fix)
    for name, value in values.items():
        if not name.isidentifier() or not isinstance(value, (int, float, str)):
            raise error("SL116", where=where, got=f"{name}={value!r}", expected="an int, float, bool or str")
        if keywords is not None and name not in keywords:
            raise error("SL116", where=where, got=f"{name}={value!r}", expected=f"a keyword {name!r} of the kernel")
    return Config.of(values)
