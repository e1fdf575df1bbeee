"""A verdict as an in-toto statement."""

import hashlib
import json
import math
from dataclasses import replace

from shiplap.judge import JudgeResult, Timed
from shiplap.judge.target import write_judge_statement

ACCEPTED = JudgeResult("ref.py:f", "fast.py:g", (), (), ("time",), (), 12, 1.5)


def test_a_statement_has_the_verdict_and_the_digests_of_both_files(tmp_path):
    (tmp_path / "ref.py").write_text("def f(x): return x\n")
    (tmp_path / "fast.py").write_text("from helper import g\n")
    (tmp_path / "helper.py").write_text("def g(x): return x\n")
    path = tmp_path / "verdict.json"
    timed = Timed("x", 1.0, 2.0, None, 0.1, math.inf, 3)
    result = replace(ACCEPTED, timings=(timed,))
    write_judge_statement(path, result, f"{tmp_path}/ref.py:f", f"{tmp_path}/fast.py:g")
    written = json.loads(path.read_text())
    assert written["_type"] == "https://in-toto.io/Statement/v1"
    assert [(s["name"], s["digest"]["sha256"]) for s in written["subject"]] == [
        (name, hashlib.sha256((tmp_path / file).read_bytes()).hexdigest())
        for name, file in (
            ("candidate/fast.py", "fast.py"),
            ("candidate/helper.py", "helper.py"),
            ("reference/ref.py", "ref.py"),
        )
    ]
    predicate = written["predicate"]
    assert (predicate["verdict"], predicate["calls"]) == ("accepted", 12)
    assert predicate["timings"][0]["light"] is None  # JSON has no infinity
    assert "torch" in predicate["facts"]
