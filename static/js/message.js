/** One message on screen. Owns its element; knows how each state of a message looks and what can be done about it. */

import { copyFrom } from "./clipboard.js";
import { numbersOf } from "./format.js";
import { MarkdownView } from "./markdown.js";

const REASONS = {
  cancelled: "Stopped.",
  max_output_tokens: "The longest length for a reply was reached.",
};

export class MessageView {
  #markdown = null;
  #drawn = null; // the text drawn last, with its status

  /** `actions`: {retry, edit, askAgain}, each called with the message. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = document.getElementById("message-template").content.firstElementChild.cloneNode(true);
    this.element.classList.add(message.role);
    this.element.setAttribute("aria-label", message.role === "user" ? "You" : "Reply");
    this.parts = {};
    for (const name of ["body", "state", "note", "numbers"]) this.parts[name] = this.element.querySelector(`.${name}`);
    const copy = this.element.querySelector(".copy");
    copy.addEventListener("click", () => copyFrom(copy, message.text));
    if (message.role === "assistant") this.#markdown = new MarkdownView(this.parts.body);
  }

  /** Draw the message as it is. `online`: whether the socket is open; `ready`: whether the model is. */
  update({ online, ready }) {
    const { message, element } = this;
    element.dataset.status = message.status;
    if (message.responseId) element.dataset.response = message.responseId;
    this.#drawText();
    this.#say("state", waitingFor(message, online, ready));
    const trouble = troubleOf(message);
    this.#say("note", trouble?.text ?? "");
    this.parts.note.classList.toggle("error", Boolean(trouble?.error));
    this.#offer(trouble?.offers ?? []);
    const ended = message.role === "assistant" && message.status !== "in_progress";
    this.parts.numbers.hidden = !ended || !message.text;
    this.parts.numbers.lastElementChild.textContent = ended ? numbersOf(message) : "";
  }

  #drawText() {
    const { message } = this;
    const done = message.status !== "in_progress";
    const drawn = `${done} ${message.text}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    if (this.#markdown) this.#markdown.update(message.text, done);
    else this.parts.body.textContent = message.text;
  }

  #say(part, text) {
    const place = this.parts[part];
    place.hidden = !text;
    if (place.querySelector("span").textContent !== text) place.querySelector("span").textContent = text;
  }

  /** Show these buttons, leaving alone those that are already there: one of them may have the focus. */
  #offer(offers) {
    const shown = [...this.parts.note.querySelectorAll("button")];
    if (shown.map((button) => button.dataset.action).join() === offers.map(([action]) => action).join()) return;
    for (const button of shown) button.remove();
    for (const [action, label] of offers) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.action = action;
      button.textContent = label;
      button.addEventListener("click", () => this.actions[action](this.message));
      this.parts.note.append(button);
    }
  }
}

function waitingFor({ role, status, text, stopping, road }, online, ready) {
  if (role === "user") {
    if (status === "sending") return "Sending";
    if (status !== "waiting") return "";
    return online && !ready ? "Will be sent as soon as the model is loaded" : "Will be sent as soon as there is a connection";
  }
  if (status !== "in_progress") return "";
  if (!road && !online) return "Will go on as soon as there is a connection";
  if (stopping) return "Stopping";
  return text ? "Writing" : "Reading";
}

/** What went wrong or ended early: {text, error, offers: [[action, label]]}, or null. */
function troubleOf({ role, status, reason, error }) {
  if (role === "user") {
    if (status !== "refused") return null;
    return { text: `Not sent: ${error}`, error: true, offers: [["retry", "Try again"], ["edit", "Edit"]] };
  }
  const again = [["askAgain", "Ask again"]];
  if (status === "failed") return { text: `The reply failed: ${error ?? "the server did not say why."}`, error: true, offers: again };
  if (status !== "incomplete") return null;
  if (REASONS[reason]) return { text: REASONS[reason], error: false, offers: [] };
  return { text: "The reply was cut off. You can ask again, or simply go on.", error: false, offers: again };
}
