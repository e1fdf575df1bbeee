# The menu. Needs Python 3.11+, a C++17 compiler and make; all else (CMake, Ninja, ...) comes into .venv by pip.
#   make test ARGS="-k fake"    make demo ARGS=--quick    make PYTHON=python3.12 install

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
CXX    ?= c++

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.installed-docs
DEMO  := $(VENV)/.installed-demo
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

PACKAGES := $(sort $(notdir $(wildcard packages/*)))

# The optional parts that development needs.
EXTRAS_shiplap-backend  := [openvino,onednn]
EXTRAS_shiplap-sparse3d := [demo,survey]
EXTRAS_shiplap-testing  := [all,dev]

# What an editable install compiles. CMakeFiles holds CMake's own probes.
NATIVE := $(shell find packages -name CMakeFiles -prune -o \
	\( -name CMakeLists.txt -o -name '*.cmake' -o -name '*.cpp' -o -name '*.h' \) -path '*/src/*' -print | grep -v shiplap_backend)
PROJECTS := $(foreach package,$(PACKAGES),packages/$(package)/pyproject.toml)

# No call compiles in the background, so bindings are built here: into the user's cache, where the next build of the
# same source finds them. Without them, calls go through Python, and the 32nd says so.
COMPILED = $(subst -,_,$(patsubst packages/%/CMakeLists.txt,%,$(wildcard packages/*/CMakeLists.txt)))
BUILD = echo "compiling native bindings of" $(1); $(BIN)/shiplap build $(1) > /dev/null || \
	  echo "not all of them could be compiled: calls go through Python" >&2

.DEFAULT_GOAL := help
.PHONY: help install demo test lint type docs power bench bench-overhead records test-gpu bench-gpu sanitize header wheel release-check clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## create .venv and install every package, editable, with the kernels compiled

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "shiplap needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its version decides which build of it pip takes. The build requirements before the packages,
# since there is no build isolation: an isolated build would leave paths into a deleted environment in CMake's cache.
$(STAMP): $(PROJECTS) constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) torch numpy
	$(PIP) scikit-build-core cmake ninja hatchling editables
	$(PIP) --no-build-isolation -e packages/shiplap-headers
	$(PIP) --no-build-isolation $(foreach package,$(PACKAGES),-e packages/$(package)$(EXTRAS_$(package)))
	@$(call BUILD,$(COMPILED))
	@echo "compiling what tests need"; $(BIN)/python -m shiplap_testing.prebuild > /dev/null || \
	  echo "not all of it could be compiled: make test does so" >&2
	@touch $@

# What the demonstration uses, and no more: its own family, the core and the headers, and what the last two require.
DEMO_PACKAGES := shiplap-headers shiplap shiplap-sparse3d
DEMO_REQUIRED = $$($(BIN)/python -c 'import tomllib; \
	core, family = [tomllib.load(open(f"packages/{name}/pyproject.toml", "rb"))["project"] for name in ("shiplap", "shiplap-sparse3d")]; \
	required = [*core["dependencies"], *family["optional-dependencies"]["demo"]]; \
	print(*[name for name in required if not name.startswith("shiplap")])')

# The kernels are compiled while torch is downloaded and unpacked. What compiles them lies in a folder of its own: two
# calls of pip at a time must not install the same package. Of the instruction sets only the best one of this machine
# and the baseline are compiled; `make install` compiles the others. Python files are compiled when they are imported,
# since the demonstration imports less than half of those that are installed.
DEMO_TOOLS := $(VENV)/demo-tools
$(DEMO): $(DEMO_PACKAGES:%=packages/%/pyproject.toml) constraints.txt $(filter packages/shiplap-sparse3d/%,$(NATIVE)) | $(BIN)/python
	@echo "installing torch and compiling kernels"; required="$(DEMO_REQUIRED)"; \
	($(PIP) --no-compile --upgrade --target $(DEMO_TOOLS) scikit-build-core cmake ninja hatchling editables && \
	export PYTHONPATH="$(abspath $(DEMO_TOOLS))" SHIPLAP_INSTRUCTIONS=best && \
	$(PIP) --no-build-isolation --no-deps -e packages/shiplap-headers && \
	$(PIP) --no-build-isolation --no-deps -e packages/shiplap -e packages/shiplap-sparse3d) & kernels=$$!; \
	$(PIP) --no-compile torch numpy $$required; torch=$$?; \
	wait $$kernels && exit $$torch
	@touch $@

# Where everything is installed, that is brought up to date instead. The bindings are compiled beside the first step of
# the training, which leaves one of two cores idle. An op that is called earlier runs through Python, and attaches its
# binding at a later call if background builds are on.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO)) ## run the demonstration and write shiplap-report/ (ARGS=--quick)
	@($(call BUILD,shiplap_sparse3d)) & bindings=$$!; echo $(BIN)/shiplap demo $(ARGS); \
	SHIPLAP_BACKGROUND_BUILD=1 $(BIN)/shiplap demo $(ARGS); status=$$?; wait $$bindings; exit $$status

# Tests start many processes: none of them compiles the package's Python again, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# A file stays with one worker, since its tests share what is compiled; shiplap_testing.plugin says which files come first.
SPREAD = --dist loadfile --no-loadscope-reorder
# One worker more than there are cores: tests wait for processes and locks for a quarter of their time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) $(SPREAD)

# The worse status of two runs. Status 5: -k left one of the runs empty.
WORSE = [ $$one != 5 ] || exit $$two; [ $$two != 5 ] || exit $$one; exit $$((one > two ? one : two))

# What tests compile is not optimised (shiplap_testing.compilers); nox -s long compiles as users do.
test: export SHIPLAP_TEST_UNOPTIMIZED := 1
# It ends with the tests that took the most processor time: what grows is seen.
test: COST = --dearest 10

# One worker more runs the tests that load a device into their process, and no others (shiplap_testing.schedule). With
# --changed in ARGS, the nearest tests to a change run before all others, and those of a device in a run beside them.
PLAIN_TESTS  = -n $(WORKERS) $(SPREAD) $(COST) -m "not device and not long and not docs"
# WORKERS may be a word of pytest-xdist, such as auto: the one more is then among them.
ALL_WORKERS = $(if $(filter auto logical,$(WORKERS)),$(WORKERS),$$(( $(WORKERS) + 1 )))
DEVICE_TESTS = -n 1 $(COST) -m "device and not long and not docs" packages/shiplap-backend
test: $(STAMP) ## run the tests
ifneq (,$(findstring --changed,$(ARGS)))
	@$(BIN)/python -m shiplap_testing.nearest $(ARGS) -- $(PLAIN_TESTS) -- $(DEVICE_TESTS)
else
	@$(BIN)/python -m pytest -q -n $(ALL_WORKERS) $(SPREAD) $(COST) -m "not long and not docs" $(ARGS)
endif

lint: $(STAMP) ## style, imports and circles, private torch, types by name, sizes, exemptions, headers, links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ruff format --check --line-length 88 README.md packages/*/README.md
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_private_torch.py
	$(BIN)/python tools/check_circles.py
	$(BIN)/python tools/check_dispatch.py
	$(BIN)/python tools/check_doors.py
	$(BIN)/python tools/size_budget.py
	$(BIN)/python -m shiplap.codegen.dtypes --check
	$(BIN)/python tools/exemptions.py
	$(BIN)/shiplap header --check
	$(BIN)/python tools/project_links.py --check

type: $(STAMP) ## check the types
	$(BIN)/mypy $(ARGS)

$(DOCS): $(STAMP)
	$(PIP) --no-build-isolation -e "packages/shiplap-testing[docs]"
	@touch $@

docs: export SHIPLAP_TEST_UNOPTIMIZED := 1
docs: $(DOCS) ## check pages, examples, records, tools and distributions, and build the documentation into site/
	$(PYTEST) -m "docs and not long"
	$(BIN)/mkdocs build --strict $(ARGS)

power: $(STAMP) ## plant faults in kernels and count those that the audit finds: docs/power.md (ARGS="--jobs 16 --seconds 480")
	$(BIN)/python tools/power $(ARGS)

bench: $(STAMP) ## measure the CPU kernels
	$(BIN)/python benchmarks/sparse3d_cpu.py $(ARGS)

bench-overhead: $(STAMP) ## measure what a call costs beside its work (ARGS=--json)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

records: $(STAMP) ## list recorded measurements, which are stale and what measures them again
	$(BIN)/python tools/records.py $(ARGS)

# So many processes take the accelerators in turn, each with its part of the memory of one; what measures or needs two
# has them alone, afterwards. Most of their time is that of compilers, which the processors of the host run.
GPU_WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 16 ? n : 16)))
# A process collects few files sooner than all: those that name the mark or what has it. Paths in ARGS take their place.
PATHS = $(strip $(foreach word,$(ARGS),$(wildcard $(firstword $(subst ::, ,$(word))))))
NAMING = $(if $(PATHS),,$$(grep -rlE "$(1)" packages/*/tests --include="test_*.py"))

test-gpu: $(STAMP) ## run the tests that need an accelerator
	@one=0; two=0; \
	$(BIN)/python -m pytest -q -n $(GPU_WORKERS) $(SPREAD) -m "gpu and not whole_device and not long" \
	  $(call NAMING,gpu|PLACES|each_device) $(ARGS) || one=$$?; \
	$(BIN)/python -m pytest -q -m "gpu and whole_device and not long" $(call NAMING,whole_device) $(ARGS) || two=$$?; \
	$(WORSE)

bench-gpu: $(STAMP) ## measure stale records of a GPU again (ARGS="--limit 300"), those that are left at the next run
	$(BIN)/python tools/records.py --renew gpu capture $(ARGS)

# tools/sanitize.py says what each part is: ARGS="device", or ARGS="kernels -- -k hash". CXX=clang++ for Clang.
sanitize: $(STAMP) ## run kernels, bindings and device C++ with the address and undefined-behaviour sanitizers
	CXX="$(CXX)" $(BIN)/python tools/sanitize.py $(ARGS)

header: $(STAMP) ## write the C header that the declarations imply
	$(BIN)/shiplap header $(ARGS)

# Both come into environments of nox, which need no `make install`. Without nox in .venv, pip installs it alone.
NOX := $(BIN)/nox
$(NOX): | $(BIN)/python
	$(PIP) nox

wheel: $(NOX) ## build dist/: source distributions and wheels of what is published, with native bindings
	$(NOX) -s dist

release-check: $(NOX) ## build dist/ as for a release, check it, and try it in an empty environment
	$(BIN)/python tools/records.py --check
	$(NOX) -s release-check

clean: ## remove what was built (.venv stays; its stamp goes)
	rm -rf build dist site shiplap-report $(STAMP) $(DOCS) $(DEMO)
	for package in packages/*; do (cd $$package && rm -rf build dist .cmake CMakeCache.txt CMakeFiles CMakeInit.txt \
	  build.ninja cmake_install.cmake compile_commands.json .ninja_deps .ninja_log .skbuild-info.json); done
	find packages -name CMakeFiles -prune -exec rm -rf {} +
	find packages \( -name '*.so' -o -name cmake_install.cmake \) -delete
	find packages tests tools -name __pycache__ -prune -exec rm -rf {} +
