PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
VENV = .venv
BIN = $(VENV)/bin
# More processes than the two cores of a small machine: many tests wait for another process or a disk.
PYTEST = pytest -n 3 --ignore=tests/e2e
# Each append followed by forgetting: without what lasts long and has nothing to do with what a driver remembers.
REBUILD = AGENTRUNS_TEST_REBUILD=1 $(BIN)/$(PYTEST) tests/db tests/crash tests/properties \
	--ignore=tests/db/test_claims.py --ignore=tests/db/test_odd_results.py --ignore=tests/crash/test_soak.py

# uv is ten times faster than pip; where it cannot be had, pip installs the same pins.
define install
	@test -n "$(PYTHON)" || { echo "agentruns needs Python 3.11 or newer: no python3, python3.13, python3.12 or python3.11 on PATH is." >&2; exit 1; }
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/pip install -qq --disable-pip-version-check uv || true
	@$(BIN)/uv pip install -q --compile-bytecode --system-certs --python $(BIN)/python $(1) 2>/dev/null || $(BIN)/pip install -qq --disable-pip-version-check $(1)
	@touch $@
endef

.PHONY: demo console test test-fast test-rebuild check

demo: $(VENV)/runtime
	@$(BIN)/python manage.py demo

console: $(VENV)/runtime
	@$(BIN)/python manage.py console

test: $(VENV)/dev
	$(BIN)/$(PYTEST)
	$(BIN)/python -m tests.servers $(PYTEST)
	$(REBUILD)
	$(if $(wildcard tests/e2e),$(BIN)/pytest tests/e2e)

test-fast: $(VENV)/dev
	$(BIN)/$(PYTEST) --ignore=tests/crash --ignore=tests/properties

test-rebuild: $(VENV)/dev
	$(REBUILD)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(foreach settings,project.settings tests.settings,\
		$(BIN)/python manage.py check --settings=$(settings) && \
		$(BIN)/python manage.py makemigrations --check --dry-run --settings=$(settings) &&) true

$(VENV)/runtime: pyproject.toml constraints.txt
	$(call install,-c constraints.txt -e '.[all]')

$(VENV)/dev: pyproject.toml constraints.txt requirements-dev.txt
	$(call install,-r requirements-dev.txt)
	@touch $(VENV)/runtime
