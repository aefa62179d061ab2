// Send one request from the page, and show its answer as it comes.

import { example } from "./schema.js";

let numbers = 0;

/** Return the part of an operation that sends it. `keyOf` gives the API key, "" if there is none. */
export function attempt(path, verb, operation, document_, keyOf, make) {
  const form = make("form", { class: "attempt" }, make("h3", {}, "Try it"));
  const places = (operation.parameters ?? []).map((parameter) => {
    const input = make("input", { type: "text", autocomplete: "off" });
    if (parameter.required) input.required = true;
    return { parameter, input, label: make("label", {}, parameter.name, input) };
  });
  if (places.length) form.append(make("div", { class: "places" }, ...places.map((place) => place.label)));
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const body = schema ? make("textarea", { id: `body-${++numbers}`, spellcheck: "false" }) : null;
  if (body) {
    body.value = JSON.stringify(example(schema, document_), null, 2);
    form.append(make("label", { for: body.id }, "Body"), body);
  }
  const send = make("button", { class: "primary", type: "submit" }, "Send");
  const stop = make("button", { type: "button" }, "Stop");
  const copy = make("button", { type: "button" }, "Copy as curl");
  const status = make("p", { class: "facts", role: "status" });
  const reply = make("pre", { class: "reply", tabindex: "0", "aria-label": "Answer" });
  stop.disabled = true;
  form.append(make("div", { class: "actions" }, send, stop, copy), status, reply);

  const target = () => {
    let url = path;
    const query = new URLSearchParams();
    for (const { parameter, input } of places) {
      if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(parameter.name, input.value);
    }
    return query.size ? `${url}?${query}` : url;
  };
  const headers = () => ({ ...(body ? { "Content-Type": "application/json" } : {}), ...(keyOf() ? { Authorization: `Bearer ${keyOf()}` } : {}) });

  let running = null;
  stop.addEventListener("click", () => running?.abort());
  copy.addEventListener("click", async () => {
    const words = [`curl -N ${quoted(location.origin + target())}`];
    if (verb !== "get" && !(verb === "post" && body)) words.push(`-X ${verb.toUpperCase()}`);
    if (body) words.push("-H 'Content-Type: application/json'");
    if (keyOf()) words.push('-H "Authorization: Bearer $DIFFLEET_API_KEY"');
    if (body) words.push(`-d ${quoted(body.value)}`);
    const text = words.join(" \\\n  ");
    try {
      await navigator.clipboard.writeText(text);
      status.textContent = "Copied.";
    } catch {
      reply.textContent = text;
    }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    reply.textContent = "";
    status.textContent = "Waiting …";
    const began = performance.now();
    const took = () => `${((performance.now() - began) / 1000).toFixed(2)} s`;
    try {
      const answer = await fetch(target(), { method: verb.toUpperCase(), headers: headers(), body: body?.value, signal: running.signal });
      status.textContent = `${answer.status} ${answer.statusText}`;
      await show(answer, reply);
      status.textContent = `${answer.status} ${answer.statusText} · ${took()}`;
    } catch (error) {
      status.textContent = error.name === "AbortError" ? `Stopped after ${took()}.` : `No answer: ${error.message}`;
    } finally {
      send.disabled = false;
      stop.disabled = true;
      running = null;
    }
  });
  return form;
}

async function show(answer, reply) {
  if (answer.headers.get("content-type")?.startsWith("application/json")) {
    const text = await answer.text();
    try {
      reply.textContent = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      reply.textContent = text;
    }
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) reply.append(piece.value);
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
