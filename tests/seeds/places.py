"""Where the tests are that show scenarios, and reasons that are given more than once."""

from __future__ import annotations

from tests.seeds.table import COST

OUTPUT = "tests/db/test_structured_output.py::test_"
BUDGETS = "tests/db/test_budgets.py::test_"
NEW = "tests/seeds/test_scenarios_b.py::test_"
DV_NEW = "tests/seeds/test_d_v.py::test_"
DR_NEW = "tests/seeds/test_d_r.py::test_"
EXECUTOR = "tests/db/test_executor.py::test_"
FAILURES = "tests/db/test_model_failures.py::test_"
SWEEP = "tests/db/test_sweep.py::test_"
VERIFY = "tests/db/test_verify.py::test_"
CLICKS = "tests/crash/test_clicks.py::test_"
FAULTS = "tests/crash/test_faults.py::test_"
AGENTS = "tests/unit/test_agents.py::test_"
CANONICAL = "tests/unit/test_canonical.py::test_"
RESULTS = "tests/unit/test_tool_results.py::test_"
API_RUNS = "tests/api/test_runs.py::test_"
API_CARDS = "tests/api/test_approvals.py::test_"
API_AUTH = "tests/api/test_auth.py::test_"
API_RACES = "tests/api/test_races.py::test_"
ADMIN_CARDS = "tests/admin/test_approvals.py::test_"
ADMIN_RUNS = "tests/admin/test_runs.py::test_"
COMMANDS = "tests/commands/"

COMMITS = f"{COST}a_step_of_n_calls_costs_n_plus_one_commits"
REPLAY = "tests/db/test_replay.py::test_"
FORKS = "tests/db/test_forks.py::test_"
STATES = "tests/db/test_states.py::test_"
RETENTION = "tests/db/test_retention.py::test_"
