/**
 * Hocket's HTTP side: conversations, items, responses and their replay as server-sent events.
 *
 * Knows paths and shapes of the wire, nothing about what is on screen.
 */

import { key } from "./storage.js";

/** A request that did not succeed. `status` is 0 when no answer came at all. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  const secret = key.get();
  if (secret) headers.Authorization = `Bearer ${secret}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ApiError(0, "unreachable", "The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error;
  return new ApiError(response.status, error?.code ?? null, error?.message ?? `The server answered ${response.status}.`);
}

async function json(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch {
    throw new ApiError(0, "unreachable", "The server's answer broke off.");
  }
}

const at = (strings, ...parts) => strings.reduce((path, piece, i) => path + encodeURIComponent(parts[i - 1]) + piece);

/** `{data, has_more, last_id}`: up to 50 conversations, the last updated first. */
export const listConversations = (after) => json(`/v1/conversations?limit=50${after ? at`&after=${after}` : ""}`);
export const createConversation = () => json("/v1/conversations", { method: "POST", body: {} });
export const getConversation = (id) => json(at`/v1/conversations/${id}`);
export const deleteConversation = (id) => json(at`/v1/conversations/${id}`, { method: "DELETE" });
export const getResponse = (id) => json(at`/v1/responses/${id}`);
export const cancelResponse = (id) => json(at`/v1/responses/${id}/cancel`, { method: "POST", body: {} });

/** Every item of a conversation, oldest first. */
export async function listItems(id) {
  const items = [];
  let page = { has_more: true, last_id: null };
  while (page.has_more) {
    page = await json(at`/v1/conversations/${id}/items` + `?limit=100&order=asc${page.last_id ? at`&after=${page.last_id}` : ""}`);
    items.push(...page.data);
  }
  return items;
}

/** `{status: "ready" | "loading" | "failed", ...}` as `/readyz` says it; an ApiError when it says nothing of the kind. */
export async function readiness() {
  const response = await fetch("/readyz", { cache: "no-store" }).catch(() => null);
  if (!response) throw new ApiError(0, "unreachable", "The server cannot be reached.");
  const body = await response.json().catch(() => null);
  if (!body?.status) throw new ApiError(response.status, null, `The server answered ${response.status}.`);
  return body;
}

/** The events of a response after a sequence number (-1: from its start), while it runs and to its end. */
export async function* responseEvents(id, after, signal) {
  const from = after >= 0 ? `&starting_after=${after}` : "";
  const response = await request(at`/v1/responses/${id}` + `?stream=true${from}`, { signal });
  for await (const data of serverSentData(response.body)) {
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
}

/** The `data` of each server-sent event in a byte stream. */
async function* serverSentData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      const events = pending.split(/\r?\n\r?\n/);
      pending = events.pop();
      for (const event of events) {
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
