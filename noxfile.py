"""What takes longer than the suite may: other releases of torch and Python, wheels, sanitizers, fuzzing.

``nox --list`` names all sessions. Those of a release, and of the matrix:

``nox -s matrix``
    the whole suite on each supported torch release (one: ``nox -s "matrix(torch='2.15.0')"``), with the wheels of all
    packages, on Python 3.11. Each writes its row of ``torch_private/verified.json``, which is committed. This session
    and the next two write what became of the tests into ``tests/matrix.json``, which ``docs/stability.md`` shows.
``nox -s core``
    the tests of declarations, calls, kernels and the audit on each of these releases and of ALSO with each Python of
    PYTHONS (one: ``nox -s "core-3.13(torch='2.15.0')"``). A Python that is not installed is skipped, unless nox is
    called with ``--error-on-missing-interpreters``. ``CXX=clang++`` takes Clang.
``nox -s oldest``
    the same with the lowest versions of torch and NumPy that are supported.
``nox -s wheels``
    the tests of each package alone (``nox -s "wheels(package='shiplap-dense')" -- -k micro``), against wheels of it and
    of what it requires; third-party packages are those of the environment that runs nox, so nothing is downloaded.
``nox -s dist``
    source distributions and wheels as they are uploaded, with native bindings, in ``dist/``. ``nox -s release-check``
    builds and checks them, and imports them in an empty environment. ``nox -s manylinux`` builds the compiled ones in
    manylinux images, which needs Docker.
``nox -s distributions``
    builds of the families too, without torch, and what is in them.
``nox -s long``
    every case of the tests of which ``make test`` runs a sample, with values that differ from run to run.
``nox -s vllm``
    the plugin against vLLM's own wheel.

**CPU builds of torch.** On x86-64 the default index has the CUDA build of a release, which brings gigabytes of CUDA
libraries. An index of CPU builds has the same release as a *local* version, such as 2.15.0+cpu. Where pip finds both,
it takes the local version, also for ``torch==2.15.0``. So name such an index in ``PIP_EXTRA_INDEX_URL``, or a folder
with wheels in ``PIP_FIND_LINKS``. On arm64 the plain release is a CPU build.
Without such an index the CUDA build serves as well, without a GPU: an environment of it has about 6 GB.
"""

import os
import platform
import runpy
import shutil
from pathlib import Path
from random import randrange

import nox

nox.options.sessions = ["matrix"]

# The releases of torch that the suite runs on, from the one place that lists them.
VERSIONS = runpy.run_path("packages/shiplap/src/shiplap/torch_private/versions.py")
RELEASES: tuple[str, ...] = VERSIONS["RELEASES"]
ALSO: tuple[str, ...] = VERSIONS["ALSO"]  # releases on which ``core`` runs, too
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST = {"torch": RELEASES[0], "numpy": "1.26.4"}
# The tests that depend on torch, Python, NumPy and the compiler: declarations, calls, kernels, audit.
CORE = ("audit", "codegen", "declare", "dispatch", "kernels", "plan", "sampling", "torch_private")
CELLS = ("python", "-m", "shiplap_testing.cells")  # pytest, which writes what became of the tests into the table
REQUIREMENTS = Path(".github", "requirements")  # with hashes; `nox -s requirements` writes them
FIRST = ("shiplap-headers", "shiplap")  # what all others require, in the order in which wheels are built
OTHERS = sorted({folder.name for folder in Path("packages").iterdir()} - {*FIRST, "shiplap-testing"})
PACKAGES = (*FIRST, *OTHERS)
COMPILED = tuple(name for name in PACKAGES if Path("packages", name, "CMakeLists.txt").is_file())
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
    extras = {"shiplap_sparse3d": "[demo,survey]", "shiplap_backend": "[openvino]", "shiplap_testing": "[all]"}
    named = [f"{wheel}{extras.get(Path(wheel).name.partition('-')[0], '')}" for wheel in wheels]
    session.install("-c", pins(session, "torch", "triton"), f"torch=={torch}", *named)
    session.run(
        "python", "-m", "shiplap_testing.capabilities", env=in_repository()
    )  # first: tests take the way it says
    for marks in ("not device", "device"):
        session.run(*CELLS, "-m", marks, *session.posargs, env=in_repository())


def run_core(session: nox.Session, **versions: str) -> None:
    """Run the tests of CORE with these versions, everything else as pinned."""
    wheels = wheels_of(session, *FIRST, "shiplap-testing")
    exact = [f"{name}=={version}" for name, version in versions.items()]
    session.install("-c", pins(session, "triton", *versions), *exact, *wheels)
    tests = [f"packages/shiplap/tests/{room}" for room in CORE]
    call = (*CELLS, "-m", "not device and not long and not docs", *tests, *session.posargs)
    session.run(*call, env={"SHIPLAP_TEST_UNOPTIMIZED": "1", **in_repository()})


@nox.session(python=PYTHONS)
@nox.parametrize("torch", sorted({*RELEASES, *ALSO}))
def core(session: nox.Session, torch: str) -> None:
    """Run the tests of declarations, calls, kernels and the audit on one Python and one torch release."""
    run_core(session, torch=torch)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the same tests with the lowest supported versions of torch and NumPy."""
    run_core(session, **OLDEST)


# --- distributions ----------------------------------------------------------------------------------------------------


def install_pinned(session: nox.Session, name: str) -> None:
    """Install the tools of one file of requirements, each with its hash."""
    session.install("--require-hashes", "-r", str(REQUIREMENTS / f"{name}.txt"))


def older_target(session: nox.Session) -> dict[str, str]:
    """The environment of builds whose wheels run on systems with an older C library than this one, where that can be.

    A compiler that ``CXX`` names is kept, and so is that of other machines than x86-64 Linux.
    """
    gcc = shutil.which("g++") is not None and "CXX" not in os.environ
    if not gcc or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return {}
    folder = Path(session.create_tmp()).absolute() / "older"
    session.run("python", "tools/older_glibc.py", str(folder))
    return {"CXX": str(folder / "c++")}


def build_all(session: nox.Session) -> Path:
    """Build every published distribution into ``dist/``, the compiled ones with native bindings."""
    install_pinned(session, "release")
    dist, target = Path("dist").absolute(), older_target(session)
    session.run("python", "tools/distributions.py", "build", "--output", str(dist), env=target)
    # Bindings are compiled by the shiplap that is released with them; those of Triton kernels need Triton's signatures.
    session.install("-c", pins(session), "--find-links", str(dist), "torch", "numpy", "triton", "shiplap")
    session.run("python", "tools/distributions.py", "repair", "--output", str(dist), env=target)
    return dist


@nox.session
def dist(session: nox.Session) -> None:
    """Build source distributions and wheels into ``dist/``, the compiled ones with native bindings."""
    build_all(session)


def check_all(session: nox.Session, folder: str) -> None:
    """Check the distributions in a folder, as an index does and as a user would have to."""
    install_pinned(session, "release")
    session.install("-c", pins(session), "--find-links", folder, "torch", "numpy", "shiplap")
    session.run("python", "tools/distributions.py", "check", "--output", folder)


def fresh_environment(session: nox.Session, folder: str, *constraints: str) -> str:
    """Install every distribution in a folder into an environment that has nothing else: its Python."""
    fresh = Path(session.create_tmp()).absolute() / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    python = str(fresh / "bin" / "python")
    call = (python, "-m", "pip", "install", "--quiet", *constraints, "--find-links", folder, "torch", "numpy")
    session.run(*call, *PACKAGES[1:], "shiplap-sparse3d[demo]", external=True)
    return python


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """Build what a release uploads, check it, and try it in an environment that has nothing else."""
    folder = str(build_all(session))
    check_all(session, folder)
    python = fresh_environment(session, folder, "-c", pins(session))
    session.run(python, "-I", "tools/try_installed.py", *PACKAGES[1:], external=True)


@nox.session(name="check-dist")
def check_dist(session: nox.Session) -> None:
    """Check the distributions that lie in ``dist/`` already, wherever they were built."""
    check_all(session, "dist")


@nox.session(name="try-dist")
def try_dist(session: nox.Session) -> None:
    """Try the distributions in ``dist/`` with the newest torch, and run the demonstration."""
    python = fresh_environment(session, "dist")
    session.run(python, "-I", "tools/try_installed.py", *PACKAGES[1:], external=True)
    report = str(Path(session.create_tmp()).absolute() / "report")
    session.run(python, "-I", "-m", "shiplap.cli", "demo", "--quick", "--output", report, external=True)


@nox.session
def pure(session: nox.Session) -> None:
    """Build the wheels for every platform and all source distributions into ``dist/``."""
    install_pinned(session, "release")
    session.run("python", "tools/distributions.py", "build", "--output", "dist", *session.posargs)
    for wheel in Path("dist").glob("*-linux_*.whl"):  # nox -s manylinux builds the compiled ones
        wheel.unlink()


@nox.session
def manylinux(session: nox.Session) -> None:
    """Build the wheels with kernels in manylinux images (needs Docker): ``[tool.cibuildwheel]`` says how."""
    install_pinned(session, "wheels")
    for package in COMPILED:
        config = ("--config-file", str(Path("pyproject.toml").absolute()), "--output-dir", "dist")
        session.run("cibuildwheel", *config, "--platform", "linux", *session.posargs, f"packages/{package}")


@nox.session
def sbom(session: nox.Session) -> None:
    """Write ``build/sbom.cdx.json``: what an environment with every distribution in ``dist/`` holds."""
    python = fresh_environment(session, "dist", "-c", pins(session))
    install_pinned(session, "sbom")
    Path("build").mkdir(exist_ok=True)
    session.run("cyclonedx-py", "environment", "--output-reproducible", "-o", "build/sbom.cdx.json", python)


@nox.session
def workflows(session: nox.Session) -> None:
    """Check the workflows of the repository: their syntax, and what an attacker could use."""
    install_pinned(session, "workflows")
    session.run("actionlint")
    session.run("zizmor", "--offline", ".github", "action.yml")  # which others run in their workflows


@nox.session
def requirements(session: nox.Session) -> None:
    """Renew the requirements with hashes of the tools that workflows install."""
    session.install("uv")
    for file in sorted(REQUIREMENTS.glob("*.in")):
        call = ("uv", "pip", "compile", "--quiet", "--upgrade", "--generate-hashes", "--no-annotate", "--no-header")
        session.run(*call, "--python-version", "3.11", str(file), "-o", str(file.with_suffix(".txt")))


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
    """Run the cases of which ``make test`` runs a sample: those that are marked ``long``. Each run draws other values,
    by a number that its command shows.
    """
    seed = [] if any("--hypothesis-seed" in a for a in session.posargs) else [f"--hypothesis-seed={randrange(2**32)}"]
    for marks in ("long and not device", "long and device"):
        session.run("python", "-m", "pytest", "-q", "-m", marks, *seed, *session.posargs, success_codes=[0, 5])


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
def lacks(session: nox.Session) -> None:
    """Judge a right kernel in 40 lacks of memory, disk, files or processes, and 60 kills: ``nox -s lacks -- 40 60``."""
    counts = (*session.posargs, *("40", "60", "17")[len(session.posargs) :])
    session.run("python", "-P", "packages/shiplap/tests/sandbox/lacks.py", *counts)


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
