"""Every way by which something of a run leaves the database: what each shows, as text.

A new page, path or command has to be added here: `missing` in test_masks.py finds those that are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user
from django.core import mail
from django.test import Client, override_settings
from django.urls import reverse

from agentruns import Policy, get_approval
from agentruns.contrib import slack
from agentruns.contrib.mail import MailNotifier
from agentruns.journal import outbox
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Notification, Run
from agentruns.services.approvals import links
from agentruns.services.runs.forks import effects
from agentruns.services.transfer import export_run
from tests.commands.running import run as run_command

API = "/api"

OF_ALL_RUNS = (
    "run_changelist", "run_costs", "run_csv", "run_figures", "run_news", "run_in_doubt", "approval_news",
    "approval_changelist",
)  # fmt: skip
OF_A_RUN = (
    "run_change", "run_live", "run_at", "run_replay", "run_verify", "run_export", "run_history",
    "approval_turn",
)  # fmt: skip


class Lenient(Policy):
    """Lets everything be decided by a link."""

    def without_console(self, approval: Approval, channel: str) -> bool:
        return True


def api(client: Client, run: Run) -> dict[str, str]:
    """Read the API's paths; a stream ends with its run."""
    one, session = f"/runs/{run.pk}", f"/sessions/{run.session.key}"
    found = {
        "/runs": ["/runs"],
        "/runs/{run_id}": [one],
        "/runs/{run_id}/messages": [f"{one}/messages"],
        "/runs/{run_id}/state": [f"{one}/state?at={seq}" for seq in _seqs(run)],
        "/runs/{run_id}/events": [f"{one}/events"] if run.is_ended else [],
        "/sessions": ["/sessions"],
        "/sessions/{path:key}": [session],
        "/sessions/{path:key}/messages": [f"{session}/messages"],
        "/approvals": ["/approvals"],
        "/approvals/{approval_id}": [f"/approvals/{card.pk}" for card in run.approvals.all()],
    }
    return {name: _read(client, *(API + path for path in paths)) for name, paths in found.items()}


def console(client: Client, run: Run) -> dict[str, str]:
    """Read the console's pages."""
    cards, seqs = run.approvals.values_list("pk", flat=True), _seqs(run)
    calls = set(run.messages.exclude(call_id="").values_list("call_id", flat=True))
    pages = {
        "index": [reverse("admin:index")],
        **{name: [_url(name)] for name in OF_ALL_RUNS},
        **{name: [_url(name, run.pk)] for name in OF_A_RUN},
        "run_row": [_url("run_row", run.pk, seq) for seq in seqs],
        "run_call": [_url("run_call", run.pk, call) for call in calls],
        "approval_change": [_url("approval_change", key) for key in cards],
        "approval_history": [_url("approval_history", key) for key in cards],
    }
    pages["run_at"] += [f"{_url('run_at', run.pk)}?seq={seq}" for seq in seqs]
    pages["approval_changelist"] += [f"{_url('approval_changelist')}?status=all"]
    found = {name: _read(client, *paths) for name, paths in pages.items()}
    erasing = [client.get(_url("run_erase", run.pk, seq)) for seq in seqs]  # refused while it goes on
    found["run_erase"] = "".join(page.content.decode() for page in erasing)

    def posted(name: str, *place: int, **form: str) -> str:
        return client.post(_url(name, run.pk, *place), form).content.decode()

    found["run_leave_out"] = "".join(posted("run_leave_out", seq, block="x") for seq in seqs)  # refused

    found["run_replay"] += posted("run_replay", who="code")
    asks = any(one.is_final for one in effects(run._state.db, run))  # else it would start one
    found["run_again"] = posted("run_again", key="k") if asks else ""
    found["run_fork"] = posted("run_fork", key="k", at="1") if asks else ""
    for name in ("run_reply", "run_watch"):  # a reply without a text is refused, on the page of the run
        found[name] = posted(name, key="k")
    return found


def commands(client: Client, run: Run) -> dict[str, str]:
    """Run the commands that show something of a run."""
    key, seq = str(run.pk), str(run.messages.latest("seq").seq)
    return {
        "show_run": "".join(_say("show_run", key, *how) for how in ([], ["--json"], ["--at", seq])),
        "list_runs": _say("list_runs") + _say("list_runs", "--json"),
        "replay_run": _say("replay_run", key) + _say("replay_run", key, "--json"),
        "export_run": _say("export_run", key),
        "erase": _say("erase", "--row", key, seq, "--dry-run"),
        "resume_runs": _say("resume_runs", "--list"),
        "verify_journal": _say("verify_journal") + _say("verify_journal", "--json"),
    }


def others(client: Client, run: Run) -> dict[str, str]:
    """Notifications by mail, webhook and Slack, the page of a link, exports, and what a check finds."""
    notices = [outbox.notice_of("default", one) for one in Notification.objects.filter(run_id=run.pk)]
    mail.outbox.clear()
    for notice in notices:
        MailNotifier()(notice)
    reader, waiting = get_user(client), [*run.approvals.filter(status="pending").select_related("run")]
    with override_settings(AGENTRUNS_MAIL_LINK_SECONDS=60, AGENTRUNS_POLICY=f"{__name__}.Lenient"):
        pages = [reverse("agentruns_decide", args=[links.sign(each, links.MAIL, reader)]) for each in waiting]
        opened = _read(Client(), *pages)
    return {
        "link": opened,
        "slack": "".join(json.dumps(slack.message(notice)) for notice in notices),
        "notice": "".join(map(str, notices)),
        "webhook": "".join(json.dumps(notice.payload()) for notice in notices),
        "mail": "".join(one.subject + one.body for one in mail.outbox),
        "export": "".join(map(json.dumps, export_run(run.pk))),
        "get_approval": "".join(
            f"{vars(seen.approval)} {seen.preview} {seen.asked_by}"
            for seen in (get_approval(each.pk, get_user(client)) for each in run.approvals.all())
        ),
        "verify": "".join(problems(run.session_id)),
        "str": "".join(map(str, [run, run.session, *Approval.objects.all(), *Message.objects.all()])),
    }


EXITS: tuple[Callable[[Client, Run], dict[str, str]], ...] = (api, console, commands, others)

# What shows nothing of a run by itself: it changes something and goes back to one of the pages above.
SILENT_VIEWS = {
    "run_reveal", "run_content", "run_file", "run_resume", "run_pause", "run_cancel", "run_raise",
    "run_start", "run_review", "run_adopt", "run_resolve", "run_delete", "run_add", "approval_add",
    "approval_delete", "approval_reveal", "approval_approve", "approval_edit", "approval_answer",
    "approval_deny", "approval_extend", "approval_draft_rule", "run_switches", "approval_absences",
    "run_deliver", "run_stop_waiting",
}  # fmt: skip


SILENT_PATHS = {
    "/agents", "/health", "/events/{name}/{path:key}", "/sessions/{path:key}/messages",
    "/rules", "/rules/{rule_id}",  # of no run
    "/runs/{run_id}/messages/{seq}/content", "/runs/{run_id}/files/{sha256}",  # only to revealers
}  # fmt: skip
SILENT_COMMANDS = {
    "run_agent", "fork_run", "approve_call", "deny_call", "create_api_token", "drain_runs", "import_run",
    "prune_runs", "lock_mcp_tools", "check_runs", "adopt_runs",
    "list_rules", "backtest_rule", "stop_rule", "send_digest",
}  # fmt: skip


def _seqs(run: Run) -> list[int]:
    return list(run.messages.values_list("seq", flat=True))


def _url(name: str, *args: Any) -> str:
    return reverse(f"admin:agentruns_{name}", args=args)


def _read(client: Client, *paths: str) -> str:
    texts = []
    for path in paths:
        response: Any = client.get(path, follow=True)
        assert response.status_code in (200, 204), (path, response.status_code)
        texts.append(response.getvalue().decode())
    return "".join(texts)


def _say(*given: str) -> str:
    outcome = run_command(*given)
    return outcome.out + outcome.err
