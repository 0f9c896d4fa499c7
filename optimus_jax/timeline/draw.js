// The timelines, as text made of the values; page.js puts it where it belongs.
"use strict";
const VALUES = JSON.parse(document.getElementById("values").textContent);
const METHODS = VALUES.methods;
const KINDS = {
  F: "LLM forward",
  B: "LLM backward",
  EF: "encoder forward",
  EB: "encoder backward",
};
const CAUSES = {
  pp_warmup: ["warm-up", "pipeline warm-up, before this device's first LLM task"],
  pp_other: ["between", "a wait between LLM tasks"],
  pp_cooldown: ["cool-down", "pipeline cool-down, after this device's last LLM task"],
};
const LANE = 25,
  BAND = 2 * LANE + 1,
  GAP = 22,
  AXIS = 20,
  MARK = 15,
  RIGHT = 8,
  EDGE = 5;

const at = (id) => document.getElementById(id);
const esc = (x) => String(x).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const sum = (list, f) => list.reduce((total, x) => total + f(x), 0);

// One unit for the whole page, with four digits of the longest step, so that figures compare.
const ends = (m) => [
  m.predicted_s,
  m.measured_s || 0,
  ...Object.values(m.views).map((v) => v.end_s),
];
const LONGEST = Math.max(...METHODS.flatMap(ends), 1e-9);
const [UNIT, PER] = LONGEST >= 1 ? ["s", 1] : LONGEST >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
const DIGITS = Math.max(0, 3 - Math.floor(Math.log10(LONGEST * PER)));
const number = (s, more = 0) => (s * PER).toFixed(DIGITS + more);
const time = (s, more) => `${number(s, more)}\u00a0${UNIT}`;
const share = (x) => `${(100 * x).toFixed(1)}\u00a0%`;

const state = { shown: 0, view: "predicted", from: 0, to: 1 }; // window: shares of the scale
const viewName = (m) => (m.views[state.view] ? state.view : "predicted");
const scale = (m) => 1.01 * (at("same").checked ? LONGEST : Math.max(...ends(m), 1e-9));
const bound = (m) => (m.name === "filled" ? VALUES.bound_s : null);

function words(name) {
  const [, kind, i, chunk, units, a, b] =
    /^(EF|EB|F|B)(\d+)(?:c(\d+))?(?:\.([\d+]+))?(?:\[(\d+):(\d+)\))?$/.exec(name) || [];
  if (!kind) return name;
  const part = units
    ? `, unit${units.includes("+") ? "s" : ""} ${units.replaceAll("+", " and ")}`
    : kind.startsWith("E")
      ? ", all units"
      : "";
  return (
    `${KINDS[kind]} of microbatch ${i}${chunk ? `, chunk ${chunk}` : ""}${part}` +
    (a ? `, layers ${a} to ${b - 1}` : "")
  );
}

/** Everything drawn on the bands, by device and time, and the pairs of exchanges that meet. */
function contents(view) {
  if (view.items) return view;
  view.items = view.devices.flatMap((device, d) =>
    [
      ...device.tasks.map((t) => ({
        ...t,
        d,
        type: "task",
        cls: t.kind,
        text: [`${t.name}: ${words(t.name)}`],
      })),
      ...device.idle.map((t) => ({
        ...t,
        d,
        type: "idle",
        cls: t.cause,
        text: [
          `idle: ${CAUSES[t.cause][1]}`,
          t.waits_for
            ? `waits for ${t.waits_for.replace(/^\S+/, (n) => `${n} (${words(n)})`)}`
            : "",
        ],
      })),
      ...device.exchanges.map((t) => ({
        ...t,
        d,
        type: "exchange",
        cls: t.features ? "mark features" : "mark",
        text: [`exchange with device ${t.with}`, ...t.what],
      })),
      {
        start: view.epilogue_s[0],
        end: view.epilogue_s[1],
        d,
        type: "epilogue",
        cls: "epilogue",
        name: "epilogue",
        text: ["epilogue: gradient reduction and optimiser"],
      },
    ].sort((a, b) => a.start - b.start || a.end - b.end),
  );
  view.items.forEach((item, k) => {
    item.k = k;
  });
  view.links = view.devices.flatMap((_, a) =>
    view.devices.flatMap((_, b) => {
      if (b <= a) return [];
      const of = (d, other) => view.items.filter((t) => t.d === d && t.with === other);
      const far = of(b, a); // both devices meet in the same order
      return of(a, b)
        .map((item, k) => [item, far[k]])
        .filter((pair) => pair[1]);
    }),
  );
  return view;
}

const idle = (view, d, cause) =>
  sum(view.devices[d].idle, (t) => (!cause || t.cause === cause ? t.end - t.start : 0));
const idleShare = (view, cause) =>
  sum([...view.devices.keys()], (d) => idle(view, d, cause)) / view.devices.length / view.end_s;

const pen = document.createElement("canvas").getContext("2d");
const sizes = new Map();
function fits(text, room) {
  if (!sizes.has(text)) {
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    sizes.set(text, pen.measureText(text).width);
  }
  return sizes.get(text) + 5 <= room;
}

function ticks(from, to, room) {
  const rough = ((to - from) * PER) / Math.max(2, room / 80);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const out = [];
  for (let k = Math.ceil((from * PER) / step); k * step <= to * PER; k++) {
    out.push([(k * step) / PER, (k * step).toFixed(digits)]);
  }
  return out;
}

const gutterOf = (width) => (width < 520 ? 62 : 112); // for the names of devices and lanes

/** The timeline of one method as SVG text, for the present window. */
function chart(m, id, width) {
  const view = contents(m.views[viewName(m)]),
    count = view.devices.length;
  const gutter = gutterOf(width),
    room = width - gutter - RIGHT;
  const from = state.from * scale(m),
    to = state.to * scale(m);
  const x = (t) => gutter + ((t - from) / (to - from)) * room;
  const inside = (px) => Math.min(Math.max(px, gutter), gutter + room);
  const marks = [
    ["predicted", m.predicted_s],
    ["measured", m.measured_s],
    ["bound", bound(m)],
  ]
    .filter(([, t]) => t != null)
    .sort((a, b) => b[1] - a[1]);
  const top = AXIS + MARK * marks.length + 4,
    y = (d) => top + d * (BAND + GAP);
  const bottom = y(count - 1) + BAND,
    height = bottom + (count > 3 ? AXIS : 4);
  const back = [],
    far = [],
    links = [],
    hits = [],
    labels = [],
    rules = [];
  const shapes = {}; // one path for each look: a pattern for each box makes printed files huge
  const label = (px, py, text, cls, anchor = "middle") =>
    labels.push(
      `<text x="${px.toFixed(1)}" y="${py.toFixed(1)}" class="${cls}" text-anchor="${anchor}">` +
        `${esc(text)}</text>`,
    );
  for (const [t, text] of ticks(from, to, room)) {
    back.push(`<path class="grid" d="M${x(t).toFixed(1)} ${AXIS - 4}V${bottom}"/>`);
    const anchor = x(t) > gutter + room - 20 ? "end" : "middle";
    label(x(t), AXIS - 8, text, "axis", anchor);
    if (count > 3) label(x(t), height - 5, text, "axis", anchor);
  }
  label(0, AXIS - 8, `time, ${UNIT}`, "axis", "start");
  view.devices.forEach((_, d) => {
    back.push(`<rect class="band" x="${gutter}" y="${y(d)}" width="${room}" height="${BAND}"/>`);
    label(0, y(d) + 17, `device ${d}`, "name", "start");
    label(
      0,
      y(d) + LANE + 17,
      `idle ${((100 * idle(view, d)) / view.end_s).toFixed(0)}\u00a0%`,
      "axis",
      "start",
    );
    if (gutter > 100) label(gutter - 6, y(d) + 17, "LLM", "axis", "end");
    if (gutter > 100) label(gutter - 6, y(d) + LANE + 17, "encoder", "axis", "end");
  });
  for (const item of view.items) {
    if (item.end < from || item.start > to) continue;
    const left = inside(x(item.start)),
      wide = inside(x(item.end)) - left;
    let py = y(item.d),
      tall = BAND;
    if (item.type === "task") [py, tall] = [py + (item.kind.startsWith("E") ? LANE + 1 : 0), LANE];
    if (item.type === "exchange") [py, tall] = [item.with > item.d ? py + BAND : py - EDGE, EDGE];
    const cls = item.cls + (wide < 3 && item.type !== "exchange" ? " thin" : "");
    const size = Math.max(wide, 1).toFixed(2);
    shapes[cls] = `${shapes[cls] || ""}M${left.toFixed(2)} ${py}h${size}v${tall}h-${size}z`;
    hits.push(
      `<rect id="${id}_${item.k}" data-k="${item.k}" class="hit" x="${left.toFixed(2)}" ` +
        `y="${py}" width="${size}" height="${tall}"/>`,
    );
    const long = item.end - item.start;
    const text = (item.type === "idle" ? [time(long), number(long)] : [item.name || ""]).find((s) =>
      fits(s, wide),
    );
    if (text) label(left + wide / 2, py + tall / 2 + 4, text, `in_${item.cls}`);
  }
  for (const [a, b] of view.links) {
    if (Math.max(a.end, b.end) < from || Math.min(a.start, b.start) > to) continue;
    const near = b.d === a.d + 1;
    const path =
      `<path class="link${near ? "" : " far"}${a.features ? " features" : ""}" ` +
      `data-k="${a.k}" data-far="${b.k}" d="M` +
      `${x((a.start + a.end) / 2).toFixed(1)} ${y(a.d) + BAND + EDGE}` +
      `L${x((b.start + b.end) / 2).toFixed(1)} ${y(b.d) - EDGE}"/>`;
    (near ? links : far).push(path);
  }
  marks.forEach(([what, t], k) => {
    // the latest on top: no line crosses another one's name
    const px = x(t),
      py = AXIS + MARK * k + 10;
    if (t < from || t > to) return;
    rules.push(`<path class="rule ${what}" d="M${px.toFixed(1)} ${py - 8}V${bottom}"/>`);
    const right = px < gutter + 150;
    label(
      px + (right ? 5 : -5),
      py,
      `${what === "bound" ? "lower bound" : `${what} end`} ${time(t)}`,
      "rule_name",
      right ? "start" : "end",
    );
  });
  const drawn = (front) =>
    Object.entries(shapes)
      .filter(([cls]) => /^(E?[FB]|mark)/.test(cls) === front)
      .map(([cls, path]) => `<path class="${cls}" d="${path}"/>`);
  const about =
    `${m.name}, ${viewName(m)}: step ${time(view.end_s)}, ${count} devices, idle ` +
    `${share(idleShare(view))} of it`;
  return (
    `<svg role="img" aria-label="${esc(about)}" viewBox="0 0 ${width} ${height}" ` +
    `width="${width}" height="${height}"><clipPath id="${id}_clip"><rect x="${gutter}" y="0" ` +
    `width="${room}" height="${height}"/></clipPath><g clip-path="url(#${id}_clip)">` +
    `${[back, drawn(false), far, drawn(true), links, hits, rules].flat().join("")}</g>` +
    `${labels.join("")}</svg>`
  );
}
