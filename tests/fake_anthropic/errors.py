"""Errors of the Messages API: one exception, one body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
STATUSES = {type: status for status, type in TYPES.items()}
TEXTS = {
    "authentication_error": "invalid x-api-key",
    "billing_error": "Your credit balance is too low to access the Anthropic API.",
    "permission_error": "Your API key does not have permission to use the specified resource.",
    "not_found_error": "Not found",
    "request_too_large": "Request exceeds the maximum size",
    "rate_limit_error": "This request would exceed your organization's rate limit.",
    "api_error": "Internal server error",
    "overloaded_error": "Overloaded",
}


class Refused(Exception):
    """The request is answered with an error."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        type: str = "",
        error_code: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        self.error_code = error_code
        self.headers = dict(headers or {})

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the body of the answer, or the data of an `error` event."""
        error: dict[str, Any] = {"type": self.type, "message": self.message}
        if self.error_code:
            error["details"] = {"error_code": self.error_code}
        return {"type": "error", "error": error, "request_id": request_id}
