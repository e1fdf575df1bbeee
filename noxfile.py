"""The supported torch releases: ``nox -s matrix``, or one of them: ``nox -s "matrix(torch='2.15.0')"``.

Each session installs the wheel, not the source tree, so it also tests what users get. Point pip at an index with CPU
builds of torch (``PIP_EXTRA_INDEX_URL``), or each session downloads the CUDA libraries.
"""

import os
from pathlib import Path

import nox

nox.options.sessions = ["matrix"]


@nox.session
@nox.parametrize("torch", ["2.11.0", "2.13.0", "2.15.0"])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests on one torch release, everything else as pinned."""
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    session.install("-c", str(constraints), f"torch=={torch}", ".[dev,demo]")
    session.run("pytest", "-q", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Hold the plugin to vLLM's own wheel (several gigabytes with all that it wants)."""
    session.install("vllm==0.33.0", ".", "pytest", "typer")
    session.run("pytest", "-q", "-m", "vllm", "tests/kernels/slidesparse/test_vllm.py", env={"SHIPLAP_TEST_VLLM": "1"})


@nox.session(name="sanitize-threads", venv_backend="none")
def sanitize_threads(session: nox.Session) -> None:
    """Run the C++ of pool and tables under the thread sanitizer (``CXX`` says by which compiler)."""
    program = Path(session.create_tmp()).resolve() / "threads"
    flags = ("-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread")
    include = "packages/shiplap-headers/src/shiplap_headers/include"
    compiler = os.environ.get("CXX", "c++")
    session.run(compiler, *flags, "-I", include, "tests/sanitize/threads.cpp", "-o", str(program), external=True)
    session.run(str(program), external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Mutate tables, passports and records: ``nox -s fuzz -- 100000`` rounds (by default 20000)."""
    rounds = session.posargs[0] if session.posargs else "20000"
    call = ("-q", "packages/shiplap/tests/trust/test_parse.py", "-k", "mutated")
    session.run("python", "-m", "pytest", *call, env={"SHIPLAP_TEST_FUZZ": rounds}, external=True)
