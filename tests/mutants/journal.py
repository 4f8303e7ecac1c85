"""Guards of the journal: the append, its commit, the fold, the verifier, the triggers."""

from __future__ import annotations

from tests.mutants import POSTGRESQL, Edit, Mutant

STORE, STATEMENTS, CONNECTION, DB = (
    "journal/store.py", "journal/statements.py", "journal/connection.py", "utils/db.py",
)  # fmt: skip
FOLD, STATE, VERIFY, TRIGGERS = (
    "journal/fold.py", "journal/conversation.py", "journal/verify.py", "models/triggers.py",
)  # fmt: skip

DOUBTS = "journal/doubts.py"
ALTERED = "db/test_altered_columns.py"

APPEND = [
    # The head alone says as much as both: each seq has one. The seq is what the index of rows is made of.
    Mutant(
        "append: a writer that has not seen the whole journal (SQLite)",
        (
            Edit(
                STATEMENTS, "AND next_seq = %s AND head = %s',", "AND (next_seq = %s OR head = %s OR 1 = 1)',"
            ),
        ),
        ("db/test_journal.py::test_a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",),
    ),
    Mutant(
        "append: a writer that has not seen the whole journal (PostgreSQL)",
        (
            Edit(
                STATEMENTS,
                "id = %s AND next_seq = %s AND head = %s'\n        f\" FOR",
                "id = %s AND (next_seq = %s OR head = %s OR TRUE)'\n        f\" FOR",
            ),
        ),
        ("db/test_journal.py::test_a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",),
        POSTGRESQL,
    ),
    Mutant(
        "append: the head, where another history is as long (SQLite)",
        (Edit(STATEMENTS, "next_seq = %s AND head = %s',", "next_seq = %s AND (head = %s OR 1 = 1)',"),),
        ("db/test_journal.py::test_a_writer_that_has_seen_another_history_of_the_same_length_is_refused",),
    ),
    Mutant(
        "append: the head, where another history is as long (PostgreSQL)",
        (
            Edit(
                STATEMENTS,
                "AND head = %s'\n        f\" FOR",
                "AND (head = %s OR TRUE)'\n        f\" FOR",
            ),
        ),
        ("db/test_journal.py::test_a_writer_that_has_seen_another_history_of_the_same_length_is_refused",),
        POSTGRESQL,
    ),
    Mutant(
        "append: a commit whose wait for the replica was cancelled",
        (Edit(CONNECTION, 'if notice.source_function == "SyncRepWaitForLSN":', "if False:"),),
        ("failover/test_failover.py::test_a_wait_for_the_replica_that_was_cancelled_is_no_commit",),
        POSTGRESQL,
    ),
    Mutant(
        "append: rows that are read again, and that no replica may have",
        (Edit("engine/driver.py", "commit_again(connections[alias], lease.session_id)", "pass"),),
        ("failover/test_failover.py::test_a_wait_for_the_replica_that_was_cancelled_is_no_commit",),
        POSTGRESQL,
    ),
    Mutant(
        "verify: a session that ends before its anchor has lost its last rows",
        (Edit("journal/anchor.py", "elif found is None and end < anchor.seq:", "elif False:"),),
        ("db/test_anchors.py::test_a_lost_tail_and_a_session_that_vanished_are_told_from_an_altered_chain",),
    ),
    Mutant(
        "append: the epoch of the writer's lease",
        (Edit(STATEMENTS, '" AND lease_epoch = %s"', '" AND (lease_epoch = %s OR 1 = 1)"'),),
        ("db/test_journal.py::test_an_engine_row_of_another_epoch_is_refused",),
    ),
    Mutant(
        "append: no service row for a run that has ended",
        (Edit(STATEMENTS, '"" if batch.closed else f" AND status NOT IN {ENDED}"', '""'),),
        ("db/test_journal.py::test_a_service_that_does_not_look_adds_nothing_to_a_run_that_has_ended",),
    ),
    Mutant(
        "append: the session only if the run could be written (order of the statement)",
        (
            Edit(STATEMENTS, "head = %s FROM r'", "head = %s FROM l'"),
            Edit(STATEMENTS, "session.id = r.session_id", "session.id = l.id"),
        ),
        ("db/test_journal.py::test_an_engine_row_of_another_epoch_is_refused",),
        POSTGRESQL,
    ),
    Mutant(
        "append: the run only if the session could be written (order of the statement)",
        (
            Edit(STATEMENTS, "SET {sets} FROM l WHERE", "SET {sets} WHERE"),
            Edit(STATEMENTS, " AND run.session_id = l.id{where}", "{where}"),
        ),
        ("db/test_journal.py::test_a_writer_that_has_not_seen_everything_is_refused_and_leaves_nothing",),
        POSTGRESQL,
    ),
    Mutant(
        "append: sessions are locked before runs, by services as by appends",
        (
            Edit(
                "services/write.py",
                'Session.objects.using(alias).filter(pk=session_id).update(next_seq=F("next_seq"))',
                'Run.objects.using(alias).filter(session_id=session_id).update(step=F("step"))',
            ),
        ),
        ("db/test_isolation.py::test_a_service_and_a_worker_take_their_locks_in_the_same_order",),
        POSTGRESQL,
    ),
    Mutant(
        "append: all of a batch or nothing, in a transaction of its own by the driver (SQLite)",
        (Edit(STORE, "            connection.rollback()\n", ""),),
        ("db/test_journal.py::test_a_refused_append_leaves_a_connection_for_the_next_one",),
    ),
    Mutant(
        "append: all of a batch or nothing",
        (
            Edit(
                STORE,
                "with transaction.atomic(using=alias, durable=durable):",
                "from contextlib import nullcontext\n        with nullcontext():",
            ),
        ),
        ("db/test_journal.py::test_an_engine_row_of_another_epoch_is_refused",),
    ),
    Mutant(
        "append: an approval that is as it was read, and in time",
        (
            Edit(
                STORE,
                "if rows.update(**columns, same_call=same_call(call.tool, call.arguments)) != 1:",
                "if rows.update(**columns, same_call=same_call(call.tool, call.arguments)) > 1:",
            ),
        ),
        ("db/test_decisions.py::test_a_decision_that_comes_a_moment_too_late_is_none",),
    ),
]

DURABLE = [
    Mutant(
        "commit: not over the socket of the process that this one was forked from",
        (Edit(CONNECTION, "return connection if pid == os.getpid() else None", "return connection"),),
        ("db/test_host_project.py::test_a_forked_process_leaves_it_to_its_parent",),
    ),
    Mutant(
        "commit: on the journal's own connection",
        (Edit(STORE, "alias = own_alias(alias)", "alias = str(alias)"),),
        (
            "db/test_hostile.py::test_each_payment_is_journaled_before_it_and_happens_once[other_schema-handler]",
        ),
        POSTGRESQL,
    ),
    Mutant(
        "commit: on the disk, whatever a pooler passes on",
        (Edit(STATEMENTS, "'synchronous_commit') WHEN 'off'", "'synchronous_commit') WHEN 'never'"),),
        ("db/test_hostile.py::test_each_append_is_on_the_disk_whatever_a_pooler_passes_on",),
        POSTGRESQL,
    ),
    Mutant(
        "commit: no transaction of user code is left open",
        (Edit("engine/driver.py", "            mend_connection(self.alias)", "            pass"),),
        (
            "db/test_hostile.py::test_each_payment_is_journaled_before_it_and_happens_once[autocommit_off-handler]",
        ),
    ),
    Mutant(
        "commit: nothing is driven inside a caller's transaction",
        (Edit(CONNECTION, "    if has_foreign_blocks(connection):", "    if False:"),),
        ("db/test_bad_input.py::test_a_call_inside_an_outer_transaction",),
    ),
    Mutant(
        "commit: nothing is driven with autocommit off",
        (
            Edit(
                CONNECTION,
                "if not connection.in_atomic_block and not connection.get_autocommit():",
                "if False:",
            ),
            Edit(CONNECTION, "    if not connection.autocommit:\n        return True\n", ""),
        ),
        ("db/test_host_project.py::test_without_autocommit_nothing_is_driven",),
    ),
]

FOLDING = [
    Mutant(
        "fold: a start uses the approval up",
        (Edit(FOLD, 'call.approval.status = "consumed"', 'call.approval.status = "approved"'),),
        (
            "db/test_gate.py::test_a_decision_under_another_definition_is_kept_and_carried_out_by_the_right_one",
        ),
    ),
    Mutant(
        "fold: as many people as are required",
        (Edit(FOLD, "len(approval.given) >= approval.required", "len(approval.given) >= 1"),),
        ("db/test_executor.py::test_two_people_approve_or_it_does_not_run",),
    ),
    Mutant(
        "fold: an edit voids what others approved",
        (Edit(FOLD, "            approval.given, approval.names = [], []\n", ""),),
        ("db/test_executor.py::test_who_approved_may_change_their_mind_until_it_is_enough",),
    ),
    Mutant(
        "fold: a call that waits for a person is not ready",
        (Edit(FOLD, 'return self.approval is None or self.approval.status == "pending"', "return False"),),
        ("db/test_engine.py::test_a_gated_call_waits_and_runs_after_approval",),
    ),
    Mutant(
        "fold: what follows a waiting call waits, too",
        (Edit(FOLD, "elif call.parallel or not blocked:", "else:"),),
        ("db/test_executor.py::test_calls_after_a_waiting_one_wait_too_unless_they_only_read",),
    ),
    # A paused run has neither a ready call nor the status in which it could be driven.
    Mutant(
        "fold: a paused run has nothing to do (both guards)",
        (
            Edit(FOLD, "if self.paused or self.ended:", "if self.ended:"),
            Edit(FOLD, "        if not self.paused:\n", "        if True:\n"),
        ),
        ("crash/test_clicks.py::test_pause_keeps_the_result_and_resume_runs_the_rest",),
    ),
    Mutant(
        "fold: a verdict of newer code is refused",
        (
            Edit(
                FOLD,
                'if call["verdict"] in GATE_DECISIONS else "refuse"',
                'if call["verdict"] in GATE_DECISIONS else "run"',
            ),
        ),
        ("db/test_releases.py::test_what_only_newer_code_understands_is_not_run",),
    ),
    Mutant(
        "fold: a call that may have happened is remembered",
        (Edit(DOUBTS, "if kind == events.TOOL_RESULT and events.leaves_doubt(payload):", "if False:"),),
        ("db/test_doubt.py::test_while_a_call_is_in_doubt_its_tool_asks_a_person",),
    ),
    Mutant(
        "fold: only a verdict that clears lifts a doubt",
        (Edit(DOUBTS, ' and payload["verdict"] in events.CLEARING:', ":"),),
        ("db/test_doubt.py::test_a_late_verdict_only_records_and_lifts_the_doubt",),
    ),
]

VERIFYING = [
    Mutant(
        "verify: rows follow one another",
        (Edit(VERIFY, "if row.prev_hash != self.head:", "if False:"),),
        ("db/test_verify.py::test_an_altered_journal_is_found",),
    ),
    Mutant(
        "verify: the hash of each row",
        (
            Edit(
                VERIFY,
                "intact = row.hash == events.row_hash(self.session.pk, row, facts_hash)",
                "intact = True",
            ),
        ),
        (
            "db/test_verify.py::test_an_altered_journal_is_found",
            "db/test_verify.py::test_the_hash_is_of_the_stored_text_whether_it_parses_or_not",
        ),
    ),
    Mutant(
        "verify: no row is missing",
        (Edit(VERIFY, "if row.seq != expected:", "if False:"),),
        ("db/test_verify.py::test_an_altered_journal_is_found",),
    ),
    Mutant(
        "verify: the tail is not cut off",
        (Edit(VERIFY, "return self.cut()", "return None"),),
        ("db/test_verify.py::test_an_altered_journal_is_found",),
    ),
    Mutant(
        "verify: what a run's first row says of it",
        (Edit(VERIFY, "**state.given(imported_into), **asked}", "**asked}"),),
        (f"{ALTERED}::test_each_column_that_the_rows_determine_is_compared_and_mended[Run]",),
    ),
    Mutant(
        "verify: a run's task",
        (Edit(VERIFY, "**state.given(imported_into), **asked}", "**state.given(imported_into)}"),),
        (f"{ALTERED}::test_each_column_that_the_rows_determine_is_compared_and_mended[Run]",),
    ),
    Mutant(
        "verify: whose a session is",
        (Edit(VERIFY, ", *_session(history)]", "]"),),
        (f"{ALTERED}::test_each_column_that_the_rows_determine_is_compared_and_mended[Session]",),
    ),
    Mutant(
        "verify: one result for each call",
        (Edit(VERIFY, 'return f"is a second result of call {call.id}."', 'return ""'),),
        ("db/test_verify.py::test_what_the_databases_constraints_refuse_is_found_too",),
    ),
    Mutant(
        "verify: an approval is used once",
        (Edit(VERIFY, 'return f"consumes approval {approval.id} a second time."', 'return ""'),),
        ("db/test_verify.py::test_an_approval_is_consumed_once",),
    ),
    Mutant(
        "verify: a start has the arguments that were recorded",
        (
            Edit(VERIFY, 'return f"starts call {call.id} with other arguments than were recorded."', "pass"),
            Edit(
                VERIFY,
                'return f"starts call {call.id} with other arguments than approval {approval.id} shows."',
                "pass",
            ),
        ),
        ("db/test_verify.py::test_a_forged_journal_is_found_by_what_it_says",),
    ),
    Mutant(
        "verify: the gate let the call through",
        (Edit(VERIFY, 'return f"starts call {call.id}, which the gate did not let through."', "pass"),),
        ("db/test_forged_rows.py::test_a_gated_call_whose_card_was_taken_out",),
    ),
    Mutant(
        "verify: folded columns are those of the journal",
        (Edit(VERIFY, "if stored[name] == due:", "if True:"),),
        ("db/test_journal.py::test_a_changed_column_is_found",),
    ),
]

REFUSED = ("db/test_journal.py::test_the_database_refuses_to_change_the_journal",)
BURIED = (*REFUSED, "db/test_journal.py::test_a_tombstone_lets_one_session_be_deleted")
FORGED = ("db/test_walls.py::test_a_tombstone_allows_no_forged_rows_and_stays",)
LOCKED = [
    Mutant(
        "triggers: no UPDATE (SQLite)",
        (Edit(TRIGGERS, 'f"NOT ({{same}} AND OLD', 'f"0 AND NOT ({{same}} AND OLD'),),
        REFUSED,
    ),
    Mutant(
        "triggers: no DELETE (SQLite)",
        (
            Edit(
                TRIGGERS,
                'f"NOT EXISTS (SELECT 1 FROM {TOMBSTONE} WHERE session_id = OLD.session_id)"',
                '"0"',
            ),
        ),
        BURIED,
    ),
    Mutant(
        "triggers: no REPLACE (SQLite)",
        (
            Edit(TRIGGERS, "AND seq = NEW.seq)", "AND seq = NEW.seq AND 0)"),
            Edit(TRIGGERS, "WHERE id = NEW.id)", "WHERE id = NEW.id AND 0)"),
        ),
        ("db/test_journal.py::test_sqlite_cannot_replace_a_row",),
    ),
    Mutant(
        "triggers: a tombstone is not deleted (SQLite)",
        (Edit(TRIGGERS, '(TOMBSTONE, "DELETE", "1")', '(TOMBSTONE, "DELETE", "0")'),),
        FORGED,
    ),
    Mutant(
        "triggers: no INSERT under a tombstone (PostgreSQL)",
        (Edit(TRIGGERS, "WHERE session_id = NEW.session_id) THEN", "WHERE FALSE) THEN"),),
        FORGED,
        POSTGRESQL,
    ),
    Mutant(
        "triggers: no UPDATE (PostgreSQL)",
        (Edit(TRIGGERS, "IF was - erasable = becomes - erasable AND", "IF TRUE OR"),),
        REFUSED,
        POSTGRESQL,
    ),
    Mutant(
        "triggers: no DELETE (PostgreSQL)",
        (
            Edit(
                TRIGGERS,
                "IF EXISTS (SELECT 1 FROM @.{TOMBSTONE} WHERE session_id = OLD.session_id) THEN",
                "IF TRUE THEN",
            ),
        ),
        BURIED,
        POSTGRESQL,
    ),
    Mutant(
        "triggers: no TRUNCATE (PostgreSQL)",
        (Edit(TRIGGERS, "ELSIF NOT EXISTS (SELECT 1 FROM @.{MESSAGE}) THEN", "ELSIF TRUE THEN"),),
        ("db/test_journal.py::test_postgresql_refuses_to_truncate_the_journal",),
        POSTGRESQL,
    ),
    Mutant(
        "triggers: also for replicas (PostgreSQL)",
        (Edit(TRIGGERS, "ENABLE ALWAYS TRIGGER", "ENABLE TRIGGER"),),
        ("db/test_walls.py::test_replicas_are_no_way_around",),
        POSTGRESQL,
    ),
]

MUTANTS = [*APPEND, *DURABLE, *FOLDING, *VERIFYING, *LOCKED]
