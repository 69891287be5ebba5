/**
 * What this browser remembers: the key (for this tab), drafts, messages not yet acknowledged, settings.
 *
 * Storage may be full or forbidden; then the page still works and forgets.
 */

function read(area, name) {
  try {
    return JSON.parse(window[area].getItem(`hocket.${name}`));
  } catch {
    return null;
  }
}

function write(area, name, value) {
  try {
    if (value === null || value === "") window[area].removeItem(`hocket.${name}`);
    else window[area].setItem(`hocket.${name}`, JSON.stringify(value));
  } catch {
    // Full or forbidden: nothing better to do than to go on without.
  }
}

/** The API key of this tab, or null. */
export const key = {
  get: () => read("sessionStorage", "key"),
  set: (value) => write("sessionStorage", "key", value),
};

/** Text being written, per conversation id; "new" is the chat that has none yet. */
export const drafts = {
  get: (id) => read("localStorage", `draft.${id}`) ?? "",
  set: (id, text) => write("localStorage", `draft.${id}`, text),
};

/** The message a conversation has sent and the server has not acknowledged: `{clientId, text}`, or null. */
export const unsent = {
  get: (id) => read("localStorage", `unsent.${id}`),
  set: (id, message) => write("localStorage", `unsent.${id}`, message),
};

/** Sampling fields a person has set: any of `temperature`, `max_output_tokens`, `seed`. */
export const settings = {
  get: () => read("localStorage", "settings") ?? {},
  set: (value) => write("localStorage", "settings", value),
};
