// From knobs to a request, and from a request to code that makes it.

const APPLIES = {
  threshold: ["threshold"],
  low_confidence_static: ["steps"],
  low_confidence_dynamic: ["threshold", "steps"],
  sequential: ["steps"],
  random: ["steps"],
  entropy_bounded: ["bound"],
  factor: ["factor"],
  threshold_quota: ["threshold", "steps"],
  adaptive_parallel: ["threshold", "steps", "max_parallel"],
  maskgit_plus: ["steps"],
  topk_margin: ["steps"],
  entropy: ["steps"],
  multi_block: ["tau_acc", "tau_add", "tau_semi", "max_blocks"],
  streaming_window: ["bound", "position_penalty"],
  linear_speculation: ["threshold"],
};

/** The options that a strategy has. */
export function optionsOf(strategy) {
  return APPLIES[strategy] ?? [];
}

/** What a model must be capable of for each mode, and what is said where it is not. */
const NEEDS = {
  chat: { chat: "This model has no chat template." },
  continue: {},
  json: { chat: "This model has no chat template.", constraints: "This model follows no grammar." },
  infill: { infill: "This model fills no holes." },
};

/** Why a model does not answer in this mode; empty where it does. */
export function lackOf(mode, capabilities) {
  const lacking = Object.entries(NEEDS[mode]).find(([capability]) => !capabilities.includes(capability));
  return lacking ? lacking[1] : "";
}

/** Tokens of a hole that does not say. */
const HOLE_TOKENS = 8;

/** Text with holes (`___`, or `___12` for one of 12 tokens) as a prompt and the template behind it. */
export function templateOf(text) {
  const parts = text.split(/_{3,}(\d{0,3})/);
  const template = [];
  for (let index = 1; index < parts.length; index += 2) {
    template.push({ hole: `hole ${(index + 1) / 2}`, max_tokens: Number(parts[index]) || HOLE_TOKENS });
    if (parts[index + 1]) template.push(parts[index + 1]);
  }
  return { prompt: parts[0], template };
}

/** The text with a hole in the place of [start, end), large enough for what stood there. */
export function withHole(text, start, end) {
  const size = Math.max(HOLE_TOKENS, Math.ceil((end - start) / 3));
  return `${text.slice(0, start)}___${size}${text.slice(end)}`;
}

/** Path and body of a request. `knobs` holds only what was set. */
export function requestOf(mode, messages, prompt, model, knobs, schema) {
  const { strategy, threshold, steps, bound, factor, max_parallel, tau_acc, tau_add, tau_semi, max_blocks, position_penalty, block_length, max_nfe, ...flat } = knobs;
  const diffusion = { stream: "frames", frame_detail: "full", frame_interval_ms: 0 };
  const steered = { strategy, threshold, steps, bound, factor, max_parallel, tau_acc, tau_add, tau_semi, max_blocks, position_penalty };
  const options = { ...steered, block_length, max_nfe };
  for (const [name, value] of Object.entries(options)) {
    if (value !== undefined) diffusion[name] = value;
  }
  const common = {
    model,
    ...flat,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    diffusion,
  };
  if (mode === "infill") {
    // The holes say how long, and are one block.
    delete common.max_tokens;
    delete diffusion.block_length;
    const { prompt: before, template } = templateOf(prompt);
    return { path: "/v1/completions", body: { prompt: before, ...common, diffusion: { ...diffusion, template } } };
  }
  if (mode === "continue") return { path: "/v1/completions", body: { prompt, ...common } };
  if (mode === "json") {
    common.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return { path: "/v1/chat/completions", body: { messages, ...common } };
}

export function asCurl(origin, { path, body }) {
  const json = JSON.stringify(plain(body), null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

export function asPython(origin, { path, body }) {
  const { messages, prompt, model, stream, stream_options, diffusion, ...rest } = plain(body);
  const known = Object.entries({ model, ...(messages ? { messages } : { prompt }), ...rest });
  const lines = known.map(([name, value]) => `    ${name}=${literal(value)},`);
  const chat = path.endsWith("/chat/completions");
  const call = chat ? "client.chat.completions.create" : "client.completions.create";
  const piece = chat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key="none")
stream = ${call}(
${lines.join("\n")}
    stream=True,
    extra_body=${literal({ diffusion })},
)
for chunk in stream:
    if chunk.choices:
        print(${piece} or "", end="", flush=True)
print()`;
}

/** The request without what only this page needs. */
function plain(body) {
  const { stream_options, diffusion, ...rest } = body;
  const { stream, frame_detail, frame_interval_ms, ...options } = diffusion;
  return { ...rest, diffusion: options };
}

function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
