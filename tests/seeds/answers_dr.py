"""Section D: where reactive-agents breaks, what all of them lack, and what shows that agentruns does not."""

from __future__ import annotations

from tests.seeds.places import (
    ADMIN_CARDS,
    ADMIN_RUNS,
    AGENTS,
    API_AUTH,
    API_CARDS,
    API_RACES,
    API_RUNS,
    CANONICAL,
    CLICKS,
    COMMITS,
    DR_NEW,
    DV_NEW,
    EXECUTOR,
    FAILURES,
    FAULTS,
    REPLAY,
    SWEEP,
)
from tests.seeds.table import (
    BAD,
    BETWEEN,
    COST,
    DEFINITION,
    E2,
    E3,
    E6,
    E8,
    ENGINE,
    FOLD,
    HARD,
    IN_FLIGHT,
    JOURNAL,
    KILL,
    ONE_CALL,
    RACES,
    TOLD,
    TOOLS,
    Shown,
)

DR: dict[str, tuple[str, Shown]] = {
    "D-R1": ("A call in flight at the crash is fired again, whatever it is.", Shown(tests=(ONE_CALL, TOLD))),
    "D-R2": (
        "A resumed run stores nothing more, so a second crash repeats everything since the first.",
        Shown(
            tests=(
                f"{DR_NEW}d_r02_a_resumed_run_that_dies_repeats_nothing_either",
                f"{KILL}a_process_that_dies_in_every_attempt_is_paused",
            )
        ),
    ),
    "D-R3": (
        "A decision met by another definition is used up without being carried out.",
        Shown(
            tests=(
                f"{DR_NEW}d_r03_a_decision_under_another_definition_is_kept_and_carried_out_by_the_right_one",
            )
        ),
    ),
    "D-R4": (
        "A crash between decision and execution loses the decision, and the run counts as completed.",
        Shown(
            tests=(
                f"{KILL}after_a_decision_the_sweep_executes_it",
                f"{KILL}an_approved_call_that_dies_is_not_approved_twice",
            )
        ),
    ),
    "D-R5": (
        "Resuming a run that waits for a person ends it with the words of the pause as its answer.",
        Shown(
            tests=(
                f"{DR_NEW}d_r05_going_on_with_a_run_that_waits_leaves_it_waiting",
                f"{API_RUNS}resume_of_a_waiting_run_returns_it",
                f"{ADMIN_RUNS}a_run_that_waits_for_approval_is_not_resumed_but_decided",
            )
        ),
    ),
    "D-R6": (
        "A gate met after a crash is lost.",
        Shown(tests=(f"{DR_NEW}d_r06_a_gate_met_after_a_crash_is_a_gate",)),
    ),
    "D-R7": (
        "Resuming a completed run fires its tools again.",
        Shown(
            tests=(
                f"{BAD}a_run_that_has_ended_refuses_everything",
                f"{API_RUNS}resume_of_a_run_that_is_live_or_ended",
            )
        ),
    ),
    "D-R8": (
        "Two processes resume one run, and both act.",
        Shown(
            tests=(
                f"{RACES}many_callers_of_the_same_run_act_once",
                f"{RACES}many_sweeps_at_once_act_once",
                f"{DV_NEW}d_v05_many_resume_one_orphan_and_one_result_is_written",
            )
        ),
    ),
    "D-R9": (
        "Nobody can tell a crashed run from a running one, so a live one is resumed.",
        Shown(
            tests=(
                f"{CLICKS}a_run_that_is_live_elsewhere_is_left_alone",
                f"{CLICKS}the_heartbeat_keeps_a_slow_tool_alive",
                f"{ADMIN_RUNS}a_run_whose_worker_is_silent_can_be_resumed",
            )
        ),
    ),
    "D-R10": (
        "Saving only now and then repeats calls that had completed.",
        Shown(
            tests=(f"{E6}63_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run", IN_FLIGHT),
            reason="There is no interval to choose.",
        ),
    ),
    "D-R11": (
        "Saving only now and then drops the gate, so that an approved call does not run.",
        Shown(
            tests=(
                f"{ENGINE}a_gated_call_waits_and_runs_after_approval",
                f"{E3}29_there_is_no_switch_that_sounds_durable",
            ),
            reason="There is no interval to choose.",
        ),
    ),
    "D-R12": (
        "A click sent twice approves the next call, which nobody saw.",
        Shown(
            tests=(
                f"{DR_NEW}d_r12_a_click_made_twice_approves_nothing_else",
                f"{ADMIN_CARDS}a_double_click_is_one_decision",
                f"{API_CARDS}a_stale_digest_says_who_edited",
            )
        ),
    ),
    "D-R13": (
        "After the first approval the run has no owner, and anybody may decide the second.",
        Shown(tests=(f"{DR_NEW}d_r13_the_second_gate_belongs_to_the_owner_as_the_first_did",)),
    ),
    "D-R14": (
        "Approving one call of a batch drops the others.",
        Shown(
            tests=(
                f"{DR_NEW}d_r14_no_call_of_a_batch_vanishes",
                f"{DR_NEW}d_r14_a_denied_call_takes_none_of_the_others_with_it",
                f"{EXECUTOR}calls_after_a_waiting_one_wait_too_unless_they_only_read",
            )
        ),
    ),
    "D-R15": (
        "An option that promises a gate gates nothing.",
        Shown(
            tests=(
                f"{E3}29_there_is_no_switch_that_sounds_durable",
                f"{AGENTS}wrong_options_are_refused",
                f"{TOOLS}contradictions_are_type_errors_that_name_both",
                "tests/unit/test_checks.py::test_a_setting_that_breaks_the_promise_is_found",
            )
        ),
    ),
    "D-R16": (
        "One of several ways to run an agent goes around the gate.",
        Shown(tests=(f"{DR_NEW}d_r16_no_way_to_drive_a_run_goes_around_the_gate",)),
    ),
    "D-R17": (
        "A definition without the tool, or without its gate, passes for the one the run was started with.",
        Shown(
            tests=(
                f"{DR_NEW}d_r03_a_decision_under_another_definition_is_kept_and_carried_out_by_the_right_one",
                f"{AGENTS}differences_are_named_part_by_part",
                f"{DEFINITION}staff_adopt_the_new_definition",
            )
        ),
    ),
    "D-R18": (
        "A run that failed is stored as completed.",
        Shown(
            tests=(
                f"{FAILURES}a_bad_request_fails_the_run_and_settles_its_calls",
                f"{FAILURES}a_retryable_error_backs_off_without_holding_anything",
                f"{FAILURES}an_exceeded_budget_fails_the_run_with_the_figure",
            )
        ),
    ),
    "D-R19": (
        "After an abort one more tool acts, and the run counts as completed.",
        Shown(
            tests=(
                f"{CLICKS}cancel_keeps_the_result_and_starts_nothing_more",
                f"{HARD}a_cancel_reaches_a_long_handler",
                f"{CLICKS}a_second_cancel_takes_the_run_from_a_worker_that_does_not_listen",
            )
        ),
    ),
    "D-R20": (
        "A pause is known to one process only.",
        Shown(
            tests=(
                f"{CLICKS}pause_keeps_the_result_and_resume_runs_the_rest",
                f"{SWEEP}pause_and_cancel_without_a_worker_act_at_once",
                f"{HARD}a_pause_that_was_only_requested_is_lifted_by_resume",
            )
        ),
    ),
    "D-R21": (
        "Processes that write at once fail on a busy database, and lost writes go unnoticed.",
        Shown(
            tests=(
                f"{RACES}one_of_many_deciders_wins",
                f"{RACES}clicks_and_workers_never_deadlock_or_lose_a_row",
                f"{E2}18_a_write_that_fails_for_good_stops_the_run_aloud",
                f"{FAULTS}at_each_commit",
            )
        ),
    ),
    "D-R22": (
        "A decision does not look whether its update changed anything.",
        Shown(
            tests=(
                f"{RACES}one_of_many_deciders_wins",
                f"{API_RACES}one_approval_is_approved_once",
                f"{ADMIN_CARDS}two_people_at_once_are_one_decision",
            )
        ),
    ),
    "D-R23": (
        "A change of the schema strands every run that is under way.",
        Shown(
            tests=(
                f"{E8}86_rows_of_newer_code_are_passed_over",
                f"{AGENTS}differences_to_a_definition_of_another_release",
            ),
            reason="Old rows are upcast when they are read; there has been no old form of a row yet.",
        ),
    ),
    "D-R24": (
        "There are several histories, and what follows an approval is in none that a client reads.",
        Shown(
            tests=(
                f"{E6}67_what_cannot_be_made_again_is_in_the_journal",
                f"{API_RUNS}messages_are_the_journal_in_order",
                f"{ADMIN_RUNS}the_journal_says_who_decided",
            )
        ),
    ),
    "D-R25": (
        "Approvals name nobody, never expire and cannot be edited, and a denied call is asked for again.",
        Shown(
            tests=(
                f"{API_CARDS}a_decided_approval_says_who_and_when",
                f"{SWEEP}an_approval_expires_with_an_honest_text",
                f"{EXECUTOR}an_edited_call_runs_with_the_edit_and_says_so",
                f"{EXECUTOR}two_people_approve_or_it_does_not_run",
                f"{ENGINE}a_denial_is_told_to_the_model_and_not_asked_again",
            )
        ),
    ),
    "D-R26": (
        "The same definition has another hash elsewhere.",
        Shown(
            tests=(
                f"{CANONICAL}the_canonical_text_never_changes",
                f"{CANONICAL}the_order_of_keys_does_not_matter",
                f"{AGENTS}the_hash_does_not_depend_on_the_order_of_tools",
            )
        ),
    ),
    "D-R27": (
        "What is kept for resuming cannot be replayed, and large results are cut.",
        Shown(
            tests=(
                f"{ADMIN_RUNS}a_long_result_is_cut_with_a_way_to_all_of_it",
                f"{REPLAY}nothing_differs_and_nothing_happens",
            ),
            reason="The journal keeps results whole; only pages cut them.",
        ),
    ),
    "D-R28": (
        "A name that is nearly that of a gated tool goes around the gate.",
        Shown(
            tests=(f"{DR_NEW}d_r28_a_name_that_is_nearly_a_tools_is_no_tools",),
            reason="Tried on the seed as well, where it does not break.",
        ),
    ),
}

DS: dict[str, tuple[str, Shown]] = {
    "D-S1": (
        "Killed at any boundary and inside any tool: nothing acts twice that can be known, and a person is "
        "asked about the rest.",
        Shown(
            tests=(
                ONE_CALL,
                IN_FLIGHT,
                BETWEEN,
                f"{KILL}an_approved_call_that_dies_is_not_approved_twice",
                "tests/crash/test_soak.py::test_soak",
            )
        ),
    ),
    "D-S2": (
        "Of many that resume, one wins and the others write nothing.",
        Shown(
            tests=(
                f"{RACES}one_of_many_claimers_wins",
                f"{RACES}many_callers_of_the_same_run_act_once",
                f"{DV_NEW}d_v05_many_resume_one_orphan_and_one_result_is_written",
            )
        ),
    ),
    "D-S3": (
        "What a worker writes after it lost its run is refused.",
        Shown(
            tests=(
                f"{CLICKS}a_zombie_that_wakes_writes_evidence_and_no_engine_row",
                f"{JOURNAL}an_engine_row_of_another_epoch_is_refused",
            )
        ),
    ),
    "D-S4": (
        "What a parallel batch had finished stays finished.",
        Shown(tests=(f"{DV_NEW}d_s04_what_a_parallel_batch_finished_stays_finished",)),
    ),
    "D-S5": (
        "However people decide - twice, against each other, late, on something else, without permission - "
        "one outcome stands and the call runs at most once.",
        Shown(
            tests=(
                f"{BAD}an_approval_decided_twice",
                f"{API_RACES}approve_and_deny_at_once",
                f"{API_CARDS}a_stale_digest_says_who_edited",
                f"{EXECUTOR}an_edited_call_runs_with_the_edit_and_says_so",
                f"{SWEEP}an_approval_expires_with_an_honest_text",
                f"{API_AUTH}who_sees_and_decides_which_approvals",
            )
        ),
    ),
    "D-S6": (
        "A crash between decision and effect is finished by the next sweep.",
        Shown(tests=(f"{KILL}after_a_decision_the_sweep_executes_it",)),
    ),
    "D-S7": (
        "The history is what was returned, and what is sent is valid for the provider each time.",
        Shown(tests=(f"{DV_NEW}d_s07_every_request_is_valid_and_the_history_is_what_was_returned", FOLD)),
    ),
    "D-S8": (
        "A changed definition is reported part by part, and the run stays as resumable as it was.",
        Shown(
            tests=(
                f"{BAD}another_definition_than_the_run_was_started_with",
                f"{DR_NEW}d_r03_a_decision_under_another_definition_is_kept_and_carried_out_by_the_right_one",
            )
        ),
    ),
    "D-S9": (
        "Budgets outlive a resume.",
        Shown(tests=(f"{DV_NEW}d_v11_budgets_are_not_begun_anew_by_a_crash",)),
    ),
    "D-S10": (
        "A replay is equal byte by byte and makes no network call.",
        Shown(tests=(f"{REPLAY}nothing_differs_and_nothing_happens",)),
    ),
    "D-S11": (
        "Cancel and pause work from another process.",
        Shown(
            tests=(
                f"{CLICKS}cancel_keeps_the_result_and_starts_nothing_more",
                f"{CLICKS}pause_keeps_the_result_and_resume_runs_the_rest",
            )
        ),
    ),
    "D-S12": (
        "The seed's limit of time holds with the whole journal.",
        Shown(
            tests=(COMMITS, f"{COST}ten_steps_of_two_calls_take_less_than_two_hundred_milliseconds"),
        ),
    ),
}
