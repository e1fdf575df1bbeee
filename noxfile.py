"""What takes longer than the suite may: other torch releases, every package against its own wheels, vLLM.

``nox -s matrix``
    the suite on each supported torch release (one of them: ``nox -s "matrix(torch='2.13.0')"``), with the wheels of all
    packages. Each writes its row of ``torch_private/verified.json``, which is committed. Point pip at an index with CPU
    builds of torch (``PIP_EXTRA_INDEX_URL``), or each session downloads the CUDA libraries.
``nox -s wheels``
    the tests of each package alone (``nox -s "wheels(package='shiplap-dense')" -- -k micro``), against wheels of it and
    of what it requires; third-party packages are those of the environment that runs nox, so nothing is downloaded.
``nox -s distributions``
    builds of the families too, without torch, and what is in them.
``nox -s long``
    every case of the tests of which ``make test`` runs a sample.
``nox -s vllm``
    the plugin against vLLM's own wheel.
"""

import os
import runpy
from pathlib import Path

import nox

nox.options.sessions = ["matrix"]

# The releases of torch that the suite runs on, from the one place that lists them.
RELEASES: tuple[str, ...] = runpy.run_path("packages/shiplap/src/shiplap/torch_private/versions.py")["RELEASES"]
FIRST = ("shiplap-headers", "shiplap")  # what all others require, in the order in which wheels are built
OTHERS = sorted({folder.name for folder in Path("packages").iterdir()} - {*FIRST, "shiplap-testing"})
PACKAGES = (*FIRST, *OTHERS)
TESTED = PACKAGES[1:]  # the headers are tested by who compiles with them


def wheels_of(session: nox.Session, *packages: str) -> list[str]:
    """Build ``packages``, each in an environment that pip isolates: their wheels."""
    session.install("build")
    dist = Path(session.create_tmp()).absolute() / "dist"
    for package in packages:  # shiplap-headers is a build requirement of the families, and on no index yet
        session.run(
            *("python", "-m", "build", "--outdir", str(dist), f"packages/{package}"),
            env={"PIP_FIND_LINKS": str(dist)},
        )
    return [str(wheel) for wheel in sorted(dist.glob("*.whl"))]


def pins(session: nox.Session, *released: str) -> str:
    """The pinned versions, but for packages of which this session takes another release."""
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    path = Path(session.create_tmp()) / "constraints.txt"
    path.write_text("\n".join(line for line in lines if line.partition("==")[0] not in released), encoding="utf-8")
    return str(path)


def in_repository() -> dict[str, str]:
    """Where an installed shiplap-testing finds the tests, pages and benchmarks."""
    return {"SHIPLAP_TEST_ROOT": str(Path.cwd())}


@nox.session
@nox.parametrize("torch", RELEASES)
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests on one torch release, everything else as pinned, and write its row of the table of capabilities."""
    wheels = wheels_of(session, *PACKAGES, "shiplap-testing")
    extras = {"shiplap_sparse3d": "[demo]", "shiplap_backend": "[openvino]", "shiplap_testing": "[all]"}
    named = [f"{wheel}{extras.get(Path(wheel).name.partition('-')[0], '')}" for wheel in wheels]
    session.install("-c", pins(session, "torch", "triton"), f"torch=={torch}", *named)
    session.run(
        "python", "-m", "shiplap_testing.capabilities", env=in_repository()
    )  # first: tests take the way it says
    for marks in ("not device", "device"):
        session.run("python", "-m", "pytest", "-q", "-m", marks, *session.posargs, env=in_repository())


@nox.session(venv_backend="none")
@nox.parametrize("package", TESTED)
def wheels(session: nox.Session, package: str) -> None:
    """Run the tests of one package where none of ours is installed but it, what it requires and shiplap-testing."""
    session.run("python", "tools/wheels.py", package, *session.posargs)


@nox.session(venv_backend="none")
def distributions(session: nox.Session) -> None:
    """Build every distribution from its source distribution, and look into them."""
    session.run("python", "-m", "pytest", "-q", "tests/test_distributions.py", env={"SHIPLAP_TEST_WHEELS": "1"})


@nox.session
def vllm(session: nox.Session) -> None:
    """Hold the plugin to vLLM's own wheel (several gigabytes with all that it wants)."""
    wheels = wheels_of(session, "shiplap-headers", "shiplap", "shiplap-slidesparse", "shiplap-testing")
    session.install("vllm==0.33.0", *wheels)
    tests = "packages/shiplap-slidesparse/tests/slidesparse/test_vllm.py"
    session.run("python", "-m", "pytest", "-q", "-m", "vllm", tests, env={"SHIPLAP_TEST_VLLM": "1", **in_repository()})


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
def long(session: nox.Session) -> None:
    """Run the cases of which ``make test`` runs a sample: those that are marked ``long``."""
    for marks in ("long and not device", "long and device"):
        session.run("python", "-m", "pytest", "-q", "-m", marks, *session.posargs, success_codes=[0, 5])


@nox.session(venv_backend="none")
def audits(session: nox.Session) -> None:
    """Every check of the audit for every shipped op: about an hour on two cores."""
    files = [str(p) for p in sorted(Path("packages").glob("*/tests/*/test_audit.py"))]
    call = [".venv/bin/python", "-m", "pytest", "-q", *files, *session.posargs]
    session.run(*call, env={"SHIPLAP_TEST_AUDITS": "all"}, external=True)


@nox.session(venv_backend="none")
def alarms(session: nox.Session) -> None:
    """Judge torch's functions as kernels of themselves: 100 seeds, 3 of all checks (``nox -s alarms -- --seeds 5``)."""
    session.run("python", "tools/alarms.py", *session.posargs)


@nox.session(venv_backend="none")
def consumers(session: nox.Session) -> None:
    """Run networks of checkouts on the facades and beside PyPI's spconv: ``nox -s consumers -- FOLDER ...``."""
    session.run(".venv/bin/python", "tools/consumers.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Mutate the corpus of tables, records, metadata and marks: ``nox -s fuzz -- 1000000`` rounds in all."""
    rounds, seed = (*session.posargs, *("20000", "17")[len(session.posargs) :])[:2]
    call = ("python", "-m", "pytest", "-q", "tests/fuzz")
    session.run(*call, env={"SHIPLAP_TEST_FUZZ": rounds, "SHIPLAP_TEST_SEED": seed}, external=True)


@nox.session(venv_backend="none")
def storm(session: nox.Session) -> None:
    """Sixteen threads call one op while it is declared again, attached, tuned: ten minutes (``nox -s storm -- 60``)."""
    seconds = session.posargs[0] if session.posargs else "600"
    folder = Path(session.create_tmp()).resolve()
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    call = ("python", "packages/shiplap/tests/safe_io/storm.py", "everything", seconds, "16", str(folder))
    session.run(*call, env={"SHIPLAP_CACHE_DIR": str(folder / "cache"), "SHIPLAP_NATIVE": "1"})


@nox.session(name="storm-sanitized", venv_backend="none")
def storm_sanitized(session: nox.Session) -> None:
    """The same with bindings and kernels under the address sanitizer, for ten minutes or ``-- 60`` seconds."""
    session.run("python", "tools/sanitize.py", "storm", "--", session.posargs[0] if session.posargs else "600")


@nox.session(venv_backend="none")
def forks(session: nox.Session) -> None:
    """Fork children of a storm at random moments: 1,000 of them, or ``nox -s forks -- 100``."""
    count = session.posargs[0] if session.posargs else "1000"
    folder = Path(session.create_tmp()).resolve()
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    call = ("python", "packages/shiplap/tests/safe_io/forks.py", count, "16", str(folder), "17")
    session.run(*call, env={"SHIPLAP_CACHE_DIR": str(folder / "cache"), "SHIPLAP_NATIVE": "1"})


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Fail every call of the operating system once, with every error, in what is written to disk."""
    test = "packages/shiplap/tests/safe_io/test_faults.py"
    session.run("python", "-m", "pytest", "-q", test, *session.posargs, env={"SHIPLAP_TEST_FAULTS": "all"})


@nox.session(venv_backend="none")
def crossed(session: nox.Session) -> None:
    """Let declarations, kernels, bindings and ways of a call meet: ``nox -s crossed -- --count 5000 --jobs 2``."""
    call = (".venv/bin/python", "-m", "shiplap_testing.crossed", *session.posargs)
    session.run(*call, external=True)


@nox.session(venv_backend="none")
def hostile(session: nox.Session) -> None:
    """Call every public op and layer of the families wrongly, 100,000 times: ``nox -s hostile -- 400`` rounds an op."""
    rounds = session.posargs[0] if session.posargs else "400"
    test = "tests/families/test_hostile.py"
    session.run("python", "-m", "pytest", "-q", test, env={"SHIPLAP_TEST_HOSTILE": rounds})
