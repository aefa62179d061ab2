// One column of settings.
import { optionsOf } from "./request.js";

const HINTS = {
  "": "What the model was measured with.",
  threshold: "Accept every position at least this sure, and always the best one.",
  low_confidence_static: "Accept an even share of the block in each step, the surest first.",
  low_confidence_dynamic: "All that are sure enough, and at least the step's share.",
  sequential: "From left to right, an even share in each step.",
  random: "An even share in each step, in random order.",
  factor: "The surest, as many as stay above a limit that falls with their number.",
  threshold_quota: "An even share in each step, and of it those that are sure enough; the rest is carried over.",
  adaptive_parallel: "The surest, as many as the steps that are left ask for, up to a limit.",
  maskgit_plus: "A share of what is left in each step, the surest first.",
  topk_margin: "A share of what is left, first where the best token leads the second by most.",
  entropy: "A share of what is left, lowest entropy first.",
  multi_block: "Several blocks at once: all that is sure in each, and the next block begins before the last one ends.",
  streaming_window: "A window that moves with the text (WeDLM): low entropy first, the farther away the lower.",
  linear_speculation: "Diffusion drafts, causal decoding checks (Nemotron): the tokens of causal decoding.",
  entropy_bounded: "Accept by rising entropy while its sum stays below the bound.",
};
const STRATEGY_OPTIONS = [
  "threshold", "steps", "bound", "factor", "max_parallel", "tau_acc", "tau_add", "tau_semi", "max_blocks",
  "position_penalty",
];

export class Knobs {
  constructor(fieldset, side) {
    this.fieldset = fieldset;
    this.side = side;
    this.model = null;
    fieldset.append(document.getElementById("knobs").content.cloneNode(true));
    this.inputs = new Map([...fieldset.querySelectorAll("[data-knob]")].map((input) => [input.dataset.knob, input]));
    fieldset.addEventListener("input", () => this.refresh());
    this.refresh();
  }

  /** Take limits and defaults from a model's card. */
  suit(model) {
    this.model = model;
    const limit = (name, value) => (this.inputs.get(name).max = value);
    limit("max_tokens", Math.min(1024, model.max_model_len - 1));
    limit("block_length", Math.min(4096, Math.max(64, model.block_length)));
    this.inputs.get("block_length").disabled = model.fixed_block_length;
    this.inputs.get("block_length").value = model.block_length;
    this.inputs.get("temperature").value = model.temperature;
    this.inputs.get("threshold").value = model.decoding.threshold ?? 0.9;
    this.refresh();
  }

  refresh() {
    const strategy = this.inputs.get("strategy").value;
    const effective = strategy || this.model?.decoding.strategy;
    this.inputs.get("steps").max = this.inputs.get("block_length").value;
    for (const name of STRATEGY_OPTIONS) {
      this.#label(name).hidden = strategy === "" || !optionsOf(effective).includes(name);
    }
    this.fieldset.querySelector("[data-hint]").textContent = HINTS[strategy];
    for (const [name, input] of this.inputs) {
      const value = this.#label(name)?.querySelector(".value");
      if (value) value.textContent = input.value;
    }
  }

  /** What is set, as fields of a request. */
  values() {
    const values = {};
    for (const [name, input] of this.inputs) {
      if (input.value === "" || input.disabled || this.#label(name)?.hidden) continue;
      values[name] = input.type === "text" || name === "strategy" ? input.value : Number(input.value);
    }
    if (values.top_p === 1) delete values.top_p;
    if (values.block_length === this.model?.block_length) delete values.block_length;
    return values;
  }

  save() {
    return Object.fromEntries([...this.inputs].map(([name, input]) => [name, input.value]));
  }

  restore(saved) {
    for (const [name, value] of Object.entries(saved ?? {})) {
      const input = this.inputs.get(name);
      if (input) input.value = value;
    }
    this.refresh();
  }

  /** Report the first field whose value cannot be sent. */
  check() {
    for (const input of this.inputs.values()) if (!input.reportValidity()) return false;
    return true;
  }

  #label(name) {
    return this.fieldset.querySelector(`[data-for=${name}]`);
  }
}
