/**
 * The conversations the server keeps: list, read, make, delete them, and bring the store up to date with what was read.
 *
 * Keeps the objects of messages already on screen: text that is shown only grows, and events in flight go on changing them.
 * Knows nothing of sockets; whoever follows running replies is told when a conversation was read.
 */

import * as api from "./api.js";
import { growTo, newReply, textOf } from "./reply.js";
import { drafts } from "./storage.js";

export class Library {
  /**
   * `onFault(fault)` says whether a fault was dealt with (a refused key), `onRead(conversation)` and
   * `onForget(conversation)` follow a successful reading and the end of a conversation.
   */
  constructor(store, { onFault, onRead, onForget }) {
    Object.assign(this, { store, onFault, onRead, onForget });
  }

  /** Read the newest conversations, or (`more`) the next page of them. */
  async loadList({ more = false } = {}) {
    const { store } = this;
    try {
      const page = await api.listConversations(more ? store.listMore : null);
      const conversations = page.data.map((record) => this.#applyRecord(record));
      if (!more) {
        store.placeFirst(conversations);
        this.#dropMissing(page);
      }
      if (more || store.listState !== "ready") store.listMore = page.has_more ? page.last_id : null;
      store.listState = "ready";
    } catch (fault) {
      if (this.onFault(fault)) return;
      if (store.listState !== "ready") store.listState = "failed";
      store.listError = fault.message;
    }
    store.emit("list");
  }

  /** Drop what was deleted elsewhere: what the first page should have and has not. */
  #dropMissing({ data, has_more: hasMore }) {
    const present = new Set(data.map(({ id }) => id));
    const reaches = hasMore ? data.at(-1).updated_at : 0;
    for (const { id, listed, updatedAt } of this.store.conversations.values()) {
      if (listed && updatedAt > reaches && !present.has(id) && id !== this.store.openId) this.store.conversations.delete(id);
    }
  }

  /** Make a conversation on the server and show it. Throws an ApiError when there is none. */
  async create() {
    const conversation = this.#applyRecord({ updated_at: Date.now() / 1000, running: [], ...(await api.createConversation()) });
    conversation.state = "read";
    this.store.placeFirst([conversation]);
    this.store.openId = conversation.id;
    this.store.emit("open");
  }

  /** Show a conversation (null: a new chat), and bring it up to date. */
  async open(id) {
    const { store } = this;
    store.openId = id;
    if (id !== null) store.conversation(id).unseen = false;
    store.emit("open");
    store.emit("list");
    if (id !== null) await this.refresh(store.conversation(id));
  }

  /** Read what the server has of a conversation, its items too if they may have changed (or `thoroughly`, in any case). */
  async refresh(conversation, { thoroughly = false } = {}) {
    conversation.stale = true;
    if (thoroughly) conversation.itemsAt = null;
    conversation.refreshing ??= this.#refreshUntilFresh(conversation).finally(() => (conversation.refreshing = null));
    return conversation.refreshing;
  }

  async #refreshUntilFresh(conversation) {
    while (conversation.stale) {
      conversation.stale = false;
      await this.#refresh(conversation);
    }
  }

  async #refresh(conversation) {
    const { store } = this;
    if (conversation.state !== "read") {
      conversation.state = "reading";
      store.emit("messages", conversation);
    }
    try {
      this.#applyRecord(await api.getConversation(conversation.id));
      const lagging = conversation.messages.some((each) => each.status === "in_progress" && !each.road);
      if (conversation.state !== "read" || conversation.itemsAt !== conversation.updatedAt || lagging) {
        const { updatedAt } = conversation;
        this.#mergeItems(conversation, await api.listItems(conversation.id));
        conversation.itemsAt = updatedAt;
      }
      conversation.state = "read";
      conversation.error = null;
    } catch (fault) {
      if (this.onFault(fault)) conversation.state = "unread";
      else if (fault.status === 404) this.forget(conversation, "gone");
      else if (conversation.state !== "read") [conversation.state, conversation.error] = ["failed", fault.message];
      return;
    } finally {
      store.emit("list");
      store.emit("messages", conversation);
    }
    this.onRead(conversation);
  }

  #applyRecord(record) {
    const conversation = this.store.conversation(record.id);
    conversation.title = record.title || conversation.title;
    conversation.createdAt = record.created_at;
    conversation.updatedAt = record.updated_at ?? record.created_at;
    const replies = conversation.messages.filter((each) => each.role === "assistant");
    const over = new Set(replies.filter((each) => each.status !== "in_progress").map((each) => each.responseId));
    conversation.running = new Set((record.running ?? []).filter((each) => !over.has(each))); // it may be older than what is known
    conversation.listed = true;
    return conversation;
  }

  /** Take over the server's items, keeping the objects of messages already shown (their views hang on them). */
  #mergeItems(conversation, items) {
    const known = conversation.messages;
    const merged = [];
    for (const item of items) {
      if (item.type !== "message" || (item.role !== "user" && item.role !== "assistant")) continue;
      const message = known.find((each) => isOf(each, item)) ?? (item.role === "user" ? sentMessage() : newReply(item.response_id));
      message.id = item.id;
      message.responseId = item.response_id;
      growTo(message, textOf(item));
      if (message.status === "in_progress" && !message.road) message.status = item.status; // what has ended stays ended
      merged.push(message);
    }
    for (const responseId of conversation.running) {
      if (!merged.some((each) => each.role === "assistant" && each.responseId === responseId)) {
        merged.push(known.find((each) => each.role === "assistant" && each.responseId === responseId) ?? newReply(responseId));
      }
    }
    const newer = known.filter((each) => !merged.includes(each)); // sent or acknowledged while the items were on their way
    conversation.messages = [...merged, ...newer];
  }

  /** Delete for good. Throws an ApiError when the server did not. */
  async remove(conversation) {
    try {
      await api.deleteConversation(conversation.id);
    } catch (fault) {
      this.onFault(fault);
      if (fault.status !== 404) throw fault;
    }
    this.forget(conversation, "deleted");
  }

  /** Drop a conversation that is "deleted" (here) or "gone" (elsewhere). */
  forget(conversation, state) {
    conversation.state = state;
    this.store.conversations.delete(conversation.id);
    drafts.set(conversation.id, "");
    this.onForget(conversation);
    if (this.store.openId === conversation.id) {
      if (state === "gone") this.store.notice = { message: "This conversation does not exist, or was deleted." };
      this.store.openId = null;
      this.store.emit("open");
      if (state === "gone") this.store.emit("notice");
    }
    this.store.emit("list");
  }
}

/** Whether a message shown is that item. One that was just sent or begun has no item's id yet, only its response's. */
function isOf({ role, id, responseId }, item) {
  return role === item.role && (id ? id === item.id : responseId !== null && responseId === item.response_id);
}

const sentMessage = () => ({ role: "user", id: null, responseId: null, text: "", status: "sent", error: null });
