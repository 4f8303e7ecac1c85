// A customer's chat made of the JSON API of agentruns and a session token; docs/howto/chat.md has the site's part.
const find = (selector, within = document) => within.querySelector(selector);
const [api, opens] = ["api", "open"].map((name) => find(`meta[name=${name}]`).content);
const ENDED = ["completed", "failed", "cancelled"];
const SAID = ["user", "assistant", "run_failed", "run_cancelled"]; // rows that add to the conversation
const WAITS = ["approval_requested", "orphan_found", "run_paused"]; // rows after which a person has to act
const [RETRY, form, button] = [2000, find("#say"), find("#say button")]; // milliseconds
let chat = JSON.parse(sessionStorage.chat ?? "null"); // {session, token}: of this tab, kept over a reload
let said = 0; // seq of the last row whose message is shown
let following = null; // id of the run whose events are read
let loading = Promise.resolve();
let asked = ""; // which approvals are shown
let key = null; // of the message that is being sent: sent again it is the same

// What a model wrote is a text, and shows characters that hide or turn the line around.
const visible = (text) =>
  text.replace(/(?![\n\u200d])[\p{C}\p{Zl}\p{Zp}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
const put = (element, text) => Object.assign(element, { textContent: visible(text) });
const made = (tag, text, more) => Object.assign(put(document.createElement(tag), text), { dir: "auto" }, more);
const toEnd = () => find("#scroll").scrollTo(0, find("#scroll").scrollHeight);
const note = (text) => [put(find("#status"), text), toEnd()] && text;
const signed = () => ({ Authorization: `Bearer ${chat.token}` });
const own = (more = "") => `/sessions/${encodeURIComponent(chat.session)}${more}`;

async function ask(path, body) {
  const isForm = body instanceof FormData; // whose type names its boundary
  const response = await fetch(api + path, {
    method: body ? "POST" : "GET",
    headers: { ...signed(), ...(body && !isForm && { "Content-Type": "application/json" }) },
    body: body && (isForm ? body : JSON.stringify(body)),
  });
  if (response.status === 401) over();
  const data = await response.json();
  if (!response.ok) throw new Error(data.detail);
  return data;
}

function over() {
  delete sessionStorage.chat;
  chat = following = null;
  form.inert = true;
  throw new Error(note("This chat has ended. Reload the page to begin a new one."));
}

const load = () => (loading = loading.catch(() => {}).then(read)); // one at a time: no message comes twice
async function read() {
  for (let next = said; next !== null; ) {
    const page = await ask(own(`/messages?after=${next}`));
    for (const { seq, role, text } of page.items) {
      const plain = text.replace(/^\[(?:image|document) ?(.*?): .*\]$/gm, "📎 $1"); // how the API describes a file
      find("#log").append(made("p", plain, { className: role }));
      said = seq;
    }
    said = Math.max(said, Number((next = page.next)));
  }
  toEnd();
}

async function cards() {
  const { items } = await ask("/approvals?status=pending");
  const these = items.map(({ id, digest }) => id + digest).join();
  if (these !== asked) find("#cards").replaceChildren(...items.map(card));
  asked = these;
  return items.length;
}

function card(approval) {
  const element = find("template").content.cloneNode(true).firstElementChild;
  const { title, tool_name, arguments: given } = approval.shown; // numbers as text: JSON.parse rounds large ones
  const { question, choices, free_text } = approval.arguments; // of a tool made by question_to("requester")
  const isQuestion = question !== undefined;
  const decide = async (verb, more) => {
    const decided = ask(`/approvals/${approval.id}/${verb}`, { digest: approval.digest, ...more });
    await decided.then(() => note("…")).catch((error) => put(find(".problem", element), error.message));
    await cards();
  };
  put(find("h2", element), isQuestion ? String(question) : title || tool_name);
  find(isQuestion ? ".verbs" : "form", element).hidden = true;
  for (const choice of isQuestion && Array.isArray(choices) ? choices.map(String) : [])
    find(".choices", element).append(made("button", choice, { value: choice, formNoValidate: true }));
  for (const typed of choices?.length && free_text === false ? find("form", element).querySelectorAll("input, .choices ~ button") : []) typed.remove();
  for (const { name, text } of isQuestion ? [] : given) find("dl", element).append(made("dt", name), made("dd", text));
  find(".approve", element).addEventListener("click", () => decide("approve"));
  find(".deny", element).addEventListener("click", () => decide("deny", { reason: "The customer said no." }));
  find("form", element).addEventListener("submit", (event) => {
    event.preventDefault();
    decide("answer", { text: event.submitter.value || event.target.text?.value });
  });
  return element;
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop(); // an event has come when the empty line behind it has
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
      if (fields.data) yield { ...fields, data: JSON.parse(fields.data) };
    }
  }
}

async function follow(run) {
  if (following === run) return;
  following = run;
  for (let last = said; following === run; await new Promise((again) => setTimeout(again, RETRY))) {
    try {
      const headers = { ...signed(), "Last-Event-ID": last };
      const response = await fetch(`${api}/runs/${run}/events`, { headers });
      if ([401, 403, 404].includes(response.status)) over();
      if (!response.ok) continue; // too many streams for now
      for await (const { id, event, data } of eventsOf(response.body)) {
        await happened(event, data);
        last = id ?? last;
        if (event === "end") return resume((following = null)); // a message may have started the next run
      }
    } catch (error) {
      if (chat) note("Connecting again…");
    }
  }
}

async function happened(event, data) {
  if (SAID.includes(event)) await load();
  if (event === "draft" || SAID.includes(event)) put(find("#draft"), data.text ?? "").hidden = event !== "draft";
  const waits = event === "waits_for" ? data.waits_for !== null : WAITS.includes(event);
  const mine = waits || event.startsWith("approval") ? await cards() : 0;
  if (waits) note(mine ? "" : "A colleague looks at this first. You can go on writing.");
  else if (event !== "user") note(["end", "draft"].includes(event) ? "" : "…");
}

async function resume() {
  try {
    const run = (await ask(own())).runs.items.find(({ status }) => !ENDED.includes(status));
    await load(); // after that: else what an ending run said last would be missing
    const goesOn = ["queued", "running"].includes(run?.status);
    await happened(run ? "waits_for" : "end", { waits_for: goesOn ? null : run?.status });
    if (run) follow(run.id);
  } catch (error) {
    if (chat) setTimeout(resume, RETRY, note(error.message));
  }
}

async function open(text) {
  const response = await fetch(opens, { method: "POST", body: new URLSearchParams({ text }) });
  if (!response.ok) throw new Error("The chat could not be opened. Try again.");
  chat = await response.json();
  sessionStorage.chat = JSON.stringify(chat);
}

async function send(content, file) {
  const parts = new FormData();
  parts.append("body", JSON.stringify({ content: content || [], idempotency_key: (key ??= crypto.randomUUID()) }));
  if (file) parts.append("files", file);
  await ask(own("/messages"), file ? parts : JSON.parse(parts.get("body")));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const [text, file] = [form.text.value.trim(), form.file.files[0]];
  if (button.disabled || !(text || file)) return;
  button.disabled = true;
  try {
    if (chat) await send(text, file);
    else await open(text || file.name).then(() => file && send("", file));
    form.reset();
    await (following ? load(changed()) : resume(changed()));
  } catch (error) {
    put(find("output"), `Not sent: ${error.message}`);
  }
  button.disabled = false;
});

function changed() {
  key = null; // another text is another message
  put(find("output"), form.file.files[0]?.name ?? "");
}
form.addEventListener("input", changed);
form.text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
if (chat) resume();
