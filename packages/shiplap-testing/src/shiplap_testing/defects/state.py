"""Right in a first call of a fresh process: settings and random numbers of others, what earlier calls left, threads."""

import os
import random
from functools import partial

import torch

from shiplap_testing.defects.declared import doubled
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.witness import keeps_state, randn

state = partial(add, "state")


def _before(action=None):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel calls ``action(x)`` and then
    writes ``2 * x`` to ``out``. If ``action`` is None, nothing is called, and there is no defect. An action that
    changes a setting of the process is a defect on purpose.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It calls ``action(x)`` (argument of ``_before``), if there
        is an action, and writes ``2 * x`` to ``out``.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Call ``action(x)`` (argument of ``_before``) if there is an action, and write ``2 * x`` to ``out``."""
            if action is not None:
                action(x)
            torch.mul(x, 2, out=out)

    return bind


def _setting(name, why, action):
    """Register the planted defect ``name``, a kernel of the op ``doubled`` that calls ``action(x)``. The action changes
    a setting of the process. ``why`` is the reason why this is a defect. An op is right if ``keeps_state`` finds the
    settings unchanged after a call.
    """
    state(name, why, of(doubled, _before(action)), of(doubled, _before()), keeps_state(lambda: (randn(2, 3),)))


_setting(
    "default dtype left at float64",
    "tables are computed in float64, and the default stays",
    lambda x: torch.set_default_dtype(torch.float64),
)
_setting(
    "random generator seeded",
    "to be reproducible, the kernel seeds the generator of the whole process",
    lambda x: torch.manual_seed(0),
)
_setting(
    "random numbers consumed",
    "a pivot is drawn from the global generator: everything after it gets other numbers",
    lambda x: torch.randint(0, 10, ()),
)
_setting(
    "Python's random numbers seeded",
    "the augmentations of the caller repeat",
    lambda x: random.seed(0),
)
_setting(
    "number of threads left at one",
    "the kernel has threads of its own, and leaves torch with one",
    lambda x: torch.set_num_threads(1),
)
_setting(
    "gradients left off",
    "grad mode is switched by hand, and not back",
    lambda x: torch.set_grad_enabled(False),
)
_setting(
    "denormals left off",
    "the flag is one of the processor: others compute without denormals from now on",
    lambda x: torch.set_flush_denormal(True),
)
_setting(
    "precision of products left at medium",
    "a setting of the whole process, for the product of one kernel",
    lambda x: torch.set_float32_matmul_precision("medium"),
)
_setting(
    "deterministic algorithms left on",
    "what has none raises from now on",
    lambda x: torch.use_deterministic_algorithms(True),
)


def _keeping(limit):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out`` and
    keeps copies of the last ``limit`` results in the list ``op.history``. If ``limit`` is 0, there is no defect. If it
    is large, there is a defect on purpose: memory grows with each call.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). It writes ``2 * x`` to ``out`` and keeps
        copies of the last ``limit`` (argument of ``_keeping``) results in the list ``op.history``. If ``limit`` is 0,
        there is no defect. If it is large, there is a defect on purpose: memory grows with each call.
        """
        history = []

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. Append a copy to the list ``history``, and drop all but the last ``limit``
            (argument of ``_keeping``) copies from it.
            """
            torch.mul(x, 2, out=out)
            history.append(out.clone())
            # With a limit of zero nothing is kept.
            del history[: len(history) - limit]

        op.history = history

    return bind


def _bounded(op):
    """Return whether fewer than ten results are kept in ``op.history`` after 50 calls of ``op``."""
    for _ in range(50):
        op(torch.ones(2, 3))
    return len(op.history) < 10


state(
    "results that are kept for ever",
    "a history for debugging, which grows with each call",
    of(doubled, _keeping(1 << 62)),
    of(doubled, _keeping(0)),
    _bounded,
)


def _opening(close_it):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel opens a file in each call. If
    ``close_it`` is true, there is no defect. If it is false, there is a defect on purpose: the file is not closed.
    """

    def open_log(x):
        """Open the null device. If ``close_it`` (argument of ``_opening``) is true, there is no defect. If it is false,
        there is a defect on purpose: the file stays open.
        """
        handle = os.open(os.devnull, os.O_WRONLY)
        if close_it:
            os.close(handle)

    return _before(open_log)


def _files(op):
    """Call ``op`` 20 times. Return whether the process has fewer than ten more open files afterwards than before."""
    # Linux lists the open files of a process there.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        op(torch.ones(2, 3))
    # Other parts of the process may open some files in the meantime.
    return len(os.listdir("/proc/self/fd")) < before + 10


state(
    "a file opened in each call",
    "and never closed: the process ends at its limit of open files",
    of(doubled, _opening(False)),
    of(doubled, _opening(True)),
    _files,
)
