// The page of a run follows the run. It asks the server for itself anew, and takes over what changed: whole
// parts, as the server made them. What somebody is using stays as it is, until they are done with it.

const SLOWEST = 15_000; // milliseconds between two looks while nothing happens
const LOST = 60_000; // and while the server does not answer
const PATIENCE = 15_000;
const WATCHED = 8_000; // and between two requests for the words that a worker writes
const NOTED = 3; // failures in a row

const box = document.getElementById("ar-live");
const waits = Number(box.dataset.interval);
const held = new Map(); // parts that are new and wait until nobody uses the old ones
let delay = Math.min(waits, 500); // words may come at once
let watched = -WATCHED;
let failures = 0;
let timer = 0;
let asking = false;
let over = "ended" in box.dataset;

function notice(name, isShown) {
  box.querySelector(`[data-notice=${name}]`).hidden = !isShown;
}

function part(name) {
  return document.querySelector(`[data-part="${CSS.escape(name)}"]`);
}

function isTouched(field) {
  if (field.tagName === "SELECT") {
    const all = [...field.options];
    return field.selectedIndex !== Math.max(all.findIndex((option) => option.defaultSelected), 0);
  }
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  return field.value !== field.defaultValue;
}

function opened(element) {
  return [...element.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent.trim());
}

function isUsed(old, fresh) {
  const selection = document.getSelection();
  if (old.contains(document.activeElement)) return true;
  if (!selection.isCollapsed && selection.containsNode(old, true)) return true;
  if (old.querySelector("details[open] form")) return true; // what is read there is what a button will do
  if (old.querySelector(".ar-verified") && !fresh.querySelector(".ar-verified")) return true; // asked for, once
  if ([...old.querySelectorAll("input, textarea, select")].some(isTouched)) return true;
  const folds = [...fresh.querySelectorAll("details > summary")].map((summary) => summary.textContent.trim());
  return opened(old).some((text) => !folds.includes(text));
}

function replace(old, fresh) {
  const open = opened(old);
  for (const summary of fresh.querySelectorAll("details > summary")) {
    if (open.includes(summary.textContent.trim())) summary.parentElement.open = true;
  }
  const places = [...old.querySelectorAll(".ar-scroll")].map((element) => element.scrollLeft);
  old.replaceWith(document.adoptNode(fresh));
  fresh.querySelectorAll(".ar-scroll").forEach((element, index) => {
    element.scrollLeft = places[index] || 0;
  });
}

function settle() {
  for (const [name, fresh] of held) {
    const old = part(name);
    if (old && isUsed(old, fresh)) continue;
    held.delete(name);
    if (old) replace(old, fresh);
  }
  notice("held", held.size > 0);
}

function append(fresh) {
  const list = document.querySelector(".ar-journal");
  if (!list || !("end" in box.dataset)) return; // the page shows earlier rows
  for (const card of fresh.querySelectorAll(".ar-journal > li")) {
    if (document.getElementById(card.id)) continue;
    list.append(document.adoptNode(card));
    box.dataset.after = card.id.replace("row-", "");
    for (const count of document.querySelectorAll(".ar-pages > span")) count.hidden = true; // no longer true
  }
}

function take(fresh) {
  const news = fresh.getElementById("ar-live");
  append(fresh);
  for (const element of [...fresh.querySelectorAll("[data-part]")]) {
    const { part: name } = element.dataset;
    if (part(name)?.isEqualNode(element)) held.delete(name);
    else held.set(name, element);
  }
  const words = fresh.getElementById("ar-now")?.textContent.replace(/\s+/g, " ").trim();
  if (words) box.querySelector("[data-words]").textContent = words; // else only the reply has grown
  settle();
  if (news.dataset.status !== box.dataset.status) box.querySelector("[data-said]").textContent = words;
  box.dataset.status = news.dataset.status;
  // More rows than one answer holds: the next one is asked for as if nothing had been seen.
  box.dataset.seen = "end" in news.dataset ? news.dataset.seen : "";
  over = "ended" in news.dataset && "end" in news.dataset;
}

// A look changes nothing. What the worker is asked for is a change, and as any other it has a token.
function watch() {
  const token = document.querySelector("[name=csrfmiddlewaretoken]");
  if (!token || !["queued", "running"].includes(box.dataset.status)) return;
  if (performance.now() - watched < WATCHED) return;
  watched = performance.now();
  const headers = { "X-CSRFToken": token.value };
  const signal = AbortSignal.timeout(PATIENCE);
  fetch(box.dataset.watch, { method: "POST", headers, mode: "same-origin", redirect: "manual", signal }).catch(() => {});
}

async function ask() {
  const url = new URL(box.dataset.url, window.location.href);
  url.searchParams.set("after", box.dataset.after);
  url.searchParams.set("seen", box.dataset.seen);
  const signal = AbortSignal.timeout(PATIENCE);
  const answer = await fetch(url, { mode: "same-origin", redirect: "manual", cache: "no-store", signal });
  if (answer.type === "opaqueredirect" || [401, 403, 404].includes(answer.status)) {
    over = true;
    notice("out", true);
  } else if (answer.status === 200) {
    take(new DOMParser().parseFromString(await answer.text(), "text/html"));
    delay = part("draft")?.textContent.trim() ? waits / 4 : waits;
  } else if (answer.status === 204) {
    delay = Math.min(delay * 1.2, Math.max(SLOWEST, waits));
  } else {
    throw new Error(`answered ${answer.status}`);
  }
}

async function look() {
  if (asking || over || document.hidden) return;
  asking = true;
  watch();
  try {
    await ask();
    failures = 0;
  } catch {
    failures += 1;
    delay = Math.min(waits * 2 ** failures, LOST);
  }
  asking = false;
  notice("lost", failures >= NOTED);
  plan();
}

function plan() {
  window.clearTimeout(timer);
  if (!over && !document.hidden) timer = window.setTimeout(look, delay);
}

document.addEventListener("visibilitychange", () => {
  window.clearTimeout(timer);
  delay = waits;
  look();
});

if (!over) window.setInterval(settle, Math.min(1000, waits));
plan();
