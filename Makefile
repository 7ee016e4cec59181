# make        start a cluster on this machine, ask it questions, print what that cost
# make serve  serve its model with one group of one rank, until Ctrl-C
# make test   run the tests that are quick and touch every promise: three and a half minutes
# make test-all  run every test that this machine can run
# make test-python PYTHON=python3.13  install the wheel for another Python; generate, serve, stop
# make test-without-torch PYTHON=python3.13  run the tests that need no torch on another Python
# make test-lowest  run the tests that use dependencies most with the lowest version of each: minutes
# make prove  run the long tests whose sources have changed, and note in tests/proofs.json that they passed
# make sanitize  run the tests of our C++ under the address and undefined behaviour sanitizers
# make check  lint, types, and that the committed gRPC stubs are fresh
# make format  lay out Python and C++ as `make check` wants them
# make wheel  build a wheel with our C++ libraries in it, compiled for this platform
# make sbom   write dist/quire.cdx.json, a bill of materials (CycloneDX) of requirements.lock
# make bench-peers  compare with other engines on this machine: hours, and 14 GB on the disk
# make docs   build the documentation as a site, in site/
# make ui     build the live page from cluster/ui, with node and npm
# make stubs  write the gRPC stubs again from proto/
# make lock   write requirements.lock again, after a change of pyproject.toml; UPGRADE=1 takes what is new
PYTHON ?= python3.11

# Without a driver, take PyTorch's CPU build. With one, PyPI's build is the CUDA build.
# PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL, where set, already say where wheels come from.
ifeq ($(PIP_FIND_LINKS)$(PIP_EXTRA_INDEX_URL)$(shell command -v nvidia-smi),)
export PIP_EXTRA_INDEX_URL := https://download.pytorch.org/whl/cpu
endif

demo: .venv/ready
	.venv/bin/quire demo

serve: .venv/ready
	.venv/bin/quire serve

test: OPTIONS := -m 'not slow' --hypothesis-profile=quick
test test-all: .venv/dev
	tests/run $(OPTIONS)

# `.ci/run` skips what this has proven. Nothing is written if a test fails.
PROOFS := $(wildcard $(addsuffix /test_*.py,tests/golden tests/kernels tests/kernels/interpreted))
prove: .venv/dev
	tests/run -m 'slow and proof' --skip-proven
	.venv/bin/python -m tests.proofs write $(PROOFS)
	$(MAKE) sanitize
	.venv/bin/python -m tests.proofs write -fsanitize=$(SANITIZE) $(SANITIZED)

test-python:
	tests/on_python wheel $(PYTHON)

test-without-torch:
	tests/on_python without-torch $(PYTHON)

test-lowest:
	tests/on_python lowest $(PYTHON)

# Python is not instrumented, so the runtime is loaded before it, and what Python keeps until it ends
# is no leak. QUIRE_NATIVE_ISA=… leaves out the kernels of other instruction sets, each of which
# compiles for a minute of CPU time. TESTS and OPTIONS are pytest's. SANITIZE=thread looks for races;
# GCC's runtime for that wants addresses that are not random.
SANITIZE ?= address,undefined
SANITIZED := tests/test_sanitizers.py tests/kernels/test_low_rank.py $(addprefix tests/kernels/test_native_,\
  attention.py program.py int8.py w4.py linear.py shared.py) $(addprefix tests/router/test_,\
  holders.py directory_machine.py in_flight.py) tests/worker/blocks/test_hashing.py tests/worker/rank/test_sampler.py
TESTS ?= $(SANITIZED)
RUNTIME := $(if $(findstring thread,$(SANITIZE)),libtsan.so,libasan.so)
sanitize: .venv/dev
	QUIRE_NATIVE_SANITIZE=$(SANITIZE) ASAN_OPTIONS=detect_leaks=0 \
	  TSAN_OPTIONS=suppressions=$(CURDIR)/tests/tsan.supp \
	  $(if $(findstring thread,$(SANITIZE)),setarch -R) env LD_PRELOAD=$$(c++ -print-file-name=$(RUNTIME)) .venv/bin/pytest $(TESTS) $(OPTIONS)

NATIVE = $(shell find kernels worker router -name '*.cpp' -o -name '*.h')
check: .venv/dev .venv-stubs/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/clang-format --dry-run -Werror $(NATIVE)
	.venv/bin/mypy
	PATH="$(CURDIR)/$(STUBS):$$PATH" sh proto/generate.sh --check

format: .venv/dev
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(NATIVE)

# For every x86-64 CPU: four instruction sets, a minute of CPU time for each that is not in the cache.
wheel: .venv/ready
	QUIRE_BUILD_NATIVE=1 .venv/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/quire_serve-*.whl

# The tool is not among what we depend on: it has an environment of its own.
sbom: .venv/ready
	mkdir -p dist
	$(UV) tool run --quiet --python .venv/bin/python --from 'cyclonedx-bom>=7.5,<8' cyclonedx-py requirements \
	  --pyproject pyproject.toml --mc-type application --output-reproducible --validate \
	  --spec-version 1.6 --output-format JSON --output-file dist/quire.cdx.json requirements.lock
	@ls dist/quire.cdx.json

# BENCH=--quick is done in minutes; `python -m bench.peers --help` lists the other options.
bench-peers: .venv/ready
	.venv/bin/python -m bench.peers $(BENCH)

# What the code says of itself must be what the pages say, and each link must lead somewhere.
docs: .venv/dev
	.venv/bin/python -m tools.reference --check
	.venv/bin/python -m tools.chart_values --check
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict

ui:
	cd cluster/ui && npm ci --no-audit --no-fund && npm run build

# The compiler lives apart from the runtime: grpcio-tools pins protobuf<6 and Ray brings 7.
STUBS := .venv-stubs/bin
stubs: .venv-stubs/ready
	PATH="$(CURDIR)/$(STUBS):$$PATH" sh proto/generate.sh

.venv-stubs/ready: proto/requirements.txt
	$(PYTHON) -m venv .venv-stubs
	$(STUBS)/pip install --quiet -r proto/requirements.txt
	touch $@

# torch is pip's, which finds the CPU build. All else is uv's, by the lock and its hashes.
UV = $(or $(shell command -v uv),.venv/bin/uv)
LOCKED = $(UV) pip install --quiet --python .venv/bin/python $(addsuffix requirements.lock,--constraints= --build-constraints=)
.venv/ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --no-deps $(shell grep -o '^torch==[0-9.]*' requirements.lock)
	command -v uv >/dev/null || .venv/bin/pip install --quiet uv
	$(LOCKED) --editable '.[bench,cluster]'
	.venv/bin/python -m quire.kernels.native.library
	.venv/bin/python -m quire.worker.blocks.native_hashing
	.venv/bin/python -m quire.router.prefix_index.native_index
	touch $@

.venv/dev: .venv/ready
	$(LOCKED) --editable '.[dev]'
	touch $@

# One file for all Pythons, from the oldest on, and all platforms. Triton's version is the CUDA build's
# of torch, which pins it, or the newest on a CPU, so it is not in there.
lock: .venv/ready
	$(UV) pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes --no-annotate --no-emit-package triton \
	  --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade) --output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv .venv-stubs

.PHONY: demo serve test test-all prove test-python test-without-torch test-lowest sanitize check format wheel sbom bench-peers ui docs stubs lock clean
