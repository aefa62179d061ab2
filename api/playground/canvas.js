// What is known of one answer, as a list of frames that can be replayed to any step. No DOM in here.

/** A run that has seen nothing. Times are milliseconds since its start. */
export function newRun(label, asked, request) {
  return {
    label,
    asked,
    request,
    status: "waiting",
    note: "",
    frames: [],
    text: "",
    firstBlockMs: null,
    totalMs: 0,
    usage: null,
    finish: null,
  };
}

/** Take one chunk of a chat or completions stream into the run; throws what an error chunk says. */
export function observe(run, chunk, nowMs) {
  if (chunk.error) throw Object.assign(new Error(chunk.error.message), chunk.error);
  if (chunk.usage) run.usage = chunk.usage;
  run.totalMs = nowMs;
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  run.text += text;
  if (text && run.firstBlockMs === null) run.firstBlockMs = nowMs;
  if (chunk.diffusion?.edits) {
    const { block, step, offset, full, edits } = chunk.diffusion;
    run.status = "running";
    run.frames.push({ block, step, offset, full, edits, atMs: nowMs });
  }
  if (choice?.finish_reason) {
    run.finish = choice.finish_detail ?? choice.finish_reason;
    run.status = "done";
  }
}

/** The canvas after the first `count` frames: cells by position, and where it stands. */
export function canvasAt(run, count) {
  const canvas = emptyCanvas();
  for (let index = 0; index < count; index++) advance(canvas, run.frames[index]);
  return canvas;
}

export function emptyCanvas() {
  return { cells: new Map(), block: null, step: null, active: null };
}

/** Apply one frame to a canvas in place. */
export function advance(canvas, frame) {
  const commits = frame.step === null;
  if (frame.full) {
    // A full frame says all there is from its offset on; what a dead worker had guessed there is void.
    for (const [position, cell] of canvas.cells) {
      if (position >= frame.offset && cell.state !== "committed") {
        if (!commits) canvas.cells.delete(position);
        else if (!frame.edits.some(([at]) => at === position)) canvas.cells.delete(position);
      }
    }
  }
  for (const [position, token, text, state, confidence] of frame.edits) {
    const before = canvas.cells.get(position);
    const known = before?.token === token && before.confidence !== null;
    canvas.cells.set(position, {
      token,
      text,
      state,
      block: frame.block,
      // Its last forward both decides and commits: no frame tells the confidence of what it decided.
      confidence: commits ? (known ? before.confidence : null) : confidence || null,
      step: commits ? (known ? before.step : null) : frame.step,
      revised: state === "revised" || (before?.revised ?? false),
    });
  }
  canvas.block = frame.block;
  canvas.step = frame.step;
  canvas.active = commits ? null : frame.block;
}

/** Tokens that each frame has added to the canvas. */
export function gains(run) {
  const canvas = emptyCanvas();
  let before = 0;
  return run.frames.map((frame) => {
    advance(canvas, frame);
    const decided = decidedOf(canvas);
    const gain = Math.max(0, decided - before);
    before = decided;
    return gain;
  });
}

export function decidedOf(canvas) {
  let count = 0;
  for (const cell of canvas.cells.values()) if (cell.token !== null && cell.text !== "") count += 1;
  return count;
}

/** What the run has cost; null where it is not known yet. */
export function costsOf(run) {
  const tokens = run.usage?.completion_tokens ?? null;
  const nfe = run.usage?.nfe || null;
  const seconds = run.totalMs / 1000;
  return {
    steps: run.frames.length ? stepsOf(run) : null,
    nfe,
    tokens,
    tpf: tokens && nfe ? tokens / nfe : null,
    tps: tokens && seconds ? tokens / seconds : null,
    first: run.firstBlockMs,
    time: run.totalMs || null,
  };
}

/** Denoise steps over all blocks: the last one seen of each, and the one that closed it. */
function stepsOf(run) {
  const last = new Map();
  for (const { block, step } of run.frames) last.set(block, step === null ? (last.get(block) ?? 0) + 1 : step);
  return [...last.values()].reduce((sum, step) => sum + step, 0);
}

/** Class of the heat scale, h0 to h5. */
export function heat(confidence) {
  return `h${[0.3, 0.5, 0.7, 0.9, 0.97].filter((edge) => confidence >= edge).length}`;
}
