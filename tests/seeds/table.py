"""What agentruns is asked to do, item by item, and the tests that show it, or why none does.

`python -m tests.seeds.table > docs/reference/requirements.md` writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The tests that show an item. `reason`: why none does, or how ours differs."""

    tests: tuple[str, ...] = ()
    reason: str = ""


GROUPS = {
    "E1": "An effect happens at most once",
    "E2": "The journal comes before the effect; a write is all or nothing",
    "E3": "What makes a run durable, and what does not",
    "E4": "Declarations of tools, and calls in doubt",
    "E5": "Crash windows",
    "E6": "The log is the truth",
    "E7": "What is stored and what is worked out again",
    "E8": "Runs, resume, listing",
    "E9": "Definitions, versions, deploys",
    "E10": "People",
    "E11": "Cost, tests, release, documentation",
}
LAST = {"E1": 7, "E2": 20, "E3": 31, "E4": 45, "E5": 52, "E6": 66, "E7": 71, "E8": 81, "E9": 86}
LAST |= {"E10": 90, "E11": 100}

E1 = "tests/seeds/test_e1_effects.py::test_item_"
E2 = "tests/seeds/test_e2_journal.py::test_item_"
E3 = "tests/seeds/test_e3_activation.py::test_item_"
E4 = "tests/seeds/test_e4_retry.py::test_item_"
E6 = "tests/seeds/test_e6_events.py::test_item_"
E8 = "tests/seeds/test_e8_runs.py::test_item_"
KILL = "tests/crash/test_sigkill.py::test_"
BAD = "tests/db/test_bad_input.py::test_"
DOUBT = "tests/db/test_doubt.py::test_"
JOURNAL = "tests/db/test_journal.py::test_"
ENGINE = "tests/db/test_engine.py::test_"
COST = "tests/db/test_cost.py::test_"
STATELESS = "tests/db/test_stateless.py::test_"
RACES = "tests/db/test_races.py::test_"
HARD = "tests/db/test_hard_cases.py::test_"
FOLD = "tests/properties/test_fold.py::test_random_runs"
TOOLS = "tests/unit/test_tools.py::test_"
HARNESS = "tests/db/test_crashing_store.py::test_"
DEFINITION = "tests/db/test_definition.py::test_"

ONE_CALL = f"{KILL}one_call"
IN_FLIGHT = f"{KILL}only_the_call_in_flight_is_in_doubt"
TOLD = f"{KILL}a_caller_surfaces_the_orphan_and_the_model_decides"
BETWEEN = f"{KILL}between_steps_nothing_is_lost_or_repeated"
KINDS = f"{ENGINE}a_run_with_one_call"

ASKED: dict[int, str] = {
    1: "Tools with effects run at most once, also when a process dies between two writes.",
    2: "Going on after a crash never enters a finished or possibly finished handler again by itself.",
    3: "Each tool call has an idempotency key to dedupe on.",
    4: "The same key again gives the earlier result, not a second effect.",
    5: "The key follows from the run, the step and the tool, so each attempt of a call has the same one.",
    6: "Journal first and idempotent tools together: a crash never becomes a doubled action.",
    7: "A call without a confirmed result is looked up by its key before anything is repeated.",
    8: "Two atomic writes around a step: before its calls, and after.",
    9: "The intent to call a tool is committed before the tool runs.",
    10: "Calls that were in flight are in the log, not only the completed ones.",
    11: "New rows and the session change together or not at all.",
    12: "That write is one database transaction over values that are ready.",
    13: "A statement that fails rolls all of it back; readers see nothing half done.",
    14: "Sequence numbers only grow, without gaps, over all appends.",
    15: "Call ids, tool names and the calls of a reply come back as they were written.",
    16: "The user's message is stored together with the first work.",
    17: "A final answer in text is stored by one last atomic write.",
    18: "A write that fails for good is raised, never swallowed.",
    19: "Each write carries the session's new state; nothing is written twice at the end.",
    20: "The order is: reply with its calls, handler, result.",
    21: "A session and a durable store make a run durable; there is no mode to switch on.",
    22: "All of it is needed: a store, a session, and that the store lasts.",
    23: "A session with a store that forgets is refused at entry, before model and store are touched.",
    24: "That guard holds for agents without tools too; without a session the same store is fine.",
    25: "Stores share one contract and are known by what they say of themselves, not by their class.",
    26: "Without a session nothing is stored and the database is not touched.",
    27: "Durable operations raise where nothing can be durable.",
    28: "Where the store is and how often it saves can be chosen.",
    29: "No option sounds durable without being so.",
    30: "Callers whom the guard stops are told both ways out.",
    31: "A caller may use one fixed session id on every call.",
    32: "A tool may declare, by a checked flag, that a lost result allows a second run.",
    33: "Without the flag a tool is taken to have effects.",
    34: "The flag is about recovery only, never a retry of an ordinary error.",
    35: "An exception of a handler becomes the stored result.",
    36: "The flag describes the operation, not a retry policy.",
    37: "Recovery finds calls that were asked for and have no result.",
    38: "It finds them from the history alone.",
    39: "A call in doubt that may not be repeated gets a result of one fixed JSON form.",
    40: "The model's next turn sees that result and decides.",
    41: "A call that may be repeated is, and the model never learns of the crash.",
    42: "The second attempt takes the normal path: validation, context, errors as results.",
    43: "Everything in doubt is settled before the model is asked again.",
    44: "Of several unfinished calls each is judged by itself.",
    45: "The error is public, so that a history can be searched for it.",
    46: "Death before the first write: nothing of the turn remains; it is asked for anew.",
    47: "Death between the reply's write and the handler.",
    48: "Death inside the handler.",
    49: "Death between the handler's return and its result.",
    50: "Death during the write of the result: all of it or none.",
    51: "Death after the result: the run simply goes on.",
    52: "In these windows a tool with effects is doubted rather than repeated.",
    53: "Store events, fold them into state, recover without repeating effects.",
    54: "No state blob that is overwritten: the log says how a run got where it is.",
    55: "The log only grows; no row is ever changed.",
    56: "Decisions, calls, observations and the end are kinds of rows.",
    57: "Folding is pure and knows the calls that are pending.",
    58: "State may be thrown away and rebuilt from the log.",
    59: "Store, tools and model are small interfaces.",
    60: "A start without an observation is a crash in flight and must be worked on.",
    61: "Recovery reads history forward, repairs what is pending, and goes on.",
    62: "Stored decisions are read, not asked for again.",
    63: "A late crash costs neither the steps before it nor the run.",
    64: "The log is a complete audit trail in order.",
    65: "The state of any earlier moment can be looked at.",
    66: "A recorded run can be played again on fixed inputs.",
    67: "Replies, arguments, results, approvals and the sequence are stored.",
    68: "What can be derived from them is not.",
    69: "Large values are stored outside, with a hash in the journal.",
    70: "Store what asking again would cost or change; work out the rest.",
    71: "Find the last completed step and enter the loop at the next.",
    72: "Survive deploys, out-of-memory kills, evictions and reboots.",
    73: "Another process finishes the run from what is stored, after SIGKILL.",
    74: "What is recovered is complete: messages, steps, thinking, usage.",
    75: "Every step boundary is durable.",
    76: "Resume takes a run id, checks the definition, and drives to an end.",
    77: "Runs are listed newest first, filtered by status, with what identifies them.",
    78: "Finished tool calls are never replayed.",
    79: "An unknown run has its own error.",
    80: "Repeating the call with the same session resumes.",
    81: "A hint of an unfinished plan is something else than a restored state.",
    82: "A run refuses to go on under another definition, and says so.",
    83: "A run goes on under the version it was started with.",
    84: "Runs in flight are part of a deploy, not an accident of it.",
    85: "Drain before a deploy: no new work, finish the current one, with a time limit.",
    86: "Old and new code read each other's rows during a deploy.",
    87: "A gated call stops the run until a person decides, from any process.",
    88: "Decisions of people are rows of the journal.",
    89: "A waiting approval survives the death of processes.",
    90: "The model may turn to a person after an uncertain effect.",
    91: "The cost of durability is known and bounded.",
    92: "Cheap reading agents can do without.",
    93: "Users get a harness to test crashes of their own agents.",
    94: "Acceptance: an unsafe tool acts once and a safe one twice over a crash; the guard comes first.",
    95: "Every back-end passes the same tests: success, rollback, sequence, metadata.",
    96: "A demonstration kills one process and finishes in another.",
    97: "Options that must not exist are refused, and types are checked.",
    98: "Documentation of activation, the flag, crash windows, cost and inspection; an index for machines.",
    99: "Change log, retrospective, and a list of manual checks before a release.",
    100: "Types, lint and format are checked for every change.",
}

SHOWN: dict[int, Shown] = {
    1: Shown(tests=(ONE_CALL, f"{RACES}many_callers_of_the_same_run_act_once", FOLD)),
    2: Shown(tests=(ONE_CALL, IN_FLIGHT, f"{RACES}many_sweeps_at_once_act_once")),
    3: Shown(
        tests=(
            f"{E1}03_every_effect_has_a_key_of_its_own_that_the_journal_knows",
            "tests/db/test_executor.py::test_equal_calls_in_one_reply_have_different_keys",
        ),
        reason="Ours differs: the journal dedupes by call; the key is for the world outside.",
    ),
    4: Shown(
        tests=(
            f"{ENGINE}repeating_the_call_is_the_same_run",
            "tests/api/test_runs.py::test_the_same_key_is_the_same_run_for_ever",
            f"{KILL}repeating_the_same_call_goes_on_with_the_same_run",
        )
    ),
    5: Shown(
        tests=(
            f"{E1}05_whoever_derives_the_key_gets_the_same",
            f"{E1}05_a_second_attempt_has_the_first_ones_key",
        )
    ),
    6: Shown(tests=(ONE_CALL, f"{E2}09_the_intent_and_the_start_are_committed_before_the_handler")),
    7: Shown(
        tests=(
            f"{E1}07_the_outside_world_is_asked_by_key_and_nothing_is_repeated_blindly",
            f"{HARD}nobody_reconciles_while_the_first_attempt_may_be_at_work",
            f"{HARD}a_reconcile_tool_that_raises_is_asked_about",
        )
    ),
    8: Shown(
        tests=(
            f"{COST}a_step_of_n_calls_costs_n_plus_one_commits",
            f"{COST}parallel_calls_start_in_one_commit",
        ),
        reason="Ours differs: each call is bracketed, not each step, so one call is in doubt, not the batch.",
    ),
    9: Shown(tests=(f"{E2}09_the_intent_and_the_start_are_committed_before_the_handler",)),
    10: Shown(tests=(ONE_CALL, IN_FLIGHT)),
    11: Shown(
        tests=(
            f"{JOURNAL}a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",
            f"{E2}13_a_write_that_fails_half_way_leaves_nothing",
            FOLD,
        ),
        reason="Ours differs: guarded updates and one insert in one durable transaction.",
    ),
    12: Shown(
        tests=(
            f"{E2}13_a_write_that_fails_half_way_leaves_nothing",
            f"{COST}the_cost_of_a_step_does_not_grow_with_the_history",
        )
    ),
    13: Shown(tests=(f"{E2}13_a_write_that_fails_half_way_leaves_nothing",)),
    14: Shown(
        tests=(
            f"{E2}14_one_unbroken_sequence_for_a_session_and_all_its_runs",
            f"{JOURNAL}a_change_made_with_the_triggers_dropped_is_found",
        )
    ),
    15: Shown(
        tests=(
            f"{E2}15_ids_names_and_blocks_come_back_as_they_were_said",
            "tests/unit/test_anthropic.py::test_a_reply_is_kept_as_it_came_and_goes_back_untouched",
        )
    ),
    16: Shown(
        tests=(f"{KILL}before_start_commits_there_is_nothing", f"{KILL}after_start_the_run_is_there"),
        reason="Ours differs: start() stores the message, so that a run that was accepted is never lost.",
    ),
    17: Shown(tests=(KINDS, f"{COST}a_step_of_n_calls_costs_n_plus_one_commits")),
    18: Shown(
        tests=(
            f"{E2}18_a_write_that_fails_for_good_stops_the_run_aloud",
            f"{HARD}a_known_result_waits_for_the_database",
        )
    ),
    19: Shown(
        tests=(f"{COST}a_step_of_n_calls_costs_n_plus_one_commits", FOLD),
        reason="Ours differs: there is no write at the end; the last reply carries the end of the run.",
    ),
    20: Shown(tests=(KINDS,)),
    21: Shown(tests=(f"{E3}21_a_session_alone_makes_the_same_call_durable",)),
    22: Shown(
        tests=(
            f"{STATELESS}a_stateless_run_touches_no_database",
            f"{BAD}a_session_with_a_store_that_forgets",
            f"{BAD}a_durable_call_without_a_session",
        )
    ),
    23: Shown(tests=(f"{BAD}a_session_with_a_store_that_forgets",)),
    24: Shown(tests=(f"{E3}24_an_agent_without_tools_is_guarded_too",)),
    25: Shown(
        tests=(f"{E3}25_a_store_is_known_by_what_it_says_of_itself",),
        reason="Back-ends are Django's: all tests run on SQLite and on PostgreSQL.",
    ),
    26: Shown(tests=(f"{STATELESS}a_stateless_run_touches_no_database",)),
    27: Shown(
        tests=(
            f"{BAD}a_durable_call_without_a_session",
            f"{BAD}a_call_inside_an_outer_transaction",
            f"{STATELESS}an_agent_that_always_asks_is_refused_before_the_model",
        )
    ),
    28: Shown(
        tests=(
            "tests/db/test_databases.py::test_everything_goes_to_the_named_database",
            f"{E8}75_each_step_is_durable_before_the_next_one_is_asked_for",
        ),
        reason="Ours differs: every event is durable; there is no interval in which work could be lost.",
    ),
    29: Shown(tests=(f"{E3}29_there_is_no_switch_that_sounds_durable",)),
    30: Shown(
        tests=(f"{E3}30_the_guard_says_both_ways_out",),
        reason="The page for callers who come from in-memory agents is docs/howto/from-memory.md.",
    ),
    31: Shown(
        tests=(f"{E3}31_a_fixed_session_is_made_on_first_use_and_goes_on",),
        reason="Ours differs: the session is made on first use.",
    ),
    32: Shown(
        tests=(
            f"{TOOLS}contradictions_are_type_errors_that_name_both",
            f"{TOOLS}recovery",
            ONE_CALL,
        )
    ),
    33: Shown(tests=(f"{TOOLS}recovery", f"{TOOLS}policy_is_json_and_complete", ONE_CALL)),
    34: Shown(
        tests=(
            f"{E4}34_a_safe_tool_that_raises_is_not_tried_again",
            f"{DOUBT}a_timeout_of_a_safe_tool_is_tried_again",
        ),
        reason=(
            "Ours differs in one case: when a handler exceeds its own `timeout` its result is lost as in "
            "a crash, so a safe tool is entered again in the same drive."
        ),
    ),
    35: Shown(
        tests=(
            f"{E4}35_the_error_is_the_stored_result_whatever_the_tool_declares",
            f"{BAD}a_tool_that_raises_may_have_acted_and_says_so",
        )
    ),
    36: Shown(
        tests=(
            f"{E4}34_a_safe_tool_that_raises_is_not_tried_again",
            f"{E4}41_the_model_never_sees_the_crash_of_a_safe_tool",
        )
    ),
    37: Shown(tests=(ONE_CALL, IN_FLIGHT, FOLD)),
    38: Shown(
        tests=(IN_FLIGHT, f"{E6}58_the_folded_columns_may_be_lost"),
        reason="Ours differs: the journal also says which calls started; the others provably did not.",
    ),
    39: Shown(tests=(TOLD, f"{E4}39_the_result_of_an_interrupted_call_has_one_json_form")),
    40: Shown(tests=(TOLD, f"{E4}40_the_next_turn_sees_the_doubt_and_decides")),
    41: Shown(
        tests=(
            f"{E4}41_the_model_never_sees_the_crash_of_a_safe_tool",
            f"{HARNESS}a_safe_tool_acts_twice_and_the_model_never_sees_the_crash",
        )
    ),
    42: Shown(
        tests=(
            f"{E4}42_a_second_attempt_takes_the_normal_path",
            "tests/db/test_executor.py::test_a_started_call_that_cannot_go_on_is_held_and_not_called_undone",
        )
    ),
    43: Shown(
        tests=(f"{E4}43_everything_in_doubt_is_settled_before_the_model_is_asked",),
        reason=(
            "Ours differs: what is in doubt is classified in one transaction; each second attempt then "
            "has rows of its own, so that it can be interrupted too."
        ),
    ),
    44: Shown(tests=(IN_FLIGHT, f"{DOUBT}surfacing_cancels_what_was_approved_after_it")),
    45: Shown(tests=(f"{E4}45_callers_can_tell_a_doubt_in_a_history",)),
    46: Shown(
        tests=(
            f"{KILL}before_start_commits_there_is_nothing",
            f"{KILL}after_start_the_run_is_there",
            BETWEEN,
        ),
        reason="Ours differs: once start() has committed, the run and its message are there.",
    ),
    47: Shown(
        tests=(ONE_CALL, IN_FLIGHT),
        reason=(
            "Ours differs: a call without a committed start is run, not doubted. The start of a reply's "
            "first ungated call is committed with the reply, so that one is doubted as soon as it is there."
        ),
    ),
    48: Shown(tests=(ONE_CALL, IN_FLIGHT), reason="Ours differs: only the call in flight is in doubt."),
    49: Shown(tests=(ONE_CALL,), reason="Ours differs: only the call in flight is in doubt."),
    50: Shown(tests=(ONE_CALL, IN_FLIGHT, f"{E2}13_a_write_that_fails_half_way_leaves_nothing")),
    51: Shown(tests=(ONE_CALL, BETWEEN)),
    52: Shown(
        tests=(ONE_CALL, f"{HARNESS}a_tool_that_declares_nothing_acts_once_and_the_model_is_told"),
        reason="Ours differs: a sweep holds the run for staff; a caller who asks lets the model decide.",
    ),
    53: Shown(tests=(FOLD, ONE_CALL)),
    54: Shown(tests=(f"{E6}58_the_folded_columns_may_be_lost", f"{JOURNAL}a_changed_column_is_found")),
    55: Shown(
        tests=(
            f"{JOURNAL}the_database_refuses_to_change_the_journal",
            f"{JOURNAL}postgresql_refuses_to_truncate_the_journal",
            f"{HARD}sqlite_cannot_replace_a_row",
        )
    ),
    56: Shown(tests=(KINDS, "tests/admin/test_journal_cards.py::test_there_are_kinds")),
    57: Shown(tests=(f"{E6}57_the_pending_set_at_every_prefix_of_the_log", FOLD)),
    58: Shown(tests=(f"{E6}58_the_folded_columns_may_be_lost", FOLD)),
    59: Shown(
        tests=(
            f"{E6}59_models_and_stores_are_two_small_interfaces",
            "tests/unit/test_providers.py::test_sync_and_async_models",
        )
    ),
    60: Shown(tests=(ONE_CALL, f"{E6}57_the_pending_set_at_every_prefix_of_the_log")),
    61: Shown(tests=(BETWEEN, f"{E6}63_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run")),
    62: Shown(tests=(f"{E6}62_a_stored_decision_is_not_asked_for_again",)),
    63: Shown(
        tests=(
            f"{E6}63_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run",
            f"{KILL}a_process_that_dies_in_every_attempt_is_paused",
        )
    ),
    64: Shown(
        tests=(
            "tests/api/test_runs.py::test_messages_are_the_journal_in_order",
            "tests/admin/test_runs.py::test_the_journal_says_who_decided",
            f"{JOURNAL}a_change_made_with_the_triggers_dropped_is_found",
        )
    ),
    65: Shown(
        tests=(
            "tests/db/test_states.py::test_the_state_at_every_row_is_the_fold_up_to_there",
            "tests/admin/test_moments.py::test_what_was_sent_is_told_from_what_was_not",
        )
    ),
    66: Shown(
        tests=(
            "tests/db/test_replay.py::test_nothing_differs_and_nothing_happens",
            "tests/db/test_replay.py::test_a_mutated_observation_diverges_at_exactly_its_row",
            "tests/db/test_forks.py::test_at_every_row_the_fork_is_valid_and_repeats_no_effect",
        )
    ),
    67: Shown(tests=(f"{E6}67_what_cannot_be_made_again_is_in_the_journal",)),
    68: Shown(tests=(f"{E6}68_what_is_a_function_of_the_log_is_not_stored",)),
    69: Shown(tests=("tests/db/test_payloads.py::test_a_result_of_forty_megabytes",)),
    70: Shown(
        tests=(
            f"{E6}62_a_stored_decision_is_not_asked_for_again",
            f"{E6}68_what_is_a_function_of_the_log_is_not_stored",
        )
    ),
    71: Shown(tests=(f"{E6}63_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run", BETWEEN)),
    72: Shown(
        tests=(
            ONE_CALL,
            "tests/unit/test_checks.py::test_a_database_that_breaks_the_promise_is_found",
            "tests/commands/test_resume_runs.py::"
            "TestWatchingProcess::test_sigterm_finishes_the_call_and_gives_the_run_back",
        )
    ),
    73: Shown(
        tests=(
            BETWEEN,
            f"{KILL}repeating_the_same_call_goes_on_with_the_same_run",
            "tests/db/test_executor.py::test_a_run_goes_on_in_another_registry_with_the_same_definition",
        )
    ),
    74: Shown(tests=(f"{E8}74_what_is_recovered_is_what_would_have_been",)),
    75: Shown(tests=(f"{E8}75_each_step_is_durable_before_the_next_one_is_asked_for",)),
    76: Shown(
        tests=(
            f"{BAD}another_definition_than_the_run_was_started_with",
            f"{BAD}a_run_that_has_ended_refuses_everything",
            TOLD,
        )
    ),
    77: Shown(
        tests=(
            f"{E8}77_runs_are_listed_newest_first_with_what_one_needs",
            "tests/commands/test_list_runs.py::test_it_is_a_table_newest_first",
            "tests/api/test_runs.py::test_list_filters",
        )
    ),
    78: Shown(tests=(IN_FLIGHT, ONE_CALL)),
    79: Shown(
        tests=(f"{BAD}unknown_run",),
        reason="Ours differs: a run without anything to resume from cannot exist; start() stores it whole.",
    ),
    80: Shown(tests=(f"{KILL}repeating_the_same_call_goes_on_with_the_same_run",)),
    81: Shown(
        reason=(
            "Ours differs: there is no hint beside the state. A session's next run always gets the whole "
            "conversation (item 31), and an unfinished run is resumed, not hinted at."
        )
    ),
    82: Shown(
        tests=(
            f"{BAD}another_definition_than_the_run_was_started_with",
            "tests/unit/test_agents.py::test_differences_are_named_part_by_part",
        )
    ),
    83: Shown(
        tests=(
            f"{E8}83_a_run_goes_on_under_the_version_it_was_started_with",
            f"{DEFINITION}the_runs_own_version_comes_before_a_newer_one",
        )
    ),
    84: Shown(
        tests=(
            f"{BAD}another_definition_than_the_run_was_started_with",
            "tests/db/test_sweep.py::test_runs_of_a_retired_definition_do_not_starve_the_others",
            f"{DEFINITION}staff_adopt_the_new_definition",
        )
    ),
    85: Shown(
        tests=(
            "tests/db/test_sweep.py::test_a_stop_leaves_at_a_boundary_and_costs_no_attempt",
            "tests/commands/test_resume_runs.py::"
            "TestWatchingProcess::test_sigterm_finishes_the_call_and_gives_the_run_back",
            "tests/db/test_draining.py::test_the_command_waits_for_what_is_driven_and_names_what_stays",
            "tests/workers/test_deploys.py::test_a_deploy",
        ),
    ),
    86: Shown(
        tests=(
            f"{E8}86_rows_of_newer_code_are_passed_over",
            "tests/unit/test_agents.py::test_differences_to_a_definition_of_another_release",
        )
    ),
    87: Shown(
        tests=(
            f"{ENGINE}a_gated_call_waits_and_runs_after_approval",
            f"{ENGINE}a_denial_is_told_to_the_model_and_not_asked_again",
            f"{KILL}after_a_decision_the_sweep_executes_it",
            "tests/admin/test_approvals.py::test_approving_records_and_a_worker_runs_it",
        )
    ),
    88: Shown(
        tests=(
            f"{E6}67_what_cannot_be_made_again_is_in_the_journal",
            f"{DOUBT}a_verdict_of_staff",
            "tests/admin/test_runs.py::test_the_journal_says_who_decided",
        )
    ),
    89: Shown(
        tests=(
            f"{KILL}after_a_decision_the_sweep_executes_it",
            f"{KILL}an_approved_call_that_dies_is_not_approved_twice",
        )
    ),
    90: Shown(
        tests=(
            f"{E4}40_the_next_turn_sees_the_doubt_and_decides",
            f"{DOUBT}while_a_call_is_in_doubt_its_tool_asks_a_person",
        )
    ),
    91: Shown(
        tests=(
            f"{COST}a_step_of_n_calls_costs_n_plus_one_commits",
            f"{COST}the_cost_of_a_step_does_not_grow_with_the_history",
            f"{COST}ten_steps_of_two_calls_take_less_than_two_hundred_milliseconds",
        ),
    ),
    92: Shown(
        tests=(
            f"{STATELESS}a_stateless_run_touches_no_database",
            f"{STATELESS}budgets_hold_without_a_database",
        )
    ),
    93: Shown(
        tests=(
            f"{HARNESS}a_tool_that_declares_nothing_acts_once_and_the_model_is_told",
            f"{HARNESS}the_first_append_is_the_reply",
            f"{HARNESS}an_unknown_crash_point_is_refused",
        )
    ),
    94: Shown(
        tests=(
            f"{HARNESS}a_tool_that_declares_nothing_acts_once_and_the_model_is_told",
            f"{HARNESS}a_safe_tool_acts_twice_and_the_model_never_sees_the_crash",
            ONE_CALL,
            f"{BAD}a_session_with_a_store_that_forgets",
        )
    ),
    95: Shown(
        tests=(
            f"{E2}13_a_write_that_fails_half_way_leaves_nothing",
            f"{E2}14_one_unbroken_sequence_for_a_session_and_all_its_runs",
            f"{E2}15_ids_names_and_blocks_come_back_as_they_were_said",
            f"{E3}25_a_store_is_known_by_what_it_says_of_itself",
        ),
        reason="`make test` runs them on SQLite and on PostgreSQL.",
    ),
    96: Shown(
        tests=(
            "tests/e2e/test_demo.py::test_it_ends_well_and_says_how_to_go_on",
            "tests/e2e/test_demo.py::test_every_effect_happened_once",
        )
    ),
    97: Shown(
        tests=(
            f"{E3}29_there_is_no_switch_that_sounds_durable",
            f"{TOOLS}contradictions_are_type_errors_that_name_both",
            "tests/unit/test_agents.py::test_wrong_options_are_refused",
        )
    ),
    98: Shown(
        tests=("tests/packaging/test_docs.py::test_the_site_builds_without_a_warning",),
        reason="The index for machines is docs/llms.txt.",
    ),
    99: Shown(reason="CHANGELOG.md, docs/explanation/retrospective.md and docs/release.md are there."),
    100: Shown(
        reason="`make check` does it: ruff, mypy, import-linter and Django's checks. No test repeats it."
    ),
}

HEAD = """\
# What is asked for, and what shows it

Written by `python -m tests.seeds.table > docs/reference/requirements.md`; do not edit it.

{total} items: {tested} are shown by tests, {unshown} have a reason instead. "Ours differs" says where
agentruns answers in another way than the item asks.
"""


def group_of(number: int) -> str:
    """Return the group an item belongs to."""
    return next(group for group, last in LAST.items() if number <= last)


def cell(shown: Shown) -> str:
    """Return what a row of a table says of an item."""
    reason = shown.reason[:1].upper() + shown.reason[1:]
    return "<br>".join([*(f"`{test}`" for test in shown.tests), *([reason] if reason else [])])


def page() -> str:
    """Return the page of the table."""
    tested = sum(bool(shown.tests) for shown in SHOWN.values())
    figures = {"total": len(SHOWN), "tested": tested, "unshown": len(SHOWN) - tested}
    lines = [HEAD.format(**figures)]
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", "| | asked for | shown by |", "|---|---|---|"]
        lines += [
            f"| {number} | {ASKED[number]} | {cell(shown)} |"
            for number, shown in SHOWN.items()
            if group_of(number) == group
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
