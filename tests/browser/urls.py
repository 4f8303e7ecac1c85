"""The URLs of the tests' host project, and beside them the programs to copy in docs/inbox and docs/chat."""

from __future__ import annotations

from datetime import timedelta

from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.utils.crypto import salted_hmac
from django.views.decorators.csrf import csrf_exempt
from django.views.static import serve

from agentruns import session_token, start_run
from tests.programs import ROOT
from tests.urls import urlpatterns as of_the_tests


@csrf_exempt
def opened(request: HttpRequest) -> JsonResponse:
    """Open a chat: make a session, its token, and the first run; find them if the page asks again."""
    session = f"chat-{salted_hmac('chat', request.POST['key']).hexdigest()}"
    token = session_token(session, timedelta(hours=1))
    start_run("chat", request.POST["text"], session, idempotency_key=session)
    return JsonResponse({"session": session, "token": token})


urlpatterns = [
    *of_the_tests,
    path("chat/open", opened),
    path("chat/<path:path>", serve, {"document_root": ROOT / "docs/chat"}),
    path("inbox/<path:path>", serve, {"document_root": ROOT / "docs/inbox"}),
]
