# Everything a newcomer needs: `make demo` or `make test` alone also does the set-up.
# PYTHON: an interpreter >= 3.11.  TORCH_INDEX: a package index to take torch from, such as PyTorch's own index of CPU
# wheels (far smaller than PyPI's, which bring CUDA).  ARGS: more words for the command, as in make demo ARGS=--quick

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
  PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(PIP_FLAGS)
ARGS ?=

# Containers often set it; the tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-torchtitan demo test test-oldest coverage check bench figures experiments faults docs clean

help:
	@echo "make demo    set up, train the demo's runs and draw them (runs/demo/figures)"
	@echo "make test    set up and run the tests"
	@echo "make test-oldest  the quick tests with the oldest releases that pyproject.toml allows, in an environment of their own"
	@echo "make coverage  the same, and the branch coverage of each module"
	@echo "make check   set up and run ruff, the import law and pyright"
	@echo "make bench   set up and run the benchmarks, each held against its bounds (ARGS=\"sync storage\": some of them)"
	@echo "make figures  set up, compute and draw the figures of experiments/ that need no training (docs/, experiments/results/)"
	@echo "make experiments  the same, and run what trains in a tiny size (together two minutes on two cores)"
	@echo "make faults  set up, and kill four commands at every call that writes; fill the disk at each (seven minutes on two cores)"
	@echo "make docs    set up, build the documentation into site/, strictly"
	@echo "make setup-torchtitan  an environment for the tests of torchtitan, which are skipped without it"
	@echo "make setup   only the set-up for use;  make setup-dev  also what tests and checks need"

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "twophase needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and by its exact version, so that no other package's range can choose one
$(VENV)/.torch: $(VENV)/.created
	@echo "installing torch (once; this is the large one)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing twophase"
	@$(PIP) -e '.[plot,sweep,digits,data]'
	@touch $@

# the reference is read off the source, so that neither torch nor twophase needs to be installed
$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing what the documentation needs"
	@$(PIP) 'pip>=25.1' # which knows dependency groups
	@$(PIP) --group docs
	@touch $@

# trackers that need an account or a server of their own are not tested
DEV_EXTRAS := plot,sweep,digits,data,hf,trainer,lightning,ft,schedulefree,tensorboard
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need"
	@$(PIP) 'pip>=25.1'
	@$(PIP) -e '.[$(DEV_EXTRAS)]' --group dev
	@# for the one tokenizer file in it; what it depends on is not needed, and wants another numpy
	@$(PIP) --no-deps mistral-common
	@# tests of pages need a Chromium; without one they are skipped, so this may fail
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Debian's chromium, for the tests of pages" && \
	    timeout 300 sh -c 'apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core' >/dev/null 2>&1; } || \
	  echo "no chromium here: the tests of pages will be skipped (apt-get install chromium brings it)"
	@touch $@

# torchtitan pins releases of its own, so it has an environment of its own, which borrows torch from $(VENV), and
# with the .pth files there coverage, which counts in processes that tests start
TITAN := .venv-torchtitan
setup-torchtitan: $(TITAN)/.installed
$(TITAN)/.installed: $(VENV)/.installed-dev constraints-torchtitan.txt
	@echo "making $(TITAN)"
	@$(BIN)/python -m venv $(TITAN)
	@$(BIN)/python -c 'import pathlib, sysconfig as s; a = pathlib.Path(s.get_path("purelib")); \
	  b = pathlib.Path("$(TITAN)").resolve() / a.relative_to(s.get_path("data")); \
	  (b / "base.pth").write_text(f"import site; site.addsitedir(\"{a.resolve()}\")\n")'
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(TITAN)/bin/python -m pip install --quiet --no-deps -r constraints-torchtitan.txt
	@touch $@

demo: setup
	@$(BIN)/twophase demo $(ARGS)

# two workers: each of them, and its fork server, imports torch
test: setup-dev
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# without torchft, which wants a later torch
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.installed
	@$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)
$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	@echo "making $(OLDEST)"
	@$(PYTHON) -m venv $(OLDEST)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(OLDEST)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints-oldest.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) gmpy2 hypothesis mpmath pytest pytest-timeout pytest-xdist \
	  pytorch-optimizer -e '.[plot,sweep,digits,data,hf,trainer,lightning,schedulefree,tensorboard]'
	@touch $@

# where it can be installed with torchtitan
coverage: setup-dev
	@$(MAKE) setup-torchtitan || echo "no environment for torchtitan: its tests are not counted"
	@$(BIN)/python -m pytest -n 2 --dist worksteal --cov $(ARGS)

check: setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pyright

bench: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks $(ARGS)

# Two scripts of experiments/ at a time, one a line, each in one thread; what a script printed is shown if it fails.
RUN_SCRIPTS = tr '\n' '\0' | OMP_NUM_THREADS=1 xargs -0 -P 2 -I{} sh -c 'log=$$(mktemp); \
  if $(BIN)/python experiments/{} $${OUT:+--out $$OUT} > $$log 2>&1; then echo "ok    {}"; else cat $$log; echo "FAIL  {}"; exit 1; fi'

define FIGURES
period_criteria.py
fig2_toy.py
fig1_mechanism.py
bench/tables.py
bench/takeaway.py
fig3_heatmaps.py
fig4_retuning.py
fig5_soft.py
blockwise/blockwise.py
compressed.py
kinds.py
linear_network.py
regimes/answers.py
endef
export FIGURES

define TINY
fig3_heatmaps.py --train quick --workers 1
blockwise/blockwise.py --train quick --workers 1
topk.py
bench/run.py "averaging outer.filter=orthogonal" --size tiny --workers 1 --quiet
fig4_retuning.py --train quick --workers 1
fig5_soft.py --train quick --workers 1
compressed.py --train quick --workers 1
kinds.py --train quick --workers 1
linear_network.py --train quick
gpu/step.py --tiny
gpu/regimes.py --tiny
regimes/llama.py --trial
endef
export TINY

# afterwards git diff --exit-code experiments/results says that the numbers are still those
figures: setup-dev
	@echo "$$FIGURES" | $(RUN_SCRIPTS)

experiments: figures
	@export OUT=$$(mktemp -d); echo "$$TINY" | $(RUN_SCRIPTS); status=$$?; rm -r "$$OUT"; exit $$status

faults: setup-dev
	@FAULTS=all $(BIN)/python -m pytest -n 2 tests/faults $(ARGS)

docs: $(VENV)/.installed $(VENV)/.installed-docs
	@$(BIN)/python -m twophase explore --out docs/assets/explore.html
	@$(BIN)/zensical build --clean --strict

clean:
	rm -rf $(VENV) $(TITAN) $(OLDEST) site .cache
