// Tables of a cluster's plan: all methods side by side, their idle time by cause, one method.
"use strict";
const FULL = ["phased", "encoder_first_tuned"]; // what methods are compared with
const perCent = (x) => (x == null ? "–" : share(x));
const giga = (bytes) => (bytes / 1e9).toFixed(1);

/** What a device does during a step but idle, mean of the ranks. */
function spentOn(view) {
  const mean = (key) => sum(view.devices, (x) => x.spent[key]) / view.devices.length;
  return [
    ["B", "LLM passes without their TP collectives", mean("llm")],
    ["EB", "encoder work while no LLM pass runs", mean("encoder")],
    ["EF", "encoder work inside LLM passes", mean("encoder_inside")],
  ];
}

const head = (texts) =>
  texts
    .map((text) => esc(text).replace(/-/g, "\u2011").replace(/_/g, "_<wbr>"))
    .map((text) => `<th scope="col">${text}</th>`)
    .join("");
const methodCell = (m, k, more = "") =>
  `<th scope="row"><label for="method_${k}">${esc(m.name)}</label> ` +
  `${m.name === CLUSTER.recommended ? "<b>recommended</b> " : ""}${more}</th>`;

function compareClusters() {
  const heads = [
    `step, ${UNIT}`,
    "without TP slots",
    ...FULL.map((name) => `speed, ${name} = 1`),
    "encoder inside LLM step",
    "encoder time saved",
    "MFU",
    "memory, GB",
    `fits in ${giga(CLUSTER.capacity)} GB`,
  ];
  const rows = METHODS.map((m, k) => {
    const f = m.figures;
    const figures = [
      `<b>${number(m.predicted_s)}</b>`,
      f.without_tp_s == null ? "–" : number(f.without_tp_s),
      ...FULL.map((name) => (f.against[name] == null ? "–" : f.against[name].toFixed(3))),
      perCent(f.inside_share),
      perCent(f.time_share),
      share(f.mfu),
      giga(f.memory),
      f.fits ? "yes" : "<b>no</b>",
    ];
    const more = `<small>${esc(m.meaning)}</small>`;
    return (
      `<tr class="${state.shown === k ? "chosen" : ""}">${methodCell(m, k, more)}` +
      `<td class="bar">${bar(viewOf(m))}</td>` +
      figures.map((text, i) => `<td data-head="${esc(heads[i])}">${text}</td>`).join("") +
      "</tr>"
    );
  });
  return (
    "<caption>All methods, simulated. Encoder inside LLM step: share of its work within the time " +
    "of the LLM's own step; encoder time saved: how much of its time the step does not get longer " +
    "by.</caption>" +
    '<thead><tr><th scope="col">method</th><th scope="col" class="bar">where a device\'s time ' +
    `goes, mean of ranks</th>${head(heads)}</tr></thead><tbody>${rows.join("")}</tbody>`
  );
}

function bubbles() {
  const causes = Object.keys(CAUSES);
  const rows = METHODS.map((m, k) => {
    const view = viewOf(m);
    const figures = [...causes, null].map((c) => `<td>${share(idleShare(view, c))}</td>`);
    const name = m.name === "text_only" ? "<small>the LLM alone</small>" : "";
    return `<tr>${methodCell(m, k, name)}${figures.join("")}</tr>`;
  });
  const looks = causes.map(
    (c) =>
      `<th scope="col"><svg aria-hidden="true"><rect class="${c}"/></svg>${esc(CAUSES[c][0])}</th>`,
  );
  return (
    "<caption>Idle time by cause, share of the method's own step, mean of the ranks, simulated" +
    `</caption><thead><tr><th scope="col">method</th>${looks.join("")}<th scope="col">all</th>` +
    `</tr></thead><tbody>${rows.join("")}</tbody>`
  );
}

function clusterFigures(m) {
  const view = viewOf(m),
    [begin, end] = view.llm_s,
    tail = view.end_s - end;
  const spent = Object.fromEntries(spentOn(view).map(([cls, , seconds]) => [cls, seconds]));
  const list = [
    ["simulated step", `<b>${time(m.predicted_s)}</b>`],
    ["LLM's own step", `<b>${time(end - begin)}</b>`],
    ["delay before it", `<b>${time(begin)}</b>`],
    ["tail after it", `<b>${time(Math.max(tail, 0))}</b>`],
    ["encoder work of a device", `<b>${time(spent.EB + spent.EF)}</b>`],
    ["of it inside LLM passes", `<b>${time(spent.EF)}</b>`],
    ["idle", `<b>${share(idleShare(view))}</b> of the step`],
  ];
  const words = m.plan.map((line) => `<p>${esc(line)}</p>`);
  if (m.name === CLUSTER.recommended) words.unshift(`<p>recommended: ${esc(CLUSTER.reason)}</p>`);
  const figures = list.map(([a, b]) => `<div><dt>${a}</dt><dd>${b}</dd></div>`);
  return `<dl>${figures.join("")}</dl>${words.join("")}`;
}
