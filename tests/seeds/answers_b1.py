"""Section B: what vertz tests, in our words, and what shows it here."""

from __future__ import annotations

from tests.seeds.places import (
    API_RUNS,
    COMMITS,
    DV_NEW,
    EXECUTOR,
    FAILURES,
    FAULTS,
    NEW,
    OUTPUT,
    RESULTS,
    RETENTION,
)
from tests.seeds.table import (
    BAD,
    COST,
    E2,
    E3,
    E4,
    E6,
    E8,
    ENGINE,
    FOLD,
    HARD,
    HARNESS,
    IN_FLIGHT,
    JOURNAL,
    KINDS,
    STATELESS,
    TOLD,
    TOOLS,
    Shown,
)

B1: dict[str, tuple[str, Shown]] = {
    "B1-1": (
        "A tool with effects whose result could not be written is not entered again; the model is told.",
        Shown(
            tests=(
                f"{HARNESS}a_tool_that_declares_nothing_acts_once_and_the_model_is_told",
                TOLD,
                f"{E4}39_the_result_of_an_interrupted_call_has_one_json_form",
            )
        ),
    ),
    "B1-2": (
        "A tool that may be repeated is, its real result is stored, and nothing tells of the crash.",
        Shown(
            tests=(
                f"{HARNESS}a_safe_tool_acts_twice_and_the_model_never_sees_the_crash",
                f"{E4}41_the_model_never_sees_the_crash_of_a_safe_tool",
            )
        ),
    ),
    "B1-3": (
        "A session with a store that forgets is refused before the model is asked, with and without tools; "
        "without a session that store is fine.",
        Shown(
            tests=(
                f"{BAD}a_session_with_a_store_that_forgets",
                f"{E3}24_an_agent_without_tools_is_guarded_too",
                f"{STATELESS}a_stateless_run_touches_no_database",
            )
        ),
    ),
    "B1-4": (
        "Whether a tool may be repeated is a checked boolean that is passed on; unset means it may not.",
        Shown(
            tests=(
                f"{TOOLS}contradictions_are_type_errors_that_name_both",
                f"{TOOLS}recovery",
                f"{TOOLS}policy_is_json_and_complete",
            )
        ),
    ),
    "B1-5": (
        "Ten scripted steps in a database in memory take less than 200 ms.",
        Shown(
            tests=(f"{COST}ten_steps_of_two_calls_take_less_than_two_hundred_milliseconds",),
            reason="Of CPU time, with a database in a file: the wall clock of a busy machine tells nothing.",
        ),
    ),
    "B1-6": (
        "Each tool step is written in its phases, a reply in text makes none of them, and a write that "
        "fails is raised.",
        Shown(
            tests=(COMMITS, KINDS, f"{E2}18_a_write_that_fails_for_good_stops_the_run_aloud"),
            reason="Ours differs: the phases are journal rows around each call, not a hook of the loop.",
        ),
    ),
    "B1-7": (
        "The error of an interrupted call has a stable kind, and its JSON names tool and call.",
        Shown(
            tests=(
                f"{E4}39_the_result_of_an_interrupted_call_has_one_json_form",
                f"{E4}40_the_next_turn_sees_the_doubt_and_decides",
                f"{E4}45_callers_can_tell_a_doubt_in_a_history",
            ),
            reason=(
                "Ours differs: the text tells the model to check, ask or stop; how to declare a tool safe is "
                "for the developer and stands in the documentation."
            ),
        ),
    ),
    "B1-8": (
        "After one append the session and all rows of it are visible.",
        Shown(
            tests=(
                f"{E2}09_the_intent_and_the_start_are_committed_before_the_handler",
                f"{E8}75_each_step_is_durable_before_the_next_one_is_asked_for",
                FOLD,
            )
        ),
    ),
    "B1-9": (
        "An append that fails in the middle leaves no row and no changed session.",
        Shown(
            tests=(
                f"{E2}13_a_write_that_fails_half_way_leaves_nothing",
                f"{FAULTS}at_each_statement",
                f"{JOURNAL}a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",
            )
        ),
    ),
    "B1-10": (
        "Appends number their rows without gaps; call ids, tool names and calls come back as written.",
        Shown(
            tests=(
                f"{E2}14_one_unbroken_sequence_for_a_session_and_all_its_runs",
                f"{E2}15_ids_names_and_blocks_come_back_as_they_were_said",
            )
        ),
    ),
    "B1-11": (
        "Unknown ids, listing with filters and order, deleting and pruning behave as a store should.",
        Shown(
            tests=(
                f"{BAD}unknown_run",
                f"{E8}77_runs_are_listed_newest_first_with_what_one_needs",
                f"{API_RUNS}list_filters",
                f"{JOURNAL}a_tombstone_lets_one_session_be_deleted",
                f"{RETENTION}nothing_is_left_but_a_tombstone",
                f"{BAD}an_unowned_session_cannot_be_taken_over",
            ),
            reason=(
                "Ours differs: an owner never changes, rows are never re-saved, and "
                "migrations make the tables."
            ),
        ),
    ),
    "B1-12": (
        "With a session the model sees what was said before, without one nothing is kept; somebody else's "
        "session reads as one that is not there.",
        Shown(
            tests=(
                f"{E3}31_a_fixed_session_is_made_on_first_use_and_goes_on",
                f"{E3}21_a_session_alone_makes_the_same_call_durable",
                f"{BAD}a_session_of_somebody_else",
                f"{API_RUNS}somebody_elses_session_reads_as_one_that_is_not_there",
            ),
            reason="Ours differs: a session nobody has used yet is made, not refused; no id is generated.",
        ),
    ),
    "B1-13": (
        "A turn whose model fails harms nothing of what the session has.",
        Shown(
            tests=(
                f"{BAD}other_stop_reasons_fail_the_run_and_the_session_goes_on",
                f"{FAILURES}a_retryable_error_backs_off_without_holding_anything",
                f"{FAILURES}a_bad_request_fails_the_run_and_settles_its_calls",
            ),
            reason="Ours differs: the failure is a row, and the user's message is kept for the next attempt.",
        ),
    ),
    "B1-14": (
        "State is stored and restored, old messages are cut off, system prompts are no messages.",
        Shown(
            tests=(
                f"{E6}58_the_folded_columns_may_be_lost",
                FOLD,
                f"{E6}68_what_is_a_function_of_the_log_is_not_stored",
            ),
            reason="Ours differs: state is what the journal adds up to, and nothing is cut off from it.",
        ),
    ),
    "B1-15": (
        "Handlers can be given from outside; sub-agents act for the same user unless told otherwise.",
        Shown(
            reason="Not in this version: a tool is declared with its function, and there are no sub-agents."
        ),
    ),
    "B1-16": (
        "An unknown tool, an exception, bad arguments or a bad result are told to the model, which goes on; "
        "all calls of a reply are answered under the provider's ids.",
        Shown(
            tests=(
                f"{BAD}a_call_that_cannot_run_is_told_to_the_model",
                f"{RESULTS}a_result_that_does_not_fit_is_stored_as_returned",
                f"{E2}15_ids_names_and_blocks_come_back_as_they_were_said",
                f"{E6}57_the_pending_set_at_every_prefix_of_the_log",
            ),
            reason="Ours differs: a result that does not fit is no error, because the tool did run.",
        ),
    ),
    "B1-17": (
        "Loops end at their limits; parallel calls run together, a few at a time, and fail alone.",
        Shown(
            tests=(
                f"{FAILURES}an_exceeded_budget_fails_the_run_with_the_figure",
                f"{NEW}b1_17_the_parallel_calls_of_a_reply_are_at_work_at_once",
                f"{NEW}b1_17_one_of_several_parallel_calls_fails_alone",
                f"{HARD}many_parallel_calls_share_few_threads_and_keep_their_own_time",
            ),
            reason=(
                "Ours differs: all parallel calls of a reply run together, not only neighbours. There is no "
                "detection of loops that are stuck or gain little, no warning before a limit, no compression."
            ),
        ),
    ),
    "B1-18": (
        "The crash harness lets writes pass, stops at the chosen one, and leaves nothing of it.",
        Shown(
            tests=(
                f"{HARNESS}the_first_append_is_the_reply",
                f"{HARNESS}a_tool_that_declares_nothing_acts_once_and_the_model_is_told",
            )
        ),
    ),
    "B1-19": (
        "A step that needs approval stops the work, which goes on after it without repeating what was done.",
        Shown(
            tests=(
                f"{ENGINE}a_gated_call_waits_and_runs_after_approval",
                f"{EXECUTOR}calls_after_a_waiting_one_wait_too_unless_they_only_read",
                f"{BAD}unknown_run",
                f"{OUTPUT}a_second_one_fails_the_run_and_says_what_was_wrong_each_time",
            ),
            reason="Ours differs: calls are approved, there are no workflows with steps.",
        ),
    ),
    "B1-20": (
        "Of two calls with one result, only the other one is made up for.",
        Shown(tests=(IN_FLIGHT, f"{DV_NEW}d_v02_of_calls_that_all_ran_only_the_last_is_doubted")),
    ),
    "B1-21": (
        "Safe and unsafe calls in one interrupted reply are each judged by what they declare.",
        Shown(
            tests=(
                f"{NEW}b1_21_of_safe_and_unsafe_calls_the_one_in_flight_is_judged_by_what_it_declares",
                f"{NEW}b1_21_an_unsafe_call_in_flight_leaves_the_safe_ones_before_it_alone",
            ),
            reason="Ours differs: calls start one by one; an unsafe one is never in doubt beside another.",
        ),
    ),
    "B1-22": (
        "A handler that raises when it is entered again has its error stored as the result.",
        Shown(tests=(f"{E4}42_a_second_attempt_takes_the_normal_path",)),
    ),
    "B1-23": (
        "Nothing is written twice at the end of a run.",
        Shown(tests=(COMMITS, KINDS)),
    ),
    "B1-24": (
        "Two steps with a call each are four atomic writes.",
        Shown(
            tests=(COMMITS,),
            reason="Ours differs: the last reply ends the run in its own commit, and start() is one more.",
        ),
    ),
}
