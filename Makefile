# make demo | test | test-cluster | test-sglang | test-slow | lint | bench: each sets up .venv first when it is missing or older than the pins.
PYTHON      ?= python3
VENV        ?= .venv
# More arguments for the command that installs torch. On Linux the default build brings CUDA (several GB);
# the CPU build is on PyTorch's own CPU index: make TORCH_ARGS='--index-url URL'.
TORCH_ARGS  ?=
# More arguments for pytest: make test PYTEST_ARGS='-k bus -x'.
PYTEST_ARGS ?=
BIN         := $(VENV)/bin
TORCH       := $(shell sed -n '/^torch==/p' constraints.txt)
UV          := $(shell sed -n '/^uv==/p' constraints.txt)
PLUGINS     := $(patsubst %/,%,$(sort $(dir $(wildcard relax_plugins/*/pyproject.toml))))
STAMP       := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
# SGLang's server has an environment of its own: it wants other versions of what .venv has too.
# Another tested release: make test-sglang SGLANG_RELEASE=0.5.14, with what cpu/releases/0.5.14.txt has instead of the pins.
SGLANG         := relax_plugins/relax-plugin-sglang/cpu
SGLANG_PINNED  := $(shell sed -n 's/^sglang==//p' $(SGLANG)/requirements.txt)
SGLANG_RELEASE ?= $(SGLANG_PINNED)
SGLANG_VENV    ?= .venv-sglang$(if $(filter-out $(SGLANG_PINNED),$(SGLANG_RELEASE)),-$(SGLANG_RELEASE))
SGLANG_OTHERS  := $(if $(filter-out $(SGLANG_PINNED),$(SGLANG_RELEASE)),$(SGLANG)/releases/$(SGLANG_RELEASE).txt)
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: help setup demo tokenizers test test-cluster test-sglang test-slow test-gpu lint format bench wheel clean

help:
	@echo "make demo       train a tiny omni-modal model on this machine's CPU, about a minute"
	@echo "make test       the fast tests"
	@echo "make tokenizers    fetch the tokenizers of released models that some tests need; make test tries it, too"
	@echo "make test-cluster  the tests that start a Ray cluster on this machine"
	@echo "make test-sglang   the tests that start a real SGLang server, in $(SGLANG_VENV); SGLANG_RELEASE=0.5.14: with another one"
	@echo "make test-slow  the long tests: whole runs, kills, resumes"
	@echo "make test-gpu   the tests that need a GPU"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make format     let ruff fix and format the files"
	@echo "make bench      compare speed with other trainers"
	@echo "make setup      only set up $(VENV)"
	@echo "make wheel      build the wheels into dist/"
	@echo "make clean      remove $(VENV), .venv-sglang*, .tokenizers, caches and built files; runs/ stays"

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Relax needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first, alone and by pip: later packages cannot choose its build, and pip's own settings (index, find-links) apply.
$(STAMP): pyproject.toml constraints.txt Makefile $(PLUGINS:%=%/pyproject.toml) | $(BIN)/python
	@echo "Setting up $(VENV), once, in a minute or two. It downloads about 500 MB: 200 for the CPU build of torch, 300 for the"
	@echo "rest; 1.8 GB on disk. On Linux pip may choose torch's CUDA build, several GB more: see TORCH_ARGS in the Makefile."
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH_ARGS) $(TORCH)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(UV)
	@$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]' $(PLUGINS:%=-e ./%)
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo "Adding the benchmarks' peers to $(VENV): about 70 MB to download."
	@$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev,bench]' $(PLUGINS:%=-e ./%)
	@touch $@

$(SGLANG_STAMP): $(SGLANG)/requirements.txt $(SGLANG_OTHERS) $(wildcard $(SGLANG)/stand_ins/*/*) constraints.txt Makefile $(STAMP)
	@echo "Setting up $(SGLANG_VENV), once, in a few minutes: about 700 MB to download with the CPU build of torch, 2.5 GB on disk."
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV) || { rm -rf $(SGLANG_VENV); exit 1; }
	@$(SGLANG_VENV)/bin/python -m pip install -q --disable-pip-version-check $(TORCH_ARGS) $(TORCH)
	@$(BIN)/uv pip install -q --compile-bytecode --no-deps --python $(SGLANG_VENV)/bin/python -r $(SGLANG)/requirements.txt $(foreach pins,$(SGLANG_OTHERS),-r $(pins) --overrides $(pins))
	@cp -R $(SGLANG)/stand_ins/* "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

demo: $(STAMP)
	$(BIN)/relax train configs/omni-tiny.yaml

# Not ours, so not in the repository: pinned by tests/tokenizers.json. Without npm or a network their tests are skipped.
tokenizers: $(STAMP)
	@$(BIN)/python tests/fetch_tokenizers.py

test: $(STAMP)
	@$(BIN)/python tests/fetch_tokenizers.py --if-possible
	$(BIN)/python -m pytest -m "not slow and not gpu and not cluster and not sglang" $(PYTEST_ARGS)

# In one process: all of them share one cluster.
test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m "cluster and not slow and not gpu" tests/cluster $(PYTEST_ARGS)

# In one process: all of them share a few servers.
test-sglang: $(STAMP) $(SGLANG_STAMP)
	RELAX_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) $(BIN)/python -m pytest -m sglang tests/sglang $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(BIN)/python tests/fetch_tokenizers.py --if-possible
	$(BIN)/python -m pytest -m "slow and not gpu and not sglang" --timeout=900 $(PYTEST_ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/embedded.py

# Uses the build backend in .venv, so it needs no network.
wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	for plugin in $(PLUGINS); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$plugin || exit 1; done

clean:
	rm -rf $(VENV) .venv-sglang* $(SGLANG_VENV) .tokenizers dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
