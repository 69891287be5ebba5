/**
 * A reply and how the events of its response change it.
 *
 * Events may come twice (a replay overlaps what was already here) and from two roads (socket, replay); each sequence number
 * is applied once, in order. Text only ever grows.
 */

const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);

export const isTerminal = (event) => TERMINAL.has(event.type);

export function newReply(responseId) {
  return {
    role: "assistant",
    id: null, // the item's
    responseId,
    text: "",
    status: "in_progress", // or "completed", "incomplete", "failed"
    reason: null, // why it is incomplete
    error: null, // what made it fail, in words
    usage: null, // {prompt, cached, output} in tokens
    took: null, // seconds from asking to the last word, as measured here
    seconds: null, // the same as the server says it, in whole seconds
    seq: -1, // last sequence number applied
    received: "", // text put together from events, which may still trail `text` while a replay catches up
    stopping: false,
    road: null, // what brings its events: "socket", an AbortController of a replay, or nothing
  };
}

/** Apply one event; false when it was applied before. Numbers may skip: a replay leaves out events that change nothing here. */
export function applyEvent(reply, event) {
  if (event.sequence_number <= reply.seq) return false;
  reply.seq = event.sequence_number;
  if (event.type === "response.output_item.added") reply.id = event.item.id;
  else if (event.type === "response.output_text.delta") {
    reply.received += event.delta;
    growTo(reply, reply.received);
  } else if (isTerminal(event)) applyResponse(reply, event.response);
  return true;
}

/** Take over what a whole response object says. */
export function applyResponse(reply, response) {
  reply.status = response.status === "cancelled" ? "incomplete" : response.status;
  reply.reason = response.incomplete_details?.reason ?? (response.status === "cancelled" ? "cancelled" : null);
  reply.error = response.error?.message ?? null;
  const item = response.output?.find((each) => each.type === "message");
  if (item) {
    reply.id = item.id;
    growTo(reply, textOf(item));
  }
  if (response.usage) {
    reply.usage = {
      prompt: response.usage.input_tokens,
      cached: response.usage.input_tokens_details?.cached_tokens ?? 0,
      output: response.usage.output_tokens,
    };
  }
  if (response.completed_at && response.created_at) reply.seconds = response.completed_at - response.created_at;
}

/** Show this text unless more of it is shown already. */
export function growTo(reply, text) {
  if (text.length > reply.text.length) reply.text = text;
}

/** The words of a message item. */
export function textOf(item) {
  return (item.content ?? []).map((part) => part.text ?? "").join("");
}
