PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
NEWER = $(shell for python in python3 python3.13 python3.12; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$python" && break; done)
VENV = .venv
BIN = $(VENV)/bin
# More processes than the two cores of a small machine: many tests wait for another process or a disk.
PYTEST = pytest -n 4 --dist worksteal
# `make test` has all its parts at work at a time, each with fewer.
BRIEFLY = pytest -n $(1) --dist worksteal
BRIEF = brief-sqlite brief-postgresql brief-browser
# GNU make 3.81 has no such option; there the lines of the parts come mixed.
SYNC = $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# By themselves: Playwright's loop runs in the thread that uses the database.
BROWSER = tests/e2e tests/browser
ENGINE = tests/db tests/crash tests/properties tests/model
# The model uses no database; only its replays do.
MODEL = tests/model/test_protocol.py tests/model/test_guards.py
# Tests whose subject is the database: locks, races, transactions, queries. What is not here and not in BOTH does the
# same on either database, and `make test` has it on SQLite.
POSTGRESQL = tests/failover tests/workers tests/hosts/test_atomic_requests.py $(patsubst %,tests/crash/test_%.py,drafts faults pictures soak) \
	$(patsubst %,tests/db/test_%.py,claims clock databases forged_rows hard_cases isolation schemas \
	notifications pgbouncer races routers storage_away sweep transactional zombies) \
	$(patsubst %,tests/api/test_%.py,drafts races runs stream uploads) \
	$(patsubst %,tests/admin/test_%.py,dashboard lists queue runs verdict_races) \
	$(patsubst %,tests/commands/test_%.py,resume_runs verify_journal)
BOTH = $(filter-out $(POSTGRESQL),$(wildcard tests/crash/test_*.py)) tests/model/test_replay.py \
	$(patsubst %,tests/db/test_%.py,cost deploys draining executor failed_drives hostile journal payloads reminders retention rewound rules_more) \
	$(patsubst %,tests/commands/test_%.py,prune_runs watch) \
	$(addprefix tests/db/test_givers.py::test_a_,revocation_races_with_the_start \
	token_that_is_revoked_while_a_worker_drives_lets_nothing_start) \
	$(addprefix tests/db/test_rules.py::test_a_,cap_is_exact_for_drives_at_once \
	decision_waits_for_another_one_of_its_rule) \
	tests/db/test_rules.py::test_rules_are_read_although_the_model_closed_the_connection \
	tests/doors/test_reauth.py::test_of_many_tries_at_once_no_more_are_checked \
	tests/db/test_decisions.py::test_what_happened_just_before_a_card_is_ended_counts \
	$(addprefix tests/db/test_forks.py::test_,two_at_once_with_the_same_key_inside_their_callers_transactions \
	a_fork_joins_the_callers_transaction_and_is_made_once_if_its_acknowledgement_is_lost) \
	tests/unit/test_checks.py::test_a_server_that_breaks_the_promise_is_found
# Long, and about many runs, every combination, or what is built of the whole: only in `make test-full`.
BUILT = tests/packaging/test_wheel.py tests/packaging/test_docs_tutorial.py tests/packaging/test_plugin.py \
	tests/packaging/test_docs.py::test_the_site_builds_without_a_warning \
	$(addprefix tests/db/test_host_project.py::test_a_project_,lives_the_whole_story \
	without_pytest_empties_its_databases without_time_zones_is_told_before_anything_runs)
LONG = $(BUILT) tests/workers/test_soak.py tests/workers/test_deploys.py tests/crash/test_soak.py \
	tests/workers/test_crew.py::test_families_whose_workers_are_killed_lose_and_double_nothing \
	$(patsubst %,tests/db/test_%.py,closing export_mutations mixed_replies odd_results) \
	tests/api/test_schemathesis.py tests/db/test_imports.py::test_any_change_is_refused_or_imported_whole \
	tests/mcp/test_hostile.py::test_a_result_of_many_megabytes_is_kept \
	tests/e2e/test_claude.py::test_every_fault_at_every_request_leaves_the_ledger_exact \
	tests/e2e/test_claude.py::test_the_demo_works_with_the_real_sdk \
	tests/e2e/test_claude.py::test_the_demo_works_with_a_local_server_and_one_variable
IGNORING = $(addprefix --ignore=,$(1))

# uv is ten times faster than pip; where it cannot be had, pip installs the same pins.
define install
	@test -n "$(PYTHON)" || { echo "agentruns needs Python 3.11 or newer: no python3, python3.13, python3.12 or python3.11 on PATH is." >&2; exit 1; }
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/pip install -qq --disable-pip-version-check uv || true
	@$(BIN)/uv pip install -q --compile-bytecode --system-certs --python $(BIN)/python $(1) 2>/dev/null || $(BIN)/pip install -qq --disable-pip-version-check $(1)
	@touch $@
endef

.PHONY: demo console test chromium $(BRIEF) test-full test-fast test-sqlite test-rebuild test-browser test-browser-61 \
	coverage mutants mutants-changed check messages bench

demo: $(VENV)/runtime
	@$(BIN)/python manage.py demo

console: $(VENV)/runtime
	@$(BIN)/python manage.py console

# Every behaviour once: on SQLite, where the engine's drivers forget all they remember; what the database decides on
# PostgreSQL, too; the demo and the console in a browser. `make test COVERED=1` measures the coverage of the part on SQLite.
# All parts at a time, because each waits often and ends with few tests at work; what one prints comes at its end.
test: $(VENV)/dev
	@$(MAKE) --no-print-directory --keep-going -j3 $(SYNC) $(BRIEF)

$(BRIEF): export AGENTRUNS_TEST_BRIEF = 1
$(BRIEF): $(VENV)/dev

brief-sqlite:
	$(if $(COVERED),@$(BIN)/coverage erase)
	AGENTRUNS_TEST_FORGETFUL=1 $(BIN)/$(if $(COVERED),coverage run -m )$(call BRIEFLY,3) $(call IGNORING,$(POSTGRESQL) $(BROWSER)) \
		$(addprefix --deselect=,$(LONG))

brief-postgresql:
	$(BIN)/python -m tests.servers $(call BRIEFLY,3) $(POSTGRESQL) $(BOTH) $(addprefix --deselect=,$(LONG))

brief-browser: chromium
	$(BIN)/$(call BRIEFLY,2) $(BROWSER) $(addprefix --deselect=,$(LONG))

# Where it cannot be installed, the tests themselves say what is missing.
chromium:
	@command -v chromium-headless-shell chromium >/dev/null || test "$$(id -u)" != 0 || \
		{ apt-get update -qq && apt-get install -qq -y chromium-headless-shell; } >/dev/null 2>&1 || true

# The products: each test on both databases, all examples, drivers that forget all they remember, the long lives,
# the guards taken out.
test-full: test-sqlite test-rebuild mutants
	$(BIN)/python -m tests.servers $(PYTEST) $(call IGNORING,tests/unit tests/packaging $(MODEL) $(BROWSER))
	$(BIN)/$(PYTEST) $(filter tests/e2e/% tests/packaging/%,$(LONG))

test-fast: $(VENV)/dev
	$(BIN)/$(PYTEST) $(call IGNORING,tests/crash tests/properties tests/workers $(BROWSER))

test-sqlite: $(VENV)/dev
	$(BIN)/$(PYTEST) $(ENGINE) tests/api tests/commands tests/hosts

test-rebuild: $(VENV)/dev
	AGENTRUNS_TEST_FORGETFUL=1 $(BIN)/$(PYTEST) -m "not remembers" $(ENGINE)

test-browser: $(VENV)/dev chromium
	$(BIN)/pytest -n 2 tests/browser

# The console on Django 6.1, which constraints.txt names for Python 3.12 and newer.
test-browser-61:
	@test -n "$(NEWER)" || { echo "Django 6.1 needs Python 3.12 or newer: no python3, python3.13 or python3.12 on PATH is." >&2; exit 1; }
	@$(MAKE) --no-print-directory VENV=.venv61 PYTHON=$(NEWER) .venv61/dev
	.venv61/bin/python -c 'import django; assert django.VERSION[:2] == (6, 1), django.__version__'
	@$(MAKE) --no-print-directory chromium
	.venv61/bin/pytest -n 3 tests/admin
	.venv61/bin/pytest -n 2 tests/browser

# Judges what the last `make test COVERED=1` reached on SQLite in processes that were not killed.
coverage: $(VENV)/dev
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
	$(BIN)/python -m tests.audit

# Collects the texts of a copy of the package, as a translator would; xgettext must have nothing to complain about.
messages: $(VENV)/dev
	@command -v xgettext >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y gettext; } || { \
		echo "GNU gettext is missing: there is no xgettext on PATH. Install it: apt-get install gettext." >&2; exit 1; }
	@rm -rf $(VENV)/messages && cp -r agentruns $(VENV)/messages && mkdir -p $(VENV)/messages/locale
	cd $(VENV)/messages && LC_ALL=C.UTF-8 $(CURDIR)/$(BIN)/django-admin makemessages -l de >messages.log 2>&1; \
		echo "processing locale de" | diff - messages.log && msgfmt --check-format -o /dev/null locale/de/LC_MESSAGES/django.po

# Takes out each guard of the promise, in copies of the code, and runs the tests that must notice.
mutants: $(VENV)/dev
	@$(BIN)/python -m tests.mutants

# Those whose guard or test changed since the commit AGENTRUNS_GREEN, or since origin/main.
mutants-changed: $(VENV)/dev
	@$(BIN)/python -m tests.mutants --changed

# Beside the peers that requirements-bench.txt names: some ten minutes, or three with `python -m benchmarks --quick`.
bench:
	@$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/bench
	.venv-bench/bin/python -m benchmarks
	.venv-bench/bin/python -m benchmarks.conversations

# Each file of each dependency has to have the hash that it had when the versions were chosen.
$(VENV)/runtime: pyproject.toml locked.txt
	$(call install,--require-hashes -r locked.txt)
	$(call install,--no-deps --no-build-isolation -e .)

$(VENV)/dev: pyproject.toml locked-dev.txt
	$(call install,--require-hashes -r locked-dev.txt)
	$(call install,--no-deps --no-build-isolation -e .)
	@touch $(VENV)/runtime

$(VENV)/bench: pyproject.toml requirements-bench.txt
	$(call install,-r requirements-bench.txt)
