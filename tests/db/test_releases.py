"""Between releases: journals of older code, rows of newer code, and older code on the newest tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

from agentruns import approve, export_run, replay_run, resolve_orphan, resume_run, start_run, state_at
from agentruns.engine.gate import Intent, call_digest
from agentruns.engine.leases import claim
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.models import Approval, Run
from agentruns.services.history import session_at
from agentruns.services.runs.write import write
from agentruns.services.sweep import sweep
from agentruns.services.transfer import import_run
from agentruns.testing import check_messages
from tests.admin.pages import read, url
from tests.admin.people import browser, user
from tests.api.http import Api
from tests.api.streaming import Stream
from tests.commands.running import run as command
from tests.db.exports import forget_everything
from tests.db.helpers import kill, payloads
from tests.effects import Effects
from tests.releases.agents import declare, while_at_work
from tests.releases.journals import HOSTILE, RELEASES, lines_of, restored
from tests.releases.old import NoSuchCommitError, environment
from tests.releases.record import RECORDED

pytestmark = pytest.mark.django_db(transaction=True)

NAMES = sorted(
    f"{path.parent.name}/{path.stem}" for path in RECORDED.glob("*/*.jsonl") if path.stem != "tables"
)
# Also with what newer code adds.
WRITTEN_SINCE = ("completed", "orphaned", "at-work", "forked")
EFFECTS = {"approved": 1, "at-work": 2, "awaiting": 1, "forked": 1, "orphaned": 1, "paused": 1, "voided": 1}


def checked(run: Run) -> Run:
    """Read a run anew, and ask verify_journal about its session."""
    run.refresh_from_db()
    outcome = command("verify_journal", "--session", run.session.key)
    assert outcome.code == 0, outcome.out
    return run


def go_on(run: Run) -> None:
    """Do what each waiting run waits for, as people and workers would."""
    kill(run)
    for call in state_at(run.pk, run.messages.latest("seq").seq).open_calls():
        if call.orphan == "held":
            resolve_orphan(run.pk, call.id, "occurred", None, result="sent", evidence="the bank says so")
    if run.status == "paused":
        resume_run(run.pk, None, drive=False)
    sweep()
    for card in Approval.objects.pending():
        approve(card.pk, None, digest=card.digest)
    sweep()


def shown(run: Run) -> None:
    """Check that every way to look at a run shows every row of it."""
    rows = list(run.messages.order_by("seq").values_list("seq", "kind"))
    seqs = [seq for seq, _kind in rows]
    admin, api = browser("superuser"), Api(user("superuser"))
    steps = read(admin.get(url(run)))
    assert {str(seq) for seq in seqs} <= {link.partition("?seq=")[2] for link in steps.links}
    page = read(admin.get(f"{url(run)}?rows=full"))
    assert {f"#row-{seq}" for seq in seqs} <= {*page.links}
    assert page.text.count(HOSTILE) >= str([row.payload for row in run.messages.all()]).count(HOSTILE)
    for seq in (seqs[0], seqs[-1]):
        assert f"Row {seq} of" in read(admin.get(f"{url(run, 'at')}?seq={seq}")).text
    status, body = api.get(f"/runs/{run.pk}/messages")
    assert (status, [(row["seq"], row["kind"]) for row in body["items"]]) == (200, rows)
    assert api.get(f"/runs/{run.pk}")[0] == api.get(f"/runs/{run.pk}/state", at=seqs[-1])[0] == 200
    assert Stream(user("superuser"), run).poll() == rows
    lines = command("show_run", str(run.pk)).out.splitlines()
    assert [int(line.split()[0]) for line in lines[-len(seqs) :]] == seqs
    assert command("show_run", str(run.pk), "--at", str(seqs[-1])).code == 0


@pytest.mark.parametrize(
    ("name", "newer"),
    [*((name, False) for name in NAMES), *((name, True) for name in NAMES if name.endswith(WRITTEN_SINCE))],
)
def test_a_run_of_another_release(name: str, newer: bool, effects: Effects) -> None:
    assert len(NAMES) >= 11 * len(RELEASES) > 0
    declare()
    if not newer:  # the export of the older release
        run = checked(import_run(lines_of(name)))
        assert run.status in (*Run.ENDED, "paused", "orphaned"), "what may be at work there is held here"
        forget_everything()
    run = checked(restored(name, newer=newer))
    began = run.status
    if newer:
        shown(run)
    go_on(run)
    run = checked(run)
    assert run.status == (began if began in Run.ENDED else "completed")
    if not newer:
        shown(run)
    if run.messages.filter(kind="payload_erased").exists():
        with pytest.raises(RunStateError, match="were erased"):
            replay_run(run.pk)
    else:
        assert replay_run(run.pk).difference is None, "the model would be sent what it was sent"
    check_messages(session_at(run.pk, run.messages.latest("seq").seq).conversation.messages())
    assert {line["key"] for line in effects.lines()} <= {row["key"] for row in payloads(run, "tool_started")}
    assert len(effects.lines()) == EFFECTS.get(name.partition("/")[2], 0)
    lines = list(export_run(run.pk, true_values=True))
    forget_everything()
    assert list(export_run(checked(import_run(lines)).pk, true_values=True))[1:-1] == lines[1:-1]


def test_what_newer_code_says_of_a_doubt_lifts_none() -> None:
    declare()
    run = restored(f"{RELEASES[0]}/orphaned")
    (call,) = [one for one in state_at(run.pk, run.messages.latest("seq").seq).open_calls() if one.orphan]
    resolve_orphan(run.pk, call.id, "unknown", None)

    def probably(run: Run, batch: Batch) -> None:
        batch.add("orphan_resolved", {"v": 2, "verdict": "probably"}, call_id=call.id, tool_name="wire")

    write(run.pk, probably)
    sweep()
    assert checked(run).status == "completed"
    page = read(browser("superuser").get(url(run)))
    assert "nobody has cleared it" in page.text and "Verdict: probably" in page.text
    page = read(browser("superuser").get(url(run, "call", call.id)))
    assert ": probably," in page.text, "what it says, and who and when"
    assert url(run, "resolve", call.id) in page.forms, "a verdict can still be given"
    again = start_run("wires", "once more", run.session.key, idempotency_key="again")
    sweep()
    assert checked(again).status == "awaiting-approval", "every further call of the tool asks"


def test_what_only_newer_code_understands_is_not_run(effects: Effects) -> None:
    """A verdict of its gate, and what it makes of a call that a worker left behind."""
    agent = declare()["finds"]
    gated = start_run(agent, "Refund A1", "gated", idempotency_key="gated")
    left = start_run(agent, "Refund A1", "left", idempotency_key="left")
    for run in (gated, left):
        lease = claim("default", run.pk)
        assert lease is not None
        batch = Batch(load("default", run.session_id, run.pk), lease.epoch)
        digest = call_digest(batch.state.secret, "find", {"number": "A1"})
        intent = Intent("call-1", "toolu_1", "find", {"number": "A1"}, digest)
        intent.verdict = "two-factor" if run == gated else "run"
        block = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"number": "A1"}}
        told = {"v": 2, "content": [block], "stop_reason": "tool_use", "calls": [intent.record()]}
        batch.add("assistant", told)
        if run == left:
            call = batch.state.run.calls["call-1"]
            batch.add(
                "tool_started", {"key": "k", "digest": digest, "declares": "nothing"}, call=call, attempt=1
            )
            batch.add("orphan_found", {"v": 2, "action": "outsourced", "evidence": "x"}, call=call, attempt=1)
        DatabaseStore().append(batch)
        lease.release()
    sweep()
    assert effects.count() == 0
    (refused,) = payloads(gated, "tool_result")
    assert (refused["outcome"], "the gate did not let it through" in refused["content"]) == ("error", True)
    assert [checked(run).status for run in (gated, left)] == ["awaiting-approval", "orphaned"]


def test_rows_of_newer_code_come_in_while_a_run_is_driven(effects: Effects) -> None:
    run = start_run(declare()["finds"], "Refund A1", "s1", idempotency_key="s1")

    def remark(run: Run, batch: Batch) -> None:
        batch.add("weather_seen", {"v": 9, "said": [HOSTILE]}, call_id="of newer code")

    while_at_work.append(lambda: write(run.pk, remark))
    sweep()
    write(run.pk, remark)
    go_on(checked(run))
    write(run.pk, remark, closed=True)
    assert checked(run).status == "completed"
    assert [line["attempt"] for line in effects.lines() if line["tool"] == "find"] == [1]
    shown(run)


def test_a_status_of_newer_code_is_shown_and_left_alone(effects: Effects) -> None:
    declare()
    run = restored(f"{RELEASES[0]}/awaiting")
    Run.objects.update(status="sleeping-over")
    Approval.objects.update(status="escalated")
    card = Approval.objects.get()
    assert sweep().driven == 0
    admin = browser("superuser")
    assert "sleeping-over" in read(admin.get(url(run))).text
    assert "escalated" in read(admin.get(url(card))).text
    for listing in ("run", "approval"):
        assert admin.get(f"/admin/agentruns/{listing}/?all=1").status_code == 200
    assert "sleeping-over" in command("list_runs").out
    assert Api(user("superuser")).get(f"/runs/{run.pk}")[1]["status"] == "sleeping-over"
    assert Api(user("superuser")).get(f"/approvals/{card.pk}")[1]["status"] == "escalated"
    with pytest.raises(ApprovalStateError):
        approve(card.pk, None)
    run.refresh_from_db()
    assert (run.status, effects.count()) == ("sleeping-over", 0)


@pytest.fixture
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`old("sweep")`: a process of an older release sweeps this test's database, and answers."""
    names = {"AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"]), "AGENTRUNS_TEST_REBUILD": ""}
    try:
        env = environment(request.param, tmp_path / "old", **names)
    except NoSuchCommitError as error:
        pytest.skip(str(error))
    child = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "tests.releases.old"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(*order: str) -> Any:
        if order:
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
        return json.loads(child.stdout.readline())

    try:
        assert Path(ask()).is_relative_to(tmp_path), "it is not the old code that runs"
        yield ask
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("old", RELEASES, indirect=True)
def test_old_code_on_the_newest_tables(old: Callable[..., Any], effects: Effects) -> None:
    agent = declare()["finds"]
    theirs = Run.objects.get(pk=old("start", "finds", "theirs"))
    assert old("sweep") == {"theirs": "awaiting-approval"}
    checked(theirs)
    approve(Approval.objects.pending().get().pk, user("superuser"))
    ours = start_run(agent, "Refund A1", "ours", idempotency_key="ours")
    assert old("sweep") == {"theirs": "completed", "ours": "awaiting-approval"}
    assert old("problems") == []
    approve(Approval.objects.pending().get().pk, user("superuser"))
    assert sweep().completed == 1
    assert [checked(run).status for run in (theirs, ours)] == ["completed", "completed"]
    assert sorted(line["tool"] for line in effects.lines()) == ["find", "find", "refund", "refund"]
    assert set(effects.counts().values()) == {1}


ADDING = (migrations.CreateModel, migrations.AddIndex, migrations.AlterModelOptions, migrations.RunPython)


def is_safe(operation: Operation) -> bool:
    """Whether code that does not know of an operation goes on reading and writing."""
    if isinstance(operation, migrations.AddField):
        return operation.field.null or operation.field.db_default is not models.NOT_PROVIDED
    return isinstance(operation, ADDING)


def test_each_migration_is_safe_for_the_code_before_it() -> None:
    """What is removed, renamed or narrowed has to be out of use for a release, and is then named here."""
    text = models.CharField(max_length=1, default="")
    stored = models.CharField(max_length=1, db_default="")
    assert [is_safe(migrations.AddField("run", "mood", each)) for each in (text, stored)] == [False, True]
    assert not is_safe(migrations.RemoveField("run", "step"))
    loader = MigrationLoader(None, ignore_no_migrations=True)
    since = [each for each in loader.disk_migrations.values() if each.app_label == "agentruns"]
    unsafe = [
        f"{each.name}: {operation.describe()}"
        for each in since
        if each.name != "0001_initial"
        for operation in each.operations
        if not is_safe(operation) or not operation.reversible
    ]
    assert (len(since) >= 2, unsafe) == (True, [])
