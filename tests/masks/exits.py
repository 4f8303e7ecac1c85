"""Every way by which something of a run leaves the database: what each shows, as text.

A new page, path or command has to be added here: `test_no_exit_is_missing` finds those that are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

from django.core import mail
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.urls import reverse

from agentruns.contrib.mail import MailNotifier
from agentruns.journal import outbox
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Notification, Run
from agentruns.services.forks import effects
from agentruns.services.transfer import export_run

API = "/api"


def api(client: Client, run: Run) -> dict[str, str]:
    """The API's paths that read; a stream ends with its run."""
    one = f"/runs/{run.pk}"
    seqs = list(run.messages.values_list("seq", flat=True))
    found = {
        "/runs": ["/runs"],
        "/runs/{run_id}": [one],
        "/runs/{run_id}/messages": [f"{one}/messages"],
        "/runs/{run_id}/state": [f"{one}/state?at={seq}" for seq in seqs],
        "/runs/{run_id}/events": [f"{one}/events"] if run.is_ended else [],
        "/sessions": ["/sessions"],
        "/sessions/{path:key}": [f"/sessions/{run.session.key}"],
        "/sessions/{path:key}/messages": [f"/sessions/{run.session.key}/messages"],
        "/approvals": ["/approvals"],
        "/approvals/{approval_id}": [
            f"/approvals/{key}" for key in run.approvals.values_list("pk", flat=True)
        ],
    }
    return {
        template: "".join(_read(client, API + path) for path in paths) for template, paths in found.items()
    }


def console(client: Client, run: Run) -> dict[str, str]:
    """The console's pages."""
    approvals = list(run.approvals.values_list("pk", flat=True))
    calls = set(run.messages.exclude(call_id="").values_list("call_id", flat=True))
    seqs = list(run.messages.values_list("seq", flat=True))
    pages = {
        "index": [("admin:index", ())],
        "run_changelist": [("admin:agentruns_run_changelist", ())],
        "run_costs": [("admin:agentruns_run_costs", ())],
        "run_csv": [("admin:agentruns_run_csv", ())],
        "run_figures": [("admin:agentruns_run_figures", ())],
        "run_news": [("admin:agentruns_run_news", ())],
        "approval_news": [("admin:agentruns_approval_news", ())],
        "run_change": [("admin:agentruns_run_change", (run.pk,))],
        "run_live": [("admin:agentruns_run_live", (run.pk,))],
        "run_row": [("admin:agentruns_run_row", (run.pk, seq)) for seq in seqs],
        "run_at": [("admin:agentruns_run_at", (run.pk,))],
        "run_replay": [("admin:agentruns_run_replay", (run.pk,))],
        "run_verify": [("admin:agentruns_run_verify", (run.pk,))],
        "run_export": [("admin:agentruns_run_export", (run.pk,))],
        "run_call": [("admin:agentruns_run_call", (run.pk, call)) for call in calls],
        "run_in_doubt": [("admin:agentruns_run_in_doubt", ())],
        "run_history": [("admin:agentruns_run_history", (run.pk,))],
        "approval_changelist": [("admin:agentruns_approval_changelist", ())],
        "approval_change": [("admin:agentruns_approval_change", (key,)) for key in approvals],
        "approval_turn": [("admin:agentruns_approval_turn", (run.pk,))],
        "approval_history": [("admin:agentruns_approval_history", (key,)) for key in approvals],
    }
    found = {
        name: "".join(_read(client, reverse(view, args=args)) for view, args in views)
        for name, views in pages.items()
    }
    at = reverse("admin:agentruns_run_at", args=[run.pk])
    found["run_at"] += "".join(_read(client, f"{at}?seq={seq}") for seq in seqs)
    erasing = [reverse("admin:agentruns_run_erase", args=[run.pk, seq]) for seq in seqs]
    found["run_erase"] = "".join(
        client.get(path).content.decode() for path in erasing
    )  # refused while it goes on
    found["run_replay"] += client.post(
        reverse("admin:agentruns_run_replay", args=[run.pk]), {"who": "code"}
    ).content.decode()
    asks = any(one.is_final for one in effects(run._state.db, run))  # else it would start one
    for action, form in (("again", {"key": "k"}), ("fork", {"key": "k", "at": "1"})):
        door = reverse(f"admin:agentruns_run_{action}", args=[run.pk])
        found[f"run_{action}"] = client.post(door, form).content.decode() if asks else ""
    for action in ("reply", "watch"):  # a reply without a text is refused, on the page of the run
        door = reverse(f"admin:agentruns_run_{action}", args=[run.pk])
        found[f"run_{action}"] = client.post(door, {"key": "k"}).content.decode()
    found["approval_changelist"] += _read(
        client, reverse("admin:agentruns_approval_changelist") + "?status=all"
    )
    return found


def commands(client: Client, run: Run) -> dict[str, str]:
    """The commands that show something of a run."""
    key = str(run.pk)
    seq = str(run.messages.latest("seq").seq)
    return {
        "show_run": _say("show_run", key)
        + _say("show_run", key, "--json")
        + _say("show_run", key, "--at", seq),
        "list_runs": _say("list_runs") + _say("list_runs", "--json"),
        "replay_run": _say("replay_run", key) + _say("replay_run", key, "--json"),
        "export_run": _say("export_run", key),
        "erase": _say("erase", "--row", key, seq, "--dry-run"),
        "resume_runs": _say("resume_runs", "--list"),
        "verify_journal": _say("verify_journal") + _say("verify_journal", "--json"),
    }


def others(client: Client, run: Run) -> dict[str, str]:
    """Notifications by mail and webhook, exports, and what a check finds."""
    notices = [outbox.notice_of("default", one) for one in Notification.objects.filter(run_id=run.pk)]
    mail.outbox.clear()
    for notice in notices:
        MailNotifier()(notice)
    return {
        "notice": "".join(map(str, notices)),
        "webhook": "".join(json.dumps(notice.payload()) for notice in notices),
        "mail": "".join(one.subject + one.body for one in mail.outbox),
        "export": "".join(map(json.dumps, export_run(run.pk))),
        "verify": "".join(problems(run.session_id)),
        "str": "".join(map(str, [run, run.session, *Approval.objects.all(), *Message.objects.all()])),
    }


EXITS: tuple[Callable[[Client, Run], dict[str, str]], ...] = (api, console, commands, others)

# What shows nothing of a run by itself: it changes something and goes back to one of the pages above.
SILENT_VIEWS = {
    "run_reveal", "run_content", "run_file", "run_resume", "run_pause", "run_cancel",
    "run_start", "run_review", "run_adopt", "run_resolve", "run_delete", "run_add", "approval_add",
    "approval_delete", "approval_reveal", "approval_approve", "approval_edit", "approval_answer",
    "approval_deny", "approval_extend", "run_switches",
}  # fmt: skip
SILENT_PATHS = {
    "/agents",
    "/health",
    "/sessions/{path:key}/messages",
    "/runs/{run_id}/messages/{seq}/content",
    "/runs/{run_id}/files/{sha256}",
}  # the last two only to revealers
SILENT_COMMANDS = {
    "run_agent", "fork_run", "approve_call", "deny_call", "create_api_token", "drain_runs", "import_run",
    "prune_runs", "lock_mcp_tools",
}  # fmt: skip


def _read(client: Client, path: str) -> str:
    response: Any = client.get(path, follow=True)
    assert response.status_code in (200, 204), (path, response.status_code)
    content = b"".join(response.streaming_content) if response.streaming else response.content
    return str(content.decode())


def _say(*given: str) -> str:
    out = StringIO()
    try:
        call_command(*given, stdout=out, stderr=out)
    except (CommandError, SystemExit) as error:
        out.write(str(error))
    return out.getvalue()
