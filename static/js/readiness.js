/**
 * Whether the model is loaded, asked of `/readyz` until it is.
 *
 * Owns the asking: every second while it loads, more slowly while nobody answers, not at all once it is ready; `check`
 * starts over (after a reconnect the server may be a new one).
 */

import { readiness } from "./api.js";

const WHILE_LOADING = 1_000; // milliseconds
const WHILE_SILENT = 3_000;

export class Readiness {
  #timer = null;
  #asking = false;

  /** `onReady()` each time the model is found ready. */
  constructor(store, onReady) {
    this.store = store;
    this.onReady = onReady;
    store.on("model", () => store.model.status === "loading" && !this.#timer && this.#later(WHILE_LOADING));
  }

  async check() {
    if (this.#asking) return;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#asking = true;
    let model;
    try {
      model = await readiness();
    } catch {
      model = null; // the connection's own banner says that nobody answers
    } finally {
      this.#asking = false;
    }
    if (model?.status !== "ready") this.#later(model ? WHILE_LOADING : WHILE_SILENT);
    if (!model) return;
    this.store.model = model;
    this.store.emit("model");
    if (model.status === "ready") this.onReady();
  }

  #later(wait) {
    this.#timer = setTimeout(() => this.check(), wait);
  }
}
