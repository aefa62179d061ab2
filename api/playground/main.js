// The page: what is asked, who answers, and what is kept over a reload.
import { costsOf, newRun, observe } from "./canvas.js";
import { Card, written } from "./card.js";
import { Refusal, chunks, end } from "./client.js";
import { Knobs } from "./knobs.js";
import { ModelMenu } from "./models.js";
import { asCurl, asPython, lackOf, requestOf, templateOf, withHole } from "./request.js";

const SAVED = "diffleet.playground";
const KEY = "diffleet.key";
const PATIENCE_MS = 3000;
const FOLLOW_MS = 5000;
const NAMES = { chat: "Answer", continue: "Continuation", json: "Answer", infill: "Filled" };
const $ = (id) => document.getElementById(id);

const narrow = matchMedia("(max-width: 860px)");
const page = {
  history: [],
  cards: [],
  stopping: null,
  /** What was chosen, also where the model that is shown does not answer so. */
  mode: "chat",
  leaving: false,
};
const knobs = { A: new Knobs($("knobs-a"), "A"), B: new Knobs($("knobs-b"), "B") };
knobs.B.restore({ strategy: "low_confidence_static" });
const menu = new ModelMenu($("model"), $("facts"), (card, isOther) => {
  for (const side of ["A", "B"]) {
    const before = knobs[side].save();
    knobs[side].suit(card);
    if (!isOther) knobs[side].restore(before);
  }
  suitModes(card);
});

/** Offer the modes in which this model answers, and show the chosen one, or the first where it is none of them. */
function suitModes({ capabilities }) {
  const radios = [...document.querySelectorAll("input[name=mode]")];
  for (const radio of radios) {
    radio.parentElement.title = lackOf(radio.value, capabilities);
    radio.disabled = radio.parentElement.title !== "";
  }
  const offered = radios.filter((radio) => !radio.disabled);
  (offered.find(({ value }) => value === page.mode) ?? offered[0]).checked = true;
  drawHistory();
}

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

// Asking.

async function ask(prompt = $("prompt").value) {
  if (page.stopping || !prompt) return;
  const sides = $("compare").checked ? ["A", "B"] : ["A"];
  if (!sides.every((side) => knobs[side].check())) return;
  hideError();
  const schema = readSchema();
  if (mode() === "json" && schema === null) return;
  if (mode() === "infill" && !checkHoles(prompt)) return;
  // A structured answer stands alone: what was said before would only lengthen its prompt.
  const messages = [...(mode() === "json" ? [] : page.history), { role: "user", content: prompt }];
  const runs = sides.map((side) => {
    const name = sides.length > 1 ? `Setting ${side}` : NAMES[mode()];
    const request = requestOf(mode(), messages, prompt, menu.value, knobs[side].values(), schema);
    return newRun(name, prompt, { ...request, name: freshName() });
  });
  if (sides.length > 1) {
    // Both sides draw from the same seed, so that only the settings tell them apart.
    const seed = runs[0].request.body.seed ?? Math.floor(Math.random() * 2 ** 31);
    for (const run of runs) run.request.body.seed ??= seed;
  }
  show(runs);
  if (narrow.matches) $("results").scrollIntoView({ block: "start" });
  await followAll(runs, messages);
}

/** Return the schema of the answer, or null after saying where it is no JSON. */
function readSchema() {
  if (mode() !== "json") return null;
  let said = "";
  let schema = null;
  try {
    schema = JSON.parse($("schema").value);
    if (typeof schema !== "object" || schema === null) said = "A schema is an object: {…}";
  } catch (error) {
    said = `No JSON: ${error.message}`;
  }
  $("schema-said").textContent = said;
  $("schema").setAttribute("aria-invalid", String(said !== ""));
  if (said) $("schema").focus();
  return said ? null : schema;
}

/** Tell whether a text with holes can be sent, and say why not. */
function checkHoles(text) {
  const { prompt, template } = templateOf(text);
  const said = !template.length
    ? "There is no hole in this text: select a word, and make one."
    : !prompt
      ? "Begin with some text: what stands before the first hole is the prompt."
      : "";
  $("infill-said").textContent = said;
  return !said;
}

/** Follow what the cards show to its end, and take the answer into the chat. */
async function followAll(runs, messages) {
  const prompt = messages.at(-1).content;
  busy(new AbortController());
  save();
  await Promise.all(page.cards.map((card) => follow(card, page.stopping.signal)));
  if (page.leaving) return;
  busy(null);
  drawVerdict();
  const [first] = runs;
  if (mode() === "chat" && first.status === "done" && first.text) {
    page.history = [...messages, { role: "assistant", content: first.text }];
    if ($("prompt").value === prompt) $("prompt").value = "";
    drawHistory();
  }
  tell(runs.map((run) => `${run.label}: ${run.note || run.text.length + " characters, " + (run.usage?.nfe ?? 0) + " forwards"}`).join("; "));
  save();
}

async function follow(card, signal) {
  const { run } = card;
  const started = performance.now() - run.totalMs;
  let id = null;
  const connection = new AbortController();
  // What is stopped before its answer has begun has no id yet: it is ended as soon as it has one.
  const stop = () => {
    run.status = "stopping";
    card.update();
    if (id) stopRequest(id, connection);
  };
  signal.addEventListener("abort", stop);
  const named = (given) => {
    id = given;
    if (signal.aborted) stop();
  };
  try {
    for await (const chunk of chunks(run.request, key(), connection.signal, named)) {
      observe(run, chunk, performance.now() - started);
      card.update();
    }
    run.status = signal.aborted ? "stopped" : "done";
  } catch (error) {
    // The browser cuts the connection before the page is gone: no fault of the server's.
    if (page.leaving) return;
    run.totalMs = performance.now() - started;
    if (error.name === "AbortError") {
      run.status = "stopped";
    } else {
      run.status = "failed";
      showError(error, run.label);
    }
  }
  card.update(true);
}

/** End a request; its stream then comes to its end. If that takes long, or the server cannot be reached, it is cut. */
async function stopRequest(id, connection) {
  try {
    await end(id, key());
    setTimeout(() => connection.abort(), PATIENCE_MS);
  } catch {
    connection.abort();
  }
}

/** A name for a request that no other has; `randomUUID` is not there on plain http. */
function freshName() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function busy(stopping) {
  page.stopping = stopping;
  $("run").disabled = stopping !== null;
  $("stop").disabled = stopping === null;
  document.body.classList.toggle("busy", stopping !== null);
}

function show(runs) {
  for (const card of page.cards) card.pause();
  page.cards = runs.map((run) => new Card(run, () => openSnippet(run.request)));
  $("runs").replaceChildren(...page.cards.map((card) => card.element));
  $("runs").classList.toggle("two", runs.length > 1);
  $("verdict").hidden = true;
}

function drawVerdict() {
  const runs = page.cards.map((card) => card.run);
  $("verdict").hidden = runs.length < 2;
  const rows = runs.map((run) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = run.label;
    row.append(head);
    const costs = costsOf(run);
    for (const name of ["steps", "nfe", "tokens", "tpf", "tps", "time"]) {
      const cell = document.createElement("td");
      cell.textContent = written(name, costs[name]);
      row.append(cell);
    }
    return row;
  });
  $("verdict").tBodies[0].replaceChildren(...rows);
}

function drawHistory() {
  // The last exchange is on the canvas.
  const items = page.history.slice(0, -2).map(({ role, content }) => {
    const item = document.createElement("li");
    item.className = role;
    const who = document.createElement("b");
    who.textContent = role === "user" ? "You" : "Model";
    item.append(who, content);
    return item;
  });
  $("history").replaceChildren(...items);
  const chats = mode() === "chat";
  $("infill-box").hidden = mode() !== "infill";
  $("schema-box").hidden = mode() !== "json";
  $("history").hidden = !chats || items.length === 0;
  for (const id of ["again", "fresh"]) $(id).hidden = !chats || page.history.length === 0;
  $("history").scrollTop = $("history").scrollHeight;
}

// Errors, in words that help.

function showError(error, label = "") {
  const box = $("error");
  const parts = [error instanceof Refusal ? error.message : `This page has failed: ${error.message}`];
  if (error.param && !error.message.includes(error.param)) parts.push(`Field: ${error.param}.`);
  if (error.retryAfter) parts.push(`Try again in ${error.retryAfter} s.`);
  if (error.status === 401) parts.push("Set a key with “API key” at the top.");
  const text = document.createElement("p");
  text.textContent = parts.join(" ");
  const small = document.createElement("small");
  const facts = [label, error.status ? `HTTP ${error.status}` : "", error.code, error.requestId];
  small.textContent = facts.filter(Boolean).join(" · ");
  box.replaceChildren(text, small);
  box.hidden = false;
}

function hideError() {
  $("error").hidden = true;
}

function tell(text) {
  $("live").textContent = text;
}

// What is kept over a reload. A request that runs goes on without its page, which follows it again by its name.

function save() {
  const saved = {
    mode: page.mode,
    ...menu.save(),
    prompt: $("prompt").value,
    schema: $("schema").value,
    compare: $("compare").checked,
    knobs: { A: knobs.A.save(), B: knobs.B.save() },
    history: page.history,
    runs: page.cards.map((card) => card.run),
  };
  for (const kept of [saved, { ...saved, runs: [] }]) {
    try {
      sessionStorage.setItem(SAVED, JSON.stringify(kept));
      return;
    } catch {
      // More than a tab may keep: without the runs it fits.
    }
  }
}

function restore() {
  let saved;
  try {
    saved = JSON.parse(sessionStorage.getItem(SAVED) ?? "null");
  } catch {
    saved = null;
  }
  if (!saved) return;
  page.mode = saved.mode;
  document.querySelector(`input[name=mode][value=${saved.mode}]`).checked = true;
  $("prompt").value = saved.prompt;
  $("schema").value = saved.schema ?? $("schema").value;
  $("compare").checked = saved.compare;
  page.history = saved.history;
  menu.restore(saved);
  for (const side of ["A", "B"]) knobs[side].restore(saved.knobs[side]);
  // Its blocks come again from the first; the steps between them were shown, and are gone.
  const runs = saved.runs.map((run) => (goesOn(run) ? { ...run, frames: [], text: "", status: "waiting" } : run));
  if (runs.length) show(runs);
  drawVerdict();
  if (runs.some(goesOn)) followAll(runs, [...page.history, { role: "user", content: runs[0].asked }]);
}

function goesOn(run) {
  return run.status === "running" || run.status === "waiting";
}

// The models.

async function loadModels() {
  try {
    await menu.load(key());
  } catch (error) {
    showError(error);
  }
}

/** See who has come and gone, as long as somebody looks. */
async function followModels() {
  if (document.hidden || page.stopping || menu.isRefused) return;
  try {
    // There were none, which is what the page has told.
    if (await menu.load(key())) hideError();
  } catch {
    // Whoever asks for an answer is told.
  }
}

// Code of a request.

let shownRequest = null;

function openSnippet(request) {
  shownRequest = request;
  drawSnippet("curl");
  $("snippet").showModal();
}

function drawSnippet(language) {
  const write = language === "curl" ? asCurl : asPython;
  $("snippet").querySelector("code").textContent = write(location.origin, shownRequest);
  for (const button of $("snippet").querySelectorAll("[data-language]")) {
    button.setAttribute("aria-pressed", String(button.dataset.language === language));
  }
}

async function copySnippet() {
  const code = $("snippet").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    $("snippet-copy").textContent = "Copied";
  } catch {
    // No clipboard on plain http: leave it selected for the reader's own keys.
    getSelection().selectAllChildren(code);
    $("snippet-copy").textContent = "Selected: press Ctrl C";
  }
  setTimeout(() => ($("snippet-copy").textContent = "Copy"), 2000);
}

function compare() {
  $("knobs-b").hidden = !$("compare").checked;
  $("ask").classList.toggle("comparing", $("compare").checked);
}

function useTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("stop").addEventListener("click", () => page.stopping?.abort());
$("compare").addEventListener("change", compare);
$("hole").addEventListener("click", () => {
  const box = $("prompt");
  box.value = withHole(box.value, box.selectionStart, box.selectionEnd);
  box.focus();
});
$("again").addEventListener("click", () => {
  const { content } = page.history.at(-2);
  page.history = page.history.slice(0, -2);
  ask(content);
});
$("fresh").addEventListener("click", () => {
  page.history = [];
  show([]);
  drawHistory();
  $("prompt").focus();
});
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    page.mode = radio.value;
    drawHistory();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) page.stopping?.abort();
});
for (const button of $("snippet").querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => drawSnippet(button.dataset.language));
}
$("snippet").querySelector("[data-close]").addEventListener("click", () => $("snippet").close());
$("snippet-copy").addEventListener("click", copySnippet);
$("key-open").addEventListener("click", () => {
  $("key-value").value = key();
  $("key").showModal();
});
$("key").addEventListener("close", () => {
  sessionStorage.setItem(KEY, $("key-value").value.trim());
  hideError();
  loadModels();
});
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("diffleet.theme", theme);
  useTheme(theme);
});
addEventListener("beforeunload", () => (page.leaving = true));
addEventListener("pagehide", save);
addEventListener("pageshow", () => (page.leaving = false));

useTheme(localStorage.getItem("diffleet.theme"));
restore();
$("settings").open = !narrow.matches;
compare();
drawHistory();
loadModels();
setInterval(followModels, FOLLOW_MS);
document.addEventListener("visibilitychange", followModels);
