/**
 * One WebSocket to `/v1/responses` that comes back by itself.
 *
 * Owns connecting, waiting longer after each failure, and knowing when to stop: a refused key (close code 4401) is final
 * until `connect` is called again. Knows nothing of conversations; what was sent and not answered when a socket ends is
 * the caller's to send again.
 */

import { key } from "./storage.js";

const KEY_REFUSED = 4401;
const FIRST_WAIT = 500; // milliseconds; doubled after each failure
const LONGEST_WAIT = 15_000;
const STEADY_AFTER = 5_000; // a socket that lived this long starts the waiting anew

export class Socket {
  /** "idle", "connecting", "open", "waiting" (until `retryAt`) or "refused" (the key). */
  state = "idle";
  retryAt = 0;
  #socket = null;
  #timer = null;
  #failures = 0;

  /** `onState()` after each change of `state`, `onEvent(event)` for each frame. */
  constructor({ onState, onEvent }) {
    this.onState = onState;
    this.onEvent = onEvent;
  }

  /** Connect now, whatever was planned. A socket already open or opening is kept. */
  connect() {
    if (this.#socket) return;
    clearTimeout(this.#timer);
    const url = new URL("/v1/responses", location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const secret = key.get();
    const socket = new WebSocket(url, secret ? ["hocket", `openai-insecure-api-key.${secret}`] : []);
    this.#socket = socket;
    let openedAt = 0;
    this.#become("connecting");
    socket.onopen = () => {
      openedAt = performance.now();
      this.#become("open");
    };
    socket.onmessage = ({ data }) => this.onEvent(JSON.parse(data));
    socket.onclose = ({ code }) => {
      if (socket !== this.#socket) return;
      this.#socket = null;
      if (code === KEY_REFUSED) return this.#become("refused");
      const steady = openedAt && performance.now() - openedAt > STEADY_AFTER;
      this.#failures = steady ? 1 : this.#failures + 1;
      this.#wait();
    };
  }

  /** Whether the frame was handed to an open socket (not whether it arrived). */
  send(frame) {
    if (this.state !== "open") return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  /** Give up this socket, which may be dead without knowing it, and connect anew. */
  reconnect() {
    this.#drop();
    this.#failures = 0;
    this.connect();
  }

  /** Stop until `connect`: the key was refused elsewhere. */
  refuse() {
    this.#drop();
    this.#become("refused");
  }

  #drop() {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    if (!socket) return;
    socket.onmessage = null;
    socket.close();
    this.#become("idle");
  }

  #wait() {
    const longest = Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** (this.#failures - 1));
    const wait = longest * (0.75 + Math.random() / 4); // many pages must not come back in the same instant
    this.retryAt = Date.now() + wait;
    this.#timer = setTimeout(() => this.connect(), wait);
    this.#become("waiting");
  }

  #become(state) {
    this.state = state;
    this.onState();
  }
}
