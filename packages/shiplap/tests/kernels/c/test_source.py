"""``sl.source``: kernels in C, C++ and CUDA C++ that are compiled with the header of their declaration."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.kernels.build import build_op
from shiplap.kernels.c.library import _fix_of_loader_error, source_libraries
from shiplap.kernels.native import source_library
from shiplap.kernels.native.source_library import SourceLibrary
from shiplap_testing.support import fails

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

C = """
int scale(const sl_context* ctx, const DLTensor* x, DLTensor* out, double a) {
  const float* p = x->data;
  float* q = out->data;
  for (int64_t i = 0; i < x->shape[0]; i++) q[i] = (float)(a * p[i]);
  return SL_OK;
}
"""
CPP = """
#include "factor.h"

int scale(const sl_context* ctx, const DLTensor* x, DLTensor* out, double a) {
  multiply(static_cast<const float*>(x->data), static_cast<float*>(out->data), x->shape[0], a * FACTOR);
  return SL_OK;
}
"""
PART = """
#include "factor.h"

void multiply(const float* p, float* q, int64_t n, double a) {
  for (int64_t i = 0; i < n; i++) q[i] = static_cast<float>(a * p[i]);
}
"""
FACTOR = "#pragma once\n#include <cstdint>\n#define FACTOR {}\nvoid multiply(const float*, float*, int64_t, double);\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def declare(ns: str, implementation: Any, device: str = "cpu") -> Any:
    @sl.op(f"{ns}::scale")
    def scale(x: Float32[Tensor, "n"], a: float = 2.0) -> Float32[Tensor, "n"]:
        return x * a

    scale.kernel(device, implementation)
    return scale


def two_files(folder: Path, factor: int = 1) -> Any:
    (folder / "include").mkdir(exist_ok=True)
    (folder / "include" / "factor.h").write_text(FACTOR.format(factor))
    (folder / "scale.cpp").write_text(CPP)
    (folder / "part.cpp").write_text(PART)
    return sl.source([folder / "scale.cpp", folder / "part.cpp"], "scale", include_dirs=[folder / "include"])


def refused(id: str, function: Any, *args: Any) -> ShiplapError:
    with pytest.raises(ShiplapError) as caught:
        function(*args)
    assert caught.value.id == id, caught.value
    return caught.value


def test_a_string_in_c_is_native_once_it_is_built(ns: str) -> None:
    op = declare(ns, sl.source(symbol="scale", code=C, language="c"))
    unbuilt = refused("SL420", op, torch.ones(3))
    assert f"call op.build() in Python, or run 'shiplap build {__name__}' in a shell" in str(unbuilt)
    op.build()
    for n in (0, 1, 1000):
        x = torch.randn(n)
        torch.testing.assert_close(op(x, 3.0), x * 3.0)
    assert op.native is not None
    compiled = torch.compile(lambda x: op(x, 3.0) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x * 3.0 + 1)


def test_a_library_of_two_files_and_a_header(ns: str, tmp_path: Path) -> None:
    op = declare(ns, two_files(tmp_path))
    op.build()
    x = torch.randn(9)
    torch.testing.assert_close(op(x), x * 2)


def test_an_edited_header_is_another_library(ns: str, tmp_path: Path) -> None:
    declare(ns, two_files(tmp_path)).build()
    edited = declare(ns, two_files(tmp_path, factor=5))
    refused("SL420", edited, torch.ones(2))
    edited.build()
    torch.testing.assert_close(edited(torch.ones(2)), torch.full((2,), 10.0))


def test_paths_are_relative_to_the_file_that_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_files(tmp_path)
    program = compile(
        'made = sl.source("scale.cpp", "scale", include_dirs=["include"])', str(tmp_path / "p.py"), "exec"
    )
    names: dict[str, Any] = {"sl": sl}
    exec(program, names)
    assert [text.path for text in names["made"].texts] == [tmp_path / "scale.cpp", tmp_path / "include" / "factor.h"]


def test_the_compilers_message_names_the_line(ns: str, tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text("\n\nint scale( {\n")
    op = declare(ns, sl.source(tmp_path / "bad.cpp", "scale"))
    assert "bad.cpp:3" in refused("SL421", build_op, op).got
    op = declare(ns, sl.source(symbol="scale", code="\nint scale( {", language="c++"))
    assert "code of scale:2" in refused("SL421", build_op, op).got


def test_a_function_of_another_prototype_does_not_compile(ns: str) -> None:
    code = "int scale(const sl_context* ctx, const DLTensor* x, DLTensor* out) { return SL_OK; }"
    op = declare(ns, sl.source(symbol="scale", code=code, language="c"))
    found = refused("SL421", build_op, op)
    assert "conflicting types" in found.got
    assert "add an adapter to the sources: a function of another name with those parameters" in found.fix


def test_a_name_that_nothing_declares_needs_an_include(ns: str) -> None:
    code = C.replace("return SL_OK", 'snprintf(0, 0, ""); return SL_OK')
    op = declare(ns, sl.source(symbol="scale", code=code.replace("x->data", "(float*)x->data"), language="c++"))
    fix = "write the #include of the header that declares snprintf, which is <cstdio>, or correct the name"
    assert refused("SL421", build_op, op).fix == fix
    op = declare(ns, sl.source(symbol="scale", code=C, language="c", libraries=["nowhere"]))
    assert refused("SL421", build_op, op).fix.startswith("correct 'nowhere' in libraries=, or pass the folder of ")
    op = declare(ns, sl.source(symbol="scale", code=C, language="c", flags=["-fnowhere"]))
    assert refused("SL421", build_op, op).fix == "correct or remove -fnowhere in flags="


def test_an_option_in_a_note_is_not_the_cause(ns: str) -> None:
    """GCC has a note on an unknown option of a warning beside each error, and takes the option otherwise."""
    code = C.replace("SL_OK", "NOWHERE")
    op = declare(ns, sl.source(symbol="scale", code=code, language="c", flags=["-Wno-foo"]))
    assert "declares NOWHERE" in refused("SL421", build_op, op).fix


PARAMETERS = "const sl_context* ctx, const DLTensor* x, DLTensor* out, double a"
PLAIN = f"int scale({PARAMETERS}) {{ return SL_OK; }}"
WRONG_KERNELS = {
    "a wrong result": ("c++", f"void scale({PARAMETERS}) {{}}", "the parameters and the result that shiplap header"),
    "static": ("c", f"static int scale({PARAMETERS}) {{ return 0; }}", "write scale without static"),
    "static in C++": ("c++", f"static int scale({PARAMETERS}) {{ return 0; }}", "write scale without static"),
    "a header of torch": ("c++", "#include <torch/extension.h>", "write scale without tensors of torch"),
    "a header of CUDA": ("c++", "#include <cuda_nowhere.h>", "compile the source as CUDA C++: name the file .cu"),
    "a kernel of CUDA": (
        "c++",
        f"__global__ void k() {{}}\n{PLAIN}",
        "compile the source as CUDA C++: name the file .cu",
    ),
    "a kernel of CUDA in C": (
        "c",
        f"__global__ void k() {{}}\n{PLAIN}",
        "compile the source as CUDA C++: name the file .cu",
    ),
    "a header of C++": (
        "c",
        "#include <vector>",
        'compile the source as C++: name the file .cpp, or pass language="c++"',
    ),
    "a method of torch": (
        "c++",
        f"int scale({PARAMETERS}) {{ return x->size(0); }}",
        "in place of size: data (cast it, as in static_cast<const float*>(x->data))",
    ),
    "a method of torch in C": (
        "c",
        f"int scale({PARAMETERS}) {{ return x->size(0); }}",
        "in place of size: data (cast it, as in (const float*)x->data)",
    ),
    "nothing declares it": ("c", f"int scale({PARAMETERS}) {{ return (int)other(1.0); }}", "that declares other, or"),
    "of the C library": (
        "c",
        f"int scale({PARAMETERS}) {{ return (int)cos(1.0); }}",
        "declares cos, which is <math.h>,",
    ),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_a_kernel_that_does_not_compile_is_told_the_repair(ns: str, name: str) -> None:
    language, code, fix = WRONG_KERNELS[name]
    made: Any = sl.source(symbol="scale", code=code, language=language)  # type: ignore[arg-type]
    assert fix in refused("SL421", build_op, declare(ns, made)).fix


def test_errors_of_clang_have_the_same_repair(ns: str) -> None:
    (text,) = sl.source(symbol="scale", code=C, language="c++").texts
    library = SourceLibrary((), (), (), (), f"{ns}::scale", "scale", "", (text,))
    member = "a.cpp:4:38: error: no member named 'size' in 'DLTensor'"
    result = "a.cpp:3:17: error: functions that differ only in their return type cannot be overloaded"
    assert WRONG_KERNELS["a method of torch"][2] in library._fix_of_error(member)
    assert WRONG_KERNELS["a wrong result"][2] in library._fix_of_error(result)


def test_a_warning_beside_an_error_is_no_cause(ns: str) -> None:
    """A C compiler may warn of a function that nothing declares, while another line does not compile."""
    (text,) = sl.source(symbol="scale", code=C, language="c").texts
    library = SourceLibrary((), (), (), (), f"{ns}::scale", "scale", "", (text,))
    warning = "a.c:1:5: warning: implicit declaration of function 'other' [-Wimplicit-function-declaration]"
    error = "a.c:9:5: error: expected ';' before 'return'"
    assert library._fix_of_error(f"{warning}\n{error}") == ""
    assert "declares other" in library._fix_of_error(warning.replace("warning", "error"))


NOTES = {
    "C": "note: include ‘<string.h>’ or provide a declaration of ‘memcpy’",
    "C++": "note: ‘memcpy’ is defined in header ‘<string.h>’; did you forget to ‘#include <string.h>’?",
    "Clang": "note: include the header <string.h> or explicitly provide a declaration for 'memcpy'",
}


@pytest.mark.parametrize("name", NOTES)
def test_the_header_of_another_name_is_no_hint(ns: str, name: str) -> None:
    (text,) = sl.source(symbol="scale", code=C, language="c").texts
    library = SourceLibrary((), (), (), (), f"{ns}::scale", "scale", "", (text,))
    error = "a.c:9:5: error: implicit declaration of function 'other'"
    assert "declares other, or" in library._fix_of_error(f"{error}\n{NOTES[name]}")
    found = library._fix_of_error(f"{error.replace('other', 'memcpy')}\n{NOTES[name]}")
    assert "declares memcpy, which is <string.h>," in found


def test_a_library_by_the_name_of_its_file(ns: str) -> None:
    op = declare(ns, sl.source(symbol="scale", code=C, language="c", libraries=["libnowhere.so.3"]))
    assert refused("SL421", build_op, op).fix.startswith('write libraries=["nowhere"], without "lib" in front')


def test_a_text_in_place_of_a_list(ns: str) -> None:
    """The letters of a text are no flags."""
    made = sl.source(symbol="scale", code=C, language="c", flags="-O2 -DFACTOR=3", libraries="m", include_dirs="there")
    assert (made.request.flags, made.request.libraries) == (("-O2", "-DFACTOR=3"), ("m",))
    assert [folder.name for folder in made.request.include_dirs] == ["there"]
    assert sl.source(symbol="scale", code=C, language="cuda", architectures="90").request.architectures == ("90",)


def test_a_text_of_flags_with_an_open_quote() -> None:
    with fails("SL404", "No closing quotation", "pass a list"):
        sl.source(symbol="scale", code=C, language="c", flags="-DX='a")


def test_the_rules_for_c_are_part_of_the_digest_of_c_alone(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> list[str]:
        texts = [sl.source(symbol="scale", code=PLAIN, language=language).texts for language in ("c", "c++")]
        return [SourceLibrary((), (), (), (), f"{ns}::scale", "scale", "", text).digest for text in texts]

    before = digests()
    monkeypatch.setattr(source_library, "C_RULES", "")
    after = digests()
    assert (before[0] == after[0], before[1] == after[1]) == (False, True)


def test_a_function_in_a_namespace_is_shown(ns: str) -> None:
    op = declare(ns, sl.source(symbol="scale", code=f"namespace mine {{ {PLAIN} }}", language="c++"))
    found = refused("SL402", build_op, op)
    assert found.got == "the C++ function mine::scale(sl_context const*, DLTensor const*, DLTensor*, double)"
    assert "move scale out of its namespace, or define scale outside of it" in found.fix
    op = declare(ns, sl.source(symbol="scale", code=f"namespace {{ __attribute__((used)) {PLAIN} }}", language="c++"))
    assert refused("SL402", build_op, op).fix == "move scale out of its namespace, and build the op again"


def test_a_function_without_a_definition_is_shown_as_it_was_written(ns: str) -> None:
    code = f"int helper(double, int); {PLAIN.replace('SL_OK', 'helper(a, 3)')}"
    op = declare(ns, sl.source(symbol="scale", code=code, language="c++"))
    assert "add the source that defines helper(double, int), or link" in refused("SL401", build_op, op).fix


def test_the_version_of_a_symbol_is_no_part_of_its_name(tmp_path: Path) -> None:
    fix = _fix_of_loader_error(tmp_path / "libf.so", "libf.so: undefined symbol: foo, version FOO_2.0")
    assert "defines foo, or link libf.so" in fix
    assert "defines f, or link libf.so" in _fix_of_loader_error(tmp_path / "libf.so", "libf.so: undefined symbol: f")


def test_cuda_is_no_kernel_of_the_cpu(ns: str) -> None:
    made = sl.source(symbol="scale", code=C, language="cuda")
    assert refused("SL122", lambda: declare(ns, made)).fix.startswith('bind it with op.kernel("cuda", ...)')


def test_a_missing_function_is_a_missing_symbol(ns: str) -> None:
    op = declare(ns, sl.source(symbol="scale", code=C.replace("scale(", "other("), language="c"))
    found = refused("SL402", build_op, op)
    assert found.expected == "int scale(const sl_context* ctx, const DLTensor* x, DLTensor* out, double a)"
    assert found.fix == (
        "define scale in the source as an ordinary function, which is neither static nor a template, with the "
        "prototype under 'expected', or pass the name of the function as symbol= of sl.source, and build the op again"
    )
    op.kernel("cpu", sl.source(symbol="other", code=C.replace("scale(", "other("), language="c"), name="scale")
    build_op(op)


def test_an_overload_of_the_declared_function_is_told_the_prototype(ns: str) -> None:
    code = "int scale(const sl_context* ctx, DLTensor* x, DLTensor* out, float a) { return SL_OK; }"
    op = declare(ns, sl.source(symbol="scale", code=code, language="c++"))
    found = refused("SL402", build_op, op)
    assert found.got == "a C++ function scale with other parameters"
    assert found.expected == "int scale(const sl_context* ctx, const DLTensor* x, DLTensor* out, double a)"


def test_a_missing_header_names_the_option(ns: str, tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text('#include "absent.h"\n')
    op = declare(ns, sl.source(tmp_path / "a.cpp", "scale"))
    assert 'absent.h, as in include_dirs=["/that/folder"]' in refused("SL421", build_op, op).fix


@pytest.mark.parametrize("said", ["absent.h: No such file or directory", "'absent.h' file not found"])
def test_gcc_and_clang_name_a_missing_header(
    ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "a.cpp:1:10: fatal error: {said}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    op = declare(ns, sl.source(symbol="scale", code=C, language="c"))
    assert "folder of absent.h, as in include_dirs=" in refused("SL421", build_op, op).fix


def test_without_a_compiler(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = declare(ns, sl.source(symbol="scale", code=C, language="c"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in refused("SL423", build_op, op).got


@pytest.mark.parametrize(
    ("keywords", "id"),
    [
        ({"files": "absent.cpp"}, "SL401"),
        ({"files": "test_source.txt"}, "SL404"),
        ({"code": C}, "SL404"),
        ({"code": C, "language": "fortran"}, "SL404"),
        ({}, "SL404"),
        ({"code": C, "language": "c", "symbol": "not a name"}, "SL402"),
        ({"code": C, "language": "cuda", "architectures": ["hopper"]}, "SL422"),
    ],
    ids=["no file", "no suffix", "no language", "another language", "no source", "no symbol", "no architecture"],
)
def test_what_cannot_be_a_source_is_refused(keywords: dict[str, Any], id: str) -> None:
    refused(id, lambda: sl.source(**{"symbol": "scale", **keywords}))


def fake_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A program in place of nvcc, which writes down its arguments."""
    program, log = folder / "nvcc", folder / "arguments"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {log}\n{body}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDACXX", str(program))
    return log


def test_cuda_is_compiled_for_the_architectures_by_nvcc(
    ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_nvcc(tmp_path, monkeypatch, ': > "$2"')  # an empty library, behind -o
    op = declare(
        ns, sl.source(symbol="scale", code=C, language="cuda", architectures=[8.0, "sm_90a", "9.0+PTX", "100f"]), "cuda"
    )
    (library,) = [source_libraries[k.native.library] for k in op.kernels["cuda"]]
    library.compile()
    arguments = log.read_text().split("\n")
    assert "-gencode=arch=compute_80,code=sm_80" in arguments
    assert "-gencode=arch=compute_90a,code=sm_90a" in arguments
    assert "-gencode=arch=compute_90,code=[compute_90,sm_90]" in arguments
    assert "-gencode=arch=compute_100f,code=sm_100f" in arguments
    assert any(a.endswith("code.cu") for a in arguments)
    assert "-include" in arguments


def test_cuda_is_compiled_for_the_gpus_of_the_machine_unless_architectures_are_named(
    ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    op = declare(ns, sl.source(symbol="scale", code=C, language="cuda"), "cuda")
    (library,) = [source_libraries[k.native.library] for k in op.kernels["cuda"]]
    assert library._architecture_flags() == ["-arch=all-major"]
    gpus += [(9, 0), (8, 0), (9, 0)]
    assert library._architecture_flags() == [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90)]
    named = replace(library, architectures=("75",))
    assert named._architecture_flags() == ["-gencode=arch=compute_75,code=sm_75"]


def test_an_architecture_that_nvcc_does_not_know(ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "nvcc fatal   : Unsupported gpu architecture 'compute_20'"
    fake_nvcc(tmp_path, monkeypatch, f'echo "{message}" >&2; exit 1')
    op = declare(ns, sl.source(symbol="scale", code=C, language="cuda", architectures=[20]), "cuda")
    assert refused("SL422", build_op, op).got == "compute_20"


def test_without_nvcc_the_other_kernels_are_built(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *args: None if "nvcc" in str(name) else find(name, *args))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = declare(ns, sl.source(symbol="scale", code=C, language="cuda"), "cuda")
    assert "CUDACXX" in refused("SL423", build_op, alone).fix
    both = declare(ns + "both", sl.source(symbol="scale", code=C, language="c"))
    both.kernel("cuda", sl.source(symbol="scale", code=C, language="cuda"))
    both.build()
    torch.testing.assert_close(both(torch.ones(2)), torch.full((2,), 2.0))


def test_the_command_in_an_error_builds_from_any_folder(run: Any, ns: str, tmp_path: Path) -> None:
    """The file is not where a module of that name would be looked for."""
    two_files(tmp_path)
    path = tmp_path / f"{ns}_kernels.py"
    path.write_text(
        "import shiplap as sl\nfrom jaxtyping import Float32\nfrom torch import Tensor\n"
        f'@sl.op("{ns}::scale")\n'
        'def scale(x: Float32[Tensor, "n"], a: float = 2.0) -> Float32[Tensor, "n"]:\n    return x * a\n'
        'scale.kernel("cpu", sl.source(["scale.cpp", "part.cpp"], "scale", include_dirs=["include"]))\n'
    )
    unbuilt = run("audit", path, "--check", "numerics")
    assert unbuilt.exit_code == 2
    assert f"shiplap build {path}" in unbuilt.output.replace("\n", "")


def test_the_command_builds_sources(run: Any, ns: str, tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / f"{ns}_ops.py").write_text(
        "import torch\nimport shiplap as sl\nfrom jaxtyping import Float32\nfrom torch import Tensor\n"
        f'@sl.op("{ns}::scale")\n'
        'def scale(x: Float32[Tensor, "n"], a: float = 2.0) -> Float32[Tensor, "n"]:\n    return x * a\n'
        'scale.kernel("cpu", sl.source(["scale.cpp", "part.cpp"], "scale", include_dirs=["include"]))\n'
    )
    result = run("build", tmp_path / f"{ns}_ops.py", "--json")
    assert result.exit_code == 0, result.output
    op = getattr(torch.ops, ns).scale
    torch.testing.assert_close(op(torch.ones(2), 3.0), torch.full((2,), 3.0))
