/** The messages of the open conversation: one view each, drawn at most once a frame, newest in view. */

import { Announcer } from "./announcer.js";
import { copyFrom } from "./clipboard.js";
import { MessageView } from "./message.js";
import { Follower } from "./scroll.js";

const SUGGESTIONS = [
  "Explain how a rainbow forms, in three sentences.",
  "Write a short poem about the sea at night.",
  "Give me five ideas for a rainy afternoon.",
  "Write a Python function that reverses a list.",
];

export class Transcript {
  #views = new Map(); // message -> MessageView
  #stale = new Set(); // messages to draw in the next frame
  #frame = null;
  #conversation = null; // the one drawn

  constructor(store, chat, composer) {
    Object.assign(this, { store, chat, composer });
    this.scroller = document.getElementById("transcript");
    this.list = document.getElementById("messages");
    this.reading = document.getElementById("reading");
    this.welcome = document.getElementById("welcome");
    this.latest = document.getElementById("latest");
    this.follower = new Follower(this.scroller, () => (this.latest.hidden = this.follower.following));
    this.announcer = new Announcer(document.getElementById("live"));
    this.seen = new IntersectionObserver((entries) => this.#onSeen(entries), { root: this.scroller });
    this.actions = {
      retry: (message) => chat.retry(store.open, message),
      edit: (message) => composer.put(chat.withdraw(store.open, message)),
      askAgain: (message) => chat.askAgain(store.open, message),
    };
    this.latest.addEventListener("click", () => this.#toLatest());
    this.list.addEventListener("click", (event) => this.#onClick(event));
    store.on("open", () => this.#onOpen());
    store.on("messages", (conversation) => conversation === store.open && this.#drawAll());
    store.on("message", (message) => this.#draw([message]));
    store.on("connection", () => this.#drawAll());
    store.on("model", () => this.#drawAll());
    this.#suggest();
  }

  /** The person sent something: whatever they were reading, they now want to see the answer. */
  follow() {
    this.follower.toEnd();
  }

  #onOpen() {
    if (this.store.open !== this.#conversation || !this.store.open) {
      this.#conversation = this.store.open;
      this.#views.clear();
      this.seen.disconnect();
      this.list.replaceChildren();
    }
    this.#drawAll();
    this.follower.toEnd();
  }

  #drawAll() {
    this.#draw(this.store.open?.messages ?? []);
  }

  /** Plan to draw these messages with the next frame, and whatever else has changed. */
  #draw(messages) {
    for (const message of messages) this.#stale.add(message);
    // A hidden tab gets no frames; the text is kept and drawn when it shows again.
    this.#frame ??= requestAnimationFrame(() => this.#onFrame());
  }

  #onFrame() {
    this.#frame = null;
    const { open } = this.store;
    this.welcome.hidden = this.store.openId !== null;
    this.#arrange(open?.messages ?? []);
    const state = { online: this.store.connection.state === "open", ready: this.store.model.status === "ready" };
    for (const message of this.#stale) this.#views.get(message)?.update(state);
    for (const message of this.#stale) {
      if (message.role !== "assistant" || !this.#views.has(message)) continue;
      if (message === open.messages.at(-1)) this.announcer.hear(message);
      if (message.status !== "in_progress" && !message.usage) this.seen.observe(this.#views.get(message).element);
    }
    this.#stale.clear();
    this.#showReading(open);
    this.follower.settle();
  }

  /** One view for each message, in order; views of messages that are gone go too. */
  #arrange(messages) {
    for (const [message, view] of this.#views) {
      if (messages.includes(message)) continue;
      view.element.remove();
      this.#views.delete(message);
    }
    messages.forEach((message, i) => {
      let view = this.#views.get(message);
      if (!view) {
        view = new MessageView(message, this.actions);
        this.#views.set(message, view);
        this.#stale.add(message);
      }
      const place = this.list.children[i];
      if (place !== view.element) this.list.insertBefore(view.element, place ?? null);
    });
  }

  /** A line in place of messages that are not here yet. */
  #showReading(open) {
    const unread = open && open.state !== "read" && !open.messages.length;
    if (!unread) return this.reading.replaceChildren();
    if (open.state !== "failed") return this.reading.replaceChildren("Reading the conversation…");
    this.reading.replaceChildren(`This conversation could not be read: ${open.error} `, this.#retryButton(open));
  }

  #retryButton(conversation) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    button.addEventListener("click", () => this.chat.library.refresh(conversation));
    return button;
  }

  #onSeen(entries) {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      this.seen.unobserve(target);
      const view = [...this.#views.values()].find(({ element }) => element === target);
      if (view) this.chat.loadDetails(view.message);
    }
  }

  #onClick(event) {
    const button = event.target.closest(".copy-code");
    if (button) copyFrom(button, button.closest(".code-box").querySelector("code").textContent);
  }

  #toLatest() {
    this.follower.toEnd();
    this.composer.focus();
  }

  #suggest() {
    const list = document.getElementById("suggestions");
    for (const text of SUGGESTIONS) {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => this.composer.submit(text));
      item.append(button);
      list.append(item);
    }
  }
}
