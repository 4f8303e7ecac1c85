// An approval inbox made of the OpenAPI document of agentruns and nothing else.
const POLL = 3000; // milliseconds
const find = (selector, within = document) => within.querySelector(selector);
const cards = new Map(); // id of an approval -> {element, approval, isOver}
const runs = new Map(); // id of a run -> what is known of it

async function ask(path, body) {
  const response = await fetch(find("meta[name=api]").content + path, {
    method: body ? "POST" : "GET",
    headers: { Authorization: `Bearer ${sessionStorage.token}`, "Content-Type": "application/json" },
    body: body && JSON.stringify(body),
  }).catch(() => null);
  const answer = await response?.json().catch(() => null); // a proxy may answer in HTML
  const [status, data] = [response?.status ?? 0, answer ?? {}];
  if (status === 401) signOut();
  const problem = !response || response.ok ? "There is no connection at the moment." : `The service answered ${status}.`;
  const why = typeof data.detail === "string" ? data.detail : `${problem} Try again.`;
  return { ok: Boolean(response?.ok && answer), status, data, why };
}

// What a model wrote may hold characters that nobody sees, or that turn the line around.
const visible = (text) =>
  text.replace(/(?!\n)[\p{C}\p{Zl}\p{Zp}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
// And a name written from right to left would move what stands beside it: each part of a sentence stands apart.
const part = (text) => Object.assign(document.createElement("bdi"), { textContent: visible(String(text)) });
const put = (element, selector, ...parts) => find(selector, element).replaceChildren(...parts.map(part));

function age(moment) {
  const minutes = Math.floor((Date.now() - Date.parse(moment)) / 60000);
  if (minutes < 120) return minutes < 1 ? "just now" : `${minutes} minutes ago`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} hours ago` : `${Math.floor(minutes / 1440)} days ago`;
}

async function requester(approval) {
  const known = runs.get(approval.run) ?? (await ask(`/runs/${approval.run}`));
  const { ok, status, data } = known; // a token may see an approval, but not its run
  if (ok || [403, 404].includes(status)) runs.set(approval.run, known); // else it is asked for again
  return ok ? [data.owner_name || "the program", " (agent ", data.agent, ")"] : ["somebody else"];
}

async function show(approval) {
  const card = cards.get(approval.id) ?? { element: find("template").content.cloneNode(true).firstElementChild };
  const { element } = card;
  const by = await requester(approval);
  const agreed = approval.required > 1 ? `, ${approval.approved_count} of ${approval.required} agreed` : "";
  const since = `, ${age(approval.requested_at)}${agreed}`;
  put(element, ".about", `${approval.risk} risk, requested by `, ...by, since);
  if (card.approval?.digest !== approval.digest) {
    const { title, tool_name, arguments: given } = approval.shown; // numbers as text: JSON.parse rounds large ones
    put(element, "h2", title || tool_name);
    put(element, "pre", ...given.flatMap(({ name, text }) => [name, ": ", text, "\n"]).slice(0, -1));
    put(element, ".outcome", card.approval ? "Somebody changed the arguments: look again." : "");
    element.className = approval.risk;
  }
  if (!card.approval) {
    element.addEventListener("submit", (event) => decide(event, card));
    find("main").append(element);
  }
  card.approval = approval; // what is shown is what is decided: its digest goes with the decision
  cards.set(approval.id, card);
}

async function decide(event, card) {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(event.target));
  const path = `/approvals/${card.approval.id}/${event.target.dataset.verb}`;
  if (card.isSent) return;
  card.isSent = true;
  const { ok, status, data, why } = await ask(path, { digest: card.approval.digest, ...given });
  card.isSent = false;
  if (ok && data.status === "pending") await show(data);
  else if (ok) close(card, `You decided: ${data.status}. A worker does the rest.`);
  else if (status === 409 && (data.approval_status ?? "pending") !== "pending")
    close(card, ...settled(data.approval_status, data));
  else put(card.element, ".outcome", why);
}

const settled = (status, { decided_by_name, decided_at }) => [
  `It is ${status}`,
  ...(decided_by_name ? [" by ", decided_by_name] : []),
  decided_at ? `, ${new Date(decided_at).toLocaleString()}.` : ".",
];

function close(card, ...parts) {
  card.isOver = true;
  card.element.querySelectorAll("form").forEach((form) => form.remove());
  put(card.element, ".outcome", ...parts);
}

async function refresh() {
  const waiting = new Set();
  for (let next = ""; next !== null; ) {
    const page = await ask(`/approvals?status=pending${next && `&cursor=${encodeURIComponent(next)}`}`);
    if (!page.ok) return page.why;
    const { data } = page;
    for (const approval of data.items) {
      waiting.add(approval.id);
      await show(approval);
    }
    next = data.next;
  }
  for (const [id, card] of cards) {
    if (card.isOver || waiting.has(id)) continue;
    const { ok, data } = await ask(`/approvals/${id}`);
    if (ok && data.status !== "pending") close(card, ...settled(data.status, data));
  }
  return waiting.size ? `${waiting.size} waiting` : "Nothing waits.";
}

async function poll() {
  const status = sessionStorage.token ? await refresh() : find("#status").textContent;
  if (status !== find("#status").textContent) put(document, "#status", status); // read out when it changes
  setTimeout(poll, POLL);
}

function signOut() {
  delete sessionStorage.token;
  find("#sign-in").hidden = false;
}

find("#sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.token = find("#sign-in input").value.trim();
  location.reload();
});
find("#sign-in").hidden = Boolean(sessionStorage.token);
poll();
