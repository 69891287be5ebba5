/**
 * What the page knows, in one place, and who wants to hear of changes.
 *
 * Topics: "list" (the conversations or their order), "open" (another conversation is shown), "messages" (a conversation's
 * messages came or went), "message" (one changed; sent with it), "connection", "model", "notice".
 */

export class Store {
  /** @type {Map<string, object>} conversations by id; see `conversationFrom` */
  conversations = new Map();
  openId = null; // null: a chat that has no conversation yet
  listState = "loading"; // or "ready", "failed"
  listError = null;
  listMore = null; // the id to ask for more after, or null
  connection = { state: "idle", retryAt: 0, everOpen: false };
  model = { status: "unknown" };
  notice = null; // {message, retry?}: something that concerns no single message
  #listeners = new Map();

  on(topic, listener) {
    if (!this.#listeners.has(topic)) this.#listeners.set(topic, []);
    this.#listeners.get(topic).push(listener);
  }

  emit(topic, detail) {
    for (const listener of this.#listeners.get(topic) ?? []) listener(detail);
  }

  get open() {
    return this.conversations.get(this.openId) ?? null;
  }

  /** The conversation of this id; a new, unread one when it was not known. */
  conversation(id) {
    if (!this.conversations.has(id)) this.conversations.set(id, emptyConversation(id));
    return this.conversations.get(id);
  }

  /** Let these, in this order, be the newest of those with equal times: the server's times are whole seconds. */
  placeFirst(conversations) {
    this.conversations = new Map([...conversations.map((each) => [each.id, each]), ...this.conversations]);
  }

  /** Newest first. */
  sorted() {
    return [...this.conversations.values()].filter((each) => each.listed).sort((a, b) => b.updatedAt - a.updatedAt);
  }
}

function emptyConversation(id) {
  return {
    id,
    title: "",
    createdAt: 0, // seconds since the epoch
    updatedAt: 0,
    listed: false, // the server has told of it
    running: new Set(), // ids of responses in progress
    unseen: false, // a reply ended while another conversation was open
    messages: [],
    state: "unread", // or "reading", "read", "failed", "gone"
    error: null,
    itemsAt: 0, // `updatedAt` when its items were last read
  };
}

/** The reply being written in a conversation, or undefined. */
export const runningReply = (conversation) =>
  conversation?.messages.findLast((each) => each.role === "assistant" && each.status === "in_progress");

/** The message a conversation has not yet had acknowledged, or undefined. */
export const pendingMessage = (conversation) =>
  conversation?.messages.findLast((each) => each.role === "user" && (each.status === "waiting" || each.status === "sending"));
