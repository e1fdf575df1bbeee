"""Compilers of make test: the same programs, without optimisation, and bindings find their header compiled."""

import os
import shutil
from pathlib import Path

import pytest

from shiplap_testing import compilers
from shiplap_testing.forked import python

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
SOURCE = """
#include "shiplap/native.h"
#ifdef __OPTIMIZE__
#error optimised
#endif
"""
USES = f"""
import os, shutil, subprocess, sys, torch
from pathlib import Path
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE
from shiplap_testing import compilers

folder = Path(os.environ[compilers.FOLDER])
assert Path(shutil.which("g++")).parent == Path(shutil.which("c++")).parent == folder
process = compilers.headers()
assert process is not None and process.wait() == 0
Path("a.cpp").write_text({SOURCE!r})
include = ["-I", str(INCLUDE), "-isystem", str(Path(torch.__file__).parent / "include")]
call = ["c++", "-o", "a.so", "a.cpp", *FLAGS, *include, "-H"]
done = subprocess.run(call, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
assert not shutil.which("ld.gold") or b".note.gnu.gold-version" in Path("a.so").read_bytes()
assert all(Path(os.environ[name]).parent.parent == compilers.USED for name in compilers.CACHES), "no user's cache"
print([line for line in done.stderr.splitlines() if line.startswith("! ")], folder)
"""


def asked(program: str, home: Path) -> list[str]:
    """The two words that a program prints which asks for such compilers."""
    without = os.pathsep.join(
        entry for entry in os.environ["PATH"].split(os.pathsep) if entry != os.environ.get(compilers.FOLDER)
    )
    env = {name: value for name, value in os.environ.items() if name != compilers.FOLDER}
    env |= {compilers.ASKED: "1", "PATH": without}
    begin = "import os; from shiplap_testing import compilers; os.environ['PATH'] = compilers.path()\n"
    done = python("-c", begin + program, env=env, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rsplit(" ", 1)


def test_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compilers.ASKED, raising=False)
    assert compilers.path() == os.environ["PATH"]


def test_what_asks_for_optimisation_gets_none_and_a_header_that_is_compiled(tmp_path: Path) -> None:
    used, folder = asked(USES, tmp_path)
    assert used == f"['! {folder}/include/shiplap/native.h.gch']"
    assert not Path(folder).exists(), "it goes with the process that made it"


def test_what_a_killed_run_leaves_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the compiled headers, which are large."""
    monkeypatch.setenv(compilers.ASKED, "1")
    monkeypatch.delenv(compilers.FOLDER, raising=False)
    program = (
        "import os; from pathlib import Path; from shiplap_testing import compilers; "
        f"compilers.USED = Path({str(tmp_path)!r}); compilers.path(); print(os.environ[compilers.FOLDER], flush=True)"
    )
    killed = python("-c", f"{program}; os.kill(os.getpid(), 9)")
    assert killed.returncode != 0
    folder = Path(killed.stdout.strip())
    assert folder.is_dir()
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert not folder.exists()


KERNEL = """
import os, shlex, subprocess
from pathlib import Path
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from shiplap_testing import compilers

process = compilers.kernels()
assert process is not None and process.wait() == 0
Path("a.cpp").write_text('#include <torch/csrc/inductor/cpp_prefix.h>\\nextern "C" void kernel(float*) {}')
options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu")
call = shlex.split(CppBuilder(name="a", sources="a.cpp", BuildOption=options, output_dir=".").get_command_line())
done = subprocess.run([*call, "-H"], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print([line for line in done.stderr.splitlines() if line.startswith("! ")], os.environ[compilers.FOLDER])
"""


@pytest.mark.long  # seconds of a compiler, for what only saves such
def test_a_kernel_of_inductor_finds_its_header_compiled(tmp_path: Path) -> None:
    used, folder = asked(KERNEL, tmp_path)
    assert used == f"['! {folder}/include/{compilers.KERNELS}.gch']"
