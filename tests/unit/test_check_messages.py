import copy
import math
from typing import Any

import pytest

from agentruns.testing import InvalidMessages, check_messages
from tests.unit.messages import HELLO, assistant, result, text, use, user

PICTURE = {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}


@pytest.mark.parametrize(
    "messages",
    [
        [HELLO],
        [user(text())],
        [HELLO, assistant(text()), HELLO],
        [HELLO, assistant(text(), use()), user(result())],
        [HELLO, assistant(use("a"), use("b")), user(result("b"), result("a"), text())],
        [HELLO, assistant(use("a")), assistant(use("b")), user(result("a")), user(result("b"))],
        [HELLO, HELLO, assistant(text()), assistant(use()), user(result()), HELLO],
        [HELLO, assistant(use("a")), user(result("a")), assistant(use("b")), user(result("b"))],
        [HELLO, assistant(text("trailing "))],
        [HELLO, assistant({"type": "thinking", "thinking": "", "signature": "x"}, use()), user(result())],
        [HELLO, assistant({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})],
        [HELLO, assistant(use()), user(result(content=[text(), PICTURE]))],
        [HELLO, assistant(use()), user({"type": "tool_result", "tool_use_id": "t1", "is_error": True})],
        [HELLO, assistant(use(input={"a": [1, 1.5, None, True, "é\ufffd\x10"]})), user(result())],
    ],
)
def test_what_the_provider_accepts(messages: Any) -> None:
    before = copy.deepcopy(messages)
    check_messages(messages)
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "at least one"),
        (None, "at least one"),
        ((HELLO,), "at least one"),
        ([assistant(text())], "first message"),
        (["hi"], "messages.0: a message"),
        ([{"role": "user"}], "messages.0"),
        ([{**HELLO, "id": 1}], "unknown fields id"),
        ([{"role": "system", "content": "x"}], "role must be"),
        ([HELLO, {"role": "tool", "content": "x"}], "messages.1: role"),
        ([{"role": "user", "content": ""}], "white space"),
        ([user()], "must not be empty"),
        ([{"role": "user", "content": None}], "must not be empty"),
        ([HELLO, assistant()], "messages.1: content must not be empty"),
        ([user(text(" \n"))], "messages.0.content.0: text"),
        ([user({"type": "text"})], "messages.0.content.0: text"),
        ([user("hi")], "a block is an object"),
        ([user({"text": "hi"})], "a block is an object"),
        ([user(use())], "belongs in an assistant"),
        ([HELLO, assistant(result())], "belongs in a user"),
        ([HELLO, assistant(use()), user(result()), assistant(use()), user(result())], "not unique"),
        ([HELLO, assistant(use("a"), use("a")), user(result("a"))], "not unique"),
        ([HELLO, assistant(use())], "at the end has no tool_result"),
        ([HELLO, assistant(use()), HELLO], "messages.2.content.0: tool_use t1 has no tool_result"),
        ([HELLO, assistant(use()), user(text(), result())], "before this block"),
        ([HELLO, assistant(use("a"), use("b")), user(result("a"))], "tool_use b has no tool_result"),
        ([HELLO, assistant(use("a"), use("b")), user(result("a"), text(), result("b"))], "tool_use b"),
        ([HELLO, assistant(use()), user(result()), user(text()), user(result())], "second tool_result"),
        ([HELLO, assistant(use()), user(result(), result())], "second tool_result"),
        ([HELLO, assistant(use()), user(result(), result("x"))], "no tool_use x"),
        ([user(result())], "no tool_use t1"),
        ([HELLO, assistant(text()), user(result())], "no tool_use t1"),
        (
            [HELLO, assistant(use()), user(result()), assistant(text()), user(result())],
            "messages.4.content.0: no tool_use t1",
        ),
        ([HELLO, assistant(use(), text()), user(result())], "nothing but tool_use may follow"),
        ([HELLO, assistant(use()), assistant(text()), user(result())], "messages.2.content.0: nothing but"),
        ([HELLO, assistant(use(id="")), user(result(""))], "needs an id"),
        ([HELLO, assistant(use(id="a b")), user(result("a b"))], "needs an id"),
        ([HELLO, assistant(use(name="a.b")), user(result())], "needs a name"),
        ([HELLO, assistant(use(input="{}")), user(result())], "input of a tool_use"),
        ([HELLO, assistant(use()), user({"type": "tool_result"})], "needs a tool_use_id"),
        ([HELLO, assistant(use()), user(result(is_error="no"))], "is_error"),
        ([HELLO, assistant(use()), user(result(content={"a": 1}))], "string or a list"),
        ([HELLO, assistant(use()), user(result(content=["a"]))], "content.0.content.0: a block"),
        ([HELLO, assistant(use()), user(result(content=[text("")]))], "content.0.content.0: text"),
        ([HELLO, assistant(use(input={"a": [math.nan]})), user(result())], "nan is not JSON"),
        ([HELLO, assistant(use(input={"a": -math.inf})), user(result())], "inf is not JSON"),
        ([user(text("a\x00"))], "NUL"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([HELLO, assistant(use(input={"\ud800": 1})), user(result())], "surrogate"),
        ([HELLO, assistant(use(input={1: 1})), user(result())], "key 1"),
        ([HELLO, assistant(use(input={"a": (1,)})), user(result())], "tuple is not JSON"),
        ([HELLO, assistant(use(input={"a": b"x"})), user(result())], "bytes is not JSON"),
    ],
)
def test_what_the_provider_refuses(messages: Any, where: str) -> None:
    with pytest.raises(InvalidMessages) as caught:
        check_messages(messages)
    assert where in str(caught.value)
    assert isinstance(caught.value, ValueError)
