"""A library that is compiled from sources: its command, its files, the headers that it covers, and fixes of errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shiplap.kernels.native import source_library
from shiplap.kernels.native.build import LIBRARY
from shiplap.kernels.native.source_library import _AS_CUDA, HEADER, SourceLibrary, SourceText, gencode_flag, link_named
from shiplap_testing.support import fails

PROTOTYPE = "#pragma once\nSL_EXPORT int f(const sl_context* ctx,\n  DLTensor* x);\n"
C, CPP, CUDA = (SourceText(f"k{s}", language, "code") for language, s in source_library.SUFFIX.items())
HEADER_TEXT = SourceText("k.h", "", "")


def library(*texts: SourceText, **changed) -> SourceLibrary:
    given = {"flags": (), "include_dirs": (), "libraries": (), "architectures": (), "symbol": "f"} | changed
    return SourceLibrary(op="lib::f", header=PROTOTYPE, texts=texts, **given)


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Programs that exist, by the names under which they are searched for."""
    found = {"c++": "/bin/c++", "nvcc": "/bin/nvcc", "/bin/nvcc": "/bin/nvcc"}
    monkeypatch.setattr(source_library.shutil, "which", found.get)
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def test_the_command_of_a_host_compiler():
    options = {"flags": ("-DA",), "include_dirs": (Path("/inc"),), "libraries": ("m",)}
    head = ["/bin/c++", *source_library.HOST_FLAGS]
    include = ["-include", f"@SOURCES@/{HEADER}", f"-I{source_library.INCLUDE}", "-I/inc", "-DA"]
    in_c = ["-x", "c", "@SOURCES@/code.c", "-x", "none"]
    assert library(C, HEADER_TEXT, **options)._compile_command() == [*head, *include, *in_c, "-lm"]
    cpp = SourceText("k.cpp", "c++", "", Path("/src/k.cpp"))
    assert library(cpp, C, **options)._compile_command() == [*head, "-std=c++20", *include, "/src/k.cpp", *in_c, "-lm"]


def test_the_command_of_nvcc():
    command = library(CUDA, CPP)._compile_command()
    assert command[:3] == ["/bin/nvcc", "-O3", "-shared"]
    assert command[3:7] == ["-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden"]
    assert command[7:9] == ["-std=c++17", "-arch=all-major"]
    assert command[-2:] == ["@SOURCES@/code.cu", "@SOURCES@/code.cpp"]


def test_the_architectures_of_a_library(monkeypatch):
    assert gencode_flag("90") == "-gencode=arch=compute_90,code=sm_90"
    assert gencode_flag("90a+PTX") == "-gencode=arch=compute_90a,code=[compute_90a,sm_90a]"
    assert library(CUDA, architectures=("80", "90"))._architecture_flags() == [gencode_flag("80"), gencode_flag("90")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (8, 6), (9, 0)][i])
    assert library(CUDA)._architecture_flags() == [gencode_flag("86"), gencode_flag("90")]
    assert library(CUDA, architectures=("80",))._architecture_flags() == [gencode_flag("80")]


def test_where_nvcc_is_searched_for(compilers, monkeypatch):
    compilers |= {f"{folder}/bin/nvcc": folder for folder in ("/home", "/path", "/usr/local/cuda")} | {"/mine": "/mine"}
    places = []
    monkeypatch.setenv("CUDACXX", "/mine")
    monkeypatch.setenv("CUDA_HOME", "/home")
    monkeypatch.setenv("CUDA_PATH", "/path")
    for gone in ("/mine", "/bin/nvcc", "/home/bin/nvcc", "/path/bin/nvcc", "/usr/local/cuda/bin/nvcc"):
        places.append(str(library(CUDA)._find_nvcc()))
        del compilers[gone]
    assert places == ["/mine", "/bin/nvcc", "/home", "/path", "/usr/local/cuda"]
    with fails("SL423", where="lib::f", expected="nvcc, the compiler of CUDA C++"):
        library(CUDA)._find_nvcc()


def test_the_host_compiler_that_cxx_names(monkeypatch):
    monkeypatch.setenv("CXX", "ccache c++ -g")
    with fails("SL423", where="lib::f", got="no ccache c++ on the PATH"):
        library(C)._host_compiler()
    monkeypatch.setenv("CXX", "'open")
    with fails("SL423", got="no c++ on the PATH"):
        library(C)._host_compiler()
    monkeypatch.setenv("CXX", "c++ -g")
    assert library(C)._host_compiler() == ["/bin/c++", "-g"]


def test_the_files_and_the_name_of_a_library():
    at = SourceText("k.c", "c", "code", Path("/src/k.c"))
    made = library(C, CPP)
    assert made._files() == {
        HEADER: PROTOTYPE + source_library.C_RULES,
        "code.c": '#line 1 "k.c"\ncode',
        "code.cpp": '#line 1 "k.cpp"\ncode',
    }
    assert library(CPP)._files()[HEADER] == PROTOTYPE
    assert library(at)._files().keys() == {HEADER}
    assert made.prototype == "int f(const sl_context* ctx, DLTensor* x)"
    assert (made.file_name, made.path.name) == (f"libf-{made.digest[:12]}.so", made.file_name)
    assert made.path.parent.name == made.digest
    assert [library(t).is_cuda for t in (C, CPP, CUDA)] == [False, False, True]


def test_what_the_digest_of_a_library_covers():
    made = [
        library(C),
        library(CPP),
        library(C, CPP),
        library(C, flags=("-g",)),
        library(C, libraries=("m",)),
        library(C, architectures=("90",)),
        library(SourceText("k.c", "c", "other")),
        library(SourceText("l.c", "c", "code")),
    ]
    assert len({each.digest for each in made}) == len(made)
    same = [library(SourceText("k.c", "c", "code", Path("/src/k.c"))), library(C, include_dirs=(Path("/inc"),))]
    assert {each.digest for each in same} == {made[0].digest}


def test_headers_are_found_beside_the_file_and_in_given_folders(tmp_path, monkeypatch):
    for folder in ("src", "inc"):
        (tmp_path / folder).mkdir()
    written = {"src/k.c": '#include "a.h"\n#include <b.h>\n#include <stdio.h>\n', "src/a.h": '#include "c.h"\n'}
    written |= {"inc/a.h": "other", "inc/b.h": '#include "b.h"\n', "inc/c.h": ""}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "src" / "k.c"
    first = SourceText("k.c", "c", path.read_text(), path)
    found = source_library.source_texts([first], [tmp_path / "inc"])
    assert {str(t.path.relative_to(tmp_path)) for t in found} == {"src/k.c", "src/a.h", "inc/b.h", "inc/c.h"}
    assert {t.language for t in found[1:]} == {""}
    assert len(source_library.source_texts([SourceText("k.c", "c", first.content)], [tmp_path / "inc"])) == 3
    monkeypatch.setattr(source_library, "MOST_HEADERS", 1)
    assert source_library.source_texts([first], [tmp_path / "inc"]) == [first]


def test_a_library_has_a_second_name(tmp_path):
    built, name = tmp_path / LIBRARY, tmp_path / "libf.so"
    built.write_bytes(b"new")
    link_named(name)
    assert name.samefile(built)
    link_named(name)
    name.unlink()
    name.write_bytes(b"new")  # as an unpacked wheel has it
    link_named(name)
    assert not name.samefile(built)
    name.write_bytes(b"old")
    link_named(name)
    assert name.samefile(built)


FIXES = [
    ((CUDA,), "nvcc fatal : Unsupported gpu architecture 'sm_12'", "SL422", "", "an architecture that this nvcc knows"),
    (
        (C,),
        "k.c: fatal error: torch/all.h: No such file",
        "SL421",
        "write f without tensors of torch",
        "the header torch/all.h",
    ),
    ((C,), "fatal error: 'cub/cub.cuh' file not found", "SL421", _AS_CUDA, "the header cub/cub.cuh"),
    ((CUDA,), "fatal error: cub/cub.cuh: No such file", "SL421", "pass the folder of cub/cub.cuh", ""),
    ((C,), "fatal error: vector: No such file", "SL421", "compile the source as C++: name the file .cpp", ""),
    ((CPP,), "fatal error: vector: No such file", "SL421", 'pass the folder of vector, as in include_dirs=["', ""),
    ((CUDA,), "fatal error: vector: No such file", "SL421", "pass the folder of vector", ""),
    ((C,), "fatal error: my.h: No such file", "SL421", "pass the folder of my.h", ""),
    (
        (C,),
        "cannot find -lblas",
        "SL421",
        "correct 'blas' in libraries=, or pass the folder of libblas.so",
        "k.c without an",
    ),
    ((C,), "unable to find library -llibblas.so.3", "SL421", 'write libraries=["blas"], without "lib" in front', ""),
    ((C,), "error: unrecognized command-line option ‘-march=x’", "SL421", "correct or remove -march=x in flags=", ""),
    ((C,), "nvcc fatal   : Unknown option '--foo'", "SL421", "correct or remove --foo in flags=", ""),
    ((C,), "clang: error: unknown argument: '-foo'", "SL421", "correct or remove -foo in flags=", ""),
    ((C,), "error: unknown type name '__global__'", "SL421", _AS_CUDA, ""),
    ((C, SourceText("b.c", "c", "__global__ void f()")), "error: expected ;", "SL421", _AS_CUDA, ""),
    ((SourceText("b.c", "c", "#ifdef __CUDACC__\n__global__ void f()"),), "error: expected ;", "SL421", None, ""),
    ((CUDA,), "error: '__global__' is odd", "SL421", None, ""),
    ((C,), "error: 'sqrt' undeclared", "SL421", "write the #include of the header that declares sqrt, or", ""),
    (
        (C,),
        "error: 'sqrt' undeclared\nnote: include '<math.h>' or provide a declaration of 'sqrt'",
        "SL421",
        "sqrt, which is <math.h>",
        "",
    ),
    (
        (CPP,),
        "error: 'sqrt' was not declared\nnote: 'sqrt' is defined in header '<cmath>'",
        "SL421",
        "sqrt, which is <cmath>",
        "",
    ),
    ((C,), "implicit declaration of function 'printf'", "SL421", "printf, which is <stdio.h>", ""),
    ((C, CPP), "'snprintf' was not declared", "SL421", "snprintf, which is <cstdio>", ""),
    ((CUDA,), 'identifier "fprintf" is undefined', "SL421", "fprintf, which is <cstdio>", ""),
    ((CPP,), "use of undeclared identifier 'foo'", "SL421", "declares foo, or correct the name", ""),
    ((C,), "call to undeclared function 'foo'", "SL421", "declares foo, or correct the name", ""),
    ((C,), "warning: 'foo' undeclared\nerror: odd", "SL421", None, ""),
    ((C,), "static declaration of 'f' follows", "SL421", "write f without static", ""),
    ((C,), "'f' was declared 'extern' and later 'static'", "SL421", "write f without static", ""),
    ((C,), "conflicting types for 'f'", "SL421", "give f the parameters and the result that shiplap header prints", ""),
    ((CPP,), "ambiguating new declaration of 'int f(int)'", "SL421", "give f the parameters", ""),
    (
        (CPP,),
        "functions that differ only in their return type cannot be distinguished by return type",
        "SL421",
        "give f the",
        "",
    ),
    ((C,), "conflicting types for 'g'", "SL421", None, ""),
    ((C,), "'const DLTensor' has no member named 'sizes'", "SL421", "data (cast it, as in (const float*)x->data)", ""),
    ((CPP,), "'struct DLTensor' has no member named 'sizes'", "SL421", "as in static_cast<const float*>(x->data)", ""),
    ((C,), "something else", "SL421", None, "k.c without an error of the compiler"),
]


@pytest.mark.parametrize(("texts", "problem", "id", "fix", "expected"), FIXES, ids=range(len(FIXES)))
def test_the_fix_of_an_error_of_the_compiler(texts, problem, id, fix, expected):
    found = library(*texts, HEADER_TEXT)._compiler_error(problem)
    usual = library(C)._compiler_error("something else").fix
    assert (found.id, found.where) == (id, "lib::f, kernel f")
    assert expected in found.expected
    assert found.fix == usual if fix is None else fix in found.fix
    assert found.fix != usual or fix in (None, "")


def test_a_library_that_is_not_compiled_says_how_it_is(monkeypatch, tmp_path):
    asked: list[tuple[str, object]] = []

    def present(place, op, rule):
        return asked.append((place.parent.name, rule)) or place.parent.name == there

    monkeypatch.setattr(source_library, "is_library_present", present)
    monkeypatch.setattr(source_library, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(source_library, "package_folders", lambda op: [tmp_path / "package"])
    monkeypatch.setattr(source_library.registry, "command_target", lambda name: "demo.py")
    monkeypatch.setattr(source_library.registry, "find_declared_op", lambda name: SimpleNamespace())
    monkeypatch.setattr(source_library, "link_named", lambda path: None)
    safe_io = source_library.safe_io
    for there, rows in (("package", 1), ("cache", 2)):
        asked.clear()
        assert library(C).locate().parent.parent.name == there
        assert asked == [("package", safe_io.NAMED), ("cache", safe_io.CODE)][:rows]
    there = ""
    with fails("SL420", where="lib::f, kernel f", expected="the library of k.c, k.cpp"):
        library(C, HEADER_TEXT, CPP).locate()
    monkeypatch.setattr(source_library.registry, "find_declared_op", lambda name: None)
    there, _ = "cache", asked.clear()
    assert library(C).locate() == tmp_path / "cache" / library(C).digest / library(C).file_name
    assert asked == [("cache", safe_io.CODE)]
