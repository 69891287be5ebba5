/** Copying text, also where the page is not a secure context and has no clipboard API. */

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Copy, and let the button say so for a moment. */
export async function copyFrom(button, text) {
  const label = button.textContent;
  if (button.dataset.busy) return;
  button.dataset.busy = "true";
  try {
    await copy(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy";
  }
  setTimeout(() => {
    button.textContent = label;
    delete button.dataset.busy;
  }, 1500);
}
