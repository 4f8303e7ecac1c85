"""docs/chat beside a poor connection, a long reply, a large picture and an API that refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect
from pytest_django.live_server_helper import LiveServer

from agentruns import Agent
from agentruns.models import Message, Run, Session
from agentruns.testing import ScriptedModel
from tests.browser.visitor import Visitor, Visitors
from tests.pictures import PNG

# Counts the characters that the page masks and writes, and the times it asks for the layout.
COUNTED = """() => {
  const work = (window.work = {masked: 0, split: 0, written: 0, layouts: 0});
  for (const [name, counter] of [["replace", "masked"], ["split", "split"]]) {
    const real = String.prototype[name];
    String.prototype[name] = function (...given) {
      work[counter] += this.length;
      return real.apply(this, given);
    };
  }
  const height = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
  Object.defineProperty(Element.prototype, "scrollHeight", {
    get() {
      work.layouts++;
      return height.get.call(this);
    },
  });
  const watch = new MutationObserver((records) => {
    for (const { target, addedNodes } of records)
      for (const node of addedNodes) if (target.isConnected) work.written += node.textContent.length;
  });
  watch.observe(document.querySelector("#scroll"), { subtree: true, childList: true });
}"""
# Streams a reply in drafts, each in pieces as a network brings them, and then as a row.
WRITTEN = """async ([size, drafts, chunk]) => {
  const writer = window.events.writable.getWriter();
  const text = "This line of a reply has forty characters\\n".repeat(size / 40 + 1);
  const send = async (event, data) => {
    const bytes = new TextEncoder().encode(`event: ${event}\\ndata: ${JSON.stringify(data)}\\n\\n`);
    for (let at = 0; at < bytes.length; at += chunk) await writer.write(bytes.slice(at, at + chunk));
    window.work.received = (window.work.received ?? 0) + bytes.length;
  };
  for (let number = 1; number <= drafts; number++) {
    await send("draft", { text: text.slice(0, (size * number) / drafts) });
    await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
  }
  window.said = [{ seq: 2, role: "assistant", text: text.slice(0, size) }];
  await send("assistant", { seq: 2 });
  while (!document.querySelector("#log .assistant")) await new Promise((next) => setTimeout(next));
  return window.work;
}"""
# Answers the page in place of the API, and lets the test write the event stream.
FAKED = """() => {
  window.events = new TransformStream();
  window.said = [];
  const json = (data) => new Response(JSON.stringify(data));
  window.fetch = async (url) => {
    if (url.endsWith("/events")) return new Response(window.events.readable);
    if (url.includes("/messages")) return json({ items: window.said.splice(0), next: null });
    if (url.includes("/approvals")) return json({ items: [], next: null });
    return json({ runs: { items: [{ id: "1", status: "running" }] } });
  };
}"""
# Draws a picture of this size, in two colours: red on the left.
DRAWN = """async ([width, height, type]) => {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "red";
  context.fillRect(0, 0, width / 2, height);
  const bytes = new Uint8Array(await (await canvas.convertToBlob({ type })).arrayBuffer());
  return Array.from(bytes);
}"""
# Puts the EXIF marker "turned by a quarter" behind the first two bytes of a JPEG.
TURNED = bytes.fromhex("ffe1002245786966000049492a0008000000010012010300010000000600000000000000")
# Reads the sides of a picture, and whether it is red at the upper right.
READ = """async (type) => {
  if (window.sent.type !== type) throw new Error(window.sent.type);
  const picture = await createImageBitmap(window.sent);
  const context = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  context.drawImage(picture, 0, 0);
  const [red] = context.getImageData(picture.width * 0.75, 5, 1, 1).data;
  return [picture.width, picture.height, red > 200];
}"""
CHANGE = "This cannot be sent as it is. Change the text or the picture, and try again."
# Keeps the file of the request that is sent next.
KEPT = """() => {
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (options?.body instanceof FormData) window.sent = options.body.get("files");
    return real(url, options);
  };
}"""
AWAY = "There is no connection at the moment. Try again."
DETAIL = "The image 'x' has more than 5242880 bytes (AGENTRUNS_FILE_MAX)."
REFUSALS = [
    (403, '{"detail": "CSRF"}', "This is not allowed here."),
    (404, "{}", "This is no longer here. Reload the page."),
    (409, "{}", "Something else happened meanwhile. Wait a moment, and try again."),
    (413, "<html>nginx</html>", "This is too large."),
    (413, f'{{"detail": "{DETAIL}"}}', "This is too large. The limit is 5.2 MB."),
    (415, "{}", "A file of this kind cannot be sent. Choose a PNG, JPEG, WebP or GIF picture."),
    (422, '{"detail": [{"msg": "none"}]}', CHANGE),
    (429, "null", "That was too much at once. Wait a while, and try again."),
    (502, "<html>Bad gateway</html>", "The service has a problem at the moment. Try again later."),
    (200, "<html>Wi-Fi: sign in</html>", AWAY),
]


@pytest.fixture
def chat(visit: Visitors) -> Visitor:
    """A customer in front of the chat, whose agent greets."""
    Agent("chat", instructions="Serve.", model=ScriptedModel([{"text": "Hello."}] * 9))
    visitor = visit("anonymous")
    visitor.open("/chat/index.html")
    return visitor


@pytest.fixture
def reply(browser: Browser, live_server: LiveServer) -> Any:
    """`reply(script, given)`: run a script on the page of a session whose events the script writes."""
    context = browser.new_context()

    def run(script: str, given: Any) -> Any:
        page = context.new_page()
        page.goto(live_server.url + "/chat/index.html")
        page.evaluate("sessionStorage.chat = JSON.stringify({session: 's', token: 't'})")
        page.add_init_script(f"({FAKED})()")
        page.reload()
        page.evaluate(COUNTED)
        found = page.evaluate(script, given)
        page.close()
        return found

    yield run
    context.close()


def write(chat: Visitor, text: str) -> None:
    chat.page.get_by_label("Message").fill(text)
    chat.page.get_by_role("button", name="Send").click()


def send(chat: Visitor, text: str) -> None:
    write(chat, text)
    expect(chat.page.get_by_label("Message")).to_have_value("")


def said() -> list[Any]:
    rows = Message.objects.filter(kind="user").order_by("seq")
    blocks = [row.payload["content"] for row in rows]
    return [each[0].get("text") if len(each) == 1 else each for each in blocks]


def answer(status: int, body: str) -> Callable[[Route], None]:
    """Answer each request with a status and a body."""
    return lambda route: route.fulfill(status=status, body=body)


def lose(route: Route) -> None:
    """Let the server store what is sent, and break the connection off before it answers."""
    route.fetch()
    route.abort()


def test_twice_the_reply_is_twice_the_work(reply: Any) -> None:
    few, many = reply(WRITTEN, [40_000, 40, 4096]), reply(WRITTEN, [80_000, 80, 4096])
    for counter in ("masked", "written", "layouts"):
        assert many[counter] <= 2.5 * few[counter], (counter, few, many)
    assert many["masked"] <= 2.5 * 80_000


def test_an_event_is_read_once_in_however_many_pieces(reply: Any) -> None:
    work = reply(WRITTEN, [200_000, 2, 1000])
    assert work["split"] <= 1.5 * work["received"]


def test_a_line_that_looks_like_a_file_takes_no_longer_than_another(reply: Any) -> None:
    """A regular expression that tries each colon with each bracket takes a quarter of an hour here."""
    line = "[image " + ": ]" * 130_000 + "x"
    script = WRITTEN.replace('role: "assistant", text: text.slice(0, size)', 'role: "user", text: line')
    script = script.replace("#log .assistant", "#log .user").replace("[size,", "[line, size,")
    assert reply(script, [line, 70, 1, 4096])["written"] >= len(line)


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png"])
def test_a_large_picture_is_sent_smaller_and_upright(chat: Visitor, kind: str) -> None:
    page = chat.page
    drawn = bytes(page.evaluate(DRAWN, [3000, 1500, kind]))
    turned = kind == "image/jpeg"
    if turned:
        drawn = drawn[:2] + TURNED + drawn[2:]
    send(chat, "Hi")
    chat.wait_for("Hi")
    file: Any = {"name": "mug", "mimeType": kind, "buffer": drawn}
    page.get_by_label("Attach a picture").set_input_files(file)
    page.evaluate(KEPT)
    send(chat, "Look")
    chat.wait_for("mug")
    width, height, is_red = page.evaluate(READ, kind)
    assert (width, height) == ((784, 1568) if turned else (1568, 784))
    assert is_red == turned


def test_what_cannot_be_scaled_is_sent_as_it_is(chat: Visitor) -> None:
    page = chat.page
    send(chat, "Hi")
    page.evaluate("delete window.OffscreenCanvas")
    drawn = page.context.new_page()
    large = bytes(drawn.evaluate(DRAWN, [2000, 10, "image/png"])) if drawn.goto(page.url) else b""
    drawn.close()
    file: Any = {"name": "mug.png", "mimeType": "image/png", "buffer": large}
    page.get_by_label("Attach a picture").set_input_files(file)
    send(chat, "Look")
    chat.wait_for("mug.png")
    assert said()[-1][1]["size"] == len(large)


def test_a_message_whose_answer_was_lost_is_stored_once(chat: Visitor) -> None:
    page = chat.page
    page.route("**/chat/open", lose)
    write(chat, "Hi")  # opens the chat
    chat.wait_for(AWAY)
    assert page.get_by_label("Message").input_value() == "Hi"
    page.unroute("**/chat/open")
    send(chat, "Hi")
    page.route("**/messages", lose)
    write(chat, "Are you there?")
    chat.wait_for(AWAY)
    page.unroute("**/messages")
    page.reload()  # sends it again
    expect(page.get_by_label("Message")).to_have_value("")
    expect(page.locator("#log .user")).to_have_text(["Hi", "Are you there?"])
    send(chat, "Are you there?")  # said once more on purpose
    expect(page.locator("#log .user")).to_have_count(3)
    assert said() == ["Hi", "Are you there?", "Are you there?"]
    assert (Run.objects.count(), Session.objects.count()) == (1, 1)
    chat.complaints.clear()


def test_pressed_twice_a_message_is_sent_once(chat: Visitor) -> None:
    page = chat.page
    twice = "document.querySelector('#say').requestSubmit(); document.querySelector('#say').requestSubmit()"
    for text in ("Hi", "My mug is broken."):
        page.get_by_label("Message").fill(text)
        page.evaluate(twice)
        expect(page.get_by_label("Message")).to_have_value("")
    expect(page.locator("#log .user")).to_have_text(["Hi", "My mug is broken."])
    assert said() == ["Hi", "My mug is broken."]


def test_a_picture_that_fails_behind_the_first_text_is_sent_alone(chat: Visitor) -> None:
    page = chat.page
    file: Any = {"name": "mug.png", "mimeType": "image/png", "buffer": PNG}
    page.get_by_label("Attach a picture").set_input_files(file)
    page.route("**/messages", lambda route: route.abort())
    write(chat, "Look at my mug.")
    chat.wait_for(AWAY)
    page.unroute("**/messages")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#log .user")).to_have_text(["Look at my mug.", "📎 mug.png"])
    chat.complaints.clear()


def test_a_text_that_was_not_sent_is_there_after_a_reload(chat: Visitor) -> None:
    chat.page.get_by_label("Message").fill("My mug is")
    chat.page.reload()
    expect(chat.page.get_by_label("Message")).to_have_value("My mug is")


@pytest.mark.parametrize("where", ["**/chat/open", "**/messages"])
def test_a_refusal_is_a_plain_sentence(chat: Visitor, where: str) -> None:
    page = chat.page
    if "messages" in where:
        send(chat, "Hi")
    page.get_by_label("Message").fill("Are you there?")
    for status, body, sentence in REFUSALS:
        page.route(where, answer(status, body))
        chat.expected.add(status)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("output")).to_have_text(f"Not sent: {sentence}")
        expect(page.get_by_label("Message")).to_have_value("Are you there?")
        page.unroute(where)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#log .user").last).to_have_text("Are you there?")


def test_a_chat_that_ended_keeps_the_text(chat: Visitor) -> None:
    page = chat.page
    send(chat, "Hi")
    chat.expected.add(401)
    page.get_by_label("Message").fill("Are you there?")
    page.route(re.compile("/api/"), answer(401, "<html>"))
    page.evaluate("document.querySelector('#say').requestSubmit()")
    chat.wait_for("This chat has ended. Reload the page")
    page.unroute_all()
    page.reload()
    expect(page.get_by_label("Message")).to_have_value("Are you there?")
