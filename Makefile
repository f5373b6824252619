# `make run` and `make test` do everything from a bare clone: environment, install, then the work.
# `make run` installs what a search on this machine needs; `make test` adds the rest.
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
READY := $(VENV)/.ready

# The first Python here that is new enough and can make a virtual environment.
FITS := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
    "$$name" -c "$(FITS)" 2> /dev/null && echo "$$name" && break; done)

# CI installs only files whose sha256 is in .ci/requirements.txt, and builds with the setuptools that
# is pinned there; DeepSpeed is an archive of sources, so setuptools must come first. Python compiles
# what is imported, which is little of what is installed.
HASHED := .ci/requirements.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Three tests share two cores, because many wait for processes. Those that start Ray or become
# another user run one after the other, and leave most of the machine to `check`, or in CI to
# `lowest`. Nothing runs beside a quiet test, which measures time or energy.
ALONE := ray or root
EVERYDAY := not (slow or quiet or long)
SLOW := slow and not (quiet or all_knobs or long)
# The tests state their environment (tests/environment.py), but what Python itself reads as it
# starts. Each part prints its slowest tests and what it left out for want of what, and leaves the
# duration of every test in build/durations. CASES="-k NAME" chooses among a part's tests, and
# ABOVE=fail fails a test that takes too many CPU seconds for every day, as CI does; else it is named.
PYTEST = LC_ALL=C.UTF-8 $(BIN)/python -E -m pytest -q -rs \
    --durations=15 --durations-min=1 --junitxml=build/durations/$@.xml $(CASES)
SHARED = -n 3 --dist worksteal
# Collecting all files takes ten seconds: a part of few tests collects those that name its marks.
naming = $(shell grep -rlE "mark\.($(1))\b" tests --include="test_*.py")
ABOVE := $(if $(CI),fail,warn)

.PHONY: run demo test test-of check-and-alone everyday-shared everyday-alone everyday-rest check slow \
    slow-quiet slow-shared slow-alone alone-and-lowest clean-root machines \
    other-cpu lowest middle all-knobs extras long release docs install hashes sbom clean

# What `make run` tunes (examples/laptop), the limits of its search, and what it predicts at the end:
# cores without clocks have little to trade, and a node of GPUs has more.
EXAMPLE := examples/laptop
SEARCH ?= --max-probes 24 --search-time 170s
PLAN ?= opt-350m --cluster a100-8

run: $(RUNNABLE)
	@$(BIN)/tuner doctor --brief
	@echo "Tuning $(EXAMPLE)/job.toml here; its \"today\" is ZeRO-3 with full checkpointing ($(EXAMPLE)/README.md)"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/tuner optimize $(EXAMPLE)/job.toml \
	    --space $(EXAMPLE)/space.toml --executor inline $(SEARCH) \
	    --today $(EXAMPLE)/ds_config.json activation_checkpointing=full
	@printf '\n%s\n' "Measured here: the search above. Predicted, without measuring: tuner plan $(PLAN)"
	@$(BIN)/tuner plan $(PLAN) --quiet

demo: $(RUNNABLE)
	$(BIN)/tuner demo

install: $(READY)

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make: this needs Python 3.11 or newer with its venv module (on \
	Debian: apt install python3-venv), and none is on the PATH; name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

ifdef CI
$(READY): pyproject.toml constraints.txt $(HASHED) | $(BIN)/python
	sed -n '/^setuptools==/,/[^\\]$$/p' $(HASHED) > $(VENV)/setuptools.txt
	$(PIP) --require-hashes -r $(VENV)/setuptools.txt
	$(PIP) --require-hashes --no-build-isolation --no-compile -r $(HASHED)
	$(PIP) --no-deps --no-build-isolation -e .
	touch $(RUNNABLE) $(READY)

$(RUNNABLE): $(READY)
else
# The variable reaches the environments in which pip builds, too: setuptools is the pinned one there.
# A path with a space in it would be two files, so the name stands alone.
$(READY) $(RUNNABLE): export PIP_CONSTRAINT = constraints.txt
$(READY) $(RUNNABLE): export PIP_BUILD_CONSTRAINT = constraints.txt

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[all,dev]'
	touch $(RUNNABLE) $(READY)

$(RUNNABLE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[train,ray,dashboard,terminal]'
	touch $(RUNNABLE)
endif

# After a change of constraints.txt.
hashes: install
	$(BIN)/python .ci/hashes.py

# Bill of materials, and the page of licences; after a change of constraints.txt, too.
sbom: install
	$(BIN)/python .ci/sbom.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check-and-alone everyday-shared

check-and-alone: install
	@$(MAKE) --no-print-directory -j2 check everyday-alone

everyday-shared: install
	$(PYTEST) --above-cpu-limit $(ABOVE) $(SHARED) -m "$(EVERYDAY) and not ($(ALONE))"

everyday-alone: install
	$(PYTEST) -m "$(EVERYDAY) and ($(ALONE))" $(call naming,ray|root)

# What of `everyday-shared` has not passed in the clean root, for want of a compiler, a browser, a
# database: all of it where no clean root was made. PASSED=FILE is another run's file of --junitxml.
PASSED ?= build/machines/debian-12.xml
everyday-rest: install
	$(PYTEST) --above-cpu-limit $(ABOVE) $(SHARED) --passed=$(PASSED) \
	    -m "$(EVERYDAY) and not ($(ALONE))"

# The everyday tests of one extra, or of a part of the core: make test-of EXTRA=planner. Pytest ends
# with 5 where none is left.
test-of: install
	@tests=$$($(BIN)/python -m benchmarks.ledger $(EXTRA)) || exit 2; \
	$(PYTEST) $(SHARED) -m "$(EVERYDAY) and not ($(ALONE))" $$tests && \
	{ $(PYTEST) -m "$(EVERYDAY) and ($(ALONE))" $$tests || [ $$? = 5 ]; }

slow: slow-quiet slow-shared slow-alone

slow-quiet: install
	$(PYTEST) -m "quiet and not (all_knobs or long)" $(call naming,quiet)

slow-shared: install
	$(PYTEST) $(SHARED) -m "$(SLOW) and not ($(ALONE))"

slow-alone: install
	$(PYTEST) -m "$(SLOW) and ($(ALONE))" $(call naming,ray|root)

# The tests of search and results once more, on the oldest kernels of OpenBLAS: the same seed
# makes the same search on every CPU.
other-cpu: install
	JOULEFRONT_TEST_KERNEL=Prescott $(PYTEST) $(SHARED) -m "$(EVERYDAY) and not ($(ALONE))" \
	    tests/search tests/answer tests/packaging/test_optunahub.py

# sdist, wheel and notes in build/release, checked in clean environments; nothing is uploaded.
release: install
	$(BIN)/python .ci/release.py

# Searches with other releases of the packages: the lowest of pyproject.toml, and some in the middle.
lowest middle:
	$(PYTHON) .ci/versions.py $@

alone-and-lowest: install
	@$(MAKE) --no-print-directory -j2 slow-alone lowest

# `make run` and the tests of `make test`, of the last commit, in a clean Debian, by an ordinary user
# without a compiler, in an empty environment: what it needs and does not name is red here, and what
# passes here runs nowhere else in CI. `make long` does so on other machines. Nothing that starts Ray
# may run beside it: Ray finds, and ends, the processes of others by their names.
clean-root: install
	$(BIN)/python -m benchmarks.machines debian-12 --brief

machines: install
	$(BIN)/python -m benchmarks.machines debian-12 debian-13 python-3.12 python-3.14

# Every configuration of the built-in training program; CI trains a covering sample of them.
all-knobs: install
	$(PYTEST) -m all_knobs

# Checkouts without extras: does what is left work and pass its tests?
extras: install
	$(BIN)/python -m benchmarks.extras

# What takes minutes each, for example trainings on the twin GPU node that are tuned as they run, and
# what comes close to a test of CI: other moments of a fault, other wheels, the benchmarks' commands,
# releases in the middle, and the search on another CPU.
long: other-cpu middle machines extras
	$(PYTEST) -m long

docs: install
	$(BIN)/python -m benchmarks.reference > docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
