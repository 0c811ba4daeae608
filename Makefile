# `make demo` and `make test` need Python 3.11 or later, make and git, and set everything else up themselves.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
HOSTS := .hosts
READY := $(VENV)/.ready
# uv takes a tenth of pip's time and downloads once for both environments; pip may know a mirror that uv does not.
install = $(VENV)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || $(1)/bin/python -m pip install $(2)
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
MINUTES ?= 10
# Tests start processes of their own: more threads than cores only slow them down.
test test-fast test-hosts test-pages test-swift-page explore: export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1
# Where compiled modules are not kept, every process of the tests compiles the project anew: 1 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite test-fast test-hosts test-pages test-swift-page explore lint reference models clean

demo: $(READY)
	@$(RUN) -m tools.demo

# The linters run while the tests are collected, which takes one core.
test: $(READY)
	$(MAKE) --jobs=2 --no-print-directory lint suite

# One worker more than cores: tests wait for processes.
suite: $(READY)
	$(RUN) -m tests.budget -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered --durations=20

test-fast: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" --ignore=tests/e2e

# All requirements of the pages at once: the newest trainers beside one torch; ms-swift has an environment of its own.
# Both wait for processes half of the time, so they run side by side.
test-hosts: $(HOSTS)/.ready $(READY)
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory test-pages test-swift-page

test-pages: $(HOSTS)/.ready
	HOST_PYTHON=$(abspath $(HOSTS)/bin/python) $(HOSTS)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/hosts

test-swift-page: $(READY)
	HOST_PYTHON=$(abspath $(RUN)) $(RUN) -m pytest tests/hosts/test_swift_page.py

$(HOSTS)/.ready: $(READY) $(wildcard docs/use-it-in/*.md)
	@echo "Setting up $(HOSTS), once."
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --no-compile torch==2.13.0
	sed -n "s/^pip install '.\[hf\]' //p" docs/use-it-in/*.md | xargs -n 1 | sort -u > $(HOSTS)/pages.txt
	$(call install,$(HOSTS),-e '.[hf]' -r $(HOSTS)/pages.txt torch==2.13.0 pytest pytest-xdist hypothesis pyyaml)
	touch $(HOSTS)/.ready

explore: $(READY)
	$(RUN) -m tests.explore $(MINUTES)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

reference: $(READY)
	$(RUN) -m tools.configuration docs/configuration.md docs/mixing.md adapters/config/trainer_keys.json adapters/config/grpo_keys.json
	$(RUN) -m tools.rooms

# Takes long: every family that transformers knows is probed.
models: $(READY)
	$(RUN) -m tools.models families docs/models.md
	$(RUN) -m tools.models unpadded docs/models.md
	$(RUN) -m tools.models vision docs/models.md

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Packplan needs Python 3.11 or later")'
	@echo "Setting up $(VENV), once; this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt setuptools torch uv
	$(call install,$(VENV),-c constraints.txt --no-build-isolation -e '.[dev]')
	touch $(READY)

clean:
	rm -rf $(VENV) $(HOSTS) runs/demo
