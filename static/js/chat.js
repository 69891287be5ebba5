/**
 * Talking with the model: send, stop, retry, and what a message and its reply need to survive a lost connection, a reload,
 * a restart of the server.
 *
 * Owns the roads on which events reach replies: a reply asked for over this socket gets them there, on the lane its message
 * was sent on; any other running reply (after a reload, a reconnect, from another tab) is followed by a replay over HTTP.
 * Draws nothing: it changes the store and says so.
 */

import * as api from "./api.js";
import { newId } from "./ids.js";
import { Library } from "./library.js";
import { applyEvent, applyResponse, isTerminal, newReply } from "./reply.js";
import { Socket } from "./socket.js";
import { key, settings, unsent } from "./storage.js";
import { pendingMessage, runningReply } from "./store.js";

const LANES = Array.from({ length: 16 }, (_, n) => `lane-${n}`); // as many as a connection may have active
const FOLLOW_ATTEMPTS = 6;
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

export class Chat {
  #lanes = new Map(); // lane -> {conversation, message, reply}: what was sent on it and has not ended
  #outbox = []; // {conversation, message}: not acknowledged yet
  #tabs = new BroadcastChannel("hocket");
  #creating = false;

  constructor(store) {
    this.store = store;
    this.socket = new Socket({ onState: () => this.#onSocketState(), onEvent: (event) => this.#onEvent(event) });
    this.library = new Library(store, {
      onFault: (fault) => this.#refusedKey(fault),
      onRead: (conversation) => this.#onRead(conversation),
      onForget: (conversation) => this.#onForget(conversation),
    });
    this.#tabs.onmessage = ({ data }) => this.#onOtherTab(data);
  }

  // --- sending -----------------------------------------------------------------------------------------------------

  /** Send a message in the open conversation, or start one with it. False when it could not even be put in a conversation. */
  async send(text) {
    const { store } = this;
    if (this.#creating) return false;
    if (store.openId === null) {
      this.#creating = true;
      try {
        await this.library.create();
      } catch (fault) {
        if (!this.#refusedKey(fault)) this.#say(`The conversation could not be started: ${fault.message}`);
        return false;
      } finally {
        this.#creating = false;
      }
    }
    const conversation = store.open;
    const message = { role: "user", id: null, responseId: null, text, clientId: newId(), status: "waiting", error: null };
    conversation.title ||= text.trim().split("\n")[0].slice(0, 80);
    conversation.messages.push(message);
    this.#post(conversation, message);
    store.emit("list");
    return true;
  }

  /** Send a refused message again, under the same name: what did arrive is not run twice. */
  retry(conversation, message) {
    message.status = "waiting";
    message.error = null;
    this.#post(conversation, message);
  }

  /** Ask once more what led to a reply that failed or broke off. */
  askAgain(conversation, reply) {
    const before = conversation.messages.slice(0, conversation.messages.indexOf(reply));
    const question = before.findLast((each) => each.role === "user");
    if (question) this.send(question.text);
  }

  /** Take a message back that was never accepted. Returns its text. */
  withdraw(conversation, message) {
    conversation.messages = conversation.messages.filter((each) => each !== message);
    this.#outbox = this.#outbox.filter((each) => each.message !== message);
    unsent.set(conversation.id, null);
    this.store.emit("messages", conversation);
    return message.text;
  }

  #post(conversation, message) {
    unsent.set(conversation.id, { clientId: message.clientId, text: message.text });
    this.#outbox.push({ conversation, message });
    this.store.emit("messages", conversation);
    this.flush();
  }

  /** A conversation was read: send what was left, follow what runs, stop what was to be stopped. */
  #onRead(conversation) {
    this.#recoverUnsent(conversation);
    for (const reply of conversation.messages) {
      if (reply.role !== "assistant" || reply.status !== "in_progress") continue;
      this.#follow(conversation, reply);
      if (reply.stopping) this.#cancel(reply);
    }
  }

  #onForget(conversation) {
    for (const { road } of conversation.messages) if (road instanceof AbortController) road.abort();
    this.#outbox = this.#outbox.filter((each) => each.conversation !== conversation);
    unsent.set(conversation.id, null);
    if (conversation.state === "deleted") this.#tabs.postMessage({ deleted: conversation.id });
  }

  /** A message left unacknowledged by a page that was closed or reloaded. */
  #recoverUnsent(conversation) {
    const left = unsent.get(conversation.id);
    if (!left || conversation.messages.some((each) => each.clientId === left.clientId)) return;
    const message = { role: "user", id: null, responseId: null, ...left, status: "waiting", error: null };
    conversation.messages.push(message);
    this.#post(conversation, message);
  }

  /** Send what waits, as far as socket, model and lanes allow. */
  flush() {
    for (const { conversation, message } of this.#outbox) {
      if (message.status !== "waiting") continue;
      const lane = LANES.find((each) => !this.#lanes.has(each));
      if (this.store.model.status !== "ready" || !lane) return;
      const sent = this.socket.send({
        type: "response.create",
        stream_id: lane,
        conversation: conversation.id,
        input: [{ type: "message", role: "user", content: [{ type: "input_text", text: message.text }] }],
        metadata: { client_message_id: message.clientId },
        ...settings.get(),
      });
      if (!sent) return;
      message.status = "sending";
      message.sentAt = performance.now();
      this.#lanes.set(lane, { conversation, message, reply: null });
      this.store.emit("message", message);
    }
  }

  /** Stop the reply being written. Returns the text of a message that was taken back because it had not been sent yet. */
  stop(conversation) {
    const reply = runningReply(conversation);
    const pending = pendingMessage(conversation);
    if (reply) this.#cancel(reply);
    else if (pending && !pending.sentAt) return this.withdraw(conversation, pending);
    else if (pending) pending.stopping = true; // it may have arrived: stop its reply once that has a name
    return null;
  }

  #cancel(reply) {
    reply.stopping = true;
    this.store.emit("message", reply);
    if (this.socket.send({ type: "response.cancel", response_id: reply.responseId })) return;
    api.cancelResponse(reply.responseId).catch(() => {}); // not reached: `refresh` asks again once there is a connection
  }

  // --- events ------------------------------------------------------------------------------------------------------

  #onEvent(event) {
    if (event.type === "error") return this.#onError(event);
    const entry = this.#lanes.get(event.stream_id);
    if (!entry) return;
    if (event.type === "response.created") this.#acknowledge(entry, event.response);
    const { conversation, reply } = entry;
    if (!reply) return;
    if (reply.road === "socket") {
      if (event.sequence_number > reply.seq + 1) {
        reply.road = null;
        this.#follow(conversation, reply); // the lane joined a reply already under way: replay what is missing
      } else this.#apply(conversation, reply, event);
    }
    if (isTerminal(event)) this.#endLane(event.stream_id);
  }

  /** The server has the message: it is no longer this page's to keep. */
  #acknowledge(entry, response) {
    const { conversation, message } = entry;
    this.#outbox = this.#outbox.filter((each) => each.message !== message);
    unsent.set(conversation.id, null);
    message.status = "sent";
    const twin = conversation.messages.find((each) => each !== message && each.role === "user" && each.responseId === response.id);
    if (twin) conversation.messages = conversation.messages.filter((each) => each !== message);
    else message.responseId = response.id;
    let reply = conversation.messages.find((each) => each.role === "assistant" && each.responseId === response.id);
    if (!reply) {
      reply = newReply(response.id);
      reply.askedAt = message.sentAt;
      conversation.messages.splice(conversation.messages.indexOf(message) + 1, 0, reply);
    }
    reply.road ??= "socket";
    entry.reply = reply;
    conversation.updatedAt = Date.now() / 1000;
    conversation.running.add(response.id);
    this.store.emit("messages", conversation);
    this.store.emit("list");
    this.#tabs.postMessage({ changed: conversation.id });
    if (message.stopping) this.#cancel(reply);
  }

  #apply(conversation, reply, event) {
    if (!applyEvent(reply, event)) return;
    if (isTerminal(event)) {
      if (reply.askedAt) reply.took = (performance.now() - reply.askedAt) / 1000;
      reply.road = null;
      conversation.running.delete(reply.responseId);
      conversation.unseen = conversation.id !== this.store.openId;
      this.store.emit("list");
      this.store.emit("messages", conversation);
      this.#tabs.postMessage({ changed: conversation.id });
    }
    this.store.emit("message", reply);
  }

  #endLane(lane) {
    this.#lanes.delete(lane);
    this.flush();
  }

  #onError({ status, error, stream_id: lane }) {
    const entry = this.#lanes.get(lane);
    if (status === 401 || error.code === "websocket_connection_limit_reached") return; // the socket closes and says the rest
    if (!entry || entry.reply) return this.#say(error.message);
    const { conversation, message } = entry;
    if (error.code === "model_loading") {
      message.status = "waiting";
      this.store.model = { status: "loading" };
      this.store.emit("model");
    } else {
      message.status = "refused";
      message.error = error.message;
      this.#outbox = this.#outbox.filter((each) => each.message !== message);
    }
    this.store.emit("messages", conversation);
    this.#endLane(lane);
  }

  // --- losing and finding the thread -------------------------------------------------------------------------------

  #onSocketState() {
    const { store, socket } = this;
    const { state, everOpen } = store.connection;
    store.connection = { state: socket.state, retryAt: socket.retryAt, everOpen: everOpen || socket.state === "open" };
    if (state === "open") this.#detach();
    store.emit("connection");
    if (socket.state === "open") this.#resume(everOpen);
  }

  /** The socket is gone: what it had not acknowledged is to be sent again, what it was bringing is to be followed. */
  #detach() {
    for (const { message, reply } of this.#lanes.values()) {
      if (message.status === "sending") message.status = "waiting";
      if (reply?.road === "socket") reply.road = null;
    }
    this.#lanes.clear();
    if (this.store.open) this.store.emit("messages", this.store.open);
  }

  async #resume(again) {
    const { store } = this;
    this.flush();
    if (again || store.listState === "failed") await this.library.loadList();
    if (store.open) await this.library.refresh(store.open, { thoroughly: again });
  }

  /** Follow a running reply over HTTP to its end, through broken connections. Returns when it ended or the socket is down too. */
  async #follow(conversation, reply) {
    if (reply.road) return;
    const road = new AbortController();
    reply.road = road;
    let failure = null;
    for (let attempt = 0; attempt < FOLLOW_ATTEMPTS && this.socket.state === "open"; attempt++) {
      if (attempt) await pause(250 * 2 ** attempt);
      const before = reply.seq;
      try {
        for await (const event of api.responseEvents(reply.responseId, reply.seq, road.signal)) this.#apply(conversation, reply, event);
        if (reply.status !== "in_progress") return;
      } catch (fault) {
        if (road.signal.aborted || this.#refusedKey(fault)) break;
        failure = fault;
        if (fault.status >= 400 && fault.status < 500) break;
      }
      if (reply.seq > before) attempt = 0;
    }
    reply.road = null;
    if (road.signal.aborted || this.socket.state !== "open") return; // `#resume` follows it once there is a connection
    reply.status = "failed";
    reply.error = failure?.message ?? "The reply broke off.";
    conversation.running.delete(reply.responseId);
    this.store.emit("messages", conversation);
    this.store.emit("list");
  }

  /** Fetch what the list of items does not say of an ended reply: its numbers, and why it is incomplete. */
  async loadDetails(reply) {
    if (reply.status === "in_progress" || reply.usage || reply.asked || !reply.responseId) return;
    reply.asked = true;
    try {
      applyResponse(reply, await api.getResponse(reply.responseId));
    } catch (fault) {
      reply.asked = fault.status !== 0; // not reached: ask again when it is next in view
      return;
    }
    this.store.emit("message", reply);
  }

  /** Whatever was missed while this tab slept: a dead connection shows here, since a request fails where a socket stays silent. */
  async wake() {
    if (this.socket.state === "waiting") return this.socket.connect();
    if (this.socket.state !== "open") return;
    await this.library.loadList();
    if (this.store.open) await this.library.refresh(this.store.open);
  }

  #onOtherTab({ changed, deleted }) {
    const conversation = this.store.conversations.get(changed ?? deleted);
    if (deleted && conversation) this.library.forget(conversation, "gone");
    if (!changed) return;
    if (conversation && changed === this.store.openId) this.library.refresh(conversation, { thoroughly: true });
    else this.library.loadList();
  }

  // --- the key -----------------------------------------------------------------------------------------------------

  /** Whether this fault is a missing or expired key; then everything stops until `unlock`. */
  #refusedKey(fault) {
    if (fault.status !== 401) return false;
    if (this.socket.state !== "refused") this.socket.refuse();
    return true;
  }

  /** Go on with a key. */
  async unlock(secret) {
    key.set(secret);
    this.socket.connect();
  }

  #say(message) {
    this.store.notice = { message };
    this.store.emit("notice");
  }
}
