"""The table of tuned choices in this process. ``Op.pick_kernel`` looks calls up, and ``shiplap.tune`` adds entries.

Nothing is measured here. ``active`` is False in a process without tuned or frozen choices that records no calls. A call
then costs one attribute access. An entry names the digest of the op for which it was made, and is ignored for an op
with another digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from shiplap.declare.binding import Binding
from shiplap.declare.bucket import Key
from shiplap.declare.config import NO_CONFIG, Config, Space
from shiplap.declare.kernel import Kernel, Rerun
from shiplap.dispatch.state import OpState
from shiplap.errors import error, notice
from shiplap.settings import settings

ReadyCalls: TypeAlias = dict[Hashable, Rerun]  # calls by all that they depend on: how each is run again
REFERENCE = "reference"
MOST_REMEMBERED_CALLS = 4096  # calls remembered per op: exact sizes may all differ


@dataclass(frozen=True)
class ChoiceEntry:
    """One tuned choice in the table, a kernel and its config for some calls of an op.

    ``key`` is ``(device type, *BucketRule.key)``, and ``source`` the identity of the op. ``place`` names what a choice
    depends on besides the call, such as the code around it in a compiled graph. Eager calls ignore a choice that has a
    place.
    """

    op: str
    source: str
    key: Key
    kernel: str
    config: Config = NO_CONFIG
    place: tuple[tuple[str, str], ...] = ()

    @property
    def call(self) -> tuple[str, str, Key, tuple[tuple[str, str], ...]]:
        """The key of the calls to which the choice applies. It has the op, the digest of the op's code, and the rounded
        sizes and dtypes. It also has the code around the call in a compiled graph.
        """
        return self.op, self.source, self.key, self.place


class MissingChoice:
    """The result of a lookup that finds no tuned choice. The call then runs with the declared default config."""


MISSING_CHOICE = MissingChoice()
_checks: dict[tuple[str, str], Callable[[Config], bool]] = {}  # by device type and name of a kernel


class UnprovenChoice(MissingChoice):
    """A choice of a kernel whose configs depend on sizes. Each call checks that the config is valid for its sizes."""

    def __init__(self, kernel: Kernel, entry: ChoiceEntry) -> None:
        """Start without any checked call, for a choice whose config the kernel declares only for some sizes."""
        self.kernel, self.entry = kernel, entry
        self.known: dict[Key, Kernel | MissingChoice] = {}

    def variant_for_call(self, op: OpState, call: Binding) -> Kernel | MissingChoice:
        """Return the kernel with the config of this choice if that config is declared for the sizes of ``call``.
        Otherwise return the constant ``MISSING_CHOICE``. The result is cached by the sizes.
        """
        # Lists cannot be keys of a dict.
        sizes = tuple([tuple(v) if isinstance(v, list) else v for v in call.env.values()])
        answer = self.known.get(sizes)
        if answer is None:
            if len(self.known) >= MOST_REMEMBERED_CALLS:
                self.known.clear()
            answer = self.known[sizes] = self._prove(op, call)
        return answer

    def _prove(self, op: OpState, call: Binding) -> Kernel | MissingChoice:
        """Return the kernel with the config of this choice if that config is declared for the sizes of ``call``.
        Otherwise issue a notice and return the constant ``MISSING_CHOICE``.
        """
        space = self.kernel.space
        listed = space.configs(call.env) if space is not None else ()
        config = next((c for c in listed if c == self.entry.config), None)
        if config is not None:
            return self.kernel.with_config(config)
        _notice_ignored_entry(
            op, f"kernel {self.kernel.name} declares no config {_entry_summary(self.entry)!r} for these sizes"
        )
        return MISSING_CHOICE


def _entry_summary(entry: ChoiceEntry) -> str:
    """Return the config of a choice as text of at most 200 characters."""
    return str(entry.config)[:200]


def _notice_ignored_entry(op: OpState, why: str) -> None:
    """Issue a notice, once for each op, that a stored choice is not used. ``why`` is the reason."""
    notice(f"stale {op.spec.name}", f"{op.spec.name}: a stored choice is not used: {why}")


_UNKNOWN = MissingChoice()  # nobody has looked

active = True  # until the environment has been looked at, once
frozen = ""  # the file, when choices are fixed
observer: Callable[[OpState, Binding], None] | None = None
from_environment: Callable[[], None] | None = None  # set by shiplap.tune: reads SHIPLAP_TUNED and SHIPLAP_RECORD
from_packages: Callable[[], None] | None = None  # set by shiplap.tune: reads what came with the packages of ops

listeners: list[Callable[[], None]] = []  # called when choices have changed: native code holds a copy

# By op, then by key, place and digest of the code: tables of several versions are held side by side.
_entries: dict[str, dict[tuple[Key, tuple[tuple[str, str], ...], str], ChoiceEntry]] = {}
_resolved: dict[str, dict[Key, Kernel | MissingChoice | None]] = {}
_memo: dict[str, dict[Key, Kernel | MissingChoice | None]] = {}  # by the quick key: what was found for it
_ready: dict[str, ReadyCalls] = {}  # by all that a call depends on: how it is launched again
_looked = False
_asked = False  # whether the packages of all declared ops have been looked into


def note_declared_op() -> None:
    """Schedule the reading of tuned choices after an op was declared, since its package may ship some. They are read at
    the next call, because an import must read no files.
    """
    global _asked
    _asked = False
    refresh_active()


def ready_calls(op: str) -> ReadyCalls:
    """Return the dict of functions that repeat earlier calls of ``op`` without checks, by the key of a call. Each
    request for an op returns the same dict. It is cleared when choices or ops change.
    """
    return _ready.setdefault(op, {})


def ensure_choices_loaded() -> None:
    """Load the tuned choices of environment variables and of packages, once after an import, at the first call or
    trace. An import reads none of them.
    """
    global _looked, _asked
    if not _looked:
        _looked = True
        try:
            if from_environment is not None:
                from_environment()
        except BaseException:
            _looked = False  # a table that cannot be read is an error at every call, not at the first one
            raise
        refresh_active()
    if not _asked:
        _asked = True
        if from_packages is not None and not frozen:
            from_packages()
        refresh_active()


def refresh_active() -> None:
    """Recompute the flag ``active``, which makes calls look up tuned choices. It is true if there are choices, a frozen
    table, an observer that records calls, or files that are not read yet.
    """
    global active
    active = bool(_entries or frozen or observer is not None or not (_looked and _asked))


def install_choice_entries(entries: list[ChoiceEntry], file: str | None = None, *, below: bool = False) -> None:
    """Add the tuned choices ``entries`` to the table of this process.

    If ``file`` is a name, the entries come from that file. They replace all other choices and are frozen. If ``file``
    is an empty string, they replace all other choices, too, and the table is unfrozen. If it is None, the entries are
    only added. If ``below`` is true, an existing choice for the same calls stays. Otherwise the new one replaces it.
    """
    global frozen, _asked
    if file is not None:
        # The packages are read again when the table is unfrozen.
        frozen, _asked = file, False
        _entries.clear()
    for entry in entries:
        table = _entries.setdefault(entry.op, {})
        key = entry.key, entry.place, entry.source
        table[key] = table.get(key, entry) if below else entry
    forget_derived_choices()
    refresh_active()
    for listener in listeners:
        listener()


def resolved_choices(op: OpState) -> dict[Key, Kernel | MissingChoice | None]:
    """Return the tuned choices for ``op`` that fit its present kernels. The keys of the dict are the device type
    followed by the key of a call. The value is the kernel, or None for the reference.

    If only Python can check the config of a choice, the value is an :class:`UnprovenChoice`, which is a
    :class:`MissingChoice`.
    """
    table = _resolved.get(op.spec.name)
    if table is None:
        table = _resolved[op.spec.name] = _resolve_entries(op)
    return table


def forget_derived_choices() -> None:
    """Clear everything that was derived from tuned choices, after choices or ops have changed. It consists of the
    choices resolved to kernels, the looked-up calls, and the stored functions that repeat calls.
    """
    _resolved.clear()
    _memo.clear()
    for calls in _ready.values():
        calls.clear()


def choice_entries() -> list[ChoiceEntry]:
    """Return all tuned choices of this process. A tuned choice is a kernel and its compile-time values for calls of
    some sizes.
    """
    return [e for table in _entries.values() for e in table.values()]


def choices_digest(op: str) -> str:
    """Return a digest of the tuned choices for the op of the name ``op``, which is part of the key of compiled graphs.
    Return an empty string if there are none.
    """
    entries = _entries.get(op, {}).values()
    lines = sorted(f"{e.op}|{e.source}|{e.key}|{e.kernel}|{e.config}|{e.place}" for e in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def find_choice(op: OpState, call: Binding) -> Kernel | MissingChoice | None:
    """Return the kernel that a tuned choice names for this call, with its compile-time values. Return None if it names
    the reference. If there is no choice, return the constant ``MISSING_CHOICE``, and kernels are tried in order.
    """
    if not (_looked and _asked):
        ensure_choices_loaded()
    if observer is not None:
        observer(op, call)
    # The memo is by op, since its keys have no name, and is read in each call.
    memo = _memo.get(op.spec.name)
    if memo is None:
        memo = _memo[op.spec.name] = {}
    device, key = call.device.type, op.rule.quick(call)
    choice = memo.get(key, _UNKNOWN)
    if choice is _UNKNOWN:
        if len(memo) >= MOST_REMEMBERED_CALLS:
            memo.clear()
        choice = memo[key] = resolved_choices(op).get((device, *op.rule.key(call)), MISSING_CHOICE)
    if isinstance(choice, UnprovenChoice):
        choice = choice.variant_for_call(op, call)
    if isinstance(choice, MissingChoice):
        return (
            _report_missing_choice(op, device, op.rule.key(call))
            if frozen and has_tunable_kernels(op, device)
            else choice
        )
    if choice is not None and (reason := choice.why_refused(call)):
        notice(f"chosen {op.spec.name} {key}", f"{op.spec.name}: the chosen kernel does not take this call ({reason})")
        return MISSING_CHOICE
    return choice


def has_tunable_kernels(op: OpState, device: str) -> bool:
    """Return whether tuning can choose something for the op on the device type. It can if there are several kernels, or
    one with configs.
    """
    kernels = op.kernels.get(device, [])
    return len(kernels) > 1 or any(k.space is not None for k in kernels)


def _report_missing_choice(op: OpState, device: str, key: Key) -> MissingChoice:
    """Issue a notice that the frozen table has no choice for this call, and return the constant ``MISSING_CHOICE``. In
    strict mode, raise ``SL607`` instead. A frozen table is a file of choices that replaces measurements.
    """
    wanted = f"{op.spec.name} {op.rule.text(key)} on {device}"
    if settings().strict:
        raise error("SL607", where=wanted, got=f"no entry in {frozen}", expected="a frozen choice")
    notice(f"frozen {op.spec.name}", f"{wanted} is not in {frozen}: its declared default runs")
    return MISSING_CHOICE


def _resolve_entries(op: OpState) -> dict[Key, Kernel | MissingChoice | None]:
    """Return the tuned choices of ``op`` by key, each as the kernel with its config, or None for the reference.

    The choices come from files, so each is checked. A choice with another digest, or with a kernel or config that does
    not exist, is left out and reported.
    """
    table: dict[Key, Kernel | MissingChoice | None] = {}
    source = op.identity
    mine = {key: entry for (key, place, _), entry in _entries.get(op.spec.name, {}).items() if not place}
    # Entries for this version of the code replace those for others with the same key.
    mine |= {e.key: e for e in _entries.get(op.spec.name, {}).values() if e.source == source and not e.place}
    for key, entry in mine.items():
        bound = {k.name: k for k in op.kernels.get(str(key[0]), [])}
        if entry.source != source:
            why = "it was made for another version of the op or its kernels"
        elif entry.kernel == REFERENCE:
            table[key] = None
            continue
        elif entry.kernel not in bound:
            why = f"no kernel {entry.kernel!r} is bound"
        else:
            kernel = bound[entry.kernel]
            config = _with_entry_config(kernel, entry)
            if config is not None:
                table[key] = config
                continue
            why = f"kernel {kernel.name} declares no config {_entry_summary(entry)!r}"
        _notice_ignored_entry(op, why)
    return table


def _with_entry_config(kernel: Kernel, entry: ChoiceEntry) -> Kernel | UnprovenChoice | None:
    """Return ``kernel`` with the compile-time values of the choice, or None if the kernel does not declare them. Return
    an :class:`UnprovenChoice` if the sizes of a call determine whether it declares them.
    """
    space, checks = kernel.space, _checks.get((kernel.device, kernel.name))
    if space is None:
        return kernel.with_config(NO_CONFIG) if not entry.config.items else None
    config = space.declared(entry.config)
    if config is None and checks is not None and _same_config_form(space, entry.config) and checks(entry.config):
        config = entry.config
    if config is not None:
        return kernel.with_config(config)
    # Whether such a config is declared is only known for the sizes of a call.
    return UnprovenChoice(kernel, entry) if space.depends else None


def check_configs(device: str, kernel: str, check: Callable[[Config], bool]) -> None:
    """Accept stored configs that the kernel ``kernel`` for ``device`` does not declare, if ``check(config)`` is true.
    The config must have the names and types of a declared one.

    This is meant for kernels of vendor libraries, whose lists of algorithms are long. These libraries refuse unknown
    numbers themselves.
    """
    _checks[device, kernel] = check


def _same_config_form(space: Space, config: Config) -> bool:
    """Return whether ``config`` has the names and types of the values of the kernel's declared configs."""
    first = space.fixed[0].items if space.fixed else ()
    return [(n, type(v)) for n, v in first] == [(n, type(v)) for n, v in config.items]
