// What the reader does: choose methods and views, zoom, point at things, go through them by key.
"use strict";
let panels = []; // one for each timeline on the page

function build() {
  const shown = state.shown === "all" ? METHODS : [METHODS[state.shown]];
  at("panels").innerHTML = shown
    .map(
      (m, k) =>
        `<section class="panel" aria-label="${esc(m.name)}">` +
        `<h3>${esc(m.name)} <small>${esc(m.meaning)}</small></h3>${figures(m)}<div class="chart" ` +
        `id="chart${k}" tabindex="0" role="application" aria-label="timeline of ${esc(m.name)}, ` +
        `${viewName(m)}; arrow keys go from interval to interval"></div>${idleTable(m)}</section>`,
    )
    .join("");
  panels = shown.map((m, k) => ({
    m,
    id: `chart${k}`,
    div: at(`chart${k}`),
    boxes: [],
    on: null, // the item that is pointed at
    here: null,
  }));
  for (const p of panels) {
    p.div.style.minHeight = `${chartTall(p.m)}px`;
    listen(p);
  }
  const absent = shown.filter((m) => !m.views.measured).map((m) => m.name);
  for (const input of document.getElementsByName("view")) {
    input.disabled = input.value === "measured" && absent.length === shown.length;
    input.checked =
      input.value === (shown.some((m) => m.views[state.view]) ? state.view : PLANNED);
  }
  for (const input of document.getElementsByName("method")) {
    input.checked = input.value === String(state.shown);
  }
  at("reason").textContent =
    absent.length && !CLUSTER ? `not measured: ${absent.join(", ")}` : "";
  at("compare").innerHTML = CLUSTER ? compareClusters() : compare();
  at("bubbles").innerHTML = CLUSTER ? bubbles() : "";
  draw();
}

let rest = 0;
/** Draws the timelines on the screen at once and large ones beyond it when nothing else is drawn;
 * with a given width, all at once. */
function draw(width) {
  clearTimeout(rest);
  for (const p of panels) {
    const { top, bottom } = p.div.getBoundingClientRect();
    p.late = panels.length > 1 && CLUSTER && !width && (bottom < 0 || top > innerHeight);
    if (!p.late) drawOne(p, width);
  }
  rest = setTimeout(drawRest, 200);
}

function drawRest() {
  const p = panels.find((panel) => panel.late);
  if (!p) return;
  drawOne(p);
  rest = setTimeout(drawRest);
}

function drawOne(p, width) {
  p.late = false;
  const { svg, boxes } = chart(p.m, p.id, width || Math.max(p.div.clientWidth, 300));
  p.div.innerHTML = svg;
  p.boxes = boxes;
  light(p, p.on);
}

let pending = 0;
function look(from, span) {
  // moves the window, as far as the step goes
  const wide = Math.min(Math.max(span, 1 / 2000), 1);
  state.from = Math.min(Math.max(from, 0), 1 - wide);
  state.to = state.from + wide;
  at("tip").hidden = true;
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => draw());
}
const zoom = (factor, centre = (state.from + state.to) / 2) =>
  look(centre - (centre - state.from) / factor, (state.to - state.from) / factor);

function tell(p, item, px, py) {
  const tip = at("tip");
  tip.innerHTML =
    item.text
      .filter(Boolean)
      .map((line, k) => `<p>${k ? "" : "<b>"}${esc(line)}` + `${k ? "" : "</b>"}</p>`)
      .join("") +
    `<p>${DEVICE} ${item.d}, ${viewName(p.m)}</p><p>${
      CLUSTER
        ? `${number(item.start, 3)} to ${time(item.end, 3)}: ${milli(item.end - item.start)}`
        : `${number(item.start, 1)} to ${time(item.end, 1)}: ${time(item.end - item.start, 1)}`
    }</p>`;
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${Math.max(4, Math.min(px + 14, innerWidth - w - 8))}px`;
  tip.style.top = `${py + 18 + h > innerHeight ? Math.max(4, py - h - 12) : py + 18}px`;
}

function light(p, item, box = p.boxes.find((b) => b.item === item)) {
  // this item alone, and the line to the one it meets
  for (const mark of p.div.querySelectorAll(".link.on")) mark.classList.remove("on");
  if (item?.type === "exchange") {
    const meets = `[data-k="${item.k}"],[data-far="${item.k}"]`;
    for (const mark of p.div.querySelectorAll(meets)) mark.classList.add("on");
  }
  const frame = p.div.querySelector(".hit");
  frame?.classList.toggle("on", Boolean(box));
  if (box) {
    const place = { x: box.left, y: box.top, width: Math.max(box.wide, 1), height: box.tall };
    for (const [name, value] of Object.entries(place)) frame.setAttribute(name, value);
  }
  p.on = item;
}

function hush(p) {
  at("tip").hidden = true;
  light(p, null);
}

function step(p, key) {
  // the item that an arrow key leads to
  const items = viewOf(p.m).items,
    now = items[p.here];
  if (!now) return items.find((t) => t.end > state.from * scale(p.m)) || items[0];
  const row = (d) => items.filter((t) => t.d === d),
    mine = row(now.d);
  const middle = (t) => (t.start + t.end) / 2;
  const off = (t) => Math.abs(middle(t) - middle(now)) + (t.type === now.type ? 0 : LONGEST);
  if (key === "ArrowUp" || key === "ArrowDown") {
    return row(now.d + (key === "ArrowUp" ? -1 : 1)).sort((a, b) => off(a) - off(b))[0] || now;
  }
  const k = { ArrowLeft: now.k - 1, ArrowRight: now.k + 1, Home: 0, End: Infinity }[key];
  return items[Math.min(Math.max(k, mine[0].k), mine.at(-1).k)];
}

function focusOn(p, item) {
  p.here = item.k;
  light(p, item);
  const [a, b] = [item.start / scale(p.m), item.end / scale(p.m)],
    span = state.to - state.from;
  if (a < state.from || b > state.to) look((a + b) / 2 - span / 2, span);
  requestAnimationFrame(() => {
    const frame = p.div.querySelector(".hit.on");
    if (!frame) return;
    frame.scrollIntoView({ block: "nearest" });
    const box = frame.getBoundingClientRect();
    tell(p, item, (box.left + box.right) / 2, box.bottom);
  });
}

function listen(p) {
  const share = (e) => {
    // where the pointer is, in the window's terms; negative left of the bands
    const svg = p.div.firstChild.getBoundingClientRect();
    const gutter = gutterOf(svg.width),
      room = svg.width - gutter - RIGHT;
    const part = (e.clientX - svg.left - gutter) / room;
    return { part, room, value: state.from + part * (state.to - state.from) };
  };
  let drag = null;
  p.div.addEventListener("pointerdown", (e) => {
    if (e.button === 0 && share(e).part >= 0) drag = { x: e.clientX, from: state.from };
  });
  p.div.addEventListener("pointermove", (e) => {
    if (drag && Math.abs(e.clientX - drag.x) > 3 && state.to - state.from < 1) {
      p.div.setPointerCapture(e.pointerId);
      hush(p);
      const span = state.to - state.from;
      look(drag.from - ((e.clientX - drag.x) / share(e).room) * span, span);
      return;
    }
    const line = e.target.closest(".link");
    const svg = p.div.firstChild.getBoundingClientRect();
    const box = line
      ? p.boxes.find((b) => b.item.k === Number(line.dataset.k))
      : share(e).part >= 0 && boxAt(p.boxes, e.clientX - svg.left, e.clientY - svg.top);
    hush(p);
    if (!box) return;
    light(p, box.item, box);
    tell(p, box.item, e.clientX, e.clientY);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    p.div.addEventListener(name, () => {
      drag = null;
    });
  }
  p.div.addEventListener("pointerleave", () => hush(p));
  p.div.addEventListener("blur", () => hush(p));
  p.div.addEventListener("focus", () => {
    if (p.div.matches(":focus-visible"))
      focusOn(p, viewOf(p.m).items[p.here] || step(p));
  });
  p.div.addEventListener("dblclick", () => look(0, 1));
  p.div.addEventListener(
    "wheel",
    (e) => {
      const { part, value } = share(e),
        span = state.to - state.from;
      if (part < 0 || (e.deltaY > 0 && span >= 1)) return; // the page scrolls
      e.preventDefault();
      if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
        look(state.from + ((e.deltaX || e.deltaY) / 1000) * span, span);
      } else zoom(Math.exp(-e.deltaY / 400), value);
    },
    { passive: false },
  );
  p.div.addEventListener("keydown", (e) => {
    if (e.key === "Escape") {
      hush(p);
      p.div.blur();
    }
    if (!/^(Arrow|Home|End)/.test(e.key) || e.ctrlKey || e.altKey || e.metaKey) return;
    e.preventDefault();
    focusOn(p, step(p, e.key));
  });
}

function remember() {
  // so that a link or a reload leads to the same picture
  const name = state.shown === "all" ? "all" : METHODS[state.shown].name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}.${state.view}`);
}

function start() {
  at("emulated").hidden = !VALUES.emulated;
  at("drawn").textContent = CLUSTER ? CLUSTER.drawn : "";
  at("same").checked = !CLUSTER; // the slowest method would leave little room for the others
  at("notes").innerHTML = VALUES.notes.map((note) => `<li>${esc(note)}</li>`).join("");
  at("methods").innerHTML = [...METHODS.map((m, k) => [k, m.name]), ["all", "all methods"]]
    .map(
      ([k, name]) =>
        `<label><input type="radio" name="method" id="method_${k}" value="${k}">` +
        `<span>${esc(name)}</span></label>`,
    )
    .join("");
  const [, name, view] = /^#(.*)\.(\w+)$/.exec(location.hash) || [];
  const k = METHODS.findIndex((m) => encodeURIComponent(m.name) === name);
  const best = METHODS.findIndex((m) => m.name === CLUSTER?.recommended);
  state.shown = name === "all" ? "all" : k < 0 ? Math.max(best, 0) : k;
  if (view === "measured" && !CLUSTER) state.view = view;
  document.addEventListener("change", (e) => {
    if (e.target.name === "method")
      state.shown = e.target.value === "all" ? "all" : +e.target.value;
    if (e.target.name === "view") state.view = e.target.value;
    build();
    remember();
  });
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.altKey || e.metaKey) return;
    ({ "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6), 0: () => look(0, 1) })[
      e.key
    ]?.();
  });
  at("in").addEventListener("click", () => zoom(1.6));
  at("out").addEventListener("click", () => zoom(1 / 1.6));
  at("reset").addEventListener("click", () => look(0, 1));
  addEventListener("resize", () => draw());
  let before = null;
  addEventListener("beforeprint", () => {
    before = { ...state };
    Object.assign(state, { shown: "all", from: 0, to: 1 });
    build();
    draw(720);
  });
  addEventListener("afterprint", () => {
    Object.assign(state, before);
    build();
  });
  build();
}
start();
