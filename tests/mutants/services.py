"""Guards of the services: who may decide, on what, in time; who sees what."""

from __future__ import annotations

from tests.mutants import Edit, Mutant

APPROVALS, CONTROL, PERMISSIONS = "services/approvals.py", "services/control.py", "services/permissions.py"
SUBMIT, SESSIONS, WRITE = "services/submit.py", "services/sessions.py", "services/write.py"
QUOTAS, STARTING = "services/quotas.py", "services/starting.py"
ALTERED = "db/test_altered_columns.py"
DECIDERS, POLICIES = "journal/deciders.py", "journal/policy.py"

DECISIONS = [
    Mutant(
        "permissions: a text is not the program",
        (
            Edit(
                "journal/events.py",
                "    if actor is None or isinstance(actor, Program):",
                "    if actor is None or isinstance(actor, Program | str):",
            ),
        ),
        ("db/test_actors.py::test_nobody_else_acts",),
    ),
    Mutant(
        "permissions: a row of another model is no user",
        (Edit("journal/events.py", "isinstance(actor, get_user_model())", "True"),),
        ("db/test_actors.py::test_nobody_else_acts",),
    ),
    Mutant(
        "permissions: with an owner, the actor is looked at too",
        (
            Edit(
                SUBMIT,
                "        events.is_program(self.actor)  # raises for what is no actor\n",
                "        pass\n",
            ),
        ),
        ("db/test_actors.py::test_with_an_owner_the_actor_is_looked_at_too",),
    ),
    Mutant(
        "erasure: what belongs to nobody is not a deleted user's",
        (
            Edit("services/erasure.py", "filter(owner_id=whose.id)", "filter(owner_id=user.pk)"),
            Edit("services/erasure.py", "Owner.of_user(user)", "user"),
        ),
        ("db/test_actors.py::test_what_belongs_to_nobody_is_no_users",),
    ),
    Mutant(
        "erasure: no run that reads the value goes on",
        (Edit("services/erasure.py", "        if hindrance is not None:", "        if False:"),),
        ("db/test_erasure.py::test_erased_in_a_fork_it_is_gone_from_the_origin",),
    ),
    Mutant(
        "erasure: a fork takes up what was erased since it read its rows",
        (Edit("services/forks.py", "    fork.read_again(alias)\n", ""),),
        ("db/test_erasure.py::test_beside_a_fork_of_the_same_rows",),
    ),
    Mutant(
        "erasure: a run made again has the context that is left",
        (
            Edit(
                "services/submit.py",
                "            request = replace(request, context=left)\n",
                "            pass\n",
            ),
        ),
        ("db/test_erasure.py::test_a_context_erased_meanwhile_is_not_written_again",),
    ),
    Mutant(
        "erasure: a fork has the context that is left",
        (Edit("services/forks.py", "        self.origin = restore(find_run(self.origin.pk))\n", ""),),
        ("db/test_erasure.py::test_a_context_erased_meanwhile_is_not_written_again",),
    ),
    Mutant(
        "approvals: in time, at the very update that decides",
        (Edit(APPROVALS, "write(approval.run_id, change, guard=IN_TIME)", "write(approval.run_id, change)"),),
        ("db/test_decisions.py::test_a_decision_that_comes_a_moment_too_late_is_none",),
    ),
    Mutant(
        "approvals: the digest that was seen",
        (
            Edit(
                APPROVALS, "if pending.digest != digest and (digest is not None or call.edited):", "if False:"
            ),
        ),
        ("db/test_hard_cases.py::test_an_edit_changes_what_the_next_person_reads",),
    ),
    Mutant(
        "approvals: after an edit the digest must be named",
        (Edit(APPROVALS, "(digest is not None or call.edited)", "digest is not None"),),
        ("db/test_decisions.py::test_after_an_edit_nobody_approves_without_saying_what_they_saw",),
    ),
    Mutant(
        "approvals: one person is no two",
        (Edit(APPROVALS, 'elif who["id"] in pending.given:', "elif False:"),),
        ("db/test_executor.py::test_two_people_approve_or_it_does_not_run",),
    ),
    Mutant(
        "approvals: what was decided stays decided",
        (
            Edit(
                APPROVALS,
                'or pending.status != "pending" or approval.status != Approval.Status.PENDING:',
                "or False:",
            ),
        ),
        ("db/test_races.py::test_one_of_many_deciders_wins",),
    ),
    Mutant(
        "approvals: nothing is decided of a run that is being cancelled",
        (
            Edit(
                APPROVALS,
                "    if batch.state.run.ended or batch.state.run.cancel_requested:",
                "    if False:",
            ),
        ),
        ("crash/test_clicks.py::test_a_decision_after_cancel_is_refused",),
    ),
    Mutant(
        "approvals: an edit fits the tool",
        (Edit(APPROVALS, "edited = tool.effective(arguments)", "edited = arguments"),),
        ("db/test_expiry_races.py::test_what_cannot_be_meant_changes_nothing",),
    ),
    Mutant(
        "approvals: what was given more time does not expire",
        (Edit(APPROVALS, "if call.approval.expires_at != approval.expires_at:", "if False:"),),
        ("db/test_expiry_races.py::test_it_was_given_more_time",),
    ),
    Mutant(
        'control: evidence that it did happen stands against "not occurred"',
        (Edit(CONTROL, 'late if held and verdict == "not_occurred" else ()', "()"),),
        ("db/test_zombies.py::test_a_handler_of_a_tool_that_declares_nothing_leaves_evidence",),
    ),
    Mutant(
        "control: a verdict only on a call in doubt",
        (Edit(CONTROL, "if not held and tool is None:", "if False:"),),
        ("db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",),
    ),
    Mutant(
        "control: a verdict needs the permission",
        (Edit(CONTROL, '    permissions.require(actor, "resolve", run)\n', ""),),
        ("db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",),
    ),
    Mutant(
        "runs: a key stands for one task",
        (Edit(SUBMIT, "    if not request.is_for(run):\n", "    if False:\n"),),
        ("db/test_bad_input.py::test_an_idempotency_key_used_for_another_task",),
    ),
    Mutant(
        "runs: an imported run is a record",
        (Edit(WRITE, "    if session.imported_at is not None:", "    if False:"),),
        ("db/test_imports.py::test_an_added_approval_starts_nothing",),
    ),
    Mutant(
        "runs: a key of another session",
        (Edit(SUBMIT, "if request.names_session and run.session.key != request.session:", "if False:"),),
        ("db/test_key_of_another_session.py::test_python_refuses_the_key_and_names_the_run_and_its_session",),
    ),
]

POLICY = [
    Mutant(
        "policy: who may not decide decides nothing",
        (Edit(PERMISSIONS, "    if why:\n        raise PermissionDeniedError(why)", "    pass"),),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    Mutant(
        "policy: the permission to decide",
        (Edit(DECIDERS, 'if not ask("can", False, actor, "decide", approval):', "if False:"),),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    # Django's backend gives no permission to such a user, a project's own might.
    Mutant(
        "policy: who is not active decides nothing (both guards)",
        (
            Edit(DECIDERS, "    if not is_somebody(actor):", "    if False:"),
            Edit(DECIDERS, 'if not ask("can", False, actor, "decide", approval):', "if False:"),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    Mutant(
        "policy: only the approvers of the tool",
        (
            Edit(
                DECIDERS,
                "if approval.approvers and not is_among(actor, approval.approvers, groups):",
                "if False:",
            ),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    Mutant(
        "policy: nobody who asked for the run, where the project says so",
        (
            Edit(
                DECIDERS,
                "if settings.REQUESTER_MAY_APPROVE or not requested(actor, run):",
                "if True:",
            ),
        ),
        (
            "db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",
            "db/test_givers.py::test_who_asked_for_a_run_is_the_owner_and_everybody_after",
        ),
    ),
    Mutant(
        "policy: who asked for a run is read from the journal when a call is decided",
        (Edit(PERMISSIONS, "    restore(approval.run)\n", ""),),
        (f"{ALTERED}::test_an_altered_owner_confirms_nothing_at_any_door",),
    ),
    Mutant(
        "policy: whose a run is is read from the journal whatever is asked of it",
        (Edit(PERMISSIONS, "    restore(run)\n", ""),),
        (f"{ALTERED}::test_an_altered_owner_confirms_nothing_at_any_door",),
    ),
    Mutant(
        "policy: the scope of a token is that of the journal's requester",
        (
            Edit(
                "api/approvals.py",
                "is_requester(user, restore(approval.run))",
                "is_requester(user, approval.run)",
            ),
        ),
        (f"{ALTERED}::test_an_altered_owner_confirms_nothing_at_any_door",),
    ),
    Mutant(
        "policy: who approved is asked about again by what the journal says of the run",
        (Edit("engine/tool_calls.py", "        restore(approval.run, driver.run)\n", ""),),
        (f"{ALTERED}::test_a_rule_reads_the_context_of_the_journal_at_the_decision_and_before_the_call",),
    ),
    Mutant(
        "policy: who asks for something after the rules were applied decides nothing",
        (
            Edit(
                APPROVALS,
                "if actor is not None and pending.approvers != REQUESTER and (why",
                "if False and (why",
            ),
        ),
        (f"{ALTERED}::test_who_asks_between_the_rules_and_the_decision_decides_nothing",),
    ),
    Mutant(
        "approvals: a card whose columns are the journal's",
        (Edit(APPROVALS, "and getattr(now, name) != value]:", "and False]:"),),
        (f"{ALTERED}::test_nothing_is_decided_on_a_card_that_is_not_the_journals",),
    ),
    Mutant(
        "sessions: one that the journal knows by this key, scope and owner",
        (Edit(SUBMIT, "    request.require_home(batch.state)\n", ""),),
        (f"{ALTERED}::test_a_session_takes_nothing_for_whom_its_columns_only_name",),
    ),
    Mutant(
        "messages: into the run of a session that the journal knows by this key, scope and owner",
        (Edit("services/messages.py", "        request.require_home(state)\n", ""),),
        (f"{ALTERED}::test_an_open_run_takes_no_message_of_another_and_a_users_session_no_visitor",),
    ),
    Mutant(
        "tokens: none of a session that the journal calls a user's",
        (Edit("services/api_tokens.py", ' or any(facts.get("owner") for facts in begun)', ""),),
        (f"{ALTERED}::test_an_open_run_takes_no_message_of_another_and_a_users_session_no_visitor",),
    ),
    Mutant(
        "services: a run is changed as its journal has it",
        (Edit(WRITE, "restore(find_run(run_id), state.run)", "find_run(run_id)"),),
        (f"{ALTERED}::test_a_definition_is_adopted_of_the_agent_that_the_journal_names",),
    ),
    Mutant(
        "run again: the task that the journal holds",
        (Edit("services/forks.py", '    changes["text"] = task_of(read_rows(asked))\n', ""),),
        (f"{ALTERED}::test_a_run_goes_on_with_the_task_and_context_of_the_journal",),
    ),
    Mutant(
        "policy: a rule of the project's that fails lets nobody through",
        (Edit(POLICIES, "        return refusal\n", "        return True\n"),),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    Mutant(
        "policy: the arguments that will run are judged, not those before the edit",
        (Edit(APPROVALS, 'approval, edited, verb="edit")', 'approval, verb="edit")'),),
        ("db/test_decisions.py::test_the_rule_judges_the_arguments_that_will_run",),
    ),
    Mutant(
        "policy: the first giver still counts when the second approves",
        (Edit(APPROVALS, "        void(batch, call, lost)\n", ""),),
        ("db/test_givers.py::test_a_decision_races_with_the_voiding",),
    ),
    Mutant(
        "policy: a repeated request is judged anew",
        (Edit("api/approvals.py", "        permissions.require_decide(user, approval)\n", ""),),
        ("api/test_races.py::test_a_repeated_request_is_judged_anew",),
    ),
    Mutant(
        "policy: who may cancel, pause and resume",
        (Edit(PERMISSIONS, "    if not may(actor, action, run):", "    if False:"),),
        (
            "admin/test_permissions.py::test_a_service_asks_by_itself[pause]",
            "db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",
        ),
    ),
    Mutant(
        "policy: everybody sees their own runs only",
        (
            Edit(
                POLICIES,
                "return runs.none() if user.pk is None else runs.filter(owner_id=user.pk)",
                "return runs",
            ),
        ),
        ("api/test_auth.py::test_who_sees_which_runs",),
    ),
    Mutant(
        "policy: everybody sees the approvals of their own runs only",
        (
            Edit(
                POLICIES,
                "return approvals.filter(run__in=runs) if is_narrowed(runs) else approvals",
                "return approvals",
            ),
        ),
        ("db/test_gate.py::test_the_second_gate_belongs_to_the_owner_as_the_first_did",),
    ),
    Mutant(
        "policy: everybody writes into their own sessions only",
        (Edit(SESSIONS, "if session.owner_id == owner.id:", "if True:"),),
        ("db/test_bad_input.py::test_a_session_of_somebody_else_or_of_nobody",),
    ),
    Mutant(
        "sessions: whoever was first to use a key does not own what the program writes there",
        (
            Edit(
                SESSIONS,
                "if session.owner_id == owner.id:",
                "if session.owner_id == owner.id or actor is None:",
            ),
        ),
        ("db/test_scope.py::test_the_program_does_not_write_into_the_session_of_whoever_came_first",),
    ),
    Mutant(
        "starting: people start what the policy lets them",
        (Edit(STARTING, "if why := why_not_start(user, agent):", 'if why := "":'),),
        ("api/test_starting.py::test_starting_takes_the_permission",),
    ),
    Mutant(
        "starting: for others only who may act for them",
        (Edit(STARTING, "or not (is_own or ask(", "or not (True or ask("),),
        ("api/test_starting.py::test_acting_for_another",),
    ),
    Mutant(
        "quotas: the count is judged as it is raised",
        (Edit(QUOTAS, "filter(is_over | Q(count__lt=limit), user_id=user_id)", "filter(user_id=user_id)"),),
        ("db/test_scope.py::test_a_quota_counts_what_a_user_starts",),
    ),
]

MASKING, STREAM = "journal/masking.py", "api/stream.py"
NO_EXIT = "masks/test_masks.py::test_no_exit_shows_what_is_sensitive"
VISITED = "doors/test_matrix.py::test_the_api[visitor]"

TRIED = ("db/test_context_values.py::test_a_masked_value_is_not_found_by_trying",)

SHOWN = [
    Mutant(
        "contexts: the API finds no value that is masked",
        (Edit("api/runs.py", "if said(run.context.get(name)) == value]", "if True]"),),
        TRIED,
    ),
    Mutant(
        "contexts: the console finds no value that is masked",
        (Edit("admin/filters.py", "redacted(masks[run.session_id].run(run).context)", "run.context"),),
        TRIED,
    ),
    Mutant(
        "contexts: what a tool calls sensitive is not kept",
        (Edit("models/run.py", "if name not in hidden}", "}"),),
        ("db/test_context_values.py::test_what_a_tool_calls_sensitive_is_kept_by_no_start_and_no_import",),
    ),
    Mutant(
        "contexts: an erased one is found no more",
        (Edit("services/erasure.py", "run__in=without).delete()", "run__in=without).count()"),),
        ("db/test_context_values.py::test_they_go_with_the_context_and_with_the_run",),
    ),
    Mutant(
        "masking: texts that repeat a value",
        (
            Edit(
                MASKING,
                "return self.secrets.hide(text) if self and isinstance(text, str) else text",
                "return text",
            ),
        ),
        (NO_EXIT,),
    ),
    Mutant(
        "masking: what a tool made of its arguments",
        (Edit(MASKING, "if not self.names(tool) or value is None:", "if True:\n            return value"),),
        ("masks/test_masks.py::test_random_values_never_leave",),
    ),
    Mutant(
        "quotas: one that raises lets nobody through",
        (Edit(POLICIES, "Quota(runs=0, streams=0)", "Quota()"),),
        ("api/test_stream.py::test_a_quota_that_raises_lets_nobody_through",),
    ),
    Mutant(
        "quotas: no rule about users is asked about a visitor",
        (
            Edit(
                POLICIES,
                'return ask("visitor_quota", nothing, session)',
                'return ask("quota", nothing, user, agent)',
            ),
        ),
        (VISITED,),
    ),
    Mutant(
        "reveals: no rule about users is asked about a visitor",
        (Edit(PERMISSIONS, "if not is_somebody(user):", "if not user.is_active:"),),
        (VISITED,),
    ),
    Mutant(
        "quotas: visitors of a session have one",
        (Edit("services/quotas.py", "isinstance(actor, SessionBearer) or getattr", "getattr"),),
        ("api/test_visitors.py::test_visitors_of_a_session_have_a_quota",),
    ),
    Mutant(
        "streams: each session's visitors are counted by themselves",
        (Edit(STREAM, "user.session_id if isinstance(user, SessionBearer) else user.pk", "user.pk"),),
        ("api/test_stream.py::test_each_session_has_streams_of_its_own_for_its_visitors",),
    ),
    Mutant(
        "streams: a newer one of the same run ends the oldest",
        (Edit(STREAM, "mine.pop(same)[1].set()", "mine.pop(same)"),),
        ("api/test_stream.py::test_a_place_is_given_back_once_however_a_stream_ends",),
    ),
    Mutant(
        "names: one written from right to left moves nothing beside it, in an element",
        (
            Edit(
                "admin/html.py",
                'return format_html("<bdi>{}</bdi>", shown) if turns(shown) else shown',
                "return shown",
            ),
        ),
        ("admin/test_directions.py::test_every_page_of_the_console",),
    ),
    Mutant(
        "names: one written from right to left moves nothing beside it, in a sentence",
        (Edit("utils/characters.py", "{FIRST_STRONG}{text}{END}", "{text}"),),
        (
            "admin/test_directions.py::test_every_page_of_the_console",
            "admin/test_directions.py::test_mails",
        ),
    ),
    Mutant(
        "names: what ends their isolation is no character of theirs",
        (Edit("admin/html.py", "isolated(bare(text))", "isolated(redact(str(text)))"),),
        ("admin/test_directions.py::test_what_ends_an_isolation_is_shown_and_ends_none",),
    ),
]

POLLER, DRAFTS = "api/poller.py", "engine/drafts.py"
DRAFTED = [
    Mutant(
        "streams: a newcomer takes no row from the others",
        (Edit(POLLER, "since <= after and last <= until", "since <= after"),),
        ("api/test_drafts.py::test_who_comes_between_two_looks_takes_no_row_from_the_others",),
    ),
    Mutant(
        "drafts: shown only of the run's epoch and next step",
        (Edit(POLLER, "drafted[:2] == [epoch, step]", "bool(drafted[2])"),),
        ("api/test_drafts.py::test_a_draft_is_shown_only_for_the_runs_epoch_and_next_step",),
    ),
    Mutant(
        "drafts: a zombie writes over nobody's",
        (Edit(DRAFTS, "epoch__lte=reply.epoch, ", ""), Edit(DRAFTS, " and epoch == reply.epoch", "")),
        ("crash/test_drafts.py::test_a_zombie_writes_over_nobodys_draft",),
    ),
    Mutant(
        "drafts: none before a reply whose calls may have sensitive arguments",
        (Edit(DRAFTS, "bool(reply.mask.arguments_of)", "False"),),
        ("db/test_drafts.py::test_with_sensitive_arguments_nothing_is_shown_before_the_reply",),
    ),
    Mutant(
        "drafts: the beginning of a hidden value is held back",
        (Edit(DRAFTS, "text[: mask.secrets.settled(text)]", "text"),),
        ("db/test_drafts.py::test_a_sensitive_result_in_two_pieces_is_masked",),
    ),
    Mutant(
        "drafts: the end, in which AGENTRUNS_REDACT may not find what it begins, is held back",
        (Edit(DRAFTS, "    if not is_on():\n        return text\n", "    return text\n"),),
        ("db/test_drafts.py::test_a_secret_in_two_pieces_is_never_stored",),
    ),
    Mutant(
        "drafts: gone with the reply",
        (Edit(DRAFTS, 'partial(rows.update, text="")', "int"),),
        ("db/test_drafts.py::test_what_is_watched_is_stored_as_it_is_written_and_gone_with_the_reply",),
    ),
]

SENDING, MESSAGES = "services/messages.py", "db/test_messages.py::test_"
SENT = [
    Mutant(
        "messages: a run that is being cancelled takes none",
        (Edit(SENDING, "if state.run.cancel_requested:", "if False:"),),
        (f"{MESSAGES}a_run_that_is_being_cancelled_takes_none",),
    ),
    Mutant(
        "messages: there is a limit of those that nobody has read",
        (Edit(SENDING, "if len(state.unread) >= MOST_UNREAD:", "if False:"),),
        (f"{MESSAGES}what_refuses_a_message", f"{MESSAGES}senders_race_for_the_last_place"),
    ),
    Mutant(
        "messages: one whose acknowledgement was lost is not sent again",
        (
            Edit(
                SENDING,
                "            if row.hash in self.tried:\n                return row.run_id\n",
                "",
            ),
            Edit(SENDING, "        if runs.exists():", "        if False:"),
        ),
        (f"{MESSAGES}a_lost_acknowledgement_sends_no_message_twice",),
    ),
    Mutant(
        "messages: a pruned session takes none",
        (Edit(SENDING, "    if pruned.exists():", "    if False:"),),
        (f"{MESSAGES}what_refuses_a_message",),
    ),
    Mutant(
        "messages: who asks for the session's next run may act for its owner",
        (Edit(SENDING, "        if self.refusal:", "        if False:"),),
        ("api/test_messages.py::test_others_learn_nothing_and_write_only_with_permission",),
    ),
    Mutant(
        "messages: the policy is asked",
        (
            Edit(
                SENDING,
                "    if last is not None and not isinstance(actor, SessionBearer):",
                "    if False:",
            ),
        ),
        ("api/test_messages.py::test_others_learn_nothing_and_write_only_with_permission",),
    ),
    Mutant(
        "messages: senders are requesters",
        (Edit("journal/fold.py", "if asker and asker not in", "if False and asker not in"),),
        (f"{MESSAGES}who_sends_a_message_is_a_requester",),
    ),
    Mutant(
        "messages: they count for quotas",
        (
            Edit(
                SENDING,
                "        count_start(settings.DATABASE, request.actor, self.limit)\n",
                "",
            ),
        ),
        (f"{MESSAGES}messages_count_as_runs_do",),
    ),
    Mutant(
        "messages: a run that has not read one does not complete",
        (Edit("engine/loop.py", "elif stop in FINAL and batch.state.unread:", "elif False:"),),
        (f"{MESSAGES}the_run_goes_on_as_often_as_it_is_written_to",),
    ),
    Mutant(
        "messages: they stand after a reply that has not read them",
        (Edit("journal/conversation.py", "if read is None or said.seq <= read:", "if True:"),),
        (f"{MESSAGES}the_run_goes_on_as_often_as_it_is_written_to",),
    ),
    Mutant(
        "messages: they stand after a reply that the provider cut",
        (Edit("journal/conversation.py", "holds = self._is_cut and", "holds = False and"),),
        (f"{MESSAGES}a_reply_that_goes_on_is_sent_back_before_the_message",),
    ),
    Mutant(
        "messages: who may not start the agent writes to no run of it",
        (Edit(STARTING, "found = startable(user, agent or", "found = get_agent(agent or"),),
        ("api/test_messages.py::test_who_may_not_start_an_agent_any_more_writes_in_no_run_of_it",),
    ),
    Mutant(
        "messages: none starts a run for a user who is gone",
        (Edit(STARTING, "if not (acts_for and owner and ask(", "if not (acts_for and ask("),),
        ("api/test_messages.py::test_nothing_is_started_for_a_user_who_is_not_active",),
    ),
    Mutant(
        "messages: the program is not oneself in another scope",
        (
            Edit(STARTING, "owner = AnonymousUser() if", "owner = None if"),
            Edit(STARTING, "acts_for and owner and", "acts_for and"),
        ),
        ("api/test_messages.py::test_who_may_start_own_runs_in_a_scope_does_not_write_as_the_program_there",),
    ),
    Mutant(
        "messages: none is put into a hidden run",
        (Edit(SENDING, "if self.seen is not None and run.pk not in self.seen:", "if False:"),),
        ("doors/test_hidden.py::test_refusals_do_not_name_a_hidden_open_run",),
    ),
    Mutant(
        "messages: whose words an ended run has not read is a requester of the next one",
        (Edit(SUBMIT, "*filter(None, unread))", "*())"),),
        ("api/test_messages.py::test_whose_words_the_next_run_reads_is_its_requester",),
    ),
    Mutant(
        "messages: whose words were answered is none",
        (Edit("journal/store.py", "in self.asking.items() if seq > read", "in self.asking.items()"),),
        ("api/test_messages.py::test_whose_words_were_answered_is_no_requester_of_the_next_run",),
    ),
    Mutant(
        "starting: a run made again has an active owner",
        (Edit(STARTING, "if run.owner_id not in (None, user.pk) and", "if False and"),),
        ("api/test_messages.py::test_nothing_is_started_for_a_user_who_is_not_active",),
    ),
    Mutant(
        "starting: the context is asked for again",
        (Edit(PERMISSIONS, 'if not narrows("context") and (named', "if (named"),),
        ("api/test_starting.py::test_a_rank_that_was_lost_starts_nothing_any_more",),
    ),
    Mutant(
        "starting: without a rule a user's context is no other's",
        (Edit(PERMISSIONS, "and (named is None or is_theirs):", "and True:"),),
        ("api/test_starting.py::test_without_a_rule_the_context_of_one_user_is_no_others",),
    ),
    Mutant(
        "visitors: they have no user's context",
        (Edit(STARTING, "if not starter or starter.startswith(VISITOR):", "if True:"),),
        ("api/test_starting.py::test_a_visitor_borrows_no_rank",),
    ),
    Mutant(
        "visitors: they write for no owner who is gone",
        (Edit(STARTING, "if owner is None and own.owner_id is not None:", "if False:"),),
        ("api/test_starting.py::test_a_visitor_of_a_users_session_has_what_the_user_has",),
    ),
    Mutant(
        "visitors: they read no context of a run",
        (Edit("api/auth.py", "        run.context = {}\n", "        pass\n"),),
        ("api/test_visitors.py::test_a_visitor_reads_no_context",),
    ),
    Mutant(
        "visitors: they read no context in its rows",
        (Edit("api/auth.py", 'hidden |= {"context"} if', 'hidden |= {"contexts"} if'),),
        ("api/test_visitors.py::test_a_visitor_reads_no_context",),
    ),
    Mutant(
        "sessions: what is read as a whole may be seen as a whole",
        (Edit(PERMISSIONS, "    if rows.exclude(run__in=visible_runs(actor)).exists():", "    if False:"),),
        (
            "doors/test_hidden.py::test_the_console_reads_no_rows_of_a_hidden_run",
            "doors/test_hidden.py::test_a_fork_copies_no_rows_of_a_hidden_run",
        ),
    ),
    Mutant(
        "sessions: up to the row that is read",
        (Edit(PERMISSIONS, "rows if until is None else rows.filter(seq__lte=until)", "rows"),),
        ("doors/test_hidden.py::test_rows_before_the_hidden_ones_may_be_read",),
    ),
    Mutant(
        "sessions: a title is the first run's",
        (Edit(PERMISSIONS, "first.filter(run__in=visible_runs(actor)).values_list", "first.values_list"),),
        ("doors/test_hidden.py::test_the_title_is_not_that_of_a_hidden_run",),
    ),
    Mutant(
        "sessions: a run's page lists no doubt of a hidden one",
        (Edit("services/waiting.py", "found and among is not None and", "False and"),),
        ("doors/test_hidden.py::test_the_page_of_a_run_lists_no_doubt_of_a_hidden_one",),
    ),
    Mutant(
        "sessions: errors name no hidden run",
        (
            Edit(
                PERMISSIONS, "        if error.run_id is None or is_program", "        if True or is_program"
            ),
        ),
        ("doors/test_hidden.py::test_a_key_does_not_tell_of_a_hidden_run_in_another_session",),
    ),
    Mutant(
        "starting: a run found for another owner tells who may not see it of no result",
        (Edit("api/auth.py", "        run.output, run.error", "        run.title, run.error"),),
        ("api/test_starting.py::test_a_key_of_another_owner_tells_who_acts_for_them_of_no_result",),
    ),
]

RENDERING = "db/test_rendering.py::test_"
MADE = [
    Mutant(
        "rendering: a call of a tool that was not chosen is refused",
        (
            Edit(
                "engine/driver.py",
                "chosen = self.agent.tools if self.agent.tools_for is None else self.run.tools or ()",
                "chosen = self.agent.tools",
            ),
        ),
        (f"{RENDERING}a_call_of_a_tool_that_was_not_chosen_is_one_of_an_unknown_tool",),
    ),
    Mutant(
        "rendering: a fork keeps what was made for its origin",
        (Edit("services/forks.py", "made = kept(", "kept("),),
        (f"{RENDERING}a_fork_keeps_them_and_a_run_of_the_task_again_does_not",),
    ),
    Mutant(
        "rendering: what was erased is not kept",
        (Edit("services/forks.py", "self.origin.agent and not gone:", "self.origin.agent:"),),
        (f"{RENDERING}a_fork_makes_erased_ones_anew",),
    ),
    Mutant(
        "rendering: an adoption keeps what was made",
        (Edit(CONTROL, 'has = {"instructions"} if not', "has = set() if not"),),
        (f"{RENDERING}an_adopted_definition_keeps_them_and_makes_what_was_not_there",),
    ),
    Mutant(
        "rendering: a run that is there is found without a function",
        (Edit(SUBMIT, "if not there.exists() and not (request.key and keyed.exists()):", "if True:"),),
        (f"{RENDERING}a_session_that_is_busy_calls_no_function",),
    ),
    Mutant(
        "rendering: what a function says is no error's text",
        (Edit("services/rendering.py", "failed with {type(failed).__name__}.", "failed with {failed}."),),
        ("masks/test_masks.py::test_what_a_function_of_an_agent_raises_is_masked",),
    ),
    Mutant(
        "rendering: what a function says is masked in the log",
        (Edit("services/rendering.py", "veiling(*(past or ()))", "veiling()"),),
        ("masks/test_masks.py::test_what_a_function_of_an_agent_raises_is_masked",),
    ),
    Mutant(
        "rendering: a transaction that a function leaves open is rolled back",
        (Edit("services/rendering.py", "        if not is_callers:", "        if False:"),),
        (f"{RENDERING}a_transaction_that_a_function_leaves_open_is_rolled_back",),
    ),
    Mutant(
        "visitors: they do not read what the agent was told",
        (Edit("api/auth.py", 'if "instructions" in row.payload else set()', "if False else set()"),),
        ("api/test_messages.py::test_a_visitor_reads_the_conversation_but_not_what_the_agent_was_told",),
    ),
    Mutant(
        "not_before: the time before does not count for a deadline",
        (Edit("journal/fold.py", "max(row.created_at, due) if due else row.created_at", "row.created_at"),),
        ("db/test_not_before.py::test_the_time_before_does_not_count_for_its_deadline",),
    ),
    Mutant(
        "not_before: an adoption leaves it alone",
        (Edit("journal/statements.py", " and batch.rows[-1].kind != events.RUN_ADOPTED:", ":"),),
        ("db/test_not_before.py::test_adoption_leaves_the_time_alone_and_resume_or_cancel_end_the_wait",),
    ),
    Mutant(
        "versions: the highest is taken, not the last registered",
        (Edit("agents/agent.py", "max(among, key=lambda found: _rank(found.version))", "among[-1]"),),
        ("unit/test_agents.py::test_the_highest_version_is_found_by_name_alone",),
    ),
]

BEGUN = [
    Mutant(
        "submit: the key of a pruned run begins no other, by the statement that begins it",
        (Edit(SUBMIT, "        unless += _uses_of_key(alias, request)\n", "        pass\n"),),
        ("db/test_retention.py::test_a_key_stays_refused_in_every_session",),
    ),
    Mutant(
        "submit: nothing is begun by a process that is to end",
        (
            Edit(SUBMIT, "[leases.drain_requests(alias)] if owner else []", "[]"),
            Edit(
                SUBMIT,
                "if owner and locks and (leases.is_draining(alias) or",
                "if owner and locks and (",
            ),
        ),
        ("db/test_draining.py::test_a_process_claims_nothing_after_the_stamp_and_its_successor_does",),
    ),
    Mutant(
        "submit: a session that another took meanwhile is not said to be begun",
        (Edit(SUBMIT, "    if not stored:", "    if False:"),),
        ("db/test_races.py::test_many_starts_with_one_key_are_one_run",),
    ),
]

MUTANTS = [*BEGUN, *DECISIONS, *POLICY, *SHOWN, *DRAFTED, *SENT, *MADE]
