"""HTTP for the MCP SDK. A request is sent once and fails alone, and its answer has a limited size."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2  # noqa: TID253 - imported by the first session
from mcp.client.streamable_http import streamable_http_client  # noqa: TID253

from agentruns.tools.card import one_line
from agentruns.tools.refusals import UNDECIDED
from agentruns.utils.bounds import ANSWER_BYTES

TOKEN = secrets.token_hex(16)  # key of the verdict "refused", "forgotten" or "lost"; no server can forge it
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
SESSION_ID = "mcp-session-id"
# How servers on older SDKs word the refusal of an unknown session, with HTTP status 400.
UNKNOWN_SESSION = re.compile(
    rb"(no valid|invalid|unknown|expired)\W+(mcp.)?session"
    rb"|session\W+(id )?(was )?(not found|terminated|expired)|server not initialized",
    re.IGNORECASE,
)


class Bounded(httpx2.AsyncByteStream):
    """The bytes of an answer, limited in size. An error while they are read fails this request alone."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self.inner:
                size += len(chunk)
                if size > ANSWER_BYTES:
                    raise httpx2.StreamError(f"The answer has more than {ANSWER_BYTES} bytes.")
                yield chunk
        except httpx2.TransportError as error:
            raise httpx2.StreamError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Discard the rest of the answer."""
        await self.inner.aclose()


class Once(httpx2.AsyncClient):
    """A client that replaces failures by answers, each of which has a verdict about the request."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request once; replace a failure by an answer with a verdict.

        The verdict is "refused", "forgotten" (the server does not know the session, so it executed nothing)
        or "lost". Failures are errors of the connection, compressed answers, and a status from 400 on for a
        POST. An answer with an error of JSON-RPC stays as it is, unless its status means that the server
        refused a tool's call or the session.
        """
        try:
            response = await super().send(request, **options)
        except httpx2.TransportError as error:
            text = one_line(f"{type(error).__name__}: {error}")
            return _failed(request, text, "refused" if isinstance(error, NEVER_SENT) else "lost")
        response.stream = Bounded(response.stream)
        status = response.status_code
        verdict = "lost"
        if response.headers.get("content-encoding", "identity") != "identity":
            text = "The answer is compressed, which was not asked for."
        elif status >= 400 and request.method == "POST":
            body, answer, asked = b"", None, json.loads(request.content)
            with suppress(ValueError, RecursionError, httpx2.StreamError):
                body = await response.aread()
                answer = json.loads(body)
            details = answer.get("error") if isinstance(answer, dict) and "jsonrpc" in answer else None
            if SESSION_ID in request.headers and _is_forgotten(status, body, answer, asked.get("id")):
                verdict = "forgotten"
            elif status < 500 and status not in UNDECIDED:
                verdict = "refused"
            # An error of JSON-RPC in answer to another request than a call may be part of the negotiation.
            is_refused_call = verdict == "refused" and asked.get("method") == "tools/call"
            if isinstance(details, dict) and not (is_refused_call or verdict == "forgotten"):
                return response
            reason = details.get("message") if isinstance(details, dict) else ""
            if status == 404 and SESSION_ID not in request.headers:
                reason = reason or "no MCP server answers at this URL"
            text = f"HTTP status {status}" + (f": {reason}" if reason else "")
        else:
            return response
        await response.aclose()
        return _failed(request, text, verdict)


def _is_forgotten(status: int, body: bytes, answer: Any, request_id: Any) -> bool:
    """Check whether an answer to a request with a session id means that the server does not know the session.

    By the protocol 404 means that, whatever its body: a gateway that finds no server for the session has
    passed the request to nobody. Servers on older SDKs answer 400 and name the session in the text. An error
    of JSON-RPC with the request's own id was written after the session was found, perhaps by the tool: with
    404 it must name the session, too, and with 400 it never counts.
    """
    is_own = isinstance(answer, dict) and request_id is not None and answer.get("id") == request_id
    names_session = UNKNOWN_SESSION.search(body[:1000]) is not None
    return (status == 404 and (names_session or not is_own)) or (
        status == 400 and names_session and not is_own
    )


def _failed(request: httpx2.Request, text: str, verdict: str) -> httpx2.Response:
    error = {"code": -32603, "message": text, "data": {TOKEN: verdict}}
    return httpx2.Response(502, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


@asynccontextmanager
async def http_transport(url: str, headers: Iterable[tuple[str, str]]) -> AsyncIterator[Any]:
    """Open the SDK's streams to a server, over a client that sends each request once."""
    timeout = httpx2.Timeout(30, read=None)  # each call has its own
    sent = {"accept-encoding": "identity", **dict(headers)}
    # A server that answers with a redirect, even to itself, would get the request once more.
    async with (
        Once(headers=sent, timeout=timeout, max_redirects=0) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=ANSWER_BYTES) as streams,
    ):
        yield streams
