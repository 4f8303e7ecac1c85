"""The pages of staff: which server a tool comes from, what it declares, and what nobody is asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from agentruns import mcp_tools, run_agent
from agentruns.models import Approval, Message, Run
from tests.mcp.servers import Declare
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def staff() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root", password="x"))
    return client


def page(staff: Client, name: str, key: object) -> str:
    response = staff.get(reverse(f"admin:agentruns_{name}_change", args=[key]))
    assert response.status_code == 200
    return response.content.decode()


def test_card_and_run_say_which_server_a_tool_comes_from(hostile: Declare, staff: Client) -> None:
    tools = hostile(requires_approval=True, allow=["liar", "post"])
    run_agent(shop_agent("asks", {"tools": [call("h__liar", text="hi")]}, tools=tools), "do it", "s1")
    told = "liar of the MCP server h at python"
    hints = "it declares: idempotentHint=True, readOnlyHint=True"
    card = page(staff, "approval", Approval.objects.get().pk)
    assert told in card and hints in card
    payload = Message.objects.get(kind="approval_requested").payload
    assert payload["origin"]["server"] == "h"
    run = page(staff, "run", Run.objects.get().pk)
    assert told in run and "post of the MCP server h" in run
    bad = {"server": "h", "tool": "<script>x</script>", "at": "\u202ea", "hints": {"<b>": "<i>"}}
    next(tool for tool in tools if tool.name == "h__liar").origin = bad
    run_agent(shop_agent("more", {"tools": [call("h__liar", text="hi")]}, tools=tools), "do it", "s2")
    for name, shown in (("approval", Approval.objects), ("run", Run.objects)):
        text = page(staff, name, shown.latest("pk").pk)
        assert "script&gt;x" in text, "a hint is hostile text"
        assert "<script>x" not in text and "<b>=" not in text and "\u202e" not in text


def test_the_page_of_a_run_says_that_the_provider_runs_tools(staff: Client) -> None:
    server = {"type": "url", "name": "crm", "url": "https://mcp.example"}
    agent = shop_agent("open", model_params={"mcp_servers": [server]}, unjournaled_tools=True)
    run_agent(agent, "do it", "s1")
    assert "lets the provider run tools by itself" in page(staff, "run", Run.objects.get().pk)
    run_agent(shop_agent("closed"), "do it", "s2")
    closed = Run.objects.get(session__key="s2")
    assert "lets the provider run tools by itself" not in page(staff, "run", closed.pk)


def test_a_card_of_any_schema_is_shown(tmp_path: Path, staff: Client) -> None:
    properties: dict[str, Any] = {
        "any": True, "none": False, "bare": {}, "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "inside": {"$ref": "#/$defs/inside"}, "odd": {"type": ["integer", "string"], "description": 7},
    }  # fmt: skip
    schema = {"properties": properties, "$defs": {"inside": {"type": "object"}}}
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"tools": [{"name": "odd", "inputSchema": schema}]}))
    tools = mcp_tools("https://nowhere.example.com", name="odd", lock=file)
    given = {"any": [1], "bare": None, "either": "x", "inside": {"a": 1}, "odd": 3}
    run_agent(shop_agent("odd", {"tools": [call("odd__odd", **given)]}, tools=tools), "do it", "s1")
    card = page(staff, "approval", Approval.objects.get().pk)
    assert "odd of the MCP server odd at https://nowhere.example.com" in card
