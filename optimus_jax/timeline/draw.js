// The timelines, as text made of the items; page.js puts it where it belongs.
"use strict";
const GAP = CLUSTER ? 10 : 22,
  AXIS = 20,
  MARK = 15,
  RIGHT = 8,
  APART = 6; // pixels from which collectives of a pass and kernels in them are drawn one by one

const pen = document.createElement("canvas").getContext("2d");
const sizes = new Map();
function fits(text, room) {
  if (room < 12) return false;
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

/** Moments that a line marks in all bands: where it is drawn, its look, its name. */
function marksOf(m) {
  const view = viewOf(m),
    found = [[m.predicted_s, PLANNED, `${PLANNED} end`]];
  if (m.measured_s != null) found.push([m.measured_s, "measured", "measured end"]);
  if (bound(m) != null) found.push([bound(m), "bound", "lower bound"]);
  if (CLUSTER && view.llm_s[0] > 0)
    found.push([view.llm_s[0], "llm", "LLM's step begins, delayed by encoder work:"]);
  if (CLUSTER && view.end_s - view.llm_s[1] > 1e-6)
    found.push([view.llm_s[1], "llm", "LLM's step ends, then a tail of encoder work:"]);
  return found.sort((a, b) => b[0] - a[0]);
}

const topOf = (m) => AXIS + MARK * marksOf(m).length + 4;
const rowTall = (m) => bandTall(viewOf(m)) + GAP;
function chartTall(m) {
  const count = viewOf(m).devices.length;
  return topOf(m) + count * rowTall(m) - GAP + (count > 3 ? AXIS : 4);
}

/** Rectangles of each look as one path: a pattern for each box makes printed files huge. Those
 * narrower than a pixel that follow one another with the same look are drawn as one. */
class Shapes {
  paths = [[], [], []]; // back to front
  last = new Map();

  add(layer, cls, left, top, wide, tall) {
    const rects = (this.paths[layer][cls] ||= []),
      key = `${cls}${top}`;
    const before = this.last.get(key);
    if (before && wide < 1 && left - before[0] - before[2] < 0.25) {
      before[2] = Math.max(before[2], left + wide - before[0]);
      return;
    }
    const rect = [left, top, wide, tall];
    this.last.set(key, rect);
    rects.push(rect);
  }

  text(layer) {
    return Object.entries(this.paths[layer]).map(([cls, rects]) => {
      const path = rects.map(([left, top, wide, tall]) => {
        const size = Math.max(wide, 0.4).toFixed(2);
        return `M${left.toFixed(2)} ${top.toFixed(1)}h${size}v${tall.toFixed(1)}h-${size}z`;
      });
      return `<path class="${cls}" d="${path.join("")}"/>`;
    });
  }
}

/** The timeline of one method for the present window: SVG text, and the boxes of what it shows. */
function chart(m, id, width) {
  const view = contents(viewOf(m)),
    count = view.devices.length,
    band = bandTall(view);
  const gutter = gutterOf(width),
    room = width - gutter - RIGHT;
  const from = state.from * scale(m),
    to = state.to * scale(m);
  const x = (t) => gutter + ((t - from) / (to - from)) * room;
  const inside = (px) => Math.min(Math.max(px, gutter), gutter + room);
  const top = topOf(m),
    y = (d) => top + d * (band + GAP);
  const bottom = y(count - 1) + band,
    height = chartTall(m);
  const back = [],
    far = [],
    links = [],
    labels = [],
    rules = [],
    boxes = [],
    shapes = new Shapes();
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
    back.push(`<rect class="band" x="${gutter}" y="${y(d)}" width="${room}" height="${band}"/>`);
    label(0, y(d) + 17, `${DEVICE} ${d}`, "name", "start");
    const waste = ((100 * idle(view, d)) / view.end_s).toFixed(0);
    label(0, y(d) + LANE + 17, `idle ${waste}\u00a0%`, "axis", "start");
    if (gutter > 100) label(gutter - 6, y(d) + 17, "LLM", "axis", "end");
    if (gutter > 100) label(gutter - 6, y(d) + LANE + 17, "encoder", "axis", "end");
  });
  const detail = (item, start, end, cls, text, top = item.top, tall = item.tall) => {
    if (end < from || start > to) return;
    const left = inside(x(start)),
      wide = inside(x(end)) - left;
    shapes.add(2, cls, left, y(item.d) + top, wide, tall);
    const shown = { ...item, start, end, text, k: null };
    boxes.push({ item: shown, left, top: y(item.d) + top, wide, tall });
  };
  for (const item of view.items) {
    if (item.end < from || item.start > to) continue;
    const left = inside(x(item.start)),
      wide = inside(x(item.end)) - left,
      full = x(item.end) - x(item.start);
    const py = y(item.d) + item.top;
    const cls = item.cls + (wide < 3 && item.type !== "exchange" ? " thin" : "");
    const front = item.type === "task" || item.type === "exchange" ? 1 : 0;
    shapes.add(front, cls, left, py, item.type === "exchange" ? Math.max(wide, 1) : wide, item.tall);
    boxes.push({ item, left, top: py, wide, tall: item.tall });
    if (item.slots && full > APART * item.slots.length) {
      item.slots.forEach(([a, b], k) =>
        detail(item, item.start + a, item.start + b, "tp", [
          `TP collective ${k + 1} of ${item.slots.length} in ${item.name}`,
          "the LLM waits for it: a tensor-parallel slot for encoder kernels",
        ]),
      );
    }
    if (item.in_slots && (2 * full) / (item.in_slots.length + 1) > APART) {
      let now = item.start;
      item.in_slots.forEach((length, k) => {
        if (k % 2 === 0) {
          detail(item, now, now + length / 1e6, item.kind, item.text);
        }
        now += length / 1e6;
      });
    }
    const long = item.end - item.start;
    const names = item.type === "idle" ? [time(long), number(long)] : [item.name || ""];
    const text = wide > 12 && names.find((s) => fits(s, wide));
    if (text && item.tall > 10)
      label(left + wide / 2, py + item.tall / 2 + 4, text, `in_${item.cls}`);
  }
  for (const [a, b] of view.links) {
    if (Math.max(a.end, b.end) < from || Math.min(a.start, b.start) > to) continue;
    const near = b.d === a.d + 1;
    const path =
      `<path class="link${near ? "" : " far"}${a.features ? " features" : ""}" ` +
      `data-k="${a.k}" data-far="${b.k}" d="M` +
      `${x((a.start + a.end) / 2).toFixed(1)} ${y(a.d) + band + EDGE}` +
      `L${x((b.start + b.end) / 2).toFixed(1)} ${y(b.d) - EDGE}"/>`;
    (near ? links : far).push(path);
  }
  marksOf(m).forEach(([t, cls, what], k) => {
    // the latest on top: no line crosses another one's name
    const px = x(t),
      py = AXIS + MARK * k + 10;
    if (t < from || t > to) return;
    rules.push(`<path class="rule ${cls}" d="M${px.toFixed(1)} ${py - 8}V${bottom}"/>`);
    const right = px < gutter + room / 3;
    const anchor = right ? "start" : "end";
    label(px + (right ? 5 : -5), py, `${what} ${time(t)}`, "rule_name", anchor);
  });
  const about =
    `${m.name}, ${viewName(m)}: step ${time(view.end_s)}, ${count} ${DEVICE}s, idle ` +
    `${share(idleShare(view))} of it`;
  const drawn = [back, shapes.text(0), far, shapes.text(1), shapes.text(2), links, rules];
  const svg =
    `<svg role="img" aria-label="${esc(about)}" viewBox="0 0 ${width} ${height}" ` +
    `width="${width}" height="${height}"><clipPath id="${id}_clip"><rect x="${gutter}" y="0" ` +
    `width="${room}" height="${height}"/></clipPath><g clip-path="url(#${id}_clip)">` +
    `${drawn.flat().join("")}<rect class="hit"/></g>${labels.join("")}</svg>`;
  return { svg, boxes };
}

/** The box under a point of the chart, or one that it misses by a pixel or two. */
function boxAt(boxes, px, py) {
  let near = null;
  for (let k = boxes.length - 1; k >= 0; k--) {
    const { left, top, wide, tall } = boxes[k];
    if (py < top || py > top + tall) continue;
    if (px >= left && px <= left + wide) return boxes[k];
    if (!near && px >= left - 2 && px <= left + wide + 2) near = boxes[k];
  }
  return near;
}
