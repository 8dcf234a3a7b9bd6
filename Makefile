# Every target sets itself up on a fresh machine: Python 3.11 or newer and a C++ compiler are all it takes.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: train test up bench docs lint install
.DELETE_ON_ERROR:

train: install  ## text to registered model, in minutes
	$(BIN)/forgeline run configs/quickstart.yaml

test: install lint  ## linters, type checker, and the whole suite
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up: install  ## Prefect server, MLflow server and a worker, until Ctrl-C
	$(BIN)/forgeline up

bench: install  ## every claim, measured; TEXT=tinyshakespeare.txt adds the Shakespeare figures
	@failed=0; for benchmark in tokenization loader step_overhead checkpoint_stall $(if $(TEXT),"nanogpt_shakespeare --text $(TEXT)"); do \
		set -- $$benchmark; name=$$1; shift; echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py "$$@" || failed=1; \
	done; exit $$failed

docs: install  ## the configuration reference, from the code
	$(BIN)/forgeline config > docs/configure.md
	$(BIN)/forgeline config --json-schema > docs/config.schema.json

install: $(INSTALLED)

# DeepSpeed's build looks at the torch that is already there, so torch and the build tools come first.
$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Forgeline needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock torch setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@
