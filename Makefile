# make        start a cluster on this machine, ask it questions, print what that cost
# make serve  serve its model with one group of one rank, until Ctrl-C
# make test   run every test that this machine can run
# make check  lint, types, and that the committed gRPC stubs are fresh
# make bench-peers  compare with other engines on this machine: hours, and 14 GB on the disk
# make stubs  write the gRPC stubs again from proto/
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

# The kernel tests choose between Triton's interpreter and its compiler when they import it,
# so each of the two has a process of its own. The interpreter multiplies with NumPy, whose OpenBLAS
# has kernels, for some CPUs, that sum a row differently by its place in the matrix: not so this one,
# which every x86-64 runs.
test: .venv/dev
	.venv/bin/pytest --ignore=tests/kernels/interpreted
	TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Nehalem .venv/bin/pytest tests/kernels/interpreted

check: .venv/dev .venv-stubs/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	PATH="$(CURDIR)/$(STUBS):$$PATH" sh proto/generate.sh --check

# BENCH=--quick is done in minutes; `python -m bench.peers --help` lists the other options.
bench-peers: .venv/ready
	.venv/bin/python -m bench.peers $(BENCH)

# The compiler lives apart from the runtime: grpcio-tools pins protobuf<6 and Ray brings 7.
STUBS := .venv-stubs/bin
stubs: .venv-stubs/ready
	PATH="$(CURDIR)/$(STUBS):$$PATH" sh proto/generate.sh

.venv-stubs/ready: proto/requirements.txt
	$(PYTHON) -m venv .venv-stubs
	$(STUBS)/pip install --quiet -r proto/requirements.txt
	touch $@

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet torch==2.13.0
	.venv/bin/pip install --quiet --editable '.[cluster]'
	.venv/bin/python -m quire.kernels.native
	.venv/bin/python -m quire.worker.native_hashing
	.venv/bin/python -m quire.router.native_holders
	touch $@

.venv/dev: .venv/ready
	.venv/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-stubs

.PHONY: demo serve test check bench-peers stubs clean
