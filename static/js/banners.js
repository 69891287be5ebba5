/** What is going on with the server, above the messages: the connection, the model's loading, faults that concern no message. */

const GRACE = 1_000; // milliseconds a lost connection may take to come back before it is worth a word

export class Banners {
  #clock = null;
  #lostAt = 0;

  /** `askKey()` opens the key dialog, `checkModel()` asks for the model's state again. */
  constructor(store, chat, { askKey, checkModel }) {
    Object.assign(this, { store, chat, askKey, checkModel });
    this.place = document.getElementById("banners");
    this.banners = new Map();
    for (const topic of ["connection", "model", "notice"]) store.on(topic, () => this.#draw());
  }

  #draw() {
    clearTimeout(this.#clock);
    this.#drawConnection();
    this.#drawModel();
    const { notice } = this.store;
    const dismiss = () => this.#dismissNotice();
    const offers = [["Dismiss", dismiss]];
    if (notice?.retry) offers.unshift(["Try again", () => (dismiss(), notice.retry())]);
    this.#show("notice", notice && { text: notice.message, role: "alert", offers });
  }

  #drawConnection() {
    const { state, retryAt, everOpen } = this.store.connection;
    if (state === "refused") {
      return this.#show("connection", { text: "This server asks for a key.", role: "alert", offers: [["Enter a key", this.askKey]] });
    }
    if (state === "open" || state === "idle") {
      this.#lostAt = 0;
      return this.#show("connection", null);
    }
    this.#lostAt ||= Date.now();
    const lostFor = Date.now() - this.#lostAt;
    if (lostFor < GRACE) {
      this.#clock = setTimeout(() => this.#draw(), GRACE - lostFor);
      return this.#show("connection", null);
    }
    const lost = everOpen ? "The connection was lost." : "The server cannot be reached.";
    const seconds = Math.ceil((retryAt - Date.now()) / 1000);
    const next = state === "waiting" && seconds > 0 ? `Trying again in ${seconds} s.` : "Trying again…";
    this.#show("connection", { text: lost, detail: next, role: "status", offers: [["Try now", () => this.chat.socket.connect()]] });
    this.#clock = setTimeout(() => this.#draw(), 1000);
  }

  #drawModel() {
    const { model, connection } = this.store;
    if (connection.state === "waiting") return this.#show("model", null); // nobody can say how the model is
    if (model.status === "failed") {
      const offers = [["Check again", this.checkModel]];
      return this.#show("model", { text: `The model could not be loaded: ${model.error}`, role: "alert", offers });
    }
    if (model.status !== "loading") return this.#show("model", null);
    const stage = model.stage ? ` (${model.stage})` : "";
    const text = `The model is loading${stage}. You can write meanwhile.`;
    this.#show("model", { text, progress: model.fraction ?? null, role: "status", offers: [] });
  }

  #dismissNotice() {
    this.store.notice = null;
    this.#draw();
  }

  /** Show, change or (null) take away one banner. Its words are only touched when they change, so that they are read once. */
  #show(name, wanted) {
    let banner = this.banners.get(name);
    if (!wanted) {
      banner?.element.remove();
      this.banners.delete(name);
      return;
    }
    if (!banner) {
      banner = newBanner(name, wanted.role);
      this.banners.set(name, banner);
      this.place.append(banner.element);
    }
    if (banner.text.textContent !== wanted.text) banner.text.textContent = wanted.text;
    banner.detail.textContent = wanted.detail ?? "";
    banner.progress.hidden = wanted.progress === undefined;
    if (typeof wanted.progress === "number") banner.progress.value = wanted.progress;
    else banner.progress.removeAttribute("value");
    if (banner.buttons.length !== wanted.offers.length) {
      for (const button of banner.buttons) button.remove();
      banner.buttons = wanted.offers.map(() => Object.assign(document.createElement("button"), { type: "button" }));
      banner.element.append(...banner.buttons);
    }
    wanted.offers.forEach(([label, action], i) => {
      if (banner.buttons[i].textContent !== label) banner.buttons[i].textContent = label;
      banner.buttons[i].onclick = action;
    });
  }
}

/** The words are announced, the counting seconds beside them are not. */
function newBanner(name, role) {
  const element = document.createElement("div");
  const words = document.createElement("div");
  const text = document.createElement("span");
  const detail = document.createElement("span");
  const progress = document.createElement("progress");
  element.className = `banner ${name}`;
  words.className = "banner-words";
  text.setAttribute("role", role);
  detail.className = "banner-detail";
  progress.max = 1;
  progress.setAttribute("aria-label", "Loading the model");
  words.append(text, " ", detail, progress);
  element.append(words);
  return { element, text, detail, progress, buttons: [] };
}
