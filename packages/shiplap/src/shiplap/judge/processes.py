"""The sandboxed processes of one judgement: those of the candidate, of the reference, and of the compiled reference."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from shiplap.errors import ShiplapError, error
from shiplap.judge.checks import JudgeSession
from shiplap.judge.library_imports import imports_from_package, library_modules
from shiplap.judge.target import JudgeTarget
from shiplap.judge.variants import InputForm
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import MachineLack, TargetProcess
from shiplap.sandbox.device_memory import device_driver
from shiplap.sandbox.load_candidate import added_folders
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.request_errors import ProcessEnded, Timeout
from shiplap.sandbox.source_scan import gather_sources
from shiplap.sandbox.supervisor import SandboxedProcess, SandboxLauncher
from shiplap.torch_private.dynamo import VECTOR_MODULE

DECLARATIONS = "shiplap.dispatch"
BUILDING_S = 120.0  # seconds for which programs such as compilers may run while the candidate is imported
PREPARING_S = 300.0  # seconds in which the launcher has to import what a candidate uses of torch
COMPILING_SHARE = 0.5  # share of the remaining time for torch.compile of the reference


class _BuildingClock:
    """The time in which programs that a candidate has started run while it is imported. It does not count for the
    judgement, since a compiler takes half a minute for the headers of torch.
    """

    def __init__(self, prisoner: SandboxedProcess) -> None:
        """Start for the process ``prisoner``, whose limit on a request is raised by the time that does not count."""
        self._prisoner, self._bounds = prisoner, prisoner.bounds
        self._seen, self.seconds = 0.0, 0.0

    def __call__(self, waited: float) -> None:
        """Look whether such a program runs, ``waited`` seconds after the request. Do not count the time since the last
        look if it does, up to ``BUILDING_S`` in all.
        """
        since, self._seen = waited - self._seen, waited
        if self.seconds + since <= BUILDING_S and self._prisoner.strays():
            self.seconds += since
            self._prisoner.until += since
            self._prisoner.bounds = replace(self._bounds, seconds=self._bounds.seconds + self.seconds)

    def finish(self, case: JudgeSession) -> None:
        """Grant the time to the judgement ``case``, and set the limit on a request back."""
        self._prisoner.bounds = self._bounds
        if self.seconds:
            self._prisoner.until -= self.seconds  # which is granted to all processes
            case.grant(self.seconds)
            case.clock.note_building(self.seconds)


class JudgedProcesses:
    """The processes in which the candidate and the reference of one judgement are loaded. They end when the judgement's
    stack of contexts is closed.

    The reference runs in a process like that of the candidate, so that both have the same conditions. A process needs
    a second or more to begin with a GPU, and a candidate may compile while it is imported. Threads therefore load both
    beside what the judgement does next.

    Attributes:
        missing: the facilities of the sandbox that are not in force for the candidate, each with the reason.
    """

    def __init__(self, case: JudgeSession, launcher: SandboxLauncher, stack: ExitStack) -> None:
        """Start a process for the candidate, and load it in a thread. With a GPU, the same is done for the reference.
        Without one, ``reference`` does that at its first call, since a refused candidate needs no process of the
        reference. ``launcher`` forks the processes, which end when ``stack`` is closed.

        Raise ``SL617`` if a process does not start, and ``Timeout`` if the time of the judgement is over. If CUDA is
        not initialized in this process, wait until the candidate is loaded, and raise the errors of ``candidate``.
        """
        self._case, self._launcher, self._stack = case, launcher, stack
        self._reference: TargetProcess | None = None
        self._modules = library_modules(case.candidate.file, case.reference.file)
        if case.options.device != "cpu":  # whose code needs no vector instructions
            self._modules = [module for module in self._modules if module != VECTOR_MODULE]
        # Its functions refer to this object, which would keep the reference and its inputs.
        stack.callback(vars(self).clear)
        # Memory of a process is unmapped once no thread uses it: killed processes end the threads.
        self._ends = stack.enter_context(ExitStack())
        self._pool = stack.enter_context(ThreadPoolExecutor(2, "shiplap judge"))
        witness = self._start(case.candidate)
        self.missing = witness.prisoner.missing
        if case.options.device != "cpu":
            if torch.cuda.is_initialized():
                device_driver()  # made once, before both threads need it
            twin = self._start(case.reference)
            self._twin: Callable[[], TargetProcess] = self._pool.submit(self._load_reference, twin).result
        else:
            self._twin = lambda: self._load_reference(self._start(case.reference))
        self._building: _BuildingClock | None = _BuildingClock(witness.prisoner)
        self._witness = self._pool.submit(self._load_candidate, witness, self._building)
        if case.options.device != "cpu" and not torch.cuda.is_initialized():
            self.candidate()  # of another device it is not known yet whether anything can run there

    def candidate(self) -> TargetProcess:
        """Return the process of the candidate, once the candidate is loaded. Raise ``CandidateError`` if that fails, or
        if the import of the candidate has changed the interpreter.
        """
        try:
            return self._witness.result()
        finally:
            building, self._building = self._building, None
            if building is not None:
                building.finish(self._case)

    def reference(self) -> TargetProcess:
        """Return the process of the reference, with the parameters that the judgement uses at the first call. Raise
        ``CandidateError`` if the reference cannot be loaded in a sandbox.
        """
        if self._reference is None:
            self._reference = self._twin()
            # Other parameters may have been drawn since the process has got the first ones.
            self._reference.renew(self._case.subject.state)
        return self._reference

    def start_compiled(self, timed: Sequence[InputForm]) -> TargetProcess:
        """Start a process that runs the reference under ``torch.compile``, and return it. One call with each of
        ``timed``, the forms of inputs that will be timed, has already compiled it.
        """
        case, made = self._case, self._start(self._case.reference)
        self._load_reference(made, compiled=True)
        made.prisoner.until = case.budget.time_of_share(COMPILING_SHARE)
        for form in timed:
            made.call(case.problem.draw(form))
        made.prisoner.until = case.budget.last
        return made

    def _load_candidate(self, witness: TargetProcess, building: _BuildingClock) -> TargetProcess:
        """Load the candidate into the process ``witness`` and return that process. ``building`` is the clock of the
        programs that it starts. Raise ``CandidateError`` if the candidate cannot be loaded, or if its import has
        changed the interpreter.
        """
        self._load(witness, self._case.candidate, "function", building=building)
        witness.check_interpreter()
        return witness

    def _load_reference(self, twin: TargetProcess, *, compiled: bool = False) -> TargetProcess:
        """Load the reference into the process ``twin`` and return that process. If ``compiled`` is true, the reference
        is compiled with ``torch.compile``.
        """
        return self._load(twin, self._case.reference, self._case.subject.kind, compiled=compiled)

    def _start(self, target: JudgeTarget) -> TargetProcess:
        """Start a sandboxed process for ``target``, which is not loaded yet, and return it. Raise ``SL617`` if the
        process does not start.
        """
        case, folder = self._case, str(Path(target.file).parent) if target.file else ""
        with case.granted_time():
            self._import_libraries()
        try:
            if case.subject.kind == "reference":  # of a declared op, which all processes import
                self._launcher.preload([DECLARATIONS], case.budget.last)
            prisoner = self._launcher.start(
                [folder] if folder else [],
                case.options.bounds,
                hidden=_hidden_places(case, target),
                # A device is opened to the sandbox only if the arguments lie on it.
                device=case.options.device != "cpu",
                until=case.budget.last,
            )
        except Timeout:
            raise
        except ProcessEnded as e:
            if time.monotonic() >= case.budget.last:
                raise Timeout(str(e)) from None
            raise not_started(e) from None
        witness = TargetProcess(prisoner)
        self._stack.callback(prisoner.kill)
        self._ends.callback(witness.end)
        case.clock.prisoners.append(prisoner)
        return witness

    def _import_libraries(self) -> None:
        """Import in the launcher what the candidate will import of torch and Triton. Raise ``MachineLack`` if that
        takes too long, and ``SL617`` if the launcher ends.
        """
        try:
            self._launcher.import_libraries(self._modules, time.monotonic() + PREPARING_S)
        except Timeout:
            named = ", ".join(self._modules)
            raise MachineLack(f"the import of {named} takes longer than {PREPARING_S:g} s") from None
        except ProcessEnded as e:
            raise not_started(e) from None

    def _load(
        self,
        witness: TargetProcess,
        target: JudgeTarget,
        kind: str,
        *,
        compiled: bool = False,
        building: _BuildingClock | None = None,
    ) -> TargetProcess:
        """Load ``target`` into the sandboxed process ``witness``, and return that process.

        ``kind`` says how the target is called, such as ``"function"`` or ``"reference"`` of a declared op. If
        ``compiled`` is true, the target is compiled with ``torch.compile``. ``building`` is the clock of programs whose
        time does not count. Raise ``CandidateError`` if the target cannot be loaded.
        """
        case = self._case
        if case.options.device != "cpu":
            witness.check_device(case.options.device)
        # Shared memory: tensors are not copied through a pipe.
        arena = ArgumentArena()
        message = LoadTarget(
            target.home,
            list(target.names),
            kind,
            [p for p in sys.path if p],
            case.subject.seed,
            arena.pack(list(case.subject.init)),
            arena.pack({k: v.to(case.options.device) for k, v in case.subject.state.items()}),
            compile=compiled,
            thorough=target is case.candidate,
        )
        witness.load(message, arena, building)
        return witness


def not_started(e: Exception) -> ShiplapError:
    """Return the error ``SL617`` for a sandboxed process or a launcher that does not start, or ends before it serves a
    request, because of ``e``.
    """
    return error("SL617", where="judge", got=str(e), expected="a process that starts")


def _hidden_places(case: JudgeSession, target: JudgeTarget) -> list[str]:
    """Return the folders and files that the process of ``target`` must not read. The list is empty for the reference.

    For the candidate they are the folders of compiled modules beside its sources, since Python would run what is there
    in place of the sources that this process has read. The folder of the reference is hidden as well, also inside the
    folder of the candidate, unless somebody else than Shiplap has put it on ``sys.path``. If the candidate lies in that
    folder itself, and it is no package, or if the candidate imports a module there as part of a package, the file of
    the reference alone is hidden.
    """
    if target is not case.candidate:
        return []
    file, shown = case.reference.file, {place for place in sys.path if place} - added_folders
    folder = str(Path(file).parent) if file else ""
    sources = [*gather_sources(target.file)] if target.file else []
    places: list[str] = []
    if folder and folder not in shown and file != target.file:
        # From there the reference could be imported, since a sandboxed process may ask for the date of any file.
        # The package of both may import the reference when it is imported itself.
        is_beside = bool(target.file) and folder == str(Path(target.file).parent)
        is_alone = is_beside and not os.path.exists(f"{folder}/__init__.py")
        sources += [Path(file)]
        places += [file] if is_alone or imports_from_package(target.file, folder, shown) else [folder]
    places += [str(source.parent / "__pycache__") for source in sources]
    return [*dict.fromkeys(name for place in places for name in (place, os.path.realpath(place)))]
