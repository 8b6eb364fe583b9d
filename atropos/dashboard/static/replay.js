"use strict";
// Plays the `data-cast` of each .replay: [seconds, text] of a terminal that knows lines, colours, \r, \b and \x1b[K.
const ROWS_KEPT = 2000;
const IDLE_S = 2; // longer pauses are played as this

class Screen {
  constructor() {
    this.rows = [[]];
    this.column = 0;
    this.style = { colour: "", bold: false, dim: false };
  }
  write(text) {
    for (const [piece, codes, erase] of text.matchAll(/\x1b\[([0-9;]*)m|\x1b\[([0-2]?)K|[^]/gu)) {
      const row = this.rows[this.rows.length - 1];
      if (codes !== undefined) this.sgr(codes.split(";").map(Number));
      else if (erase !== undefined) this.erase(row, erase);
      else if (piece === "\n") {
        this.rows.push([]);
        if (this.rows.length > ROWS_KEPT) this.rows.shift();
      } else if (piece === "\r") this.column = 0;
      else if (piece === "\b") this.column = Math.max(0, this.column - 1);
      else if (piece === "\t") do this.put(row, " "); while (this.column % 8);
      else this.put(row, piece);
    }
  }
  put(row, character) {
    while (row.length < this.column) row.push([" ", ""]);
    row[this.column++] = [character, this.classes()];
  }
  erase(row, how) {
    if (how !== "1") row.length = how === "2" ? 0 : Math.min(row.length, this.column);
    else for (let at = 0; at < Math.min(row.length, this.column + 1); at++) row[at] = [" ", ""];
  }
  sgr(codes) {
    for (let at = 0; at < codes.length; at++) {
      const code = codes[at];
      if (code === 38 || code === 48) at += codes[at + 1] === 5 ? 2 : 4;
      else if (code === 0) this.style = { colour: "", bold: false, dim: false };
      else if (code === 1) this.style.bold = true;
      else if (code === 2) this.style.dim = true;
      else if (code === 22) this.style.bold = this.style.dim = false;
      else if (code === 39) this.style.colour = "";
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) this.style.colour = `c${code % 10}`;
    }
  }
  classes() {
    return [this.style.colour, this.style.bold && "bold", this.style.dim && "dim"].filter(Boolean).join(" ");
  }
  show(target) {
    const parts = document.createDocumentFragment();
    for (const row of this.rows) {
      for (let at = 0; at < row.length; ) {
        const classes = row[at][1];
        let text = "";
        for (; at < row.length && row[at][1] === classes; at++) text += row[at][0];
        const span = document.createElement("span");
        span.className = classes;
        span.textContent = text;
        parts.append(span);
      }
      parts.append("\n");
    }
    target.replaceChildren(parts);
    target.scrollTop = target.scrollHeight;
  }
}

function made(kind, properties, attributes = {}) {
  const element = Object.assign(document.createElement(kind), properties);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function player(box) {
  const events = JSON.parse(box.dataset.cast);
  const at = []; // when each is played
  events.forEach(([seconds], n) => at.push(n ? at[n - 1] + Math.min(IDLE_S, seconds - events[n - 1][0]) : Math.min(IDLE_S, seconds)));
  const end = at.length ? at[at.length - 1] : 0;
  const button = made("button", { type: "button", textContent: "Play" });
  const seek = made("input", { type: "range", min: 0, max: end, step: "any", value: 0 }, { "aria-label": "position" });
  const clock = made("output", { className: "n" });
  const speed = made("select", {}, { "aria-label": "speed" });
  for (const times of [1, 2, 5, 20]) speed.append(made("option", { value: times, textContent: `${times}×` }));
  const view = made("pre", { className: "screen", tabIndex: 0 }, { role: "log", "aria-label": "terminal", "aria-live": "off" });
  const bar = made("div", { className: "bar" });
  bar.append(button, seek, clock, speed);
  box.append(view, bar);
  let screen = new Screen();
  let shown = 0; // events written
  let now = 0;
  let playing = 0; // the frame's request

  function go(seconds) {
    now = Math.min(end, Math.max(0, seconds));
    let due = 0;
    while (due < at.length && at[due] <= now) due++;
    const changed = shown !== due || !view.childNodes.length;
    if (due < shown) [screen, shown] = [new Screen(), 0];
    while (shown < due) screen.write(events[shown++][1]);
    if (changed) screen.show(view);
    seek.value = String(now);
    clock.textContent = `${(shown ? events[shown - 1][0] : 0).toFixed(1)} s, ${shown} of ${events.length}`;
  }
  function pause() {
    cancelAnimationFrame(playing);
    playing = 0;
    button.textContent = "Play";
  }
  function play() {
    if (now >= end) go(0);
    let last = performance.now();
    const step = (time) => {
      go(now + (Math.max(0, time - last) / 1000) * Number(speed.value));
      last = time;
      playing = requestAnimationFrame(step);
      if (now >= end) pause();
    };
    button.textContent = "Pause";
    playing = requestAnimationFrame(step);
  }
  const toggle = () => (playing ? pause() : play());
  const next = (by) => at[by > 0 ? Math.min(shown, at.length - 1) : Math.max(0, shown - 2)];
  button.addEventListener("click", toggle);
  seek.addEventListener("input", () => go(Number(seek.value)));
  view.addEventListener("keydown", (event) => {
    const keys = {
      " ": toggle,
      ArrowRight: () => go(now + 5),
      ArrowLeft: () => go(now - 5),
      ".": () => go(next(1)),
      ",": () => go(next(-1)),
      Home: () => go(0),
      End: () => go(end),
    };
    if (event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  go(end); // what there was to see; Play begins at the start
}

// A static page has up to a thousand of them: each is made when it comes to be seen.
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    player(target);
  }
});
for (const box of document.querySelectorAll(".replay")) seen.observe(box);
