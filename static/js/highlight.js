/** Colours for code. The library is loaded when code is first seen, so a page without code never asks for it. */

import DOMPurify from "../vendor/dompurify/purify.es.mjs";

const LONGEST = 50_000; // characters; longer code stays plain rather than holding up the page
let library = null;

/** Colour a `<code>` element whose text is complete; unknown languages are left as they are. */
export async function highlight(code, language) {
  if (code.textContent.length > LONGEST) return;
  library ??= import("../vendor/highlight/highlight.min.js").then(({ default: hljs }) => hljs);
  let hljs;
  try {
    hljs = await library;
  } catch {
    library = null; // not reached: the code stays plain, the next one asks again
    return;
  }
  if (!hljs.getLanguage(language)) return;
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
}
