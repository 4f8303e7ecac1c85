"""Guards of the engine: executor, gate, leases, recovery, transactional tools."""

from __future__ import annotations

from tests.mutants import POSTGRESQL, Edit, Mutant

CALLS, DOUBT, GATE, HANDLER = (
    "engine/tool_calls.py",
    "engine/in_doubt.py",
    "engine/gate.py",
    "engine/handler.py",
)
STATEMENTS = "journal/statements.py"
DRIVER, LEASES, LOOP, WORKER = "engine/driver.py", "engine/leases.py", "engine/loop.py", "engine/worker.py"
FOLD, TOOL = "journal/fold.py", "tools/base.py"

EXECUTOR = [
    Mutant(
        "executor: an approval counts only while its giver may give it",
        (Edit(CALLS, "    if _void(driver, group):\n        return\n", ""),),
        ("db/test_givers.py::test_it_counts_no_more_when_the_call_is_to_run",),
    ),
    Mutant(
        "executor: a server that has changed its tools makes the run wait",
        (Edit(CALLS, "    if _unready(driver, group):\n        return\n", ""),),
        ("mcp/test_hostile.py::test_a_changed_tool_makes_the_run_wait",),
    ),
    Mutant(
        "executor: an approved call of a tool that is off is refused",
        (Edit(CALLS, "if gate.is_off(driver, call.tool) and", "if False and"),),
        ("db/test_switches.py::test_a_call_that_was_approved_before_is_refused_too",),
    ),
    Mutant(
        "executor: a started call of a tool that was switched off since is refused",
        (Edit(CALLS, "if not gate.is_off(driver, call.tool):", "if True:"),),
        (
            "db/test_switches.py::test_calls_that_are_journaled_as_started_and_wait_for_their_turn_are_refused",
            "db/test_switches.py::test_a_call_that_is_about_to_be_entered_is_not",
        ),
    ),
    Mutant(
        "executor: a start is committed before the handler is entered",
        (Edit(CALLS, "if not all(one.id in calls", "if False and not all(one.id in calls"),),
        (
            "db/test_zombies.py::test_a_start_whose_acknowledgement_came_after_others_went_on_to_the_next_reply",
        ),
    ),
    Mutant(
        "executor: the start of an approved call, too",
        (
            Edit(
                CALLS,
                "driver.commit(start)",
                "driver.started |= {(one.id, one.attempt) for one in group}",
            ),
        ),
        ("crash/test_sigkill.py::test_an_approved_call_that_dies_is_not_approved_twice",),
    ),
    Mutant(
        "executor: the start of the next call is not in the transaction of a handler",
        (Edit(CALLS, "        if not joined:  # a start", "        if True:  # a start"),),
        ("db/test_transactional.py::test_the_start_of_the_next_call_is_in_no_handlers_transaction",),
    ),
    Mutant(
        "executor: a gated call starts in a commit of its own",
        (Edit(CALLS, ' or ready[0].verdict != "run" or ready[0].attempt', " or ready[0].attempt"),),
        ("db/test_gate.py::test_a_start_that_is_refused_takes_no_result_with_it",),
    ),
    Mutant(
        "executor: nothing starts once a cancel or a pause is requested",
        (
            Edit(
                CALLS, "if run.cancel_requested or run.pause_requested or driver.should_stop():", "if False:"
            ),
        ),
        ("crash/test_clicks.py::test_cancel_keeps_the_result_and_starts_nothing_more",),
    ),
    Mutant(
        "executor: the card shows the arguments that run",
        (Edit(CALLS, "call.approval.digest != call.digest or ", ""),),
        ("db/test_forged_rows.py::test_a_card_that_shows_other_arguments_than_its_call_lets_nothing_run",),
    ),
    Mutant(
        "executor: an approval that was used lets nothing run that has not started",
        (Edit(CALLS, 'call.approval.status == "consumed" and call.attempt == 0', "call.attempt < 0"),),
        ("db/test_forged_rows.py::test_an_approval_that_was_used_lets_nothing_run_that_has_not_started",),
    ),
    # The fold keeps a waiting call from the engine, and the executor looks again.
    Mutant(
        "executor: a pending approval is none (both guards)",
        (
            Edit(
                FOLD,
                'return self.approval is None or self.approval.status == "pending"',
                "return False",
            ),
            Edit(CALLS, 'not in ("approved", "consumed")', 'not in ("approved", "consumed", "pending")'),
        ),
        ("db/test_engine.py::test_a_gated_call_waits_and_runs_after_approval",),
    ),
    Mutant(
        "executor: a call that the gate refused",
        (Edit(CALLS, 'if call.verdict == "refuse" or (', "if (False and "),),
        ("db/test_releases.py::test_what_only_newer_code_understands_is_not_run",),
    ),
    # `invoke` looks as well, but then the journal says that the handler was entered.
    Mutant(
        "executor: the arguments are validated again before a call is started",
        (Edit(CALLS, "    if not entered:\n        try:", "    if False:\n        try:"),),
        ("db/test_arguments.py::test_a_coercer_that_changes_after_the_decision_runs_nothing",),
    ),
    Mutant(
        "executor: the arguments are still those that were recorded",
        (
            Edit(
                CALLS,
                "same = gate.call_digest(driver.state.secret, tool.name, arguments) == call.digest",
                "same = True",
            ),
        ),
        ("db/test_arguments.py::test_a_coercer_that_changes_after_the_decision_runs_nothing",),
    ),
    # Recovery classifies what was started; the executor refuses what nobody classified.
    Mutant(
        "executor: a call that was started before is not entered (both guards)",
        (
            Edit(
                CALLS,
                "if call.is_started and not entered and call.orphan not in",
                "if False and call.orphan not in",
            ),
            Edit(LOOP, "        for call in left:\n", "        for call in ():\n"),
        ),
        ("db/test_executor.py::test_a_tool_that_declares_nothing_acts_once_and_the_model_is_told",),
    ),
    Mutant(
        "executor: the lease is held when the handler is entered",
        (  # with the last look, which would send it back to the check for ever
            Edit(DRIVER, "            self.lease.extend()", "            pass"),
            Edit("tools/context.py", "if not self._covers():", "if False:"),
        ),
        (
            "db/test_zombies.py::test_a_process_frozen_before_the_handler_for_longer_than_its_lease_does_not_enter_it",
        ),
    ),
    # Such a call is started as well, so the executor would hold it with a poorer reason.
    Mutant(
        'executor: evidence that comes after the verdict "not occurred" (both guards)',
        (
            Edit(FOLD, 'self.orphan == "not_occurred" and self.returned_late', "False"),
            Edit(
                FOLD,
                'self.orphan == "not_occurred" and not self.returned_late',
                'self.orphan == "not_occurred"',
            ),
        ),
        (
            "db/test_zombies.py::test_evidence_that_comes_after_the_verdict_not_occurred_stops_the_second_attempt",
        ),
    ),
    Mutant(
        "executor: a result that comes late is kept as evidence",
        (Edit(CALLS, "        store_late_result(driver, [call], observation.facts(), offload)\n", ""),),
        ("db/test_zombies.py::test_a_handler_of_a_tool_that_declares_nothing_leaves_evidence",),
    ),
    Mutant(
        "executor: what comes late is stored on a new connection after an error",
        (
            Edit(
                HANDLER,
                "                    connections[alias].close()\n        time",
                "                    pass\n        time",
            ),
        ),
        (
            "db/test_leases.py::test_evidence_is_stored_once_although_the_connection_breaks_before_or_after[before]",
        ),
    ),
    Mutant(
        "executor: what comes late is tried again as long as its process lives",
        (Edit(HANDLER, 'if passes and in_thread(lease.alias, "late", again) else', "if passes else"),),
        ("db/test_leases.py::test_what_cannot_be_stored_within_a_lease_is_stored_when_it_can_be",),
    ),
    Mutant(
        "executor: what comes late is stored once",
        (Edit(HANDLER, "if rows.filter(hash__in=tried).exists():", "if False:"),),
        (
            "db/test_leases.py::test_evidence_is_stored_once_although_the_connection_breaks_before_or_after[after]",
        ),
    ),
    Mutant(
        "executor: the last thing before a handler is a look at the lease",
        (Edit(TOOL, "        ctx._look()\n        result = call", "        result = call"),),
        ("db/test_last_look.py::test_no_handler_is_entered_after_a_wait_that_outlasted_the_lease[nothing]",),
    ),
    Mutant(
        "executor: who is given up enters no handler",
        (Edit(HANDLER, "return not given_up and (lease", "return (lease"),),
        ("db/test_last_look.py::test_a_thread_that_nobody_waits_for_any_more_enters_no_handler",),
    ),
    Mutant(
        "executor: a parallel call that was not entered has its turn again",
        (Edit(CALLS, "                        queue.appendleft(call)\n", "                        pass\n"),),
        ("db/test_last_look.py::test_nothing_of_a_parallel_group_is_entered_then",),
    ),
    Mutant(
        "executor: a late look of the handler's own",
        (Edit("tools/context.py", "if not self._covers(extend=True):", "if False:"),),
        ("db/test_last_look.py::test_a_handler_that_prepares_for_long_looks_before_it_acts",),
    ),
    Mutant(
        "executor: such a look extends the lease",
        (Edit(HANDLER, "if extend and lease is not None and uptime()", "if False and lease and uptime()"),),
        ("db/test_last_look.py::test_a_handler_that_prepares_for_long_looks_before_it_acts",),
    ),
    # `reconcile` is asked by the same look as a handler is entered, after the lease was held.
    Mutant(
        "executor: the outside world is asked under a lease (both guards)",
        (
            Edit(
                CALLS,
                "        driver.hold_lease()\n        with suppress(NotEntered)",
                "        with suppress(NotEntered)",
            ),
            Edit(TOOL, "        ctx._look()\n        try:", "        try:"),
        ),
        ("db/test_last_look.py::test_the_outside_world_is_asked_under_a_lease_only",),
    ),
    Mutant(
        "executor: a handler that does not know",
        (
            Edit(
                HANDLER, "    except ToolDurabilityError as error:", "    except ZeroDivisionError as error:"
            ),
        ),
        ("db/test_doubt.py::test_a_handler_that_does_not_know_is_held_for_staff",),
    ),
    Mutant(
        "executor: a handler that does not return in time",
        (
            Edit(
                CALLS,
                "    raise Interrupted(TIMED_OUT.format(seconds=tool.timeout))",
                '    return Observation("too late", is_error=True)',
            ),
        ),
        ("db/test_doubt.py::test_a_timeout_is_no_result_and_what_comes_late_is_evidence",),
    ),
    Mutant(
        "executor: an exception does not say that nothing happened",
        (Edit(HANDLER, "failed.in_doubt = not tool.refused(error)", "failed.in_doubt = False"),),
        ("db/test_refusals.py::test_any_other_exception_leaves_a_doubt_and_the_next_call_asks",),
    ),
    Mutant(
        "executor: after such an error the tool's other calls of the reply are not run",
        (Edit(CALLS, "            in_doubt.stop_tool(batch, call)\n", "            pass\n"),),
        ("db/test_refusals.py::test_the_other_calls_of_the_reply_to_that_tool_are_not_run",),
    ),
    Mutant(
        "executor: what the origin of a fork executes between the gate and the start",
        (
            Edit(
                CALLS,
                'if call.verdict == "run" and not call.attempt and (since := gate.run_since(driver, tool)):',
                'if since := "":',
            ),
        ),
        ("db/test_fork_after_effects.py::test_what_the_origin_executes_between_the_gate_and_the_start",),
    ),
    Mutant(
        "executor: only the definition that a run was started with drives it",
        (Edit(WORKER, "if agent.definition_hash == run.definition_id:", "if True:"),),
        ("db/test_bad_input.py::test_another_definition_than_the_run_was_started_with",),
    ),
    Mutant(
        "executor: the definition is looked at again under the lease",
        (Edit(LOOP, "if state.run.definition != agent.definition_hash:", "if False:"),),
        ("db/test_definition.py::test_what_is_adopted_just_before_the_claim_is_what_drives",),
    ),
    Mutant(
        "executor: a run that dies every time is paused",
        (Edit(LOOP, "elif driver.attempts >= settings.MAX_ATTEMPTS:", "elif False:"),),
        ("crash/test_sigkill.py::test_a_process_that_dies_in_every_attempt_is_paused",),
    ),
    Mutant(
        "executor: what was stored although its acknowledgement was lost",
        (
            Edit(
                DRIVER,
                "stored = next((hashes[each] for each in rows.",
                "stored = next((None for each in rows.",
            ),
        ),
        ("crash/test_faults.py::test_at_each_commit",),
        POSTGRESQL,
    ),
]

GATED = [
    Mutant(
        "gate: what a person denied is not asked for again",
        (Edit(GATE, "    if earlier is not None:", "    if False:"),),
        ("db/test_engine.py::test_a_denial_is_told_to_the_model_and_not_asked_again",),
    ),
    Mutant(
        "gate: while a call is in doubt its tool asks (rule 4)",
        (
            Edit(
                GATE,
                'driver.state.in_doubt.open.values() if tool.recovery == "nothing" else ()',
                "()",
            ),
        ),
        (
            "db/test_doubt.py::test_while_a_call_is_in_doubt_its_tool_asks_a_person",
            "db/test_refusals.py::test_any_other_exception_leaves_a_doubt_and_the_next_call_asks",
        ),
    ),
    Mutant(
        "gate: what a fork left out and its origin has executed since",
        (Edit(GATE, "if since := run_since(driver, tool):", 'if since := "":'),),
        (
            "db/test_fork_after_effects.py::test_what_the_origin_executes_later_is_seen_before_the_same_tool_runs",
        ),
    ),
    Mutant(
        "gate: a name that is nearly a tool's is no tool's",
        (
            Edit(
                GATE,
                "tool = driver.tools.get(name) if isinstance(name, str) else None",
                "tool = driver.tools.get(intent.tool)",
            ),
        ),
        ("db/test_bounds.py::test_a_tool_name_is_matched_exactly",),
    ),
    Mutant(
        "declarations: no option of a card without a card",
        (
            Edit(
                "tools/options.py",
                "            if self.requires_approval is False:\n",
                "            if False:\n",
            ),
        ),
        ("unit/test_arity.py::test_an_option_of_a_card_without_one_is_refused",),
    ),
    Mutant(
        "declarations: a function takes what it is called with",
        (Edit("utils/arity.py", "        signature.bind(*parameters)\n", "        pass\n"),),
        (
            "unit/test_arity.py::test_a_function_of_another_arity_is_refused",
            "unit/test_arity.py::test_a_policy_takes_what_it_is_asked_with",
        ),
    ),
    Mutant(
        "gate: no number that is not finite",
        (
            Edit(
                TOOL,
                "if refused := [place for place, allowed in found if not allowed][:_MAX_ERRORS]:",
                "if refused := []:",
            ),
        ),
        (
            "properties/test_numbers.py::test_no_card_and_no_effect",
            "properties/test_numbers.py::test_an_edit_to_it_is_refused_and_costs_nothing",
            "properties/test_numbers.py::test_one_that_was_approved_before_does_not_run",
        ),
    ),
    Mutant(
        "gate: no number that a type of the project hides",
        (
            Edit(
                TOOL,
                "            found += [each for each in finite.places(plain) if each[0][0] not in inside]\n",
                "",
            ),
        ),
        ("properties/test_numbers.py::test_one_that_is_only_written",),
    ),
    Mutant(
        "gate: what one number may be, the one beside it may not",
        (
            Edit(
                "tools/finite.py",
                "            yield annotation, allows\n",
                "            yield annotation, True\n",
            ),
        ),
        ("properties/test_numbers.py::test_a_tool_may_allow_it_number_by_number",),
    ),
    Mutant(
        "gate: a context has finite numbers",
        (
            Edit(
                "services/sessions.py", "if found := next(finite.places(context), None):", "if found := None:"
            ),
        ),
        ("properties/test_numbers.py::test_a_context_is_finite",),
    ),
    Mutant(
        "gate: a predicate that raises means ask",
        (
            Edit(
                TOOL,
                "return asks is not False",
                "return asks is True",
            ),
        ),
        ("db/test_executor.py::test_the_gate_asks_when_its_predicate_raises",),
    ),
    Mutant(
        "gate: a predicate without an answer means ask",
        (Edit(TOOL, "return True if answer is None else bool(answer)", "return bool(answer)"),),
        ("unit/test_tools.py::test_a_predicate_decides",),
    ),
    Mutant(
        "gate: a reply that was cut off runs nothing",
        (Edit(GATE, '    if stop_reason != "tool_use":', "    if False:"),),
        ("db/test_bad_input.py::test_a_reply_cut_at_max_tokens_runs_nothing",),
    ),
    Mutant(
        "gate: where nobody can be asked nothing runs",
        (
            Edit(
                GATE,
                "    if why and not driver.store.durable:",
                '    if why and not driver.store.durable and (why := ""):',
            ),
        ),
        ("db/test_gate.py::test_no_way_to_drive_a_run_goes_around_the_gate[without a session]",),
    ),
    Mutant(
        "gate: ids that the provider repeats are replaced",
        (Edit(GATE, "or any(provider_id in ids for ids in seen):", "or False:"),),
        ("db/test_executor.py::test_repeated_and_missing_tool_use_ids_are_replaced",),
    ),
]

# A lease is compared by its owner as well as by its epoch.
ANY_OWNER = (
    Edit(LEASES, 'owner = {"lease_owner": self.owner} if self.owner else {}', "owner = {}"),
    Edit(STATEMENTS, "for each in (batch.epoch, batch.owner) if each", "for each in (batch.epoch,) if each"),
)

LEASED = [
    Mutant(
        "leases: a live one is not claimed",
        (
            Edit(
                LEASES,
                "        runs.runnable()\n        .filter(pk=run_id)",
                "        runs\n        .filter(pk=run_id)",
            ),
            Edit(LEASES, "using(alias).runnable().filter(*free)", "using(alias).filter(*free)"),
        ),
        ("db/test_leases.py::test_a_live_run_is_not_claimed",),
    ),
    Mutant(
        "leases: a claim does not wait for a locked run",
        (Edit(STATEMENTS, "FOR NO KEY UPDATE SKIP LOCKED", "FOR NO KEY UPDATE"),),
        ("db/test_leases.py::test_a_locked_run_is_passed_over",),
        POSTGRESQL,
    ),
    Mutant(
        "leases: a live one is not claimed by one statement",
        (Edit(LEASES, "using(alias).runnable().filter(*free)", "using(alias).filter(*free)"),),
        ("db/test_leases.py::test_a_live_run_is_not_claimed",),
        POSTGRESQL,
    ),
    Mutant(
        "leases: who claims by one statement locks what it saw",
        (Edit(STATEMENTS, " FOR NO KEY UPDATE SKIP LOCKED", ""),),
        ("db/test_claims.py::test_one_of_eight_claimers_wins_each_time",),
        POSTGRESQL,
    ),
    Mutant(
        "leases: each claim by one statement has an epoch of its own",
        (*ANY_OWNER, Edit(STATEMENTS, " lease_epoch = run.lease_epoch + 1,", "")),
        ("db/test_leases.py::test_who_was_overtaken_extends_nothing_and_enters_nothing",),
        POSTGRESQL,
    ),
    Mutant(
        "leases: who is to drain claims nothing",
        (Edit(LEASES, "free = ~Exists(drain_requests(alias)), ~Exists(", "free = ~Exists("),),
        ("db/test_draining.py::test_a_process_claims_nothing_after_the_stamp_and_its_successor_does",),
        POSTGRESQL,
    ),
    Mutant(
        "leases: each claim has an epoch of its own",
        (
            *ANY_OWNER,
            Edit(
                LEASES,
                "lease_owner=owner,\n                lease_epoch=epoch + 1,",
                "lease_owner=owner,",
            ),
        ),
        ("db/test_leases.py::test_who_was_overtaken_extends_nothing_and_enters_nothing",),
    ),
    Mutant(
        "leases: one is given back by its owner only",
        (Edit(LEASES, "mine = self.held(alias)", "mine = Run.objects.using(alias).filter(pk=self.run_id)"),),
        ("db/test_leases.py::test_who_was_overtaken_gives_nothing_back",),
    ),
    Mutant(
        "leases: one is extended by its owner only",
        (Edit(LEASES, "rows = self.held(alias)", "rows = Run.objects.using(alias).filter(pk=self.run_id)"),),
        ("db/test_leases.py::test_who_was_overtaken_extends_nothing_and_enters_nothing",),
    ),
    Mutant(
        "leases: a service takes no live one",
        (Edit(LEASES, "(runs if by_force else runs.filter(FREE))", "(runs)"),),
        ("crash/test_clicks.py::test_cancel_keeps_the_result_and_starts_nothing_more",),
    ),
    Mutant(
        "leases: one that a service takes has an epoch of its own",
        (
            *ANY_OWNER,
            Edit(
                LEASES,
                'lease_owner=SERVICE,\n        lease_epoch=F("lease_epoch") + 1,',
                "lease_owner=SERVICE,",
            ),
        ),
        ("db/test_sweep.py::test_pause_and_cancel_without_a_worker_act_at_once",),
    ),
    Mutant(
        "leases: the heartbeat keeps one alive",
        (Edit(LEASES, "                    self.lease.extend()", "                    pass"),),
        ("crash/test_clicks.py::test_the_heartbeat_keeps_a_slow_tool_alive",),
    ),
    Mutant(
        "leases: none is kept alive by a handler that hangs for ever",
        (
            Edit(
                DRIVER,
                "self.lease.allow(math.inf if tool.transactional else tool.timeout or settings.TOOL_TIMEOUT)",
                "self.lease.allow(math.inf)",
            ),
        ),
        ("crash/test_progress.py::test_a_tool_that_hangs_is_in_doubt_by_its_class",),
    ),
    Mutant(
        "leases: who is told late that its result is stored writes nothing on others' state",
        (Edit(DRIVER, "and (stored is None or not stored.releases):", "and stored is None:"),),
        (
            "db/test_zombies.py::test_a_result_whose_acknowledgement_came_after_others_went_on_to_the_next_reply",
        ),
    ),
    Mutant(
        "leases: a draining process claims nothing",
        (Edit(LEASES, "free = ~Exists(drain_requests(alias)), ~Exists(", "free = ~Exists("),),
        ("db/test_draining.py::test_a_process_claims_nothing_after_the_stamp_and_its_successor_does",),
    ),
    Mutant(
        "leases: a request to drain is later than the one before, whatever the clock says",
        (
            Edit(
                LEASES,
                "max(database_now(alias), last_request(alias) + timedelta(milliseconds=1))",
                "database_now(alias)",
            ),
        ),
        ("db/test_draining.py::test_a_clock_that_steps_strands_no_new_worker_and_frees_no_old_one",),
    ),
    Mutant(
        "leases: after a request to drain was lost the next one counts",
        (Edit(LEASES, "= last if last < known else NEVER", "= known"),),
        ("db/test_draining.py::test_a_request_that_a_restore_lost_is_none_and_the_next_one_counts",),
    ),
    Mutant(
        "leases: an idle Celery worker knows the requests before it",
        (Edit("tasks.py", "        request_at_start(settings.DATABASE)", "        pass"),),
        ("db/test_draining.py::test_a_celery_worker_that_was_idle_drains",),
    ),
    Mutant(
        "leases: a draining process stops at its next boundary",
        (Edit(LEASES, "self.found = is_draining(own_alias(self.alias))", "self.found = False"),),
        ("db/test_draining.py::test_a_drive_ends_at_its_next_boundary",),
    ),
]

RECOVERY = [
    Mutant(
        "recovery: a tool that declares nothing is held",
        (Edit(DOUBT, '.get(call.declares or declared, "held")', '.get("", "retry")'),),
        ("db/test_doubt.py::test_a_handler_that_does_not_know_is_held_for_staff",),
    ),
    Mutant(
        "recovery: a tool with a reconciler is asked about",
        (Edit(DOUBT, '"reconcile": "reconcile"}', '"reconcile": "retry"}'),),
        ("crash/test_sigkill.py::test_one_call",),
    ),
    Mutant(
        "recovery: by the declaration at the start, not today's",
        (
            Edit(
                FOLD,
                'call.declares, call.timeout = payload["declares"], payload.get("timeout")',
                'call.declares, call.timeout = "safe_to_retry", payload.get("timeout")',
            ),
        ),
        ("db/test_definition.py::test_a_call_started_before_is_judged_by_what_its_tool_declared_then",),
    ),
    Mutant(
        "recovery: a transactional call that left no result did not happen",
        (Edit(DOUBT, 'if call.declares == "transactional" and not recovery_failed:', "if False:"),),
        ("db/test_transactional.py::test_ctrl_c_inside_the_block_undoes_it_and_the_call_runs_again",),
    ),
    Mutant(
        "recovery: a transactional handler that ended its transaction is in doubt",
        (Edit(HANDLER, "raise Interrupted(ENDED_BY_HANDLER)", "raise RuntimeError(ENDED_BY_HANDLER)"),),
        ("db/test_hostile.py::test_what_a_handler_committed_behind_the_journal_is_in_doubt",),
    ),
    Mutant(
        "recovery: nobody asks before the first attempt's time is over",
        (
            Edit(CALLS, "    if left > 0:\n", "    if False:\n"),
            Edit(CALLS, "    return left > 0\n", "    return False\n"),
        ),
        ("db/test_hard_cases.py::test_nobody_reconciles_while_the_first_attempt_may_be_at_work",),
    ),
    Mutant(
        "recovery: that time is over by the database's clock",
        (
            Edit(CALLS, "- driver.now()).total_seconds()", "- datetime.now(UTC)).total_seconds()"),
            Edit(CALLS, "from datetime import timedelta", "from datetime import UTC, datetime, timedelta"),
        ),
        ("crash/test_clocks.py::test_nobody_is_asked_while_the_first_attempt_is_at_work[0-3600]",),
        POSTGRESQL,
    ),
    Mutant(
        "recovery: nothing runs beside a handler that is still at work here",
        (Edit(CALLS, "if abandoned is not None and not abandoned.done():", "if False:"),),
        ("db/test_hard_cases.py::test_a_handler_that_is_still_at_work_here_is_not_run_beside_itself",),
    ),
    Mutant(
        "recovery: a reconcile tool that raises is asked about",
        (Edit(CALLS, 'asks=observation.in_doubt and tool.recovery == "reconcile"', "asks=False"),),
        ("db/test_hard_cases.py::test_a_reconcile_tool_that_raises_is_asked_about",),
    ),
    Mutant(
        "recovery: a reconciler that does not know settles nothing",
        (Edit(CALLS, "if not isinstance(verdict, Occurred | NotOccurred):", "if False:"),),
        ("db/test_refusals.py::test_a_caller_who_asks_is_told_when_reconcile_does_not_know",),
    ),
    Mutant(
        "recovery: what follows a call in doubt is not run",
        (Edit(DOUBT, "    _stop(batch, [one for one in later if not one.parallel])\n", ""),),
        ("db/test_doubt.py::test_an_agent_may_prefer_to_be_told",),
    ),
    Mutant(
        "recovery: what may have happened is unknown, also where the run ends",
        (
            Edit(
                DOUBT,
                "        if call.may_have_happened:\n            unknown(batch, call, None)",
                "        if False:\n            unknown(batch, call, None)",
            ),
        ),
        ("crash/test_clicks.py::test_a_second_cancel_takes_the_run_from_a_worker_that_does_not_listen",),
    ),
]

TRANSACTIONAL = [
    Mutant(
        "transactional: the database refuses any other COMMIT (the fence)",
        (
            Edit(
                HANDLER,
                "fence = CommitFence.objects.using(alias).create(nothing_id=NOWHERE)",
                "fence = CommitFence(pk=0)",
            ),
            Edit(HANDLER, "filter(pk=fence.pk).delete()[0] != 1:", "filter(pk=fence.pk).delete()[0] > 1:"),
        ),
        ("db/test_hostile.py::test_executescript_cannot_commit_what_a_transactional_handler_wrote",),
    ),
    Mutant(
        "transactional: the transaction is the one that the handler was entered in (the savepoint)",
        (Edit(HANDLER, "                require_same_transaction(connection)\n", ""),),
        ("db/test_hostile.py::test_a_transactional_handler_cannot_end_its_transaction",),
    ),
    Mutant(
        "transactional: no SQL that ends the transaction",
        (Edit(HANDLER, "        if not _ENDS_TRANSACTION.match(sql):", "        if True:"),),
        ("db/test_hostile.py::test_a_transactional_handler_cannot_end_its_transaction",),
    ),
    Mutant(
        "transactional: no block of the handler's is left open",
        (Edit(HANDLER, "if connection.atomic_blocks != blocks:", "if False:"),),
        ("db/test_transactional.py::test_what_fails_leaves_no_write_and_an_error_result",),
    ),
    Mutant(
        "transactional: what fails is rolled back",
        (
            Edit(
                HANDLER,
                "                    raise _RollBack(observation)\n",
                "                    pass\n",
            ),
        ),
        ("db/test_transactional.py::test_what_fails_leaves_no_write_and_an_error_result",),
    ),
    Mutant(
        "transactional: no writes to other databases, which no rollback reaches",
        (
            Edit(
                HANDLER,
                '        if sql.lstrip("( \\n").upper().startswith(',
                "        if True or sql.startswith(",
            ),
        ),
        ("db/test_transactional.py::test_what_fails_leaves_no_write_and_an_error_result",),
    ),
]

REWOUND = [
    Mutant(
        "rewound: a row that was seen committed is looked for",
        (
            Edit(
                "journal/store.py",
                "state.is_rewound = is_gone and not is_told",
                "state.is_rewound = False",
            ),
        ),
        ("db/test_rewound.py::test_a_process_knows_a_run_that_ended_before_the_loss",),
    ),
    Mutant(
        "rewound: a drive builds nothing on what is left",
        (Edit(DRIVER, "        if self.state.is_rewound:\n            self._rewound(lease)\n", ""),),
        ("db/test_rewound.py::test_reconcile_is_asked_before_a_first_attempt",),
    ),
    Mutant(
        "rewound: nor does one that begins",
        (
            Edit(
                LOOP,
                "        if state.is_rewound:\n            rewound.hold(lease)\n            return None\n",
                "",
            ),
        ),
        ("db/test_rewound.py::test_a_process_knows_a_run_that_ended_before_the_loss",),
    ),
    Mutant(
        "rewound: an epoch that was given twice holds for one owner",
        ANY_OWNER,
        ("db/test_rewound.py::test_an_epoch_that_was_given_twice_holds_for_one_owner",),
    ),
    Mutant(
        "rewound: a call that may have been made is asked about first",
        (Edit(CALLS, "    if declared := _doubted_since(driver, call):", "    if declared := '':"),),
        (
            "db/test_rewound.py::test_what_was_not_charged_is_charged_after_reconcile_has_said_so",
            "db/test_rewound.py::test_an_approval_from_before_the_loss_starts_nothing",
        ),
    ),
    Mutant(
        "rewound: also where it would travel with the result before it",
        (Edit(CALLS, 'and call.orphan != "reconcile" and not _doubted_since(driver, call)', "and True"),),
        ("db/test_rewound.py::test_reconcile_is_asked_before_a_first_attempt",),
    ),
    Mutant(
        "rewound: what was not made does not run after a call that was told as unknown",
        (Edit(CALLS, "    if in_doubt.is_after_unknown(driver.run, call):", "    if False:"),),
        ("db/test_rewound.py::test_a_lost_call_that_was_not_made_does_not_run_after_an_unknown_one",),
    ),
    Mutant(
        "rewound: what declares nothing asks a person",
        (Edit(GATE, "    if driver.run.restored_at and tool", "    if False and tool"),),
        (
            "db/test_rewound.py::test_a_result_is_not_built_onto_what_is_left",
            "db/test_rewound.py::test_hold_all_marks_what_was_paused_too",
        ),
    ),
    Mutant(
        "rewound: a promoted server lends no run",
        (Edit(LEASES, ", ~Exists(timeline.moved(alias))", ","),),
        ("db/test_rewound.py::test_a_promoted_server_lends_no_run_before_all_are_held",),
        POSTGRESQL,
    ),
    Mutant(
        "rewound: a task asked for again keeps the keys of its calls",
        (
            Edit(
                "services/submit.py",
                'derived(request, "secret")} if request.key else {}',
                "secret()} if 0 else {}",
            ),
        ),
        ("db/test_rewound.py::test_the_same_task_asked_again_has_the_same_keys",),
    ),
]

MUTANTS = [*EXECUTOR, *GATED, *LEASED, *RECOVERY, *TRANSACTIONAL, *REWOUND]
