PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
NEWER = $(shell for python in python3 python3.13 python3.12; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$python" && break; done)
VENV = .venv
BIN = $(VENV)/bin
# More processes than the two cores of a small machine: many tests wait for another process or a disk.
PYTEST = pytest -n 4 --dist worksteal --ignore=tests/e2e --ignore=tests/browser
# By itself: Playwright's loop runs in the thread that uses the database.
BROWSER = pytest -n 2 tests/browser
ENGINE = tests/db tests/crash tests/properties
# What has nothing to do with what a driver remembers, or counts what it costs.
REMEMBERED = tests/crash/test_soak.py $(patsubst %,tests/db/test_%.py,claims claude cost forks host_project imports \
	log_records notifications odd_results opentelemetry pgbouncer releases replay retention routers states sweep_cost verify)
# The rest of the engine, with all that a driver remembers thrown away after each append.
REBUILD = AGENTRUNS_TEST_REBUILD=1 $(BIN)/$(PYTEST) $(ENGINE) $(addprefix --ignore=,$(REMEMBERED))

# uv is ten times faster than pip; where it cannot be had, pip installs the same pins.
define install
	@test -n "$(PYTHON)" || { echo "agentruns needs Python 3.11 or newer: no python3, python3.13, python3.12 or python3.11 on PATH is." >&2; exit 1; }
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/pip install -qq --disable-pip-version-check uv || true
	@$(BIN)/uv pip install -q --compile-bytecode --system-certs --python $(BIN)/python $(1) 2>/dev/null || $(BIN)/pip install -qq --disable-pip-version-check $(1)
	@touch $@
endef

.PHONY: demo console test test-fast test-sqlite test-rebuild test-browser test-browser-61 coverage check messages bench

demo: $(VENV)/runtime
	@$(BIN)/python manage.py demo

console: $(VENV)/runtime
	@$(BIN)/python manage.py console

# Each test at least once; the engine's on both databases, with crashes, races and properties, but for what is
# between it and a model: on PostgreSQL as it is, on SQLite with what it remembers thrown away (`make test-sqlite` has it
# there as it is). The console's pages are read on PostgreSQL, where a broken query breaks the transaction, and
# seen in a browser on SQLite; so are the endpoints that ask nothing of a database that others do not (those of races,
# pages, keys and streams run on both). Celery workers are for PostgreSQL.
ON_POSTGRESQL = tests/admin tests/workers $(patsubst %,tests/api/test_%.py,approvals auth content control docs_page \
	errors etag forks health limits malformed mounting openapi redaction runs schemathesis sessions throttling tokens)
ON_SQLITE = tests/unit tests/packaging $(patsubst %,tests/db/test_%.py,budgets claude log_records \
	model_failures opentelemetry questions stateless states structured_output) $(patsubst %,tests/commands/test_%.py, \
	create_api_token deciding fork_run list_runs redaction run_agent show_run terminal)

test: $(VENV)/dev
	$(BIN)/$(PYTEST) tests/api tests/commands tests/hosts tests/packaging tests/unit $(REMEMBERED) \
		$(addprefix --ignore=,$(ON_POSTGRESQL))
	$(BIN)/python -m tests.servers $(PYTEST) $(addprefix --ignore=,$(ON_SQLITE))
	$(REBUILD)
	$(BIN)/pytest -n 4 --dist worksteal tests/e2e tests/browser

test-fast: $(VENV)/dev
	$(BIN)/$(PYTEST) --ignore=tests/crash --ignore=tests/properties

test-sqlite: $(VENV)/dev
	$(BIN)/$(PYTEST) $(ENGINE)

test-rebuild: $(VENV)/dev
	$(REBUILD)

test-browser: $(VENV)/dev
	$(BIN)/$(BROWSER)

# The console on Django 6.1, which constraints.txt names for Python 3.12 and newer.
test-browser-61:
	@test -n "$(NEWER)" || { echo "Django 6.1 needs Python 3.12 or newer: no python3, python3.13 or python3.12 on PATH is." >&2; exit 1; }
	@$(MAKE) --no-print-directory VENV=.venv61 PYTHON=$(NEWER) .venv61/dev
	.venv61/bin/python -c 'import django; assert django.VERSION[:2] == (6, 1), django.__version__'
	.venv61/bin/pytest -n 3 tests/admin
	.venv61/bin/$(BROWSER)

# What is reached without the crash tests; whether the tests pass is for `make test` to say.
coverage: $(VENV)/dev
	@$(BIN)/coverage erase
	-@$(BIN)/coverage run -m $(PYTEST) -q tests/unit tests/db tests/api tests/admin tests/commands
	@$(BIN)/coverage combine -q
	@$(BIN)/python -m tests.covered

check: $(VENV)/dev messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(foreach settings,project.settings tests.settings,\
		$(BIN)/python manage.py check --settings=$(settings) && \
		$(BIN)/python manage.py makemigrations --check --dry-run --settings=$(settings) &&) true

# Collects the texts of a copy of the package, as a translator would; xgettext must have nothing to complain about.
messages: $(VENV)/dev
	@command -v xgettext >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y gettext; } || { \
		echo "GNU gettext is missing: there is no xgettext on PATH. Install it: apt-get install gettext." >&2; exit 1; }
	@rm -rf $(VENV)/messages && cp -r agentruns $(VENV)/messages && mkdir -p $(VENV)/messages/locale
	cd $(VENV)/messages && LC_ALL=C.UTF-8 $(CURDIR)/$(BIN)/django-admin makemessages -l de >messages.log 2>&1; \
		echo "processing locale de" | diff - messages.log && msgfmt --check-format -o /dev/null locale/de/LC_MESSAGES/django.po

# Beside the peers that requirements-bench.txt names: some ten minutes, or two with `python -m benchmarks --quick`.
bench:
	@$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/bench
	.venv-bench/bin/python -m benchmarks

$(VENV)/runtime: pyproject.toml constraints.txt
	$(call install,-c constraints.txt -e '.[all]')

$(VENV)/dev: pyproject.toml constraints.txt requirements-dev.txt
	$(call install,-r requirements-dev.txt)
	@touch $(VENV)/runtime

$(VENV)/bench: pyproject.toml requirements-bench.txt
	$(call install,-r requirements-bench.txt)
