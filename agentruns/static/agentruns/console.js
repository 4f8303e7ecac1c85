// Keys of the console. Everything also works without them: each key only goes where a link or a button is.
//
// The list: J and K move the mark, Enter or A opens the card, D and E open it at that verb.
// A card: A, D and E go to the verb, J and K to the next and the previous card. Enter then presses the button.

const MARKED = "ar-marked";

function isTyping(target) {
  return target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]") !== null;
}

function rows() {
  return [...document.querySelectorAll(".model-approval.change-list #result_list tbody tr, .ar-queue tbody tr")];
}

function linkOf(row) {
  return row.querySelector("th a");
}

function mark(row) {
  for (const other of rows()) other.classList.toggle(MARKED, other === row);
}

function marked() {
  const all = rows();
  return all.find((row) => row.classList.contains(MARKED)) || all[0];
}

function move(step) {
  const all = rows();
  const next = all[Math.min(Math.max(all.indexOf(marked()) + step, 0), all.length - 1)];
  mark(next);
  linkOf(next).focus();
}

function onList(key) {
  if (key === "j") move(1);
  else if (key === "k") move(-1);
  else if ((key === "a" || key === "d" || key === "e") && !document.querySelector(".ar-queue")) {
    const verb = { a: "approve", d: "deny", e: "edit" }[key];
    window.location.assign(`${linkOf(marked()).href}#${verb}`);
  } else if (key === "enter" && document.activeElement === document.body) linkOf(marked()).click();
  else return false;
  return true;
}

function goTo(element) {
  if (element.tagName === "A") {
    element.click();
    return;
  }
  if (element.tagName === "DETAILS") element.open = true;
  const field = "textarea, select, input:not([type=hidden]), button";
  const place = element.tagName === "BUTTON" ? element : element.querySelector(field) || element;
  place.focus();
  place.scrollIntoView({ block: "nearest" });
}

function onCard(key) {
  const element = document.querySelector(`.ar [data-key="${key}"]`);
  if (element) goTo(element);
  return element !== null;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || isTyping(event.target)) return;
  const key = event.key.toLowerCase();
  if (rows().length ? onList(key) : onCard(key)) event.preventDefault();
});

document.addEventListener("click", (event) => {
  const link = event.target.closest('.ar-bar a[href^="#"]');
  if (link) goTo(document.querySelector(link.hash));
});

// One note: it is taken along by who edits after all.
document.addEventListener(
  "toggle",
  ({ target }) => {
    const [note, mine] = document.querySelectorAll("#ar-decide [name=reason], #edit [name=reason]");
    if (target.id === "edit" && mine) mine.value ||= note.value;
  },
  true,
);

// Several on one page: how many are ticked, and the sum of their numbers, exact whatever their size.
function tellTicked() {
  const place = document.querySelector("[data-ticked]");
  if (!place) return;
  const boxes = [...document.querySelectorAll(".ar-lines input[type=checkbox]")];
  const ticked = boxes.filter((box) => box.checked);
  const decimals = (box) => (box.dataset.number || "").split(".")[1] || "";
  const places = Math.max(0, ...boxes.map((box) => decimals(box).length));
  const scaled = (box) => BigInt((box.dataset.number || "0").split(".")[0] + decimals(box).padEnd(places, "0"));
  const sum = ticked.reduce((total, box) => total + scaled(box), 0n);
  const digits = String(sum < 0n ? -sum : sum).padStart(places + 1, "0");
  const whole = digits.slice(0, digits.length - places).replace(/\B(?=(\d{3})+$)/g, place.dataset.comma);
  const rest = places ? place.dataset.point + digits.slice(-places) : "";
  const words = { "{ticked}": ticked.length, "{sum}": `${sum < 0n ? "-" : ""}${whole}${rest}` };
  place.textContent = place.dataset.ticked.replace(/\{(ticked|sum)\}/g, (gap) => words[gap]);
}

document.addEventListener("change", tellTicked);
window.addEventListener("pageshow", tellTicked); // also after "back", when the browser has ticked as it was

document.addEventListener("DOMContentLoaded", () => {
  tellTicked();
  if (rows().length) mark(rows()[0]);
  const verb = { "#approve": "a", "#deny": "d", "#edit": "e" }[window.location.hash];
  if (verb) onCard(verb);
});

// The reader's time zone: the server takes one that it knows, where the project has chosen none.
const zone = `agentruns_zone=${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
if (!document.cookie.split("; ").includes(zone)) {
  const secure = window.location.protocol === "https:" ? "; secure" : "";
  document.cookie = `${zone}; path=/; max-age=31536000; samesite=lax${secure}`;
}
