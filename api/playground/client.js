// The fleet over HTTP: its models, and one streamed answer.

/** An answer of the server that is not 200, or an error inside a stream, in words. */
export class Refusal extends Error {
  constructor(error, status, requestId) {
    super(error.message || `HTTP ${status}`);
    this.param = error.param ?? null;
    this.code = error.code ?? null;
    this.status = status;
    this.requestId = requestId;
    this.retryAfter = null;
  }
}

export async function models(key) {
  const response = await call("/v1/models", { headers: headersOf(key) });
  return (await response.json()).data;
}

/**
 * Yield the chunks of an answer; throws `Refusal`. Asking again under the same name follows the same request from its
 * first block on, so closing the connection does not end it: `end` does, with the id that `onNamed` gets.
 */
export async function* chunks({ path, body, name }, key, signal, onNamed) {
  const headers = { ...headersOf(key), "Content-Type": "application/json", "Idempotency-Key": name };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  onNamed(response.headers.get("x-diffleet-request"));
  for await (const data of sse(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error, 200, response.headers.get("x-request-id"));
    yield chunk;
  }
  throw new Refusal({ message: "The connection ended before the answer did." }, 0, null);
}

/** End a request; one that has ended stays as it is. */
export async function end(id, key) {
  await call(`/generate/${encodeURIComponent(id)}`, { method: "DELETE", headers: headersOf(key), keepalive: true });
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal({ message: "The server cannot be reached. Is it still running?" }, 0, null);
  }
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Something between here and the server has answered in its own words.
  }
  const refusal = new Refusal(error, response.status, response.headers.get("x-request-id"));
  refusal.retryAfter = response.headers.get("retry-after");
  throw refusal;
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function* sse(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    let end;
    while ((end = pending.indexOf("\n\n")) >= 0) {
      const lines = pending.slice(0, end).split("\n");
      pending = pending.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
