"""Section B: what reactive-agents tests, in our words, and what shows it here."""

from __future__ import annotations

from tests.seeds.places import (
    ADMIN_CARDS,
    AGENTS,
    API_AUTH,
    API_CARDS,
    API_RUNS,
    BUDGETS,
    CANONICAL,
    COMMANDS,
    COMMITS,
    DR_NEW,
    EXECUTOR,
    FAILURES,
    FORKS,
    NEW,
    REPLAY,
    STATES,
    VERIFY,
)
from tests.seeds.table import (
    BAD,
    BETWEEN,
    E3,
    E6,
    E8,
    ENGINE,
    JOURNAL,
    KILL,
    KINDS,
    ONE_CALL,
    STATELESS,
    TOOLS,
    Shown,
)

B2: dict[str, tuple[str, Shown]] = {
    "B2-1": (
        "Each boundary of the loop is stored; who merely watches can neither fail the run nor slow it.",
        Shown(
            tests=(
                f"{E8}75_each_step_is_durable_before_the_next_one_is_asked_for",
                f"{E6}59_models_and_stores_are_two_small_interfaces",
            ),
            reason="Ours differs: the journal is the run itself, not an observer whose errors are swallowed.",
        ),
    ),
    "B2-2": (
        "What is stored is versioned and comes back equal; what cannot be stored is refused in words, and "
        "rows of newer code or broken ones are recognised.",
        Shown(
            tests=(
                f"{CANONICAL}what_is_written_is_read_back",
                f"{CANONICAL}what_is_not_json_is_refused",
                f"{CANONICAL}a_circular_value_is_refused",
                f"{E8}86_rows_of_newer_code_are_passed_over",
                f"{VERIFY}the_hash_is_of_the_stored_text_whether_it_parses_or_not",
            ),
            reason="Ours differs: rows of newer code are read over instead of refused, for rolling deploys.",
        ),
    ),
    "B2-3": (
        "A resumed run keeps its count of steps; a new one begins at none.",
        Shown(
            tests=(
                f"{E8}74_what_is_recovered_is_what_would_have_been",
                f"{E6}63_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run",
            )
        ),
    ),
    "B2-4": (
        "A durable run leaves rows that can be read, another one leaves nothing.",
        Shown(
            tests=(
                f"{E3}21_a_session_alone_makes_the_same_call_durable",
                f"{STATELESS}a_stateless_run_touches_no_database",
            )
        ),
    ),
    "B2-5": (
        "A fresh agent of the same definition finishes the run, which then is completed.",
        Shown(
            tests=(f"{EXECUTOR}a_run_goes_on_in_another_registry_with_the_same_definition", BETWEEN),
            reason="Ours differs: a run that has ended is not resumed (D-R7).",
        ),
    ),
    "B2-6": (
        "Another system prompt is another definition, and resuming says so.",
        Shown(
            tests=(
                f"{BAD}another_definition_than_the_run_was_started_with",
                f"{AGENTS}differences_are_named_part_by_part",
            )
        ),
    ),
    "B2-7": (
        "Runs are listed, also by status.",
        Shown(
            tests=(
                f"{E8}77_runs_are_listed_newest_first_with_what_one_needs",
                f"{COMMANDS}test_list_runs.py::test_it_filters",
            )
        ),
    ),
    "B2-8": (
        "A process dies, another one completes the run.",
        Shown(
            tests=(ONE_CALL, BETWEEN, f"{KILL}repeating_the_same_call_goes_on_with_the_same_run"),
            reason="Ours differs: the process is killed in the middle of the run, and effects are counted.",
        ),
    ),
    "B2-9": (
        "What was accepted is stored before the call returns, and the end of a run is not stored before it.",
        Shown(
            tests=(f"{E8}75_each_step_is_durable_before_the_next_one_is_asked_for", COMMITS),
            reason="Ours differs: no write is left in flight, so there is nothing to flush or to warn of.",
        ),
    ),
    "B2-10": (
        "A run is forked at a point of its past, with a link back.",
        Shown(
            tests=(
                f"{FORKS}at_every_row_the_fork_is_valid_and_repeats_no_effect",
                f"{FORKS}it_goes_on_from_there_as_a_run_of_its_own",
            )
        ),
    ),
    "B2-11": (
        "One can look into a run: status, steps, pending calls, the last thing said.",
        Shown(
            tests=(
                f"{COMMANDS}test_show_run.py::test_it_shows_where_the_run_stands_and_its_journal",
                f"{E6}57_the_pending_set_at_every_prefix_of_the_log",
                f"{STATES}the_state_at_every_row_is_the_fold_up_to_there",
            ),
        ),
    ),
    "B2-12": (
        "The store of runs keeps status, approvals, events and owners, and refuses to decide twice.",
        Shown(
            tests=(
                f"{BAD}an_approval_decided_twice",
                f"{API_RUNS}messages_come_in_pages",
                f"{API_AUTH}who_sees_which_runs",
                f"{BAD}unknown_run",
            )
        ),
    ),
    "B2-13": (
        "A call is gated by a flag or by a predicate that sees it; without either it is not.",
        Shown(
            tests=(
                f"{TOOLS}a_plain_flag_decides",
                f"{TOOLS}a_predicate_decides",
                f"{TOOLS}a_gate_that_fails_asks",
                f"{EXECUTOR}the_gate_asks_when_its_predicate_raises",
            ),
            reason="Ours differs: the predicate sees the arguments, and one that fails asks a person.",
        ),
    ),
    "B2-14": (
        "A gated call waits without being executed, others run, and approved it runs.",
        Shown(
            tests=(
                f"{EXECUTOR}calls_after_a_waiting_one_wait_too_unless_they_only_read",
                f"{ENGINE}a_gated_call_waits_and_runs_after_approval",
            ),
            reason="Ours differs: there is no mode in which the gate lets through.",
        ),
    ),
    "B2-15": (
        "Waiting for a person is not failing.",
        Shown(
            tests=(
                f"{COMMANDS}test_run_agent.py::TestExitCodes::test_waiting_for_a_person",
                f"{DR_NEW}d_r05_going_on_with_a_run_that_waits_leaves_it_waiting",
            )
        ),
    ),
    "B2-16": (
        "Approved: the stored call runs. Denied: the model is told why. Another card's click: nothing.",
        Shown(
            tests=(
                f"{ENGINE}a_gated_call_waits_and_runs_after_approval",
                f"{ENGINE}a_denial_is_told_to_the_model_and_not_asked_again",
                f"{BAD}a_denial_needs_a_reason",
                f"{BAD}a_decision_on_something_else_than_what_was_seen",
            ),
            reason="Ours differs: a denial without a reason is refused.",
        ),
    ),
    "B2-17": (
        "A durable run is a row from its first moment, whether or not it ever waits.",
        Shown(
            tests=(KINDS, f"{KILL}after_start_the_run_is_there"),
            reason="Ours differs: there is no callback that decides inside the call; people decide later.",
        ),
    ),
    "B2-18": (
        "A process that did not ask finds what waits, decides it, and the run completes; twice is refused.",
        Shown(
            tests=(
                f"{NEW}b2_18_whoever_comes_later_finds_what_waits_and_decides_it",
                f"{KILL}after_a_decision_the_sweep_executes_it",
                f"{BAD}an_approval_decided_twice",
            )
        ),
    ),
    "B2-19": (
        "A real wait: approved, the tool ran and the answer is final; denied, the next turn reads it.",
        Shown(
            tests=(
                f"{KILL}after_a_decision_the_sweep_executes_it",
                f"{NEW}b2_19_the_next_turn_of_the_model_reads_the_denial",
                f"{ADMIN_CARDS}approving_records_and_a_worker_runs_it",
            )
        ),
    ),
    "B2-20": (
        "Gates that need a person are refused where nothing can wait for one.",
        Shown(
            tests=(
                f"{STATELESS}an_agent_that_always_asks_is_refused_before_the_model",
                f"{STATELESS}a_call_that_would_ask_is_denied",
            )
        ),
    ),
    "B2-21": (
        "The gate sits where tools are executed: refused means not run, approved means run, unflagged means "
        "nobody is asked.",
        Shown(
            tests=(
                f"{DR_NEW}d_r16_no_way_to_drive_a_run_goes_around_the_gate",
                f"{EXECUTOR}arguments_that_no_longer_validate_do_not_run",
                f"{EXECUTOR}two_people_approve_or_it_does_not_run",
                f"{TOOLS}a_plain_flag_decides",
            )
        ),
    ),
    "B2-22": (
        "The model asks a person for a value and gets it as the result of its call; an answer to something "
        "else changes nothing.",
        Shown(
            tests=(f"{NEW}b2_22_a_person_answers_what_the_model_asks",),
            reason="Ours differs: any gated tool can be answered instead of executed.",
        ),
    ),
    "B2-23": (
        "Clients read events from a cursor, see only their own runs, and are told of malformed bodies.",
        Shown(
            tests=(
                f"{API_RUNS}messages_come_in_pages",
                f"{API_AUTH}who_sees_which_runs",
                f"{API_CARDS}bad_bodies",
                "tests/api/test_stream.py::test_it_goes_on_right_after_the_row_that_the_client_had",
            ),
        ),
    ),
    "B2-24": (
        "Whoever may not decide is refused and the call stays pending; who may, succeeds.",
        Shown(
            tests=(
                f"{API_AUTH}who_sees_and_decides_which_approvals",
                f"{API_AUTH}without_credentials_everything_is_401",
                "tests/admin/test_permissions.py::test_decisions",
            )
        ),
    ),
    "B2-25": (
        "Limits of rate, of anonymous use, of concurrency and of money.",
        Shown(
            tests=(
                f"{FAILURES}an_exceeded_budget_fails_the_run_with_the_figure",
                f"{BUDGETS}a_budget_is_enforced_before_the_next_request",
                f"{API_AUTH}without_credentials_everything_is_401",
                f"{BAD}another_task_in_a_busy_session",
            ),
            reason=(
                "Ours differs: nobody is anonymous, a session has one unfinished run, a run has budgets; the "
                "rate of requests is the host project's."
            ),
        ),
    ),
    "B2-26": (
        "Recorded results are given back in a replay; what was not recorded ends it.",
        Shown(tests=(f"{REPLAY}nothing_differs_and_nothing_happens",)),
    ),
    "B2-27": (
        "Recorded replies are given back for matching requests in a replay.",
        Shown(
            tests=(
                f"{REPLAY}nothing_differs_and_nothing_happens",
                f"{REPLAY}a_mutated_observation_diverges_at_exactly_its_row",
            )
        ),
    ),
    "B2-28": (
        "Hashes do not depend on the order of keys; two runs can be compared.",
        Shown(
            tests=(
                f"{CANONICAL}the_order_of_keys_does_not_matter",
                f"{REPLAY}a_model_that_decides_otherwise_shows_where",
            )
        ),
    ),
    "B2-29": (
        "A recorded run plays again byte by byte, and one changed result is found where it is.",
        Shown(
            tests=(
                f"{JOURNAL}a_change_made_with_the_triggers_dropped_is_found",
                f"{VERIFY}an_altered_journal_is_found",
                f"{REPLAY}a_run_that_nobody_changed_is_equal",
                f"{REPLAY}a_mutated_observation_diverges_at_exactly_its_row",
            ),
        ),
    ),
}
