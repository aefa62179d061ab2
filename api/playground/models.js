// The menu of models. Until somebody has chosen, it shows one that has workers, and follows where they go.
import { Refusal, models } from "./client.js";

export class ModelMenu {
  #models = [];
  #shown = null;
  #chosen = false;

  /** `onCard(card, isOther)` is told the card of the model that is shown, and whether it is not the one before. */
  constructor(select, facts, onCard) {
    this.select = select;
    this.facts = facts;
    this.onCard = onCard;
    /** The server wants another key: asking on would be in vain. */
    this.isRefused = false;
    select.addEventListener("change", () => {
      this.#chosen = true;
      this.#show();
    });
  }

  /** The name that requests ask for. */
  get value() {
    return this.select.value;
  }

  /** Ask which models there are; returns whether these are the first. Throws `Refusal`. */
  async load(key) {
    let found;
    try {
      found = await models(key);
    } catch (error) {
      this.isRefused = error.status === 401 || error.status === 403;
      throw error;
    }
    this.isRefused = false;
    if (!found.length) throw new Refusal({ message: "No worker has announced a model yet." }, 0, null);
    const isFirst = !this.#models.length;
    this.#models = found;
    const names = found.map(({ id }) => id);
    // An open menu must not be drawn anew for nothing.
    if (names.join(" ") !== [...this.select.options].map(({ value }) => value).join(" ")) {
      this.select.replaceChildren(...names.map((name) => new Option(name, name)));
    }
    this.select.value = this.#preselected();
    this.select.disabled = false;
    this.#show();
    return isFirst;
  }

  save() {
    return { model: this.#shown?.id ?? null, chosen: this.#chosen };
  }

  restore({ model, chosen }) {
    this.#shown = model ? { id: model, digest: null } : null;
    this.#chosen = Boolean(chosen);
  }

  /** A choice stays; what nobody has chosen stays while it has workers, or while no other one has any. */
  #preselected() {
    const shown = this.#models.find(({ id }) => id === this.#shown?.id);
    if (!shown) this.#chosen = false;
    if (shown && (this.#chosen || shown.served)) return shown.id;
    return (this.#models.find(({ served }) => served) ?? shown ?? this.#models[0]).id;
  }

  #show() {
    const card = this.#models.find(({ id }) => id === this.select.value);
    const alone = card.served ? "" : " · no worker now: requests wait";
    this.facts.textContent = `${card.family} · blocks of ${card.block_length} · context ${card.max_model_len}${alone}`;
    const before = this.#shown;
    this.#shown = card;
    if (card.id !== before?.id || card.digest !== before.digest) this.onCard(card, card.id !== before?.id);
  }
}
