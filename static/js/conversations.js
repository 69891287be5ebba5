/** The list of conversations beside the chat, newest first, and opening, deleting and paging it. */

import { ageOf } from "./format.js";

export class Conversations {
  #rows = new Map(); // id -> element

  /** `go(id)` opens a conversation by its address; `confirmDelete(title)` resolves to whether to go on. */
  constructor(store, library, { go, confirmDelete }) {
    Object.assign(this, { store, library, go, confirmDelete });
    this.place = document.getElementById("conversations");
    this.template = document.getElementById("conversation-template").content.firstElementChild;
    this.place.addEventListener("click", (event) => this.#onClick(event));
    store.on("list", () => this.#draw());
    this.#draw();
  }

  #draw() {
    const { store } = this;
    const focused = document.activeElement?.closest?.(".conversation")?.dataset.id;
    const children = [];
    let list = null;
    let heading = null;
    for (const conversation of store.sorted()) {
      const age = ageOf(conversation.updatedAt);
      if (age !== heading) {
        heading = age;
        list = document.createElement("ul");
        const title = document.createElement("h2");
        title.textContent = age;
        title.id = `age-${children.length}`;
        list.setAttribute("aria-labelledby", title.id);
        children.push(title, list);
      }
      list.append(this.#row(conversation));
    }
    for (const id of this.#rows.keys()) if (!store.conversations.has(id)) this.#rows.delete(id);
    if (!children.length) children.push(this.#line(store.listState === "loading" ? "Loading…" : "No conversations yet."));
    if (store.listState === "failed") {
      children.length = 0;
      children.push(this.#line(`The list could not be read: ${store.listError}`), this.#button("Try again", "retry"));
    } else if (store.listMore) children.push(this.#button("Show more", "more"));
    this.place.replaceChildren(...children);
    if (focused) this.#rows.get(focused)?.querySelector("a").focus({ preventScroll: true });
  }

  #row(conversation) {
    const { id, title, running, unseen } = conversation;
    const row = this.#rows.get(id) ?? this.template.cloneNode(true);
    this.#rows.set(id, row);
    const name = title || "New chat";
    const link = row.querySelector("a");
    row.dataset.id = id;
    link.href = `/c/${encodeURIComponent(id)}`;
    link.title = name;
    if (id === this.store.openId) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    row.querySelector(".conversation-title").textContent = name;
    row.querySelector("button").setAttribute("aria-label", `Delete ${name}`);
    const badge = row.querySelector(".badge");
    badge.className = `badge${running.size ? " running" : unseen ? " unseen" : ""}`;
    const words = running.size ? "a reply is being written" : unseen ? "a new reply" : "";
    badge.setAttribute("role", "img");
    badge.setAttribute("aria-label", words);
    badge.hidden = !words;
    return row;
  }

  #line(text) {
    const line = document.createElement("p");
    line.className = "placeholder";
    line.textContent = text;
    return line;
  }

  #button(text, action) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "plain wide";
    button.dataset.action = action;
    button.textContent = text;
    return button;
  }

  #onClick(event) {
    const { action } = event.target.closest("button")?.dataset ?? {};
    if (action) return this.library.loadList({ more: action === "more" });
    const id = event.target.closest(".conversation")?.dataset.id;
    if (!id) return;
    if (event.target.closest("button")) this.#delete(this.store.conversations.get(id));
    else if (event.target.closest("a") && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      this.go(id);
    }
  }

  async #delete(conversation) {
    if (!(await this.confirmDelete(conversation.title || "New chat"))) return;
    try {
      await this.library.remove(conversation);
    } catch (fault) {
      this.store.notice = { message: `The conversation was not deleted: ${fault.message}`, retry: () => this.#delete(conversation) };
      this.store.emit("notice");
    }
  }
}
