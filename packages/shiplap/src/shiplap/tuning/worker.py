"""``python -m shiplap.tuning.worker FD``: a process that verifies and times candidates, so that a crash ends only it.

Requests are JSON lines on stdin, and replies are JSON lines on the original stdout. FD is a file of 16 bytes in shared
memory, which hold the index of the running candidate and its start time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shiplap.declare.config import Config
from shiplap.dispatch import Op, registry
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import error_line
from shiplap.tuning.allowed import WORKER
from shiplap.tuning.bench import BEAT, LocalBench
from shiplap.tuning.candidate import Candidate, kernel_candidates
from shiplap.tuning.inputs import Inputs, draw_inputs
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.verify import is_device_lost

PR_SET_PDEATHSIG = 1


class TuningWorker:
    """The server of the requests of one task at a time."""

    def __init__(self, beat: mmap.mmap) -> None:
        self._beat = beat
        self._bench: LocalBench | None = None
        self._tasks: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "compile": self._compile,
            "quiet": self._quiet,
            "verify": self._verify,
            "race": self._race,
        }

    def at(self, index: int) -> None:
        BEAT.pack_into(self._beat, 0, index, time.monotonic())

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one request. An exception becomes a reply with ``error``."""
        try:
            return self._tasks[asked["do"]](asked)
        except Exception as e:
            index, _ = BEAT.unpack_from(self._beat, 0)
            return {"error": error_line(e), "fatal": is_device_lost(e), "index": index}
        finally:
            self.at(-1)

    def _open(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        op = import_op(asked)
        if op.identity != asked["identity"]:
            # A kernel that was attached by the caller's own code is missing here, and its times would be those of
            # another op.
            return {"error": f"{op.spec.name} differs there: kernels attached elsewhere, or changed files"}
        torch.set_num_threads(asked["threads"])
        drawn = draw_inputs(op, SampleRecipe.parse(asked["recipe"]), asked["device"])
        candidates = candidates_by_provider(asked["provider"], op, drawn)
        listed = {(c.kernel, c.config): c for c in candidates}
        wanted = [(c["kernel"], Config.of(c["config"])) for c in asked["candidates"]]
        if missing := [w for w in wanted if w not in listed]:
            return {"error": f"candidate {missing[0]} is unknown here"}
        self._bench = LocalBench(drawn, [listed[w] for w in wanted], asked["capture"], self.at)
        return {"ok": True}

    def _compile(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        return {"begun": self._bench.compile(asked["indices"])}

    def _quiet(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        self._bench.quiet()
        return {}

    def _verify(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        return asdict(self._bench.verify(asked["index"]))

    def _race(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        timings, failed = self._bench.race(asked["indices"], RacePlan(**asked["plan"]))
        return {
            "timings": {str(i): asdict(t) for i, t in timings.items()},
            "failed": {str(i): why for i, why in failed.items()},
        }


def candidates_by_provider(provider: str, op: Op, drawn: Inputs) -> Sequence[Candidate]:
    """Return the candidates by the same function as in the parent. With ``""`` they are the op's own kernels."""
    if not provider:
        return kernel_candidates(op, drawn.device, drawn.call.env)
    module, _, name = provider.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    offered: Sequence[Candidate] = value(op, drawn)
    return offered


def import_op(asked: Mapping[str, Any]) -> Op:
    """Import the modules that declare the op and its kernels, and return the op. LookupError if they did not declare
    it.
    """
    sys.path[:] = asked["path"]
    problem: Exception | None = None
    for module in asked["modules"]:
        try:
            importlib.import_module(module)
        except Exception as e:  # it may fail after the declaration, for example because it tunes
            problem = e
    if registry.find_declared_op(asked["op"]) is None and asked["file"]:
        try:
            _import_file(Path(asked["file"]))
        except Exception as e:
            problem = e
    op = registry.find_declared_op(asked["op"])
    if op is None:
        raise LookupError(f"no {asked['op']} in {asked['modules'] or asked['file']}") from problem
    return op


def _import_file(path: Path) -> None:
    """Import a file under a name that is not ``__main__``, so that code behind that guard does not run."""
    name = f"_shiplap_tuned_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def serve_tuning_requests() -> None:
    """Serve requests until stdin ends, the parent dies, or the device is lost."""
    os.environ[WORKER] = str(os.getpid())
    with contextlib.suppress(OSError, AttributeError):
        # A parent that is killed cannot end its worker, and a worker that hangs in a kernel does not notice the end of
        # stdin.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of kernels must not mix with replies
    worker = TuningWorker(mmap.mmap(int(sys.argv[1]), BEAT.size))
    for line in sys.stdin:
        reply = worker.answer(json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("fatal"):
            os._exit(0)  # a context that is lost cannot even be torn down in order


if __name__ == "__main__":
    serve_tuning_requests()
