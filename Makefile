# `make demo` and `make test` need Python 3.11 or later, make and git, and set everything else up themselves.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
HOSTS := .hosts
DOCS := .docs
READY := $(VENV)/.ready
# uv takes a tenth of pip's time and unpacks once for both environments; pip may know a mirror that uv does not.
LINKS = UV_FIND_LINKS=$$($(RUN) -m pip config get global.find-links 2> /dev/null)
install = $(LINKS) $(VENV)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || $(RUN) -m pip --python $(1)/bin/python install $(2)
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
MINUTES ?= 10
# Need ms-swift and DeepSpeed, which the environment of the newest trainers lacks.
PAGE := tests/hosts/test_swift_page.py tests/hosts/test_sharded_weights.py tests/e2e/test_zero.py
# Needs the site, which has an environment of its own.
SITE := tests/docs/test_site.py
# Tests start processes of their own: more threads than cores only slow them down.
test test-fast test-hosts test-docs explore: export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1
# Where compiled modules are not kept, every process of the tests compiles the project anew: 1 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite test-fast test-hosts newest pinned test-docs explore lint docs reference models clean

demo: $(READY)
	@$(RUN) -m tools.demo

# The linters run while the tests are collected, which takes one core.
test: $(READY)
	$(MAKE) --jobs=2 --no-print-directory lint suite

# One worker more than cores: tests wait for processes.
suite: $(READY)
	$(RUN) -m tests.budget -p tests.workers -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder --max-worker-restart=1 $(PAGE:%=--ignore=%) --ignore=$(SITE) --cov --cov-report=term:skip-covered --durations=20

test-fast: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" --ignore=tests/e2e

# All requirements of the pages at once: the newest trainers beside one torch; ms-swift has an environment of its own.
test-hosts: $(HOSTS)/.ready
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory newest pinned

newest:
	HOST_PYTHON=$(abspath $(HOSTS)/bin/python) $(HOSTS)/bin/python -m pytest --durations=10 tests/hosts

pinned:
	EVERY_CELL=1 $(RUN) -m pytest --durations=10 $(PAGE) tests/e2e/test_bench.py::test_a_benchmark_has_figures_of_every_row

$(HOSTS)/.ready: $(READY) Makefile $(wildcard docs/use-it-in/*.md)
	@echo "Setting up $(HOSTS), once."
	$(PYTHON) -m venv --without-pip $(HOSTS)
	sed -n "s/^pip install '.\[hf\]' //p" docs/use-it-in/*.md | xargs -n 1 | sort -u > $(HOSTS)/pages.txt
	$(call install,$(HOSTS),-e '.[hf]' -r $(HOSTS)/pages.txt torch==2.13.0 torchdata pytest hypothesis pyyaml)
	touch $(HOSTS)/.ready

explore: $(READY)
	$(RUN) -m tests.explore $(MINUTES)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(RUN) tools/size.py check

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet
	@echo 'Look at it: $(PYTHON) -m http.server --directory site'

# The site as it was built: its links, its names of the API, its width on a phone.
test-docs: docs
	SITE=site $(RUN) -m pytest $(SITE)

$(DOCS)/.ready: $(READY) pyproject.toml
	@echo "Setting up $(DOCS), once."
	$(PYTHON) -m venv --without-pip $(DOCS)
	$(call install,$(DOCS),-e '.[docs]')
	touch $(DOCS)/.ready

reference: $(READY)
	$(RUN) -m tools.configuration docs/configuration.md docs/mixing.md adapters/config/trainer_keys.json adapters/config/grpo_keys.json
	$(RUN) -m tools.rooms
	$(RUN) -m tools.slots

# Takes long: every family that transformers knows is probed.
models: $(READY)
	$(RUN) -m tools.models families docs/models.md
	$(RUN) -m tools.models unpadded docs/models.md
	$(RUN) -m tools.models vision docs/models.md

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Packplan needs Python 3.11 or later")'
	@echo "Setting up $(VENV), once; this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt setuptools uv
	$(call install,$(VENV),-c constraints.txt --no-build-isolation -e '.[dev]')
	touch $(READY)

clean:
	rm -rf $(VENV) $(HOSTS) $(DOCS) site runs/demo
