"""Select a candidate for each bucket: verify all candidates, time them, store the choice, freeze it.

Names are loaded when they are first used, so a program that does not tune does not pay for the import.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.dispatch.package_folder import packaged_choice_tables
from shiplap.lazy_imports import names
from shiplap.settings import settings

if TYPE_CHECKING:
    from shiplap.tuning.candidate import Candidate, CandidateRefused
    from shiplap.tuning.choice import Choice
    from shiplap.tuning.frozen_table import frozen, thaw
    from shiplap.tuning.inputs import recipe_of
    from shiplap.tuning.recorded_calls import record
    from shiplap.tuning.result import TuneResult
    from shiplap.tuning.selector import SelectionOptions, select
    from shiplap.tuning.store import ChoiceStore
    from shiplap.tuning.worker_process import WorkerProcess

__all__ = [
    "Candidate",
    "CandidateRefused",
    "Choice",
    "ChoiceStore",
    "SelectionOptions",
    "TuneResult",
    "WorkerProcess",
    "freeze",
    "frozen",
    "recipe_of",
    "record",
    "select",
    "thaw",
    "tune",
]

_LATE = {
    "Candidate": "shiplap.tuning.candidate",
    "Choice": "shiplap.tuning.choice",
    "WorkerProcess": "shiplap.tuning.worker_process",
    "SelectionOptions": "shiplap.tuning.selector",
    "CandidateRefused": "shiplap.tuning.candidate",
    "ChoiceStore": "shiplap.tuning.store",
    "TuneResult": "shiplap.tuning.result",
    "frozen": "shiplap.tuning.frozen_table",
    "recipe_of": "shiplap.tuning.inputs",
    "record": "shiplap.tuning.recorded_calls",
    "select": "shiplap.tuning.selector",
    "thaw": "shiplap.tuning.frozen_table",
}

__getattr__ = names(__name__, _LATE)


@with_checked_arguments
def tune(
    op: Op,
    samples: Iterable[Any],
    budget: float | str | None = None,
    *,
    device: str | None = None,
    remeasure: bool = False,
    capture: str = "auto",
    isolate: bool = True,
    timeout: float = 60.0,
    progress: bool | None = None,
    compiled: bool | None = None,
) -> TuneResult:
    """Find the fastest kernel and config for the calls that ``samples`` describe, and use them for such calls in this
    process.

    Candidates run in a separate process. Each candidate is compared with the reference before it is timed. The choices
    are also saved in the store. If the store already has a choice for a bucket, that bucket is not measured again.

    Args:
        op: a declared op.
        samples: descriptions of calls. Each is a tuple of arguments, a dict of sizes and scalars such as
            ``{"n": 4096, "c": 64}`` (with ``"dtype"`` if it is not float32), or a recipe. New values are drawn from the
            declaration.
        budget: the time for all samples, in seconds or as text such as ``"5m"``. The default is 30 s for each bucket.
            When the time is over, finished choices are stored. The other buckets get choices with ``origin="left
            out"``.
        device: the device for samples that are given as sizes, by default the CPU.
        remeasure: whether buckets that the store already has are measured again. False by default.
        capture: ``"auto"``, or ``"always"``, which times replays of CUDA graphs and rejects candidates that cannot be
            captured.
        isolate: whether candidates run in a separate process. True by default.
        timeout: the seconds after which a candidate counts as hanging and is stopped, 60 by default.
        progress: whether a progress bar is shown on stderr. By default it is shown if stderr is a terminal.
        compiled: whether templates are measured in compiled code, too. By default they are only if some of them run
            nowhere else, such as those in C++.

    Returns:
        The result. It has one choice for each bucket (class of sizes), in the order of ``samples``. If templates are
        measured in compiled code, a second choice follows with ``choice.compiled`` set. Its candidates were measured in
        a compilation of the op alone. ``findings`` name what was left out, with the reason.

    Raises:
        ShiplapError: ``SL613`` if there are no samples. ``SL606`` for integer arguments without a builder of samples.
            ``SL608`` inside an op, a backward pass, a trace or a capture. ``SL502`` or ``SL610`` for samples that
            cannot be drawn.
    """
    # The import is inside the function because the engine imports the sampler and the worker process, which no call
    # needs.
    from shiplap.sampling.device import require_device
    from shiplap.tuning import engine
    from shiplap.tuning.selector import SelectionOptions

    registry.require_op(op, "tune()")
    if device is not None:
        require_device(device, f"tune(device={device!r})")
    return engine.tune_all(
        engine.make_requests(op, samples, device),
        budget,
        options=SelectionOptions(remeasure=remeasure, capture=capture),
        isolate=isolate,
        timeout=timeout,
        progress=progress,
        compiled=compiled,
    )


@with_checked_arguments
def freeze(path: str | os.PathLike[str], ops: Iterable[Op] | None = None) -> list[Choice]:
    """Write the choices that are valid on this machine to the file ``path``, and return them. :func:`frozen` reads the
    file.

    The choices come from the store and from this process. They are those of ``ops``, by default of all ops. A choice
    for another device, library version or version of a declared op is left out. Raise ``SL602`` if the file cannot be
    written.
    """
    from shiplap.tuning.frozen_table import write_frozen_table

    chosen = None if ops is None else tuple(ops)
    for each in chosen or ():
        registry.require_op(each, "freeze()")
    return write_frozen_table(path, chosen)


def apply_tuning_settings() -> None:
    """Install the choices in the file that the environment variable ``SHIPLAP_TUNED`` names, and start recording calls
    in the file that ``SHIPLAP_RECORD`` names. An unset variable has no effect. This function is called when the first
    op is called or traced.
    """
    current = settings()
    if current.tuned:
        from shiplap.tuning.frozen_table import frozen

        frozen(current.tuned)
    if current.record:
        from shiplap.tuning.recorded_calls import start_recording

        start_recording(current.record)


def load_packaged_choices() -> None:
    """Install the tuning choices that the packages of declared ops contain. Choices that this process has from
    elsewhere take precedence over them.
    """
    if any(packaged_choice_tables(op) for op in registry.declared_op_list()):
        from shiplap.tuning.packaged_choices import install_packaged_choices

        install_packaged_choices()


# `dispatch` may not import this room, which lies above it. It calls these two functions at the first call of an op.
tuned_choices.from_environment = apply_tuning_settings
tuned_choices.from_packages = load_packaged_choices
