"""A child process of a crossed run: declares a batch of cases, calls them, and writes a line for each thing it does.

``python -m shiplap_testing.crossed.child FOLDER DEVICE``: cases come as a JSON list on standard input. Lines of JSON go
to the file ``results`` in the folder: before each way of a call, so that a crash or a hang is known by its last line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Read op declarations from standard input as JSON, call their ops, and return the exit status 0.

    The first argument of the command line is a folder, and the second the device. Each event is written to the file
    ``results`` in the folder, as a line of JSON.
    """
    folder, device = Path(sys.argv[1]), sys.argv[2]
    given = json.load(sys.stdin)
    os.environ.setdefault("SHIPLAP_NATIVE", "0")  # bindings are built when a case asks for them, and only then
    from shiplap_testing.crossed.declared import Declared

    cases = [Declared.from_json(case) for case in given["cases"]]
    skipped = {(seed, way) for seed, way in given.get("skip", ())}
    with (folder / "results").open("a", encoding="utf-8") as lines:
        begun = [time.monotonic()]

        def tell(**fields: Any) -> None:
            """Write ``fields``, an event of the run, as a line of JSON to the file of results. If one of them is
            ``outcome``, add the seconds since the event before.
            """
            if "outcome" in fields:
                fields["seconds"] = round(time.monotonic() - begun[0], 2)
            begun[0] = time.monotonic()
            lines.write(json.dumps(fields) + "\n")
            lines.flush()

        run(cases, folder, device, skipped, tell)
    return 0


def run(
    cases: Any,
    folder: Path,
    device: str,
    skipped: set[tuple[int, str]],
    tell: Any,
    first: tuple[str, ...] = ("eager", "aot_eager"),
) -> None:
    """Declare the ops of the declarations ``cases`` with files in ``folder``, and call each of them on ``device``.

    An op is called in the ways ``first`` (such as ``eager``) and in those that its declaration names (such as
    ``vmap``). Pairs of a declaration's seed and a way in ``skipped`` are left out. ``tell`` is called with keyword
    arguments when a call of an op begins, and with the outcome when it ends.
    """
    import torch

    from shiplap.inductor.fusion_choice import watch_fusion_choices
    from shiplap_testing.crossed.declare import declare
    from shiplap_testing.crossed.packaged import packaged_results
    from shiplap_testing.crossed.ways import run_way

    # Many children run at a time.
    torch.set_num_threads(1)
    tell(begin="declare", seed=-1)
    made = declare(cases, folder, device)
    for case in cases:
        if case.seed in made.raised:
            tell(seed=case.seed, way="declare", outcome="raised", detail=made.raised[case.seed])
        elif case.seed in made.refused:
            tell(seed=case.seed, way="declare", outcome="refused", detail=made.refused[case.seed])
        elif case.seed in made.unbound:
            tell(seed=case.seed, way="declare", outcome="refused", detail=made.unbound[case.seed])
        elif case.seed in made.unwritten:
            tell(seed=case.seed, way="declare", outcome="unwritten", detail=made.unwritten[case.seed])
    packed = [
        c
        for c in cases
        if "packaged" in c.ways and c.seed in made.ops and c.seed not in {**made.refused, **made.unbound}
    ]
    choices: list[Any] = []
    for case in cases:
        for way in (*first, *case.ways) if case.seed in made.ops else ():
            if (case.seed, way) in skipped or way == "packaged":
                continue
            tell(begin=way, seed=case.seed)
            with watch_fusion_choices(choices.append):
                outcome, detail = run_way(way, made.ops[case.seed], case, device)
            by = served(case, made)
            if case.kernel == "template" and not (device == "cuda" or any(_is_template(c) for c in choices)):
                by = []
            choices.clear()
            tell(seed=case.seed, way=way, outcome=outcome, detail=detail, served=by)
        # A case with a package is whole after that, which comes last.
        if case not in packed:
            tell(seed=case.seed, way="whole", outcome="done")
    if packed:
        tell(begin="packaged", seed=packed[0].seed)
        for seed, outcome, detail in packaged_results(packed, made, folder, device):
            tell(seed=seed, way="packaged", outcome=outcome, detail=detail, served=["kernel", "binding"])
        for case in packed:
            tell(seed=case.seed, way="whole", outcome="done")
    tell(end=True)


def _is_template(choice: Any) -> bool:
    """Return whether the compiler chose one of the op's templates. ``choice`` is its decision about how to fuse a call
    of the op with the operations around it.
    """
    return any(v.status == "ok" and v.candidate == choice.chosen for v in choice.verdicts)


def served(case: Any, made: Any) -> list[str]:
    """Return those of the features ``kernel`` and ``binding`` of ``case`` that its calls test, as a list of these
    names.

    The list is empty if shiplap refused the kernel or none was written, since calls then run the reference. It has only
    ``kernel`` if shiplap refused the native binding. ``made`` says what was refused and what was not written.
    """
    if case.seed in made.unbound:
        return ["kernel"]
    return [] if case.seed in made.refused or case.seed in made.unwritten else ["kernel", "binding"]


if __name__ == "__main__":
    sys.exit(main())
