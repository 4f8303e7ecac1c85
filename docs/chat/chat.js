// A customer's chat made of the JSON API of agentruns and a session token; docs/howto/chat.md has the site's part.
const find = (selector, within = document) => within.querySelector(selector);
const [api, opens] = ["api", "open"].map((name) => find(`meta[name=${name}]`).content);
const ENDED = ["completed", "failed", "cancelled"];
const SAID = ["user", "assistant", "run_failed", "run_cancelled"]; // rows that add to the conversation
const WAITS = ["approval_requested", "orphan_found", "run_paused"]; // rows after which a person has to act
const [RETRY, PATIENCE] = [2000, 120000]; // milliseconds
const LONGEST = 1568; // pixels: models scale larger pictures down to this
const REFUSED = {
  0: "There is no connection at the moment. Try again.",
  401: "You are signed out. Reload the page.",
  403: "This is not allowed here.",
  404: "This is no longer here. Reload the page.",
  409: "Something else happened meanwhile. Wait a moment, and try again.",
  413: "This is too large.",
  415: "A file of this kind cannot be sent. Choose a PNG, JPEG, WebP or GIF picture.",
  422: "This cannot be sent as it is. Change the text or the picture, and try again.",
  429: "That was too much at once. Wait a while, and try again.",
};
// How the API describes a file: each part ends at a character it cannot hold, so that no line takes long.
const FILE = /^\[(?:image|document) (.*): [^\s,:]+, \d+ bytes, [0-9a-f]+\]$/gm;
const [form, button] = [find("#say"), find("#say button")];
const stored = (name) => JSON.parse(sessionStorage[name] ?? "null"); // of this tab, kept over a reload
let chat = stored("chat"); // {session, token}
let isOver = false;
let said = 0; // seq of the last row whose message is shown
let following = null; // id of the run whose events are read
let loading = Promise.resolve();
let asked = ""; // which approvals are shown
let [draft, drawn, frame, again] = ["", "", 0, 0]; // the reply so far, its part on the page; timers

// What a model wrote is a text, and shows characters that hide or turn the line around.
const visible = (text) =>
  text.replace(/(?![\n\u200d])[\p{C}\p{Zl}\p{Zp}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
const put = (element, text) => Object.assign(element, { textContent: visible(text) });
const made = (tag, text, more) => Object.assign(put(document.createElement(tag), text), { dir: "auto" }, more);
const toEnd = () => find("#scroll").scrollTo(0, find("#scroll").scrollHeight);
const note = (text) => find("#status").textContent !== text && [put(find("#status"), text), toEnd()];
const signed = () => ({ Authorization: `Bearer ${chat.token}` });
const own = (more = "") => `${api}/sessions/${encodeURIComponent(chat.session)}${more}`;

// A proxy may answer in HTML, and a `detail` may be anything: only a limit is taken from it.
function explain(status, detail) {
  const [, most, unit] = /(?:more than|at most) (\d+) (bytes|characters)/.exec(JSON.stringify(detail ?? "")) ?? [];
  const limit = unit === "bytes" ? `${Math.floor(most / 1e5) / 10} MB` : `${most} characters`;
  const sentence = REFUSED[status] ?? "The service has a problem at the moment. Try again later.";
  return unit ? `${sentence} The limit is ${limit}.` : sentence;
}

async function ask(url, body) {
  const isJson = body?.constructor === Object; // the type of a form is the browser's to name
  const response = await fetch(url, {
    method: body ? "POST" : "GET",
    headers: { ...(chat && signed()), ...(isJson && { "Content-Type": "application/json" }) },
    body: isJson ? JSON.stringify(body) : body,
    signal: AbortSignal.timeout(PATIENCE),
  }).catch(() => null);
  const data = await response?.json().catch(() => null);
  if (response?.status === 401 && chat) over();
  if (!response?.ok || !data) throw new Error(explain(response?.ok ? 0 : response?.status ?? 0, data?.detail));
  return data;
}

function over() {
  for (const name of ["chat", "sent"]) delete sessionStorage[name];
  chat = following = null;
  isOver = true;
  busy(isOver);
  const text = "This chat has ended. Reload the page to begin a new one.";
  note(text);
  throw new Error(text);
}

const load = () => (loading = loading.catch(() => {}).then(read)); // one at a time: no message comes twice
async function read() {
  for (let next = said; next !== null; ) {
    const page = await ask(own(`/messages?after=${next}`));
    for (const { seq, role, text } of page.items) {
      find("#log").append(made("p", role === "user" ? text.replace(FILE, "📎 $1") : text, { className: role }));
      said = seq;
    }
    said = Math.max(said, Number((next = page.next)));
  }
  toEnd();
}

async function cards() {
  const { items } = await ask(`${api}/approvals?status=pending`);
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
  let isSent = false;
  const decide = async (verb, more) => {
    if (isSent) return;
    isSent = true;
    const decided = ask(`${api}/approvals/${approval.id}/${verb}`, { digest: approval.digest, ...more });
    await decided.then(() => note("…"), (error) => put(find(".problem", element), error.message));
    isSent = false;
    await cards().catch(() => {}); // the next event shows them
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
  let [fields, pieces] = [{}, []]; // of the event and of the line that have not ended
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const [first, ...starts] = value.split("\n");
    pieces.push(first);
    for (const start of starts) {
      const line = pieces.join("");
      const colon = line.indexOf(": ");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
      if (!line && fields.data) yield { ...fields, data: JSON.parse(fields.data) };
      if (!line) fields = {};
      pieces = [start];
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

// Each draft is the whole text so far: what is new of it is added, at most once for each frame of the screen.
function draw() {
  const element = find("#draft");
  if (!draft.startsWith(drawn)) element.textContent = drawn = "";
  element.hidden = !draft;
  for (const line of visible(draft.slice(drawn.length)).match(/.*\n|.+/g) ?? []) {
    if (element.lastChild?.lastChild.data.endsWith("\n") ?? true) element.append(document.createElement("span"));
    element.lastChild.append(line); // each line has its layout: those that ended keep theirs
  }
  [drawn, frame] = [draft, 0];
  toEnd();
}

async function happened(event, data) {
  if (SAID.includes(event)) await load();
  if (event === "draft" || SAID.includes(event)) draft = data.text ?? "";
  if (event === "draft") frame ||= requestAnimationFrame(draw);
  else draw();
  const waits = event === "waits_for" ? data.waits_for !== null : WAITS.includes(event);
  const mine = waits || event.startsWith("approval") ? await cards() : 0;
  const outside = ["event", "waiting"].includes(data.waits_for); // no colleague can hurry it
  if (waits && outside) note("This goes on as soon as we hear of it. You can go on writing.");
  else if (waits) note(mine ? "" : "A colleague looks at this first. You can go on writing.");
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
    if (!chat) return;
    note(error.message);
    clearTimeout(again);
    again = setTimeout(resume, RETRY);
  }
}

// A message keeps its key until it was taken, over a reload as well: sent again it is there once.
const same = (text, file) => JSON.stringify([text, file?.name, file?.size, file?.lastModified]);
function keyOf(text, file) {
  if (stored("sent")?.message !== same(text, file))
    sessionStorage.sent = JSON.stringify({ message: same(text, file), key: crypto.randomUUID() });
  return stored("sent").key;
}

async function open(text) {
  chat = await ask(opens, new URLSearchParams({ text, key: keyOf(text) }));
  sessionStorage.chat = JSON.stringify(chat);
  delete sessionStorage.sent;
}

async function send(text, file) {
  const [url, body] = [own("/messages"), { content: text || [], idempotency_key: keyOf(text, file) }];
  const parts = new FormData();
  parts.append("body", JSON.stringify(body));
  if (file) parts.append("files", await scaled(file), file.name);
  await ask(url, file ? parts : body);
  delete sessionStorage.sent;
}

// A picture is drawn upright. What cannot be drawn, or written in its own type as a GIF, is sent as it is.
async function scaled(file) {
  try {
    const picture = await createImageBitmap(file);
    const share = LONGEST / Math.max(picture.width, picture.height);
    if (share >= 1) return file;
    const sides = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * share)));
    const canvas = new OffscreenCanvas(...sides);
    const context = Object.assign(canvas.getContext("2d"), { imageSmoothingQuality: "high" });
    context.drawImage(picture, 0, 0, ...sides);
    const smaller = await canvas.convertToBlob({ type: file.type, quality: 0.9 });
    return smaller.type === file.type ? smaller : file;
  } catch {
    return file;
  }
}

// The text stays readable and can be copied while it is sent, and after the chat has ended.
const busy = (is) => (form.text.readOnly = form.file.disabled = button.disabled = is);
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const [text, file] = [form.text.value.trim(), form.file.files[0]];
  if (button.disabled || !(text || file)) return;
  busy(true);
  try {
    if (chat) await send(text, file);
    else {
      await open(text || file.name);
      form.text.value = ""; // it is there: if the picture fails, the picture alone is sent again
      if (file) await send("", file);
    }
    form.reset();
    changed();
  } catch (error) {
    put(find("output"), `Not sent: ${error.message}`);
  }
  busy(isOver);
  if (chat) following ? load().catch(() => {}) : resume(); // also what was stored without an answer
});

const changed = () => put(find("output"), form.file.files[0]?.name ?? "");
form.addEventListener("input", changed);
form.text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
// A text that was not sent is in the field after a reload. If it was on its way, it is sent again.
addEventListener("pagehide", () => {
  delete sessionStorage.text;
  if (form.text.value) sessionStorage.text = form.text.value;
});
form.text.value ||= sessionStorage.text ?? "";
if (chat) resume();
if (stored("sent")?.message === same(form.text.value.trim())) form.requestSubmit();
else if (stored("sent")) put(find("output"), "Your picture may not have arrived. Choose it again, and send it.");
