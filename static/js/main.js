/** Puts the page together: the store, what acts on it, what draws it, and the address bar. */

import { Banners } from "./banners.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { askKey, confirmDelete, openSettings } from "./dialogs.js";
import { Readiness } from "./readiness.js";
import { Store } from "./store.js";
import { Transcript } from "./transcript.js";

const LIST_EVERY = 10_000; // milliseconds, while another conversation has a reply in progress that no event here will end

const $ = (id) => document.getElementById(id);
const store = new Store();
const chat = new Chat(store);
const readiness = new Readiness(store, () => chat.flush());
const composer = new Composer(store, chat, () => transcript.follow());
const transcript = new Transcript(store, chat, composer);
const unlock = () => askKey((secret) => chat.unlock(secret));
new Banners(store, chat, { askKey: unlock, checkModel: () => readiness.check() });
new Conversations(store, chat.library, { go, confirmDelete });

// --- the address ---------------------------------------------------------------------------------------------------

const addressed = () => /^\/c\/([^/]+)$/.exec(location.pathname)?.[1] ?? null;
const addressOf = (id) => (id === null ? "/" : `/c/${encodeURIComponent(id)}`);

function go(id) {
  closeSidebar();
  composer.focus();
  return chat.library.open(id);
}

/** The address follows the store: a first message gives a new chat its conversation, a deleted one is left. */
store.on("open", () => {
  const address = addressOf(store.openId);
  if (location.pathname !== address) history.pushState(null, "", address);
  nameThePage();
});
window.addEventListener("popstate", () => chat.library.open(fromAddress()));

function fromAddress() {
  const id = addressed();
  return id === null ? null : decodeURIComponent(id);
}

function nameThePage() {
  const title = store.open?.title || "New chat";
  if ($("title").textContent !== title) $("title").textContent = title;
  document.title = store.open?.title ? `${title} – Hocket` : "Hocket";
}

for (const link of [$("new-chat"), $("new-chat-top")]) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(null);
  });
}

// --- the side bar on a narrow screen -------------------------------------------------------------------------------

function openSidebar() {
  document.body.classList.add("sidebar-open");
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("close-sidebar").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return;
  document.body.classList.remove("sidebar-open");
  $("open-sidebar").setAttribute("aria-expanded", "false");
  $("open-sidebar").focus();
}

$("open-sidebar").addEventListener("click", openSidebar);
$("close-sidebar").addEventListener("click", closeSidebar);
$("scrim").addEventListener("click", closeSidebar);
$("open-settings").addEventListener("click", openSettings);

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("sidebar-open")) closeSidebar();
  else if (store.open) composer.stop();
});

// --- the server ----------------------------------------------------------------------------------------------------

let asked = false; // for the key; once per refusal, not once per request that is refused

store.on("connection", () => {
  const { state } = store.connection;
  if (state === "open") readiness.check();
  if (state === "refused" && !asked) unlock();
  asked = state === "refused";
});

store.on("list", nameThePage);
store.on("messages", nameThePage);

store.on("model", () => {
  const { model } = store;
  const words = { ready: model.model, loading: "Loading the model…", failed: "No model" };
  $("model-name").textContent = words[model.status] ?? "";
  $("model-name").title = $("model-name").textContent;
  if (model.model) $("welcome-model").textContent = model.model;
});

window.addEventListener("online", () => chat.socket.reconnect());
window.addEventListener("offline", () => chat.socket.reconnect());
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && chat.wake());

setInterval(() => {
  const elsewhere = [...store.conversations.values()].some((each) => each.running.size && each.id !== store.openId);
  if (elsewhere && document.visibilityState === "visible" && store.connection.state === "open") chat.library.loadList();
}, LIST_EVERY);

chat.socket.connect();
readiness.check();
chat.library.loadList();
chat.library.open(fromAddress());
composer.focus();
