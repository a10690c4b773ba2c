// The page's own script. Everything here adds to pages that work without it.

const RETRY_MS = [500, 1000, 2000, 5000];
const SILENT_MS = 15000; // the server sends an event each 5 s at least
const LIMBO_MS = 2500; // a dot that is in no list stays so long: its stream may be on its way
const STEP = 9; // pixels from one dot to the next

/** Put HTML in place of an element, and keep the focus where it was. */
function replace(element, html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  const fresh = template.content.firstElementChild;
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  element.replaceWith(fresh);
  restore(fresh, focused);
}

/** Put HTML into an element, and keep the focus where it was. */
function fill(element, html) {
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  element.innerHTML = html;
  restore(element, focused);
}

function restore(element, href) {
  if (href) element.querySelector(`a[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
}

/** Streams as dots above the boxes of their instances. */
class StreamDots {
  constructor(layer) {
    this.layer = layer;
    this.slots = new Map(); // instance -> ids by slot, null where one is free
    this.dots = new Map(); // id -> {element, at, gone}
    new ResizeObserver(() => this.place()).observe(layer.parentElement);
  }

  /** Take the ids of instances, all of them or those that differ. */
  take(lists, whole) {
    if (whole) for (const key of this.slots.keys()) if (!(key in lists)) this.slots.delete(key);
    for (const [key, ids] of Object.entries(lists)) {
      const wanted = new Set(ids);
      const slots = (this.slots.get(key) ?? []).map((id) => (wanted.has(id) ? id : null));
      const there = new Set(slots);
      for (const id of ids) {
        if (there.has(id)) continue;
        const free = slots.indexOf(null);
        if (free < 0) slots.push(id);
        else slots[free] = id;
      }
      this.slots.set(key, slots);
      for (const id of ids) this.settle(id, key);
    }
    for (const [id, dot] of this.dots) {
      if (this.slots.get(dot.at)?.includes(id)) dot.gone = 0;
      else if (!dot.gone) dot.gone = performance.now();
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.sweep(), LIMBO_MS);
    this.place();
  }

  /** Remove the dots of streams that have ended. */
  sweep() {
    for (const [id, dot] of this.dots) {
      if (!dot.gone || performance.now() - dot.gone < LIMBO_MS) continue;
      dot.element.remove();
      this.dots.delete(id);
    }
  }

  settle(id, key) {
    const dot = this.dots.get(id);
    if (!dot) {
      const element = document.createElement("i");
      element.className = "dot new";
      this.layer.append(element);
      this.dots.set(id, { element, at: key, gone: 0 });
    } else if (dot.at !== key) {
      dot.at = key;
      dot.element.classList.add("moved");
      dot.element.addEventListener("transitionend", () => dot.element.classList.remove("moved"), { once: true });
    }
  }

  /** Let each dot stand in the box of its instance. */
  place() {
    const origin = this.layer.getBoundingClientRect();
    for (const [key, slots] of this.slots) {
      const field = document.querySelector(`[data-key="${CSS.escape(key)}"] .field`);
      if (!field) continue;
      const box = field.getBoundingClientRect();
      const columns = Math.max(1, Math.floor(box.width / STEP));
      const rows = Math.max(1, Math.floor(box.height / STEP));
      slots.forEach((id, at) => {
        const dot = id && this.dots.get(id);
        if (!dot || dot.at !== key) return;
        const slot = at % (columns * rows);
        const x = box.left - origin.left + (slot % columns) * STEP;
        const y = box.bottom - origin.top - (Math.floor(slot / columns) + 1) * STEP; // from the bottom, as the box is filled
        dot.element.style.transform = `translate(${x}px, ${y}px)`;
        if (dot.element.classList.contains("new")) requestAnimationFrame(() => dot.element.classList.remove("new"));
      });
    }
  }
}

/** Follows the live picture while the page is seen, as far as the page shows it. */
class LivePicture {
  constructor(path) {
    this.path = path;
    const layer = document.getElementById("dots");
    this.dots = layer && new StreamDots(layer);
    this.state = document.getElementById("live-state");
    this.streams = document.getElementById("streams");
    this.tries = 0;
    this.seen = Date.now(); // when the picture was last known to be live
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.follow()));
    window.addEventListener("pagehide", () => this.rest());
    this.follow();
  }

  follow() {
    if (this.source || document.hidden) return;
    this.expect();
    this.source = new EventSource(this.path);
    this.source.addEventListener("picture", (event) => this.show(JSON.parse(event.data), true));
    this.source.addEventListener("change", (event) => this.show(JSON.parse(event.data), false));
    this.source.addEventListener("live", () => this.isLive());
    this.source.addEventListener("stale", (event) => this.isStale(JSON.parse(event.data)));
    this.source.addEventListener("closed", () => this.again());
    this.source.addEventListener("error", () => this.again(this.source?.readyState === EventSource.CLOSED));
  }

  rest() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  again(refused) {
    this.rest();
    const over = refused && this.tries > 1;
    this.tellStale(over ? "no answer, the session may be over: load the page again" : "the connection is lost; trying again");
    this.timer = setTimeout(() => this.follow(), RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)]);
    this.tries += 1;
  }

  /** Take a connection on which nothing comes for lost. */
  expect() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.again(), SILENT_MS);
  }

  isLive() {
    this.tries = 0;
    this.seen = Date.now();
    this.tell("Live.");
    this.expect();
  }

  isStale({ since }) {
    this.tries = 0;
    this.seen = since * 1000;
    this.tellStale("the server can't see what runs; it tries again");
    this.expect();
  }

  tellStale(why) {
    this.tell(`Not live since ${new Date(this.seen).toISOString().slice(11, 19)} UTC: ${why}.`);
  }

  show(found, whole) {
    this.isLive();
    for (const [name, html] of Object.entries(found.regions)) {
      const region = document.querySelector(`[data-region="${name}"]`);
      if (region) fill(region, html);
      else this.showParts(html);
    }
    for (const [key, html] of Object.entries(found.parts)) {
      const part = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
      if (part) replace(part, html);
    }
    if (this.streams) this.streams.textContent = `${found.streams.toLocaleString("en")} streams.`;
    this.dots?.take(found.dots, whole);
    const said = found.said?.filter((one) => this.dots || one.startsWith(`${document.querySelector("h1").textContent}: `));
    if (said?.length) document.getElementById("said").textContent = said.join(", ");
  }

  /** Show those parts of a region that this page has, where it has not the region. */
  showParts(html) {
    const template = document.createElement("template");
    template.innerHTML = html;
    for (const fresh of template.content.querySelectorAll("[data-key]")) {
      const part = document.querySelector(`[data-key="${CSS.escape(fresh.dataset.key)}"]`);
      if (part && part.outerHTML !== fresh.outerHTML) replace(part, fresh.outerHTML);
    }
  }

  tell(text) {
    if (this.state.textContent !== text) this.state.textContent = text;
  }
}

const live = document.querySelector("[data-live]");
if (live) new LivePicture(live.dataset.live);
