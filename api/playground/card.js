// One run on the screen: canvas, costs, timeline.
import { canvasAt, costsOf, gains, heat } from "./canvas.js";

const SVG = "http://www.w3.org/2000/svg";
const REDRAW_MS = 40;

export class Card {
  constructor(run, onCopy) {
    const template = document.getElementById("run-card");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.run = run;
    this.shown = 0;
    this.follows = true;
    this.chosen = null;
    this.timer = null;
    this.drawnMs = 0;
    this.pending = null;
    this.find = (selector) => this.element.querySelector(selector);
    this.canvas = this.find(".canvas");
    this.scrub = this.find(".scrub");
    this.element.dataset.label = run.label;
    this.find("h2").textContent = run.label;
    this.find(".asked").textContent = run.asked;
    this.canvas.setAttribute("aria-label", `Canvas of ${run.label}; arrow keys choose a token`);
    this.scrub.setAttribute("aria-label", `Step of ${run.label}`);
    this.find(".speed").setAttribute("aria-label", `Speed of the replay of ${run.label}`);
    this.find(".copy").addEventListener("click", onCopy);
    this.find(".copy").setAttribute("aria-label", `Copy ${run.label} as code`);
    this.find(".back").addEventListener("click", () => this.seek(this.shown - 1));
    this.find(".on").addEventListener("click", () => this.seek(this.shown + 1));
    this.find(".play").addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.scrub.addEventListener("input", () => this.seek(Number(this.scrub.value)));
    this.find(".spark").addEventListener("click", (event) => this.#seekTo(event));
    this.canvas.addEventListener("pointerover", (event) => this.#inspect(positionOf(event.target)));
    this.canvas.addEventListener("keydown", (event) => this.#walk(event));
    this.update(true);
  }

  /** Draw what the run has become; while it runs, not more often than the eye needs. */
  update(now = false) {
    const time = performance.now();
    if (!now && time - this.drawnMs < REDRAW_MS) {
      // The stream may pause here: what came last must not wait for what comes next.
      this.pending ??= setTimeout(() => this.update(true), REDRAW_MS);
      return;
    }
    clearTimeout(this.pending);
    this.pending = null;
    this.drawnMs = time;
    if (this.follows) this.shown = this.run.frames.length;
    this.#draw();
    this.#drawCosts();
    this.#drawSpark();
  }

  /** Show the canvas as it was after `count` frames. */
  seek(count) {
    this.pause();
    this.#go(count);
  }

  play() {
    const frames = this.run.frames;
    if (this.shown >= frames.length) this.#go(0);
    this.find(".play").textContent = "Pause";
    const tick = () => {
      this.#go(this.shown + 1);
      if (this.shown >= frames.length) return this.pause();
      const gap = frames[this.shown].atMs - frames[this.shown - 1].atMs;
      this.timer = setTimeout(tick, Math.min(600, Math.max(30, gap)) / Number(this.find(".speed").value));
    };
    this.timer = setTimeout(tick, 0);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.find(".play").textContent = "Replay";
  }

  #go(count) {
    const length = this.run.frames.length;
    this.shown = Math.min(length, Math.max(0, count));
    this.follows = this.shown === length;
    this.#draw();
  }

  #draw() {
    const { run, shown } = this;
    const canvas = canvasAt(run, shown);
    const ends = shown === run.frames.length && run.status !== "running" && run.status !== "waiting";
    const blocks = new Map();
    for (const position of [...canvas.cells.keys()].sort((a, b) => a - b)) {
      const cell = canvas.cells.get(position);
      if (!blocks.has(cell.block)) blocks.set(cell.block, []);
      blocks.get(cell.block).push([position, cell]);
    }
    const nodes = [];
    for (const [block, cells] of blocks) {
      const frame = document.createElement("span");
      frame.className = block === canvas.active && !ends ? "block active" : "block";
      frame.dataset.block = block;
      for (const [position, cell] of cells) frame.append(cellNode(position, cell, position === this.chosen));
      nodes.push(frame);
    }
    if (!nodes.length && run.text) nodes.push(run.text);
    this.canvas.replaceChildren(...nodes);
    this.canvas.classList.toggle("empty", nodes.length === 0);
    this.canvas.dataset.empty = run.status === "waiting" ? "waiting for a worker…" : "nothing yet";
    this.cells = canvas.cells;
    if (this.follows && run.status === "running") this.canvas.scrollTop = this.canvas.scrollHeight;
    this.scrub.max = run.frames.length;
    this.scrub.value = shown;
    const where = describe(canvas, shown, run.frames.length);
    this.find(".where").textContent = where;
    this.scrub.setAttribute("aria-valuetext", where);
    for (const name of [".scrub", ".play", ".back", ".on"]) this.find(name).disabled = run.frames.length === 0;
    this.find(".spark").style.setProperty("--shown", run.frames.length ? shown / run.frames.length : 0);
    this.#inspect(this.chosen);
  }

  #drawCosts() {
    const costs = costsOf(this.run);
    for (const [name, value] of Object.entries(costs)) this.find(`[data-cost=${name}]`).textContent = written(name, value);
    const state = this.find(".state");
    state.textContent = this.run.note || words(this.run);
    state.className = `state ${this.run.status}`;
    this.element.classList.toggle("running", this.run.status === "running" || this.run.status === "waiting");
  }

  #drawSpark() {
    const spark = this.find(".spark");
    const values = gains(this.run);
    const most = Math.max(1, ...values);
    spark.setAttribute("viewBox", `0 0 ${Math.max(1, values.length)} 1`);
    const bars = values.map((value, index) => {
      const bar = document.createElementNS(SVG, "rect");
      const height = Math.max(0.04, value / most);
      for (const [name, number] of Object.entries({ x: index + 0.1, y: 1 - height, width: 0.8, height })) {
        bar.setAttribute(name, number);
      }
      bar.setAttribute("class", this.run.frames[index].block % 2 ? "odd" : "even");
      return bar;
    });
    spark.replaceChildren(...bars);
  }

  #seekTo(event) {
    const box = event.currentTarget.getBoundingClientRect();
    this.seek(Math.ceil(((event.clientX - box.left) / box.width) * this.run.frames.length));
  }

  #walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8, Home: -Infinity, End: Infinity }[event.key];
    const positions = [...(this.cells?.keys() ?? [])].sort((a, b) => a - b);
    if (step === undefined || !positions.length) return;
    event.preventDefault();
    const at = this.chosen === null ? -Math.sign(step) : positions.indexOf(this.chosen);
    this.chosen = positions[Math.min(positions.length - 1, Math.max(0, at + step))];
    this.#draw();
  }

  #inspect(position) {
    if (position === null || position === undefined) return;
    const cell = this.cells?.get(position);
    if (cell) this.find(".inspector").textContent = about(position, cell);
  }
}

function cellNode(position, cell, chosen) {
  const node = document.createElement("span");
  const decided = cell.token !== null;
  const kinds = ["cell"];
  if (!decided) kinds.push("mask");
  else {
    kinds.push(cell.state === "committed" ? "final" : "guess");
    if (cell.confidence !== null) kinds.push(heat(cell.confidence));
    if (cell.revised) kinds.push("revised");
    if (cell.text === "") kinds.push("filler");
  }
  if (chosen) kinds.push("chosen");
  node.className = kinds.join(" ");
  node.dataset.position = position;
  node.textContent = decided ? cell.text : "";
  return node;
}

function positionOf(node) {
  const position = node.dataset?.position;
  return position === undefined ? null : Number(position);
}

function about(position, cell) {
  const parts = [`Token ${position + 1}, block ${cell.block + 1}`];
  if (cell.token === null) return `${parts[0]}: masked`;
  parts.push(cell.text === "" ? "filler or end of the answer" : JSON.stringify(cell.text), `id ${cell.token}`);
  if (cell.step !== null) parts.push(`accepted at step ${cell.step}`);
  else parts.push("accepted in the forward that closed its block");
  if (cell.confidence !== null) parts.push(`confidence ${cell.confidence.toFixed(3)}`);
  if (cell.revised) parts.push("revised");
  return parts.join(" · ");
}

function describe(canvas, shown, length) {
  if (!length) return "";
  if (canvas.block === null) return `start of ${length} frames`;
  const what = canvas.step === null ? "committed" : `step ${canvas.step}`;
  return `block ${canvas.block + 1}, ${what} · frame ${shown} of ${length}`;
}

const ENDS = {
  stop_token: "finished",
  stop_string: "met a stop string",
  max_tokens: "reached the most tokens",
  max_nfe: "reached the most forwards",
  max_model_len: "filled the context",
  deadline: "ran out of time",
};

function words(run) {
  if (run.status === "done") return ENDS[run.finish] ?? run.finish;
  return { waiting: "waiting", running: "denoising", stopping: "stopping", stopped: "stopped", failed: "failed" }[run.status] ?? run.status;
}

export function written(name, value) {
  if (value === null) return "–";
  switch (name) {
    case "first":
    case "time":
      return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
    case "tpf":
      return value.toFixed(2);
    case "tps":
      return value < 10 ? value.toFixed(1) : String(Math.round(value));
    default:
      return String(value);
  }
}
