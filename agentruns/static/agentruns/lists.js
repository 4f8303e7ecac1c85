// A list says when there is something new, and the front page follows what happens: each asks the server every
// few seconds, while somebody looks. Without this both stay as they were loaded.

const PATIENCE = 15_000; // milliseconds
const LOST = 60_000; // between two looks while the server does not answer

function isUsed(element) {
  const selection = document.getSelection();
  if (element.contains(document.activeElement)) return true;
  if ([...element.querySelectorAll("input")].some((field) => field.value !== field.defaultValue)) return true;
  return !selection.isCollapsed && selection.containsNode(element, true);
}

function take(element, text) {
  const link = element.querySelector("a[hidden]") || element.querySelector("a");
  if (element.getAttribute("role") === "status") {
    if (link.textContent !== text) link.textContent = text;
    link.hidden = false;
    return element;
  }
  if (isUsed(element)) return element;
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("[data-poll]");
  if (!fresh) return element;
  const open = [...element.querySelectorAll("details[open]")].map((details) => details.id);
  element.replaceWith(document.adoptNode(fresh));
  for (const id of open) document.getElementById(id).open = true;
  return fresh;
}

async function look(element) {
  const signal = AbortSignal.timeout(PATIENCE);
  const options = { mode: "same-origin", redirect: "manual", cache: "no-store", signal };
  const answer = await fetch(element.dataset.poll, options);
  if (answer.type === "opaqueredirect" || [401, 403, 404].includes(answer.status)) return null;
  if (answer.status === 204) return element;
  if (answer.status !== 200) throw new Error(`answered ${answer.status}`);
  return take(element, await answer.text());
}

async function follow(element) {
  const interval = Number(element.dataset.interval);
  let now = element;
  let failures = 0;
  while (now) {
    const wait = Math.min(interval * 2 ** failures, LOST);
    await new Promise((done) => window.setTimeout(done, wait));
    if (document.hidden) continue;
    try {
      now = await look(now);
      failures = 0;
    } catch {
      failures += 1;
    }
  }
}

for (const element of document.querySelectorAll("[data-poll]")) follow(element);
