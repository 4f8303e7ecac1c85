"""Short descriptions of calls and results, for the story."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from project.helpdesk.money import euros

_CALLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "look_up_order": lambda args: args["order_number"],
    "search_articles": lambda args: f'"{args["query"]}"',
    "photos": lambda args: f'"{short(args["task"], 34)}"',
    "show_photo": lambda args: f"of ticket {args['ticket_number']}",
    "await_return": lambda args: f"of order {args['order_number']}",
    "refund": lambda args: f"of {euros(args['amount_cents'])} for order {args['order_number']}",
    "send_voucher": lambda args: f"of {euros(args['cents'])} for order {args['order_number']}",
    "read_mail": lambda args: f"of ticket {args['ticket_number']}",
    "email_customer": lambda args: f'"{short(args["subject"], 50)}"',
    "add_note": lambda args: f'"{short(args["text"], 34)}"',
}

_RESULTS: dict[str, Callable[[Any], str]] = {
    "look_up_order": lambda found: f"{found['item']}, {euros(found['total_cents'])}, {found['status']}",
    "search_articles": lambda found: ", ".join(article["title"] for article in found) or "nothing",
    "photos": lambda answer: "the run that asked has the answer",
    "show_photo": lambda blocks: blocks[0]["name"],
    "await_return": lambda parcel: f"{parcel['found']}, {parcel['state']}",
    "refund": lambda paid: f"{paid['status']}, receipt {paid['refund_id']}",
    "send_voucher": lambda voucher: f"{voucher['status']}, code {voucher['code']}",
    "read_mail": lambda mail: f'"{short(mail, 50)}"',
    "email_customer": lambda mail: mail["status"],
    "add_note": lambda note: f"{note['status']}, ticket {note['ticket_status']}",
}


def call(tool: str, arguments: dict[str, Any]) -> str:
    """Name a call for people: "refund of 24.90 EUR for order 1002"."""
    return f"{tool} {_said(_CALLS, tool, arguments)}"


def result(tool: str, content: Any) -> str:
    """Describe the result of a call in a few words."""
    return _said(_RESULTS, tool, content)


def short(text: str, limit: int = 200) -> str:
    """Join the lines of a text, and cut it at `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _said(sayings: dict[str, Callable[[Any], str]], tool: str, value: Any) -> str:
    try:
        return sayings[tool](value)
    except (KeyError, TypeError):  # another tool, or a result that a person entered
        return short(value if isinstance(value, str) else json.dumps(value), 80)
