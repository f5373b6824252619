# `make run` and `make test` do everything from a bare clone: environment, install, then the work.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# CI installs only files whose sha256 is in .ci/requirements.txt, and builds with the setuptools that
# is pinned there; DeepSpeed is an archive of sources, so setuptools must come first.
HASHED := .ci/requirements.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test check slow docs install hashes clean

run: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/tuner optimize

install: $(READY)

$(READY): pyproject.toml constraints.txt $(if $(CI),$(HASHED))
	$(PYTHON) -m venv $(VENV)
ifdef CI
	sed -n '/^setuptools==/,/[^\\]$$/p' $(HASHED) > $(VENV)/setuptools.txt
	$(PIP) --require-hashes -r $(VENV)/setuptools.txt
	$(PIP) --require-hashes --no-build-isolation -r $(HASHED)
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt -e '.[all,dev]'
endif
	touch $(READY)

# After a change of constraints.txt.
hashes: install
	$(BIN)/python .ci/hashes.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -m "not slow"

slow: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -m slow

docs: install
	$(BIN)/python -m tuner.cli.reference > docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
