// The reference: /openapi.json, drawn as operations with their fields, each of which can be sent.

import { attempt } from "./attempt.js";
import { fieldsOf, objectsIn, typeOf } from "./schema.js";

const TITLES = { native: "Native", openai: "OpenAI's shapes", operations: "Operations" };
const DEEPEST = 5;
const byId = (id) => document.getElementById(id);

/** Make an element; text is text, never markup. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Return a text's parts, what stands between backticks as code. */
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));
}

function fieldTable(fields, api, depth) {
  const head = make("tr", {}, ...["Field", "Type", "Meaning"].map((word) => make("th", { scope: "col" }, word)));
  const rows = fields.map(({ name, schema, needed }) => {
    const meaning = make("td", {}, ...prose(schema.description ?? ""));
    if (schema.default !== undefined && schema.default !== null) {
      meaning.append(`${schema.description ? " " : ""}Default: ${JSON.stringify(schema.default)}.`);
    }
    if (depth < DEEPEST) {
      for (const inner of objectsIn(schema, api)) meaning.append(nested(inner, api, depth + 1));
    }
    const label = make("th", { scope: "row" }, make("code", {}, name));
    if (needed) label.append(" ", make("span", { class: "needed" }, "required"));
    return make("tr", {}, label, make("td", {}, typeOf(schema, api)), meaning);
  });
  return make("table", { class: "fields" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function nested(schema, api, depth) {
  const fields = fieldsOf(schema, api);
  const kind = fields.find(({ schema: one }) => "const" in one);
  const title = kind ? `${kind.name}: ${JSON.stringify(kind.schema.const)}` : schema.title ?? "Fields";
  const details = make("details", { class: "nested" }, make("summary", {}, title));
  // Drawn when it is opened: the whole tree would be thousands of rows.
  details.addEventListener("toggle", () => details.childElementCount > 1 || details.append(fieldTable(fields, api, depth)));
  return details;
}

function inside(path, verb, operation, api) {
  const parts = [make("p", {}, ...prose(operation.description ?? ""))];
  const parameters = (operation.parameters ?? []).map((one) => ({
    name: one.name, needed: one.required, schema: { description: `In the ${one.in}.`, ...one.schema },
  }));
  if (parameters.length) parts.push(make("h3", {}, "Parameters"), fieldTable(parameters, api, 0));
  for (const [kind, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    const [object] = objectsIn(schema, api);
    if (object) parts.push(make("h3", {}, `Body, ${kind}`), fieldTable(fieldsOf(object, api), api, 0));
  }
  const answers = Object.entries(operation.responses ?? {}).map(([status, one]) => make("tr", {},
    make("th", { scope: "row" }, make("code", {}, status)), make("td", {}, Object.keys(one.content ?? {}).join(", ")), make("td", {}, ...prose(one.description))));
  const head = make("tr", {}, ...["Status", "Type", "Meaning"].map((word) => make("th", { scope: "col" }, word)));
  parts.push(make("h3", {}, "Answers"), make("table", { class: "fields" }, make("thead", {}, head), make("tbody", {}, ...answers)));
  if (operation.requestBody?.content?.["multipart/form-data"]) parts.push(make("p", {}, "Send it with curl -F: a page cannot choose your files for you."));
  else parts.push(attempt(path, verb, operation, api, () => byId("key").value, make));
  return make("div", { class: "inside" }, ...parts);
}

function operationOf(path, verb, operation, api) {
  const [gist] = (operation.description ?? "").split(/(?<=\.)\s/);
  const anchor = `${verb}-${path.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "")}`;
  const summary = make("summary", {}, make("span", { class: "verb" }, verb.toUpperCase()), make("span", { class: "path" }, path), make("span", { class: "gist" }, ...prose(gist)));
  const details = make("details", { class: "operation", id: anchor }, summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(inside(path, verb, operation, api));
  });
  const words = `${verb} ${path} ${JSON.stringify(operation)}`.toLowerCase();
  return { details, words, tag: operation.tags?.[0] ?? "operations" };
}

function draw(api) {
  byId("facts").textContent = `${api.info.description} Version ${api.info.version}.`;
  const all = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => operationOf(path, verb, operation, api)));
  const groups = [...new Set(all.map(({ tag }) => tag))].map((tag) => {
    const members = all.filter((one) => one.tag === tag);
    const section = make("section", {}, make("h2", {}, TITLES[tag] ?? tag), ...members.map(({ details }) => details));
    return { section, members };
  });
  byId("operations").replaceChildren(...groups.map(({ section }) => section));
  const filter = () => {
    const wanted = byId("find").value.toLowerCase().trim().split(/\s+/);
    for (const { details, words } of all) details.hidden = !wanted.every((word) => words.includes(word));
    for (const { section, members } of groups) section.hidden = members.every(({ details }) => details.hidden);
    const shown = all.filter(({ details }) => !details.hidden).length;
    byId("found").textContent = shown === all.length ? `${all.length} operations` : `${shown} of ${all.length} operations`;
  };
  byId("find").addEventListener("input", filter);
  filter();
  const named = location.hash && document.getElementById(location.hash.slice(1));
  if (named?.matches("details")) {
    named.open = true;
    named.scrollIntoView();
  }
}

byId("tools").addEventListener("submit", (event) => event.preventDefault());
try {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  draw(await answer.json());
} catch (error) {
  byId("error").textContent = `The description cannot be read: ${error.message}`;
  byId("error").hidden = false;
}
