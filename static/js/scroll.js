/**
 * Keeps the newest words in view, unless the person has scrolled away from them.
 *
 * Any movement up lets go; arriving at the end takes hold again. Growing content alone never moves what is being read.
 */

const AT_END = 8; // pixels

export class Follower {
  following = true;
  #lastTop = 0;

  /** `onChange()` when following starts or ends, or content arrives out of view. */
  constructor(element, onChange) {
    this.element = element;
    this.onChange = onChange;
    element.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    new ResizeObserver(() => this.settle()).observe(element);
  }

  /** Call after content changed. */
  settle() {
    if (this.following) this.element.scrollTop = this.element.scrollHeight;
    this.#lastTop = this.element.scrollTop;
    this.onChange();
  }

  /** Go to the end and stay with it. */
  toEnd() {
    this.following = true;
    this.settle();
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const distance = scrollHeight - clientHeight - scrollTop;
    if (scrollTop < this.#lastTop && distance > 1) this.following = false;
    else if (scrollTop >= this.#lastTop && distance <= AT_END) this.following = true;
    this.#lastTop = scrollTop;
    this.onChange();
  }
}
