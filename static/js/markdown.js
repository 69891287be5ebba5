/**
 * A model's markdown, drawn safely and without flicker while it is still being written.
 *
 * The text is split into top-level blocks. A block that a later, complete line has ended never changes again: its nodes stay
 * as they are. Only what follows is parsed anew, and merged into the nodes already there, so selections survive.
 *
 * Safety has three walls: HTML in the text is shown as text, never parsed; what the parser makes passes DOMPurify with a
 * short list of elements and link schemes; and the page's Content-Security-Policy allows neither inline script nor anything
 * from another origin. Images are shown as links, so nothing is fetched unless a person follows one.
 */

import { Marked, Parser } from "../vendor/marked/marked.esm.js";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { highlight } from "./highlight.js";
import { morph } from "./morph.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong del a br hr input".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ADD_URI_SAFE_ATTR: ["align", "start", "type"], // the rest must look like a link
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}" class="image">${escape(text || href)}</a>`,
  },
});

const purifier = DOMPurify(window);
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.hasAttribute("class") && !/^(?:image|language-[\w+#-]+)$/.test(node.className)) node.removeAttribute("class");
  if (node.nodeName === "INPUT") Object.assign(node, { type: "checkbox", disabled: true });
  if (node.nodeName !== "A") return;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
});

/** The nodes of one block of markdown, given as the HTML the parser made of it. */
function drawn(html) {
  const fragment = purifier.sanitize(html, ALLOWED);
  for (const node of fragment.querySelectorAll("p, h1, h2, h3, h4, h5, h6, ul, ol, li, blockquote, table")) node.dir = "auto";
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBox(pre));
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "table-box";
    box.tabIndex = 0;
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

/** Code under a bar that names its language and copies it. */
function codeBox(pre) {
  const box = document.createElement("div");
  const bar = document.createElement("div");
  const language = document.createElement("span");
  const copy = document.createElement("button");
  box.className = "code-box";
  box.dir = "ltr";
  bar.className = "code-bar";
  language.textContent = languageOf(pre) ?? "";
  copy.type = "button";
  copy.className = "copy-code";
  copy.textContent = "Copy";
  pre.tabIndex = 0;
  bar.append(language, copy);
  box.append(bar, pre.cloneNode(true));
  return box;
}

const languageOf = (pre) => /language-(\S+)/.exec(pre.querySelector("code")?.className)?.[1] ?? null;

export class MarkdownView {
  #text = ""; // what is drawn
  #settled = 0; // length of the part of it whose blocks are final
  #final = []; // {end, html, element, highlighted} of final blocks
  #open = []; // the same of blocks that may still change

  /** @param {Element} element holds one child per block, and is this view's alone */
  constructor(element) {
    this.element = element;
  }

  /** Draw the text, which continues what was drawn (else all is drawn anew). `done`: nothing will follow. */
  update(text, done = false) {
    text = text.replace(/\r\n?/g, "\n");
    const whole = done || !text.startsWith(this.#text.slice(0, this.#settled));
    if (whole) {
      this.#open = [...this.#final, ...this.#open];
      this.#final = [];
      this.#settled = 0;
    }
    this.#text = text;
    const rest = text.slice(this.#settled);
    const blocks = this.#parse(done ? rest : withoutOpenLink(rest));
    this.#draw(blocks);
    this.#settle(done ? blocks.length : endedBlocks(blocks));
  }

  #parse(source) {
    const tokens = marked.lexer(source);
    const parser = new Parser(marked.defaults);
    const blocks = [];
    let end = 0;
    for (const token of tokens) {
      const start = end;
      end += token.raw.length;
      if (token.type === "space" || token.type === "def") continue;
      blocks.push({ end, lineEnds: source.indexOf("\n", start), html: parser.parse([token]) });
    }
    return blocks;
  }

  /** Bring the open blocks' elements to what `blocks` say, reusing whatever is the same. */
  #draw(blocks) {
    const before = this.#open;
    this.#open = blocks.map((block, i) => {
      const old = before[i];
      if (old?.html === block.html) return { ...block, element: old.element, highlighted: old.highlighted };
      const element = document.createElement("div");
      element.className = "block";
      element.append(drawn(block.html));
      if (!old) {
        this.element.append(element);
        return { ...block, element };
      }
      morph(old.element, element);
      return { ...block, element: old.element };
    });
    for (const extra of before.slice(blocks.length)) extra.element.remove();
  }

  /** The first `count` open blocks will not change any more. */
  #settle(count) {
    if (!count) return;
    const final = this.#open.slice(0, count);
    for (const block of final) {
      if (block.highlighted) continue;
      block.highlighted = true;
      for (const pre of block.element.querySelectorAll("pre")) {
        const language = languageOf(pre);
        if (language) highlight(pre.querySelector("code"), language);
      }
    }
    const settled = final.at(-1).end;
    this.#settled += settled;
    this.#final.push(...final);
    this.#open = this.#open.slice(count);
    for (const block of this.#open) block.end -= settled;
  }
}

/** While a link's address is being written, only its words: the address would appear and vanish again. */
const withoutOpenLink = (text) => text.replace(/!?\[([^[\]\n]*)\]\([^()\n]*$/, "$1");

/**
 * How many leading blocks are ended for good: those before the last block whose first line is complete. A last line still
 * being written may turn out to belong to the block before it ("***" may become "***bold***").
 */
function endedBlocks(blocks) {
  return Math.max(0, blocks.findLastIndex((block) => block.lineEnds >= 0));
}
