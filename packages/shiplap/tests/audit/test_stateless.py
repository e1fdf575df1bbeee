"""stateless: what a C ABI library keeps between calls, read from its symbols."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import shiplap as sl
from shiplap.audit.checks import stateless
from shiplap.kernels.c.declaration import CAbiImplementation
from shiplap.sampling.symbols import WritableSymbol, read_library_state
from shiplap_testing.effort import sampled
from shiplap_testing.zoo import bad, good, stateful
from tests.audit.common import look
from tests.audit.test_memory import double

NAMED = [s for s in stateful.SPECIMENS if s.name in stateful.NAMES]


def library_of(op) -> Path:
    return op.kernels["cpu"][0].native.library


@pytest.mark.parametrize("specimen", sampled(NAMED, 2), ids=str)
def test_stateless_fires_and_names_the_symbols(specimen):
    finding = look(specimen.op, "stateless")
    assert finding.verdict == "fail"
    for name in stateful.NAMES[specimen.name]:
        assert name in finding.evidence
    assert "sl_context" in finding.fix


def test_stateless_tells_thread_local_from_global():
    (error,) = read_library_state(library_of(NAMED[1].op)).symbols
    assert error == WritableSymbol("last_error", 1024, "thread-local")
    assert {s.kind for s in read_library_state(library_of(NAMED[0].op)).symbols} == {"global"}


def test_stateless_is_silent_and_says_what_it_set_aside():
    assert look(good.saxpy, "stateless").verdict == "ok"
    finding = look(stateful.STATELESS[0].op, "stateless")
    assert finding.verdict == "ok"
    assert "DW.ref._ZTISt9exception (C++ exceptions)" in finding.evidence


def test_stateless_skips_what_has_no_library():
    finding = look(double, "stateless")
    assert (finding.verdict, "no C ABI kernel" in finding.evidence) == ("skip", True)
    assert look(bad.values.wrong_numerics, "stateless").verdict == "skip"


@pytest.mark.skipif(shutil.which("strip") is None, reason="no strip")
@pytest.mark.parametrize(("index", "verdict"), [(0, "incomplete"), (1, "fail"), (-1, "incomplete")])
def test_stateless_of_a_stripped_library_is_never_ok_by_ignorance(tmp_path, monkeypatch, index, verdict):
    """Thread-locals still show as a section; writable data without names cannot be told from the runtime's."""
    op = (NAMED[index] if index >= 0 else NAMED[2]).op
    source = library_of(op)
    subprocess.run(["strip", "-o", tmp_path / source.name, source], check=True)
    monkeypatch.setattr(stateless, "locate_library", lambda path: tmp_path / source.name)
    finding = look(op, "stateless")
    assert finding.verdict == verdict
    assert "stripped" in finding.evidence


@pytest.mark.parametrize("stripped", sampled([False, True], 1))
def test_a_cpp_runtime_that_is_linked_in_is_no_alarm_and_no_ok(tmp_path, monkeypatch, stripped):
    """As manylinux wheels do it: dozens of writable objects, none of them ours."""
    source = tmp_path / "a.cpp"
    source.write_text("""#include <iostream>
#include <stdexcept>
extern "C" int f(int n) { try { throw std::runtime_error("x"); } catch (std::exception& e) { std::cerr << e.what(); }
  return n; }""")
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-static-libstdc++",
        "-static-libgcc",
        "-o",
        tmp_path / "libstatic.so",
        source,
    ]
    subprocess.run([*command, *(["-s"] if stripped else [])], check=True)
    monkeypatch.setattr(stateless, "locate_library", lambda path: tmp_path / "libstatic.so")
    finding = look(good.saxpy, "stateless")
    assert finding.verdict == "incomplete", finding.evidence
    assert "C++ runtime linked in" in finding.evidence


def test_stateless_of_something_else_is_incomplete(tmp_path, monkeypatch):
    (tmp_path / "libtext.so").write_text("INPUT(other.so)")
    monkeypatch.setattr(stateless, "locate_library", lambda path: tmp_path / "libtext.so")
    finding = look(good.saxpy, "stateless")
    assert finding.verdict == "incomplete"
    assert "no readable ELF symbol table" in finding.evidence


def test_stateless_names_libraries_that_are_elsewhere(monkeypatch):
    monkeypatch.setattr(stateless, "_native_forms", lambda op: [sl.cabi("/nowhere/libfar.so", "f")])
    assert isinstance(sl.cabi("/nowhere/libfar.so", "f"), CAbiImplementation)
    finding = look(good.saxpy, "stateless")
    assert (finding.verdict, finding.evidence) == ("skip", "not on this machine: libfar.so")


def test_state_that_a_library_admits_is_told_and_is_not_ok(tmp_path, monkeypatch):
    """A plan registry, say: skip with its reason. What it does not name, and thread-locals, stay failures."""
    source = tmp_path / "a.c"
    source.write_text("""#include <stdint.h>
void* plans;
__attribute__((visibility("default"))) const char shiplap_keeps[] =
    "plans: made before, never changed\\nlost: no reason";
#ifdef MORE
MORE lost;
#endif
int f(void) { return plans != 0; }""")

    def verdict(*more):
        library = tmp_path / f"lib{len(more[0]) if more else 0}.so"
        subprocess.run(["cc", "-shared", "-fPIC", *more, "-o", library, source], check=True)
        monkeypatch.setattr(stateless, "locate_library", lambda path: library)
        return look(good.saxpy, "stateless")

    finding = verdict()
    assert finding.verdict == "skip"
    assert "keeps plans (made before, never changed), and says so" in finding.evidence
    assert verdict("-DMORE=int").verdict == "skip"
    threaded = verdict("-DMORE=_Thread_local int")
    assert threaded.verdict == "fail"
    assert "lost (4 bytes, thread-local)" in threaded.evidence
    source.write_text(source.read_text().replace("lost: no reason", ""))
    assert "lost (4 bytes, global)" in verdict("-DMORE=float").evidence


REGISTRATION = """
extern "C" { typedef void** fatbin; }
static struct { int magic, version; const void* data; void* unused; } __fatDeviceText
    __attribute__((section(".nvFatBinSegment"), used)) = {0x466243b1, 1, 0, 0};
static void** __cudaFatCubinHandle;
static void __device_stub__scale(int n) { static int (*volatile __f)(int); __f = nullptr; (void)n; }
static void __nv_cudaEntityRegisterCallback(void** handle) { static void** volatile __ref; __ref = handle; }
__attribute__((constructor)) static void __sti____cudaRegisterAll() {
  __cudaFatCubinHandle = (void**)&__fatDeviceText; __nv_cudaEntityRegisterCallback(__cudaFatCubinHandle); }
struct Wrapper { void* data; };
struct Table { int sizes[4]; Table() { for (int i = 0; i < 4; ++i) sizes[i] = i; } };
EXTRA
extern "C" int f(int n) { __device_stub__scale(n); return (__cudaFatCubinHandle != nullptr) OTHER; }
"""


@pytest.mark.parametrize(
    ("extra", "other", "kept"),
    [
        ("", "", []),
        ("static float scratch[64];", "+ (scratch[n] = n, 0)", ["_ZL7scratch"]),
        ("static float __scratch[64];", "+ (__scratch[n] = n, 0)", ["_ZL9__scratch"]),  # a buffer, whatever its name
        (
            "namespace cub { inline int& cached() { static int n; return n; } }",
            "+ cub::cached()",
            ["_ZZN3cub6cachedEvE1n"],
        ),
        ("namespace thrust { float* scratch; }", "+ (thrust::scratch = nullptr, 0)", ["_ZN6thrust7scratchE"]),
        ("namespace nvtx3 { int count; }", "+ (nvtx3::count += n)", ["_ZN5nvtx35countE"]),
        (
            "namespace cub { inline namespace CUB_300001_SM_900 { inline int& at() { static int n; return n; } } }",
            "+ cub::at()",
            [],
        ),
        (
            "namespace own { namespace thrust { inline namespace THRUST_300001_SM_900_NS { int n; } } }",
            "+ own::thrust::n",
            [],
        ),
        ("namespace nvtx3 { inline namespace v1 { int count; } }", "+ (nvtx3::count += n)", []),
        (
            "namespace own { inline namespace CUB_300001_SM_900 { int n; } }",
            "+ own::n",
            ["_ZN3own17CUB_300001_SM_9001nE"],
        ),
        ("int nvtxGlobals_v3[9];", "+ (nvtxGlobals_v3[0] = n)", []),  # CUB includes the profiler's header
        ("static int precalc_xorwow_matrix[9];", "+ (precalc_xorwow_matrix[0] = n)", []),  # cuRAND's header has it
        (  # of several files linked by nvcc -rdc=true
            "static void* __cudaPrelinkedFatbins[3];"
            "static void __cudaRegisterLinkedBinary(const Wrapper* of, void (*call)(void**), void*) {"
            "  static void (*__callback_array[3])(void**); static int __i = 0;"
            "  __cudaPrelinkedFatbins[__i] = of->data; __callback_array[__i++] = call; }",
            "+ (__cudaRegisterLinkedBinary(nullptr, nullptr, nullptr), 0)",
            [],
        ),
        ("static void* __cudaPrelinked[3];", "+ (__cudaPrelinked[n] = nullptr, 0)", ["_ZL15__cudaPrelinked"]),
        (
            "namespace cuda { namespace std { inline int& at() { static int n; return n; } } }",
            "+ (cuda::std::at() += n)",
            [],
        ),
        ("namespace cuda { float* workspace; }", "+ (cuda::workspace = nullptr, 0)", ["_ZN4cuda9workspaceE"]),
        (
            "namespace cubes { inline int& cached() { static int count; return count; } }",
            "+ (cubes::cached() += n)",
            ["_ZZN5cubes6cachedEvE5count"],
        ),
    ],
)
def test_the_registration_of_device_code_is_told_from_the_author_s_state(tmp_path, extra, other, kept):
    source, library = tmp_path / "a.cpp", tmp_path / "liba.so"
    source.write_text(REGISTRATION.replace("EXTRA", extra).replace("OTHER", other))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    state = read_library_state(library)
    assert [s.name for s in state.symbols] == kept
    assert any("CUDA runtime" in text for text in state.runtime)


def test_names_of_the_registration_mean_nothing_without_device_code(tmp_path):
    source, library = tmp_path / "a.cpp", tmp_path / "liba.so"
    source.write_text('static void** __cudaFatCubinHandle; extern "C" void f(void** p) { __cudaFatCubinHandle = p; }')
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    assert [s.name for s in read_library_state(library).symbols] == ["_ZL20__cudaFatCubinHandle"]


def test_namespaces_of_the_vendor_s_headers_mean_nothing_without_device_code(tmp_path):
    source, library = tmp_path / "a.cpp", tmp_path / "liba.so"
    source.write_text('namespace cub { int count; } extern "C" int f(int n) { return cub::count += n; }')
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    assert [s.name for s in read_library_state(library).symbols] == ["_ZN3cub5countE"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("runtime", ["static", "shared"])
def test_a_library_that_nvcc_built_keeps_what_its_author_declares(tmp_path, runtime):
    kernel = "__global__ void k(float* y) { y[threadIdx.x] *= 2; }\n"
    vendor = "#include <cub/cub.cuh>\n#include <thrust/sort.h>\n#include <thrust/execution_policy.h>\n"
    vendor += """size_t bytes(float* y) {
  size_t size = 0; cub::DeviceScan::InclusiveSum(nullptr, size, y, y, 9); return size; }
void sort(float* y, cudaStream_t s) { thrust::sort(thrust::cuda::par_nosync.on(s), y, y + 9); }
"""
    call = 'extern "C" int f(float* y, void* s) { k<<<1, 32, 0, (cudaStream_t)s>>>(y); return cudaGetLastError(); }\n'
    own = "namespace thrust { float* kept; }\n"
    for name, text, kept in (
        ("a", "", []),
        ("b", "__device__ float scratch[64];\n", ["_ZL7scratch"]),
        ("c", vendor + own, ["_ZN6thrust4keptE"]),
    ):
        (tmp_path / f"{name}.cu").write_text(text + kernel + call)
        library = tmp_path / f"lib{name}.so"
        command = ["nvcc", "-Xcompiler", "-fPIC", "-shared", "-cudart", runtime, "-o", library]
        subprocess.run([*command, tmp_path / f"{name}.cu"], check=True)
        assert [s.name for s in read_library_state(library).symbols] == kept
