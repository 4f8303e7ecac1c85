"""Section D: where vertz and the essays' sketches break, and what shows that agentruns does not."""

from __future__ import annotations

from tests.seeds.places import (
    ADMIN_RUNS,
    API_RUNS,
    CLICKS,
    DV_NEW,
    EXECUTOR,
    FAILURES,
    NEW,
    OUTPUT,
    SWEEP,
)
from tests.seeds.table import (
    BAD,
    BETWEEN,
    DEFINITION,
    DOUBT,
    E1,
    E4,
    E6,
    E8,
    ENGINE,
    FOLD,
    HARD,
    IN_FLIGHT,
    JOURNAL,
    KILL,
    KINDS,
    ONE_CALL,
    RACES,
    TOOLS,
    Shown,
)

DV: dict[str, tuple[str, Shown]] = {
    "D-V1": (
        "The final answer is returned and not stored.",
        Shown(
            tests=(
                KINDS,
                f"{DV_NEW}d_s07_every_request_is_valid_and_the_history_is_what_was_returned",
                f"{E6}68_what_is_a_function_of_the_log_is_not_stored",
            )
        ),
    ),
    "D-V2": (
        "All calls of a batch ran, and a crash before the one write of their results puts them all in doubt.",
        Shown(tests=(f"{DV_NEW}d_v02_of_calls_that_all_ran_only_the_last_is_doubted", IN_FLIGHT)),
    ),
    "D-V3": (
        "Going on after a crash tells the model of the task a second time.",
        Shown(
            tests=(
                f"{DV_NEW}d_s07_every_request_is_valid_and_the_history_is_what_was_returned",
                f"{E8}74_what_is_recovered_is_what_would_have_been",
                f"{KILL}repeating_the_same_call_goes_on_with_the_same_run",
            )
        ),
    ),
    "D-V4": (
        "A call to which the provider gave no id is not recognised after a crash and acts twice.",
        Shown(
            tests=(
                f"{DV_NEW}d_v04_a_call_without_an_id_is_known_after_a_crash",
                f"{EXECUTOR}repeated_and_missing_tool_use_ids_are_replaced",
            )
        ),
    ),
    "D-V5": (
        "Two processes take up the same interrupted call: it runs twice and has two results.",
        Shown(
            tests=(
                f"{DV_NEW}d_v05_many_resume_one_orphan_and_one_result_is_written",
                f"{RACES}one_of_many_claimers_wins",
                f"{RACES}many_callers_of_the_same_run_act_once",
                f"{RACES}many_sweeps_at_once_act_once",
            )
        ),
    ),
    "D-V6": (
        "State that is stored and restored is not the state that was.",
        Shown(tests=(FOLD, f"{E6}58_the_folded_columns_may_be_lost")),
    ),
    "D-V7": (
        "A slow worker is taken for dead, and its result comes beside the one that was made up for it.",
        Shown(
            tests=(
                f"{CLICKS}a_run_that_is_live_elsewhere_is_left_alone",
                f"{CLICKS}the_heartbeat_keeps_a_slow_tool_alive",
                f"{CLICKS}a_zombie_that_wakes_writes_evidence_and_no_engine_row",
            )
        ),
    ),
    "D-V8": (
        "A call that never began looks like one that acted, so a tool with effects never runs.",
        Shown(
            tests=(
                f"{DV_NEW}d_v08_a_call_that_never_started_is_run_whatever_it_declares",
                f"{NEW}b1_21_of_safe_and_unsafe_calls_the_one_in_flight_is_judged_by_what_it_declares",
                IN_FLIGHT,
            ),
            reason=(
                "Ours differs in one place: the start of a reply's first ungated call is committed with the "
                "reply, so that call is in doubt from then on."
            ),
        ),
    ),
    "D-V9": (
        "A tool gets nothing that it could use as an idempotency key.",
        Shown(
            tests=(
                f"{E1}03_every_effect_has_a_key_of_its_own_that_the_journal_knows",
                f"{E1}05_a_second_attempt_has_the_first_ones_key",
                f"{E1}07_the_outside_world_is_asked_by_key_and_nothing_is_repeated_blindly",
            )
        ),
    ),
    "D-V10": (
        "A crash leaves rows under an id that nobody was told.",
        Shown(
            tests=(
                f"{ENGINE}start_queues_and_a_sweep_drives",
                f"{API_RUNS}start_queues_a_run_and_drives_nothing",
                f"{KILL}after_start_the_run_is_there",
            )
        ),
    ),
    "D-V11": (
        "Limits count from zero after each crash.",
        Shown(tests=(f"{DV_NEW}d_v11_budgets_are_not_begun_anew_by_a_crash",)),
    ),
    "D-V12": (
        "Shortening what the model is sent loses what is stored.",
        Shown(
            tests=(f"{E6}68_what_is_a_function_of_the_log_is_not_stored",),
            reason="Nothing shortens what is sent in this version; what is sent is made from the journal.",
        ),
    ),
    "D-V13": (
        "Cutting old rows off leaves a result without its call.",
        Shown(
            tests=(
                f"{JOURNAL}the_database_refuses_to_change_the_journal",
                f"{JOURNAL}a_tombstone_lets_one_session_be_deleted",
            ),
            reason="Rows go with their whole session or not at all.",
        ),
    ),
    "D-V14": (
        "What the user says next hides an interrupted call for ever.",
        Shown(
            tests=(
                f"{DV_NEW}d_v14_a_call_in_doubt_is_not_hidden_by_what_the_user_says_next",
                f"{DOUBT}while_a_call_is_in_doubt_its_tool_asks_a_person",
                f"{BAD}another_task_in_a_busy_session",
            )
        ),
    ),
    "D-V15": (
        "The first user to touch a session of nobody becomes its owner.",
        Shown(
            tests=(
                f"{BAD}an_unowned_session_cannot_be_taken_over",
                f"{HARD}nobody_is_not_the_owner_of_what_belongs_to_nobody",
            )
        ),
    ),
    "D-V16": (
        "A turn that fails at the model or at its schema leaves nothing to see.",
        Shown(
            tests=(
                f"{FAILURES}a_bad_request_fails_the_run_and_settles_its_calls",
                f"{FAILURES}a_retryable_error_backs_off_without_holding_anything",
                f"{ADMIN_RUNS}a_failed_run_says_why",
                f"{OUTPUT}an_answer_of_the_wrong_form_is_sent_back_once",
                f"{OUTPUT}a_second_one_fails_the_run_and_says_what_was_wrong_each_time",
            ),
        ),
    ),
    "D-V17": (
        "A sub-agent is not durable.",
        Shown(reason="There are no sub-agents in this version."),
    ),
    "D-V18": (
        "An approval is whatever the caller says; its expiry is ignored.",
        Shown(
            tests=(
                f"{BAD}a_decision_needs_the_permission",
                f"{EXECUTOR}two_people_approve_or_it_does_not_run",
                f"{SWEEP}an_approval_expires_with_an_honest_text",
            )
        ),
    ),
    "D-V19": (
        "The adapter drops why the model stopped, its thinking, and whether a result is an error.",
        Shown(
            tests=(
                "tests/unit/test_anthropic.py::test_a_reply_is_kept_as_it_came_and_goes_back_untouched",
                f"{BAD}a_reply_cut_at_max_tokens_runs_nothing",
                f"{E4}39_the_result_of_an_interrupted_call_has_one_json_form",
            )
        ),
    ),
    "D-V20": (
        "An old session goes on under another prompt, model or tool, and nobody notices.",
        Shown(
            tests=(
                f"{BAD}another_definition_than_the_run_was_started_with",
                f"{E8}83_a_run_goes_on_under_the_version_it_was_started_with",
            )
        ),
    ),
}

DE: dict[str, tuple[str, Shown]] = {
    "D-E1": (
        "A key without arguments and place lets the second of two calls pass for the first.",
        Shown(
            tests=(
                f"{EXECUTOR}equal_calls_in_one_reply_have_different_keys",
                f"{E1}03_every_effect_has_a_key_of_its_own_that_the_journal_knows",
            )
        ),
    ),
    "D-E2": (
        "Appends that expect no sequence number let two workers interleave.",
        Shown(
            tests=(
                f"{JOURNAL}a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",
                f"{JOURNAL}an_engine_row_of_another_epoch_is_refused",
            )
        ),
    ),
    "D-E3": (
        "Not every tool can dedupe; some need a person.",
        Shown(tests=(f"{TOOLS}recovery", ONE_CALL, f"{DOUBT}a_verdict_of_staff")),
    ),
    "D-E4": (
        "That the world does not know of a call yet is no proof that it will not happen.",
        Shown(
            tests=(
                f"{HARD}nobody_reconciles_while_the_first_attempt_may_be_at_work",
                f"{HARD}a_handler_that_is_still_at_work_here_is_not_run_beside_itself",
                f"{CLICKS}a_zombie_that_wakes_writes_evidence_and_no_engine_row",
            )
        ),
    ),
    "D-E5": (
        "One pending call is not enough when calls are parallel.",
        Shown(
            tests=(
                f"{E6}57_the_pending_set_at_every_prefix_of_the_log",
                f"{E4}43_everything_in_doubt_is_settled_before_the_model_is_asked",
            )
        ),
    ),
    "D-E6": (
        "A tool that raises stays pending and kills every process that takes it up.",
        Shown(
            tests=(
                f"{E4}35_the_error_is_the_stored_result_whatever_the_tool_declares",
                f"{KILL}a_process_that_dies_in_every_attempt_is_paused",
                f"{FAILURES}a_model_that_raises_counts_as_an_attempt_and_ends_paused",
            )
        ),
    ),
    "D-E7": (
        "The call of the model itself leaves no trace, so a crash after a paid answer asks again.",
        Shown(
            tests=(
                BETWEEN,
                f"{E6}62_a_stored_decision_is_not_asked_for_again",
                f"{FAILURES}a_retryable_error_backs_off_without_holding_anything",
            ),
            reason=(
                "Ours differs: a request is no row, since asking again has no effect; a failed attempt and "
                "every reply are. A crash before a reply is stored asks again, as often as attempts allow."
            ),
        ),
    ),
    "D-E8": (
        "No events for approvals, cancelling and versions.",
        Shown(
            tests=(
                f"{E6}67_what_cannot_be_made_again_is_in_the_journal",
                f"{CLICKS}cancel_keeps_the_result_and_starts_nothing_more",
                f"{DEFINITION}staff_adopt_the_new_definition",
            )
        ),
    ),
}
