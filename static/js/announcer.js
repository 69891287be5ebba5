/**
 * Reads replies to screen readers in whole sentences.
 *
 * A live region that changed with every token would stutter; this one gets a sentence when it is complete, and the rest at
 * the end.
 */

const SENTENCE_END = /[.!?…][)"'”’\]]*\s|[。！？]|\n/g;
const KEPT = 8; // read sentences left in the region

export class Announcer {
  #reply = null;
  #said = 0;

  /** @param {Element} region the aria-live region */
  constructor(region) {
    this.region = region;
  }

  /** Say what is new of this reply. One that was already there when it is first seen here is only read on from there. */
  hear(reply) {
    if (reply !== this.#reply) {
      this.#reply = reply;
      this.#said = reply.status === "in_progress" ? 0 : reply.text.length;
    }
    const fresh = reply.text.slice(this.#said);
    const end = reply.status === "in_progress" ? lastSentenceEnd(fresh) : fresh.length;
    this.#said += end;
    this.say(fresh.slice(0, end));
  }

  say(text) {
    const words = text.replace(/[*_#`>|~]+/g, " ").replace(/\s+/g, " ").trim();
    if (!words) return;
    const line = document.createElement("p");
    line.textContent = words;
    this.region.append(line);
    while (this.region.children.length > KEPT) this.region.firstChild.remove();
  }
}

function lastSentenceEnd(text) {
  let end = 0;
  for (const match of text.matchAll(SENTENCE_END)) end = match.index + match[0].length;
  return end;
}
