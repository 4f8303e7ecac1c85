"""Guards of the services: who may decide, on what, in time; who sees what."""

from __future__ import annotations

from tests.mutants import Edit, Mutant

APPROVALS, CONTROL, PERMISSIONS = "services/approvals.py", "services/control.py", "services/permissions.py"
QUERYSETS, RUNS, WRITE = "models/querysets.py", "services/runs.py", "services/write.py"

DECISIONS = [
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
        (Edit(CONTROL, "            _refuse_against_evidence(run, call, verdict)\n", ""),),
        ("db/test_zombies.py::test_a_handler_of_a_tool_that_declares_nothing_leaves_evidence",),
    ),
    Mutant(
        "control: a verdict only on a call in doubt",
        (Edit(CONTROL, "if not held and tool is None:", "if False:"),),
        ("db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",),
    ),
    Mutant(
        "control: a verdict needs the permission",
        (Edit(CONTROL, '    permissions.require(actor, "agentruns.resolve_orphan", run)\n', ""),),
        ("db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",),
    ),
    Mutant(
        "runs: a key stands for one task",
        (Edit(RUNS, "    if not request.is_for(run):\n", "    if False:\n"),),
        ("db/test_bad_input.py::test_an_idempotency_key_used_for_another_task",),
    ),
    Mutant(
        "runs: an imported run is a record",
        (Edit(WRITE, "    if session.imported_at is not None:", "    if False:"),),
        ("db/test_imported_records.py::test_an_added_approval_starts_nothing",),
    ),
    Mutant(
        "runs: a key of another session",
        (Edit(RUNS, "if request.names_session and run.session.key != request.session:", "if False:"),),
        ("db/test_key_of_another_session.py::test_python_refuses_the_key_and_names_the_run_and_its_session",),
    ),
]

POLICY = [
    Mutant(
        "policy: who may not decide decides nothing",
        (Edit(APPROVALS, "    if why_not:\n", "    if False:\n"),),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run",),
    ),
    Mutant(
        "policy: the permission to decide",
        (Edit(PERMISSIONS, "    if not actor.has_perm(DECIDES):", "    if False:"),),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run[without the permission]",),
    ),
    # Django's backend gives no permission to such a user, a project's own might.
    Mutant(
        "policy: who is not active decides nothing (both guards)",
        (
            Edit(
                PERMISSIONS,
                "    if not actor.is_active:\n        return _(",
                "    if False:\n        return _(",
            ),
            Edit(PERMISSIONS, "    if not actor.has_perm(DECIDES):", "    if False:"),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run[not active]",),
    ),
    Mutant(
        "policy: only the approvers of the tool",
        (
            Edit(
                PERMISSIONS,
                "if approval.approvers and not _is_among(actor, approval.approvers, groups):",
                "if False:",
            ),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run[not among the approvers]",),
    ),
    Mutant(
        "policy: not the requester, where the project says so",
        (
            Edit(
                PERMISSIONS,
                "if not settings.REQUESTER_MAY_APPROVE and owns(actor, approval.run):",
                "if False:",
            ),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run[the requester]",),
    ),
    Mutant(
        "policy: a rule of the project's that fails lets nobody decide",
        (
            Edit(
                PERMISSIONS,
                'return _("The project\'s own rule failed, so nobody is let through. The log says why.")',
                'return ""',
            ),
        ),
        ("db/test_decisions.py::test_who_may_not_decide_lets_nothing_run[a rule that fails]",),
    ),
    Mutant(
        "policy: who may cancel, pause and resume",
        (Edit(PERMISSIONS, "if may(actor, permission) or (", "if True or ("),),
        (
            "admin/test_services.py::test_a_service_asks_by_itself[pause-decider]",
            "db/test_doubt.py::test_a_verdict_needs_the_permission_and_a_call_in_doubt",
        ),
    ),
    Mutant(
        "policy: everybody sees their own runs only",
        (Edit(QUERYSETS, "        return self.filter(owner_id=user.pk)", "        return self"),),
        ("api/test_auth.py::test_who_sees_which_runs",),
    ),
    Mutant(
        "policy: everybody sees the approvals of their own runs only",
        (Edit(QUERYSETS, "        return self.filter(run__owner_id=user.pk)", "        return self"),),
        ("db/test_gate.py::test_the_second_gate_belongs_to_the_owner_as_the_first_did",),
    ),
    Mutant(
        "policy: everybody writes into their own sessions only",
        (
            Edit(
                RUNS,
                "if request.again is None and owner is not None and session.owner_id != owner.pk:",
                "if False:",
            ),
        ),
        ("db/test_bad_input.py::test_a_session_of_somebody_else",),
    ),
]

MUTANTS = [*DECISIONS, *POLICY]
