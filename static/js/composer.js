/** Where a person writes: the box, its draft per conversation, and the one button that sends or stops. */

import { drafts } from "./storage.js";
import { pendingMessage, runningReply } from "./store.js";

const TALLEST = 220; // pixels

export class Composer {
  #draftId = null; // the conversation whose draft is in the box

  /** `onSend()` after a message was taken. */
  constructor(store, chat, onSend) {
    Object.assign(this, { store, chat, onSend });
    this.form = document.getElementById("composer");
    this.box = document.getElementById("composer-text");
    this.button = document.getElementById("send");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#busy) this.stop();
      else this.submit();
    });
    this.box.addEventListener("input", () => this.#onInput());
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
    store.on("open", () => this.#onOpen());
    for (const topic of ["messages", "message"]) store.on(topic, () => this.#drawButton());
  }

  get #busy() {
    return Boolean(runningReply(this.store.open) ?? pendingMessage(this.store.open));
  }

  focus() {
    this.box.focus();
  }

  /** Put text into the box, before what is being written there. */
  put(text) {
    this.box.value = this.box.value ? `${text}\n${this.box.value}` : text;
    this.#onInput();
    this.focus();
  }

  /** Send what is in the box, or this text. */
  async submit(text = null) {
    const words = text ?? this.box.value;
    if (!words.trim() || this.#busy) return;
    if (text === null) this.#fill("");
    this.focus();
    const taken = await this.chat.send(words);
    if (taken) {
      this.#save();
      this.onSend();
    } else if (text === null) this.put(words);
  }

  /** Stop what is being written here, if anything is. */
  stop() {
    if (!this.#busy) return;
    const back = this.chat.stop(this.store.open);
    if (back) this.put(back);
    this.focus();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return; // 229: composing, in Safari
    event.preventDefault();
    this.submit();
  }

  #onInput() {
    this.#save();
    this.#drawBox();
    this.#drawButton();
  }

  #onOpen() {
    const id = this.store.openId ?? "new";
    if (id !== this.#draftId) {
      const started = this.#draftId === "new" && this.store.open && !this.store.open.messages.length && this.store.open.state === "read";
      this.#draftId = id;
      if (started) drafts.set("new", ""); // the new chat became this conversation: what is in the box stays with it
      else this.box.value = drafts.get(id);
    }
    this.#drawBox();
    this.#drawButton();
  }

  #fill(text) {
    this.box.value = text;
    this.#drawBox();
    this.#drawButton();
  }

  #save() {
    drafts.set(this.#draftId ?? "new", this.box.value);
  }

  #drawBox() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, TALLEST)}px`;
  }

  #drawButton() {
    const busy = this.#busy;
    this.button.classList.toggle("stop", busy);
    this.button.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.button.disabled = !busy && !this.box.value.trim();
  }
}
