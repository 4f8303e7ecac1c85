"""A POST to another server, with a time limit for the whole delivery, that follows no redirect."""

from __future__ import annotations

import socket
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib import request as urls
from urllib.error import HTTPError
from urllib.parse import urlsplit

from agentruns.utils.lanes import Lane

LOCAL = ("localhost", "127.0.0.1", "::1")


def post(
    url: str, headers: dict[str, str], body: bytes, *, lane: Lane, seconds: float, most: int = 0
) -> tuple[int, bytes]:
    """Post `body` once; return the answer's status, and at most `most` bytes of a successful answer.

    The caller has checked the scheme of the URL. Raises OSError if the delivery fails, or takes longer
    than `seconds`.
    """
    request = urls.Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - the caller's
    # The time limit of a socket begins anew with each byte, so the lane limits the whole delivery.
    watched = _Watched()
    # A proxy of the environment could not reach localhost.
    direct = [urls.ProxyHandler({})] if urlsplit(request.full_url).hostname in LOCAL else []
    opener = urls.build_opener(watched, *direct)

    def send() -> tuple[int, bytes]:
        try:
            with opener.open(request, timeout=seconds) as answer:
                return int(answer.status), answer.read(most) if most else b""
        except HTTPError as error:
            with error:
                return error.code, b""

    try:
        return lane(send, seconds)
    except HTTPException as error:
        raise OSError(f"The receiver's answer is not HTTP: {type(error).__name__}.") from None
    finally:
        watched.end()


class _Watched(urls.HTTPHandler, urls.HTTPSHandler, urls.HTTPRedirectHandler):
    """A handler whose `end` ends the connections it opened, even while another thread reads from them.

    It follows no redirect, so that a message and its credentials go only to the configured address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[HTTPConnection] = []

    def do_open(self, http_class: Any, req: urls.Request, **options: Any) -> HTTPResponse:
        def opened(*args: Any, **kwargs: Any) -> HTTPConnection:
            self._opened.append(http_class(*args, **kwargs))
            return self._opened[-1]

        return super().do_open(opened, req, **options)

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None

    def end(self) -> None:
        for connection in self._opened:
            if (sock := connection.sock) is not None:
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
