/** Turn one tree of nodes into another, keeping every node that need not go: its identity, focus and selection survive. */

/** Make the children of `old` what the children of `wanted` are. `wanted` is used up. */
export function morph(old, wanted) {
  const before = [...old.childNodes];
  const after = [...wanted.childNodes];
  after.forEach((node, i) => {
    const kept = before[i];
    if (!kept) old.append(node);
    else if (kept.nodeType !== node.nodeType || kept.nodeName !== node.nodeName) kept.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) morphText(kept, node.data);
    else if (!kept.isEqualNode(node)) {
      morphAttributes(kept, node);
      morph(kept, node);
    }
  });
  for (const node of before.slice(after.length)) node.remove();
}

/** Append rather than replace: a selection inside stays where it is. */
function morphText(kept, data) {
  if (data.startsWith(kept.data)) {
    if (data.length > kept.length) kept.appendData(data.slice(kept.length));
  } else kept.data = data;
}

function morphAttributes(kept, wanted) {
  for (const { name } of [...kept.attributes]) if (!wanted.hasAttribute(name)) kept.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (kept.getAttribute(name) !== value) kept.setAttribute(name, value);
}
