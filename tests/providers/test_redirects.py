"""Redirects: no provider's client follows one, so key and conversation stay with the configured server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ModelRequest, ProviderError
from agentruns.providers.openai import OpenAIModel

KEY = "sk-test-0123456789abcdef0123456789"
ASKED = [{"role": "user", "content": [{"type": "text", "text": "my secret"}]}]


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], tuple[int, str]]) -> Iterator[tuple[str, list[str]]]:
    """Serve on another port: every request is noted and answered with a status and a location."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            status, location = answer(self)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # a client makes this of a 303

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", paths
        finally:
            httpd.shutdown()


def claude(url: str, **more: Any) -> AnthropicModel:
    import anthropic

    return AnthropicModel("claude-x", anthropic.Anthropic(api_key=KEY, base_url=url), **more)


def gpt(url: str, **more: Any) -> OpenAIModel:
    return OpenAIModel("gpt-x", base_url=f"{url}/v1", api_key=KEY, **more)


def given(url: str, **more: Any) -> OpenAIModel:
    import openai

    http = openai.DefaultHttpxClient(follow_redirects=True)
    client = openai.AzureOpenAI(
        api_key=KEY, azure_endpoint=url, api_version="2025-01-01", azure_deployment="x", http_client=http
    )
    return OpenAIModel("gpt-x", client=client, **more)


@pytest.mark.parametrize("make", [claude, gpt, given])
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_client_follows_a_redirect_and_the_run_waits_for_a_person(
    make: Any, streaming: bool, status: int
) -> None:
    with ExitStack() as stack:
        other, reached = stack.enter_context(server(lambda request: (200, "")))
        for where in (f"{other}/v1/thief?token=1", "/elsewhere"):  # another port is another origin
            url, asked = stack.enter_context(server(lambda request, to=where: (status, to)))  # type: ignore[misc]
            model = make(url, streaming=streaming)
            with pytest.raises(ProviderError) as caught:
                model.propose(ModelRequest(model="x", system="", messages=ASKED))
            error = caught.value
            assert (error.disposition, error.status, error.type) == ("pause", status, "redirect")
            said = where.partition("?")[0]
            assert f"answered {status}: a redirect to {said} is not followed. Set the base_url" in str(error)
            assert KEY not in str(error)
            assert len(asked) == 1
        assert reached == []


def test_a_client_of_the_project_still_follows_redirects_for_the_project() -> None:
    import openai

    with ExitStack() as stack:
        other, reached = stack.enter_context(server(lambda request: (200, "")))
        url, _asked = stack.enter_context(server(lambda request: (307, f"{other}/v1/here")))
        client = openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0)
        with pytest.raises(ProviderError):
            OpenAIModel("gpt-x", client=client).propose(ModelRequest(model="x", system="", messages=ASKED))
        assert reached == []
        client.chat.completions.with_raw_response.create(model="x", messages=[])
        assert reached == ["/v1/here"]
