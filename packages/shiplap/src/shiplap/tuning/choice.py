"""``Choice``: the candidate chosen for a bucket, the reason, and the form in which the store keeps both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shiplap.declare.bucket import Bucket
from shiplap.declare.config import NO_CONFIG, Config
from shiplap.dispatch.tuned_choices import ChoiceEntry
from shiplap.sampling.finding import Finding
from shiplap.tuning.key import Key

LEFT_OUT = "left out"


@dataclass(frozen=True)
class Choice:
    """The candidate that runs for all calls of one bucket (class of sizes), with the reason why it was chosen.

    Attributes:
        op, device, bucket, dtypes, layout: the calls that the choice is for. ``device`` is a device type.
        kernel, config: the candidate. The kernel ``"reference"`` is the op's reference.
        time: the median seconds of a run, or 0.0 if nothing was measured.
        runner_up, runner_up_time: the label and the time of the second fastest candidate. The label is empty if there
            is none.
        default_time: the time of the declared default, or 0.0 if it was not measured.
        reason: the reason of the choice on one line.
        findings: the candidates that were dropped, and why.
        tried: the number of candidates that were considered.
        origin: ``"measured"``, ``"stored"``, ``"frozen"``, ``"default"``, ``"received"`` (from another rank),
            ``"in force"`` (in compiled code, received or from a package), or ``"left out"``. In the last case the
            budget ended before this bucket had a choice, and ``kernel`` is empty.
        sizes: the recipe of the call that was measured.
        unverified: the reason why the kernel is not verified. It is empty for a verified kernel.
        place: further fields of the key as (name, value), which describe the code around a call in a compiled graph. It
            is empty for a choice that eager calls use.
    """

    op: str
    device: str
    bucket: Bucket
    dtypes: str
    layout: str
    kernel: str
    config: Config = NO_CONFIG
    time: float = 0.0
    runner_up: str = ""
    runner_up_time: float = 0.0
    default_time: float = 0.0
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    tried: int = 0
    origin: str = "measured"
    sizes: str = ""
    unverified: str = ""
    place: tuple[tuple[str, str], ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether the choice is for compiled code. Otherwise it is for eager calls."""
        return bool(self.place)

    @property
    def label(self) -> str:
        """The name of the chosen kernel with its config, such as ``tiled(BLOCK=64)``."""
        return self.config.label(self.kernel)

    def but(self, **changes: Any) -> Choice:
        """Return a copy of the choice with the fields in ``changes`` replaced."""
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the choice as a dict of values that ``json`` can write, for ``--json``."""
        return {
            **self.value(),
            "op": self.op,
            "device": self.device,
            "bucket": str(self.bucket),
            "dtypes": self.dtypes,
            "layout": self.layout,
            "origin": self.origin,
            "compiled": self.compiled,
        }

    def value(self) -> dict[str, Any]:
        """Return the fields of the choice that are not part of its key, such as kernel, config, times and reason. They
        are a dict of values that ``json`` can write, which the store keeps.
        """
        return {
            "kernel": self.kernel,
            "config": self.config.as_dict(),
            "time": self.time,
            "runner_up": self.runner_up,
            "runner_up_time": self.runner_up_time,
            "default_time": self.default_time,
            "reason": self.reason,
            "findings": [asdict(f) for f in self.findings],
            "tried": self.tried,
            "sizes": self.sizes,
            "unverified": self.unverified,
        }


def choice_from_json(key: Key, value: Mapping[str, Any], origin: str) -> Choice:
    """Return the choice that the store or a table holds under ``key`` as ``value``. ``origin`` says where it was read,
    as in ``Choice.origin``. Raise ``ValueError`` if the value is not a choice.
    """
    # msgspec is imported late because a program that reads no stored choice does not need it.
    import msgspec

    from shiplap.tuning.schema import StoredValue

    try:
        read = msgspec.convert(dict(value), StoredValue)
        findings = tuple(Finding(**f) for f in read.findings)  # type: ignore[arg-type]
    except (msgspec.ValidationError, TypeError) as e:
        raise ValueError(str(e)) from e
    return Choice(
        op=key["op"],
        device=key["device"],
        bucket=Bucket.parse(key["bucket"]),
        dtypes=key["dtypes"],
        layout=key["layout"],
        kernel=read.kernel,
        config=Config.of(read.config),
        time=read.time,
        runner_up=read.runner_up,
        runner_up_time=read.runner_up_time,
        default_time=read.default_time,
        reason=read.reason,
        findings=findings,
        tried=read.tried,
        origin=origin,
        sizes=read.sizes,
        unverified=read.unverified,
        place=place_of_key(key),
    )


def place_of_key(key: Key) -> tuple[tuple[str, str], ...]:
    """Return the (name, value) pairs of ``key`` that describe the code around a call, as in :attr:`Choice.place`.

    They are the fields of the key whose names begin with ``extra.``, without that prefix. Choices for eager calls have
    none.
    """
    prefix = "extra."
    return tuple((name.removeprefix(prefix), value) for name, value in key.fields if name.startswith(prefix))


def choice_table_entry(choice: Choice, source: str) -> ChoiceEntry:
    """Return the ``ChoiceEntry`` with which an op finds the kernel and config of ``choice`` for a call. ``source`` is
    the digest of the op's code. An op with another digest ignores the entry.
    """
    key: tuple[Any, ...] = (choice.device, *(v for _, _, v in choice.bucket.limits), choice.dtypes, choice.layout)
    return ChoiceEntry(choice.op, source, key, choice.kernel, choice.config, choice.place)


def show_time(seconds: float) -> str:
    """Return the time ``seconds`` as a string with at most three significant digits and a unit (s, ms, us or ns), such
    as ``1.23 ms`` or ``45.6 us``.
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:  # a shorter time has at most three digits before the point in the next unit
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
