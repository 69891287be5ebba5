/** The three dialogs: the key, deleting, settings. Each opens on request and says what was chosen. */

import { key, settings } from "./storage.js";

const SETTINGS = ["temperature", "max_output_tokens", "seed"];
const KEY_CHARACTERS = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/; // what a WebSocket subprotocol may be made of

for (const button of document.querySelectorAll("dialog [data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}

/** Ask for the API key. `onKey(key)` when one was given; nothing when the person would rather not. */
export function askKey(onKey) {
  const dialog = document.getElementById("key-dialog");
  if (dialog.open) return;
  const form = document.getElementById("key-form");
  const input = document.getElementById("key-input");
  const error = document.getElementById("key-error");
  const refused = key.get() !== null;
  document.getElementById("key-reason").textContent = refused
    ? "The key used so far is not accepted, or has expired. Nothing you wrote is lost."
    : "Whoever runs it can give you one.";
  input.value = "";
  error.textContent = "";
  form.onsubmit = (event) => {
    const secret = input.value.trim();
    if (KEY_CHARACTERS.test(secret)) return onKey(secret);
    event.preventDefault();
    error.textContent = "A key is made of letters, digits and signs like - _ . without spaces.";
  };
  dialog.showModal();
  input.focus();
}

/** Resolves to whether the conversation of this title is to be deleted. */
export function confirmDelete(title) {
  const dialog = document.getElementById("delete-dialog");
  document.getElementById("delete-name").textContent = title;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), { once: true }));
}

export function openSettings() {
  const dialog = document.getElementById("settings-dialog");
  const form = document.getElementById("settings-form");
  const chosen = settings.get();
  for (const name of SETTINGS) form.elements[name].value = chosen[name] ?? "";
  document.getElementById("settings-reset").onclick = () => {
    for (const name of SETTINGS) form.elements[name].value = "";
  };
  form.onsubmit = () => {
    const given = SETTINGS.filter((name) => form.elements[name].value !== "");
    settings.set(Object.fromEntries(given.map((name) => [name, form.elements[name].valueAsNumber])));
  };
  dialog.showModal();
}
