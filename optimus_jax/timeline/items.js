// What the values hold, as items to be drawn: each on a device, with its look, place and words.
"use strict";
const VALUES = JSON.parse(document.getElementById("values").textContent);
const METHODS = VALUES.methods;
const CLUSTER = VALUES.cluster; // a plan for many devices, of which the ranks of one pipeline show
const PLANNED = CLUSTER ? "simulated" : "predicted"; // what is not measured
const DEVICE = CLUSTER ? "rank" : "device";
const KINDS = {
  F: "LLM forward",
  B: "LLM backward",
  I: "LLM backward of the input",
  W: "LLM backward of the weights",
  EF: "encoder forward",
  EB: "encoder backward",
};
const CAUSES = VALUES.causes || {
  pp_warmup: ["warm-up", "pipeline warm-up, before this device's first LLM task"],
  pp_other: ["between", "a wait between LLM tasks"],
  pp_cooldown: ["cool-down", "pipeline cool-down, after this device's last LLM task"],
};
const LANE = 25,
  SLICE = 9, // least height of encoder work on a part of a rank's devices
  THIN = 0.6, // of a lane, for work in tensor-parallel slots
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
const DIGITS = Math.max(CLUSTER && UNIT === "s" ? 3 : 0, 3 - Math.floor(Math.log10(LONGEST * PER)));
const number = (s, more = 0) => (s * PER).toFixed(DIGITS + more);
const time = (s, more) => `${number(s, more)}\u00a0${UNIT}`;
const share = (x) => `${(100 * x).toFixed(1)}\u00a0%`;
const milli = (s) => `${(1e3 * s).toFixed(3)}\u00a0ms`;

const state = { shown: 0, view: PLANNED, from: 0, to: 1 }; // window: shares of the scale
const viewName = (m) => (m.views[state.view] ? state.view : PLANNED);
const viewOf = (m) => m.views[viewName(m)];
const scale = (m) => 1.01 * (at("same").checked ? LONGEST : Math.max(...ends(m), 1e-9));
const bound = (m) => (m.name === "filled" ? VALUES.bound_s : null);

const slices = (view) => view.slices || 1;
const encoderTall = (view) => Math.max(LANE, slices(view) * SLICE);
const bandTall = (view) => LANE + 1 + encoderTall(view);

function words(name) {
  const [outer, inside] = name.split("|");
  if (inside) return `${words(outer)}, with ${words(inside)} inside`;
  const [, kind, i, chunk, encoder, units, a, b] =
    /^(EF|EB|F|B|I|W)(\d+)(?:c(\d+))?(?:e(\d+))?(?:\.([\d+]+))?(?:\[(\d+):(\d+)\))?$/.exec(name) ||
    [];
  if (!kind) return name;
  const part = units
    ? `, unit${units.includes("+") ? "s" : ""} ${units.replaceAll("+", " and ")}`
    : kind.startsWith("E") && !CLUSTER
      ? ", all units"
      : "";
  return (
    `${KINDS[kind]} of microbatch ${i}${chunk ? `, chunk ${chunk}` : ""}` +
    `${encoder ? `, encoder ${encoder}` : ""}${part}` +
    (a ? `, layers ${a} to ${b - 1}` : "")
  );
}

/** Everything drawn on the bands, by device and time, and the pairs of exchanges that meet. */
function contents(view) {
  if (view.items) return view;
  const fill = CLUSTER ? ranks(view) : devices(view);
  view.items = fill.flatMap((row) => row.sort((a, b) => a.start - b.start || a.end - b.end));
  view.items.forEach((item, k) => {
    item.k = k;
  });
  view.links = view.devices.flatMap((_, a) =>
    view.devices.flatMap((_, b) => {
      if (b <= a || CLUSTER) return [];
      const of = (d, other) => view.items.filter((t) => t.d === d && t.with === other);
      const far = of(b, a); // both devices meet in the same order
      return of(a, b)
        .map((item, k) => [item, far[k]])
        .filter((pair) => pair[1]);
    }),
  );
  return view;
}

const idleItem = (t, d) => ({
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
});

/** Of a run: tasks, exchanges, idle time and the epilogue of each device. */
function devices(view) {
  const band = bandTall(view);
  return view.devices.map((device, d) => [
    ...device.tasks.map((t) => ({
      ...t,
      d,
      type: "task",
      cls: t.kind,
      top: t.kind.startsWith("E") ? LANE + 1 : 0,
      tall: LANE,
      text: [`${t.name}: ${words(t.name)}`],
    })),
    // the encoder's part of a fused task, in its own lane too
    ...device.tasks
      .filter((t) => t.inside)
      .map((t) => ({
        ...t,
        d,
        name: t.name.split("|")[1],
        type: "task",
        cls: `${t.inside} slots`,
        top: LANE + 1,
        tall: THIN * LANE,
        text: [`${t.name}: ${words(t.name)}`],
      })),
    ...Object.entries(view.collectives_s || {}).map(([which, [start, end]]) => ({
      start,
      end,
      d,
      type: "collective",
      cls: "collective",
      name: which,
      top: 0,
      tall: LANE,
      text: [which === "gather" ? "gathering weights" : "scattering gradients"],
    })),
    ...device.idle.map((t) => ({ ...idleItem(t, d), top: 0, tall: band })),
    ...device.exchanges.map((t) => ({
      ...t,
      d,
      type: "exchange",
      cls: t.features ? "mark features" : "mark",
      top: t.with > d ? band : -EDGE,
      tall: EDGE,
      text: [`exchange with device ${t.with}`, ...t.what],
    })),
    {
      start: view.epilogue_s[0],
      end: view.epilogue_s[1],
      d,
      type: "epilogue",
      cls: "epilogue",
      name: "epilogue",
      top: 0,
      tall: band,
      text: ["epilogue: gradient reduction and optimiser"],
    },
  ]);
}

/** Of a cluster: LLM passes, encoder work, collectives and idle time of each rank. */
function ranks(view) {
  const backbone = VALUES.backbones[view.backbone],
    count = slices(view);
  const each = encoderTall(view) / count;
  const part = (t) => ({ top: LANE + 1 + (t.lane || 0) * each, tall: (t.lanes || count) * each });
  return view.devices.map((device, d) => [
    ...backbone.devices[d].map((t) => {
      const start = t.start + view.shift_s;
      const slots = t.slots == null ? [] : backbone.tp_slots[t.slots];
      const item = { name: t.name, d, start, end: t.end + view.shift_s, type: "task", cls: t.kind };
      const held = slots.length
        ? `${slots.length} TP collectives in it, ${milli(sum(slots, (s) => s[1] - s[0]))}`
        : "";
      return { ...item, slots, top: 0, tall: LANE, text: [`${t.name}: ${words(t.name)}`, held] };
    }),
    ...device.encoder.map((t) => {
      const place = part(t);
      if (t.in_slots) place.tall *= THIN;
      const cls = t.in_slots ? `${t.kind} slots` : t.kind;
      return { ...t, ...place, d, type: "task", cls, text: encoderText(t) };
    }),
    ...view.collectives.map((t) => ({
      ...t,
      d,
      type: "collective",
      cls: "collective",
      name: CAUSES[t.cause][0],
      top: 0,
      tall: LANE,
      text: [CAUSES[t.cause][1]],
    })),
    ...device.idle.map((t) => {
      const below = t.lane != null || t.cause.startsWith("dp"); // beside something in the LLM's lane
      const place = below ? part(t) : { top: 0, tall: bandTall(view) };
      return { ...idleItem(t, d), ...place };
    }),
  ]);
}

function encoderText(t) {
  if (t.all) return [`all ${KINDS[t.kind]}s of this rank's devices, by a formula`];
  if (t.kernels == null) return [`${t.name}: ${words(t.name)}`, "encoder layers of an LLM pass"];
  const many = t.kernels === 1 ? "1 kernel" : `${t.kernels} kernels`;
  const runs = (t.in_slots || []).filter((_, k) => k % 2 === 0);
  return [
    `${t.name}: ${words(t.name)}${t.next ? " of the next step" : ""}`,
    t.in_slots
      ? `${many} in ${runs.length} TP slots, ${milli(sum(runs, (r) => r / 1e6))} in all`
      : `${many} while no LLM pass runs`,
    `${t.encoder ? `encoder ${t.encoder}, ` : ""}encoder pipeline ${t.pipeline}` +
      (t.stage == null ? "" : `, stage ${t.stage}`),
  ];
}

/** Seconds of a device's idle time, of one cause or of all. */
function idle(view, d, cause) {
  const { spent } = view.devices[d];
  if (spent) return cause ? spent[cause] : sum(Object.keys(CAUSES), (c) => spent[c]);
  return sum(view.devices[d].idle, (t) => (!cause || t.cause === cause ? t.end - t.start : 0));
}
const idleShare = (view, cause) =>
  sum([...view.devices.keys()], (d) => idle(view, d, cause)) / view.devices.length / view.end_s;
