"""Every operation of the OpenAPI document, with whatever schemathesis thinks of, on runs of every state."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from django.core.handlers.wsgi import WSGIHandler
from hypothesis import HealthCheck, settings as examples

from agentruns import cancel_run, pause_run, run_agent, start_run, tool
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.models.statuses import ENDED
from agentruns.providers.base import ModelRequest, ProviderError
from agentruns.services.api_tokens import create_token
from tests.admin.people import user
from tests.api.snapshot import FILE
from tests.files import fetched
from tests.settings import BRIEF
from tests.shop.agents import call, shop_agent
from tests.shop.waits import collecting

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = 2 if BRIEF else 6
DOCUMENT = json.loads(FILE.read_text())
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]


@tool
def lose(text: str) -> str:
    """Take its worker along."""
    raise MemoryError(text)


def refuse(request: ModelRequest) -> dict[str, Any]:
    raise ProviderError("The key is not valid.", type="authentication_error")


def tell(actor: Any) -> None:
    """Make a run of each state, with approvals of one digest, a call in doubt, and a content in a file."""
    asking = shop_agent("asking", {"tools": [call("refund", cents=5000)]})
    posting = shop_agent("posting", {"tools": [call("post", text="hi")]})
    for number in range(3):
        run_agent(asking, "refund it", f"asking-{number}", actor=actor)
    run_agent(posting, "post it", "posting", actor=actor)
    run_agent(shop_agent("refused", refuse), "say it", "refused", actor=actor)
    run_agent(
        shop_agent("losing", {"tools": [call("lose", text="x")]}, tools=[lose]), "go", "losing", actor=actor
    )
    run_agent(collecting(), "collect it", "collects", actor=actor)
    _queued, paused, cancelled = (
        start_run(posting, "later", f"later-{number}", actor=actor) for number in "123"
    )
    pause_run(paused.pk, actor)
    cancel_run(cancelled.pk, actor)
    fetched(70_000, actor=actor)
    assert set(Run.objects.values_list("status", flat=True)) == {*Run.Status.values} - {"running"}


known: dict[str, list[str]] = {}


def existing(given: dict[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    """Replace ids and names that were thought of by those of what is there."""
    found = {name: value for name, value in given.items() if names.get(name) and isinstance(value, str)}
    for name, value in found.items():
        found[name] = names[name][crc32(value.encode(errors="replace")) % len(names[name])]
    return {**given, **found}


@pytest.fixture
def token(folder: Path, settings: Any) -> str:
    settings.ALLOWED_HOSTS = ["localhost"]
    actor = user("superuser")
    tell(actor)
    known.update(
        run_id=[str(each) for each in Run.objects.values_list("pk", flat=True)],
        ended=[str(each) for each in Run.objects.filter(status__in=ENDED).values_list("pk", flat=True)],
        approval_id=[str(each) for each in Approval.objects.values_list("pk", flat=True)],
        digest=list(Approval.objects.values_list("digest", flat=True)[:1]),
        call_id=[row.call_id for row in Message.objects.filter(kind=events.ORPHAN_FOUND)],
        agent=["posting"],
        key=["posting"],
    )
    return create_token(actor, ["runs:read", "runs:write", "approvals:decide", "rules:write"])[1]


@examples(max_examples=EXAMPLES, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
def does_what_its_description_says(case: Any, token: str) -> None:
    from schemathesis.core.parameters import ParameterLocation
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    if case.path_parameters:
        # The stream of a run that goes on would not end.
        names = {**known, "run_id": known["ended"]} if case.path.endswith("/events") else known
        case.path_parameters = existing(case.path_parameters, names)
    if isinstance(case.body, dict):
        case.body = existing(case.body, known)
    # No schema says which cursors there are, or that a key in header and body is one and the same.
    # HTTP ignores headers and parameters that nobody knows; of a body every member has to be known.
    excluded = [] if case.meta.is_negative_at(ParameterLocation.BODY) else [negative_data_rejection]
    case.call_and_validate(
        headers={"Authorization": f"Bearer {token}"}, excluded_checks=[positive_data_acceptance, *excluded]
    )


@cache
def described() -> tuple[Any, Any]:
    """Return the API as schemathesis reads it, and the values it finds there to try."""
    import schemathesis
    from schemathesis.checks import load_all_checks
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.python._constants.orchestrator import make_constants_value_source

    load_all_checks()
    api = schemathesis.openapi.from_dict(DOCUMENT)
    api.app = WSGIHandler()
    return api, FeedbackSources(constants_value_source=make_constants_value_source(api))


# Not schemathesis' own `parametrize`: it thinks of every case in each process that only collects tests.
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[" ".join(each) for each in OPERATIONS])
def test_every_operation_does_what_its_description_says(method: str, path: str, token: str) -> None:
    from schemathesis.pytest._test_builder import build_operation_test

    api, feedback = described()
    test = build_operation_test(
        config=api.config,
        operation=api[path][method],
        test_func=does_what_its_description_says,
        given_kwargs={},
        feedback=feedback,
    )
    test(token=token)
