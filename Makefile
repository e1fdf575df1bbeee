# The menu. Needs Python 3.11+, a C++17 compiler and make; all else (CMake, Ninja, ...) comes into .venv by pip.
#   make test ARGS="-k fake"    make demo ARGS=--quick    make PYTHON=python3.12 install

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
CXX    ?= c++

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.installed-docs
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# What an editable install compiles. CMakeFiles holds CMake's own probes.
NATIVE := CMakeLists.txt $(wildcard cmake/*.cmake) $(shell find src -name CMakeFiles -prune -o \
	\( -name CMakeLists.txt -o -name '*.cpp' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' \) -print)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint type docs bench bench-overhead test-gpu bench-gpu sanitize header wheel clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## create .venv and install shiplap, editable, with its kernels compiled

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shiplap needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its version decides which build of it pip takes. CMake and Ninja before the package, since
# there is no build isolation: an isolated build would leave paths into a deleted environment in the CMake cache.
$(STAMP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) torch numpy
	$(PIP) scikit-build-core cmake ninja
	$(PIP) --no-build-isolation -e ".[dev,demo]"
	@touch $@

demo: $(STAMP) ## run the demonstration and write shiplap-report/ (ARGS=--quick)
	$(BIN)/shiplap demo $(ARGS)

# Tests start many processes: none of them compiles the package's Python again, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# A file stays with one worker, since its tests share what is compiled; tests/conftest.py says which files come first.
PYTEST = $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

# Tests that load a device into their process come in a run of their own. Status 5: -k left one of the runs empty.
test: $(STAMP) ## run the tests
	@one=0; two=0; \
	$(PYTEST) -m "not device" $(ARGS) || one=$$?; \
	$(PYTEST) -m device tests/backend $(ARGS) || two=$$?; \
	[ $$one != 5 ] || exit $$two; [ $$two != 5 ] || exit $$one; exit $$((one > two ? one : two))

# The header check switches itself on with the verb.
lint: $(STAMP) ## style, import directions, private torch, size budget, generated header
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_private_torch.py
	$(BIN)/python tools/size_budget.py
	$(if $(wildcard src/shiplap/cli/header.py),$(BIN)/shiplap header --check)

type: $(STAMP) ## check the types
	$(BIN)/mypy $(ARGS)

$(DOCS): $(STAMP)
	$(PIP) --no-build-isolation -e ".[docs]"
	@touch $@

docs: $(DOCS) ## build the documentation into site/
	$(BIN)/mkdocs build $(ARGS)

bench: $(STAMP) ## measure the CPU kernels
	$(BIN)/python benchmarks/sparse3d_cpu.py $(ARGS)

bench-overhead: $(STAMP) ## measure what a call costs beside its work (ARGS=--json)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

test-gpu: $(STAMP) ## run the tests that need an accelerator
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

bench-gpu: $(STAMP) ## measure on an accelerator (benchmarks/*_gpu.py)
	for script in benchmarks/*_gpu.py; do $(BIN)/python $$script $(ARGS) || exit; done

# Python itself is not instrumented, so the runtimes are preloaded; libstdc++ with them, or the first exception thrown
# in torch aborts because the sanitizer found no __cxa_throw to intercept when it started.
PRELOAD = $(foreach lib,libasan.so libubsan.so libstdc++.so.6,$(shell $(CXX) -print-file-name=$(lib)))

# --capture=sys: the report of a sanitizer goes to file descriptor 2 and the process ends; pytest would keep it.
sanitize: $(STAMP) ## run the kernel tests with the address and undefined-behaviour sanitizers
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_CXX_COMPILER=$(CXX) -DSHIPLAP_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	env LD_PRELOAD="$(strip $(PRELOAD))" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  SHIPLAP_LIBRARY_PATH=$(abspath build/sanitize/lib) $(BIN)/python -m pytest -q --capture=sys tests/kernels $(ARGS)

header: $(STAMP) ## write the C header that the declarations imply
	$(BIN)/shiplap header $(ARGS)

wheel: $(STAMP) ## build dist/shiplap-*-py3-none-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove what was built (.venv stays; its stamp goes)
	rm -rf build dist site shiplap-report .cmake CMakeCache.txt CMakeFiles CMakeInit.txt build.ninja cmake_install.cmake \
	  compile_commands.json .ninja_deps .ninja_log .skbuild-info.json $(STAMP) $(DOCS)
	find src -name CMakeFiles -prune -exec rm -rf {} +
	find src \( -name '*.so' -o -name cmake_install.cmake \) -delete
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +
