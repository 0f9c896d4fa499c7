// The figures beside the timelines: of one method, of its devices, and of all methods.
function figures(m) {
  if (CLUSTER) return clusterFigures(m);
  const view = viewOf(m);
  const list = [["predicted step", `<b>${time(m.predicted_s)}</b>`]];
  list.push([
    "measured step",
    m.measured_s == null
      ? "<b>not measured</b>"
      : `<b>${time(m.measured_s)}</b> ${m.iqr_s == null ? "" : `IQR ${time(m.iqr_s)}, `}` +
        `${(100 * (m.measured_s / m.predicted_s - 1)).toFixed(1).replace(/^(?=\d)/, "+")}\u00a0% ` +
        "against predicted",
  ]);
  if (bound(m) != null) list.push(["lower bound", `<b>${time(bound(m))}</b>`]);
  list.push([`idle, ${viewName(m)}`, `<b>${share(idleShare(view))}</b> of the step`]);
  const worst = view.devices
    .flatMap((x, d) => x.idle.map((t) => ({ ...t, d })))
    .sort((a, b) => b.end - b.start - a.end + a.start)[0];
  if (worst)
    list.push([
      "longest idle interval",
      `<b>${time(worst.end - worst.start)}</b> device ` +
        `${worst.d}, ${CAUSES[worst.cause][0]}` +
        (worst.waits_for ? `, waits for ${esc(worst.waits_for)}` : ""),
    ]);
  return `<dl>${list.map(([a, b]) => `<div><dt>${a}</dt><dd>${b}</dd></div>`).join("")}</dl>`;
}

const cells = (view, d) =>
  [...Object.keys(CAUSES), null]
    .map((cause) => {
      const s = d == null ? idleShare(view, cause) * view.end_s : idle(view, d, cause);
      return `<td>${number(s)} <small>${share(s / view.end_s)}</small></td>`;
    })
    .join("");

function idleTable(m) {
  const view = viewOf(m);
  const alike = CLUSTER ? ` <small>${CLUSTER.alike.toLocaleString("en")} devices</small>` : "";
  const rows = view.devices.map(
    (_, d) => `<tr><th scope="row">${DEVICE} ${d}${alike}</th>${cells(view, d)}</tr>`,
  );
  return (
    `<div class="wide"><table class="idle"><caption>Idle time of each ${DEVICE}, ${viewName(m)}: ${UNIT} and share of ` +
    `the step</caption><thead><tr><th></th>${Object.keys(CAUSES)
      .map(
        (c) =>
          `<th scope="col"><svg ` +
          `aria-hidden="true"><rect class="${c}"/></svg>${CAUSES[c][0]}</th>`,
      )
      .join("")}<th scope="col">all` +
    `</th></tr></thead><tbody>${rows.join("")}<tr><th scope="row">mean</th>${cells(view)}</tr>` +
    "</tbody></table></div>"
  );
}

function compare() {
  const basis = METHODS.every((m) => m.measured_s != null) ? "measured_s" : "predicted_s";
  const heads = [
    `predicted step, ${UNIT}`,
    `measured step, ${UNIT}`,
    `step against ${METHODS[0].name}, ${basis.slice(0, -2)}`,
    ...Object.values(CAUSES).map((c) => `idle, ${c[0]}`),
    "idle, all",
  ].map((text) => esc(text).replace("-", "\u2011"));
  const rows = METHODS.map((m, k) => {
    const view = viewOf(m);
    const other = viewName(m) === state.view ? "" : "; not measured, shown as predicted";
    const spread = m.iqr_s == null ? "" : ` <small>IQR ${number(m.iqr_s)}</small>`;
    const figures = [
      number(m.predicted_s),
      m.measured_s == null ? "–" : number(m.measured_s) + spread,
      `${(m[basis] / METHODS[0][basis]).toFixed(2)}×`,
      ...[...Object.keys(CAUSES), null].map((c) => share(idleShare(view, c))),
    ];
    return (
      `<tr class="${state.shown === k ? "chosen" : ""}"><th scope="row"><label for="method_${k}">` +
      `${esc(m.name)}</label> <small>${esc(m.meaning + other)}</small></th>` +
      `<td class="bar">${bar(view)}` +
      `</td>${figures.map((text, i) => `<td data-head="${heads[i]}">${text}</td>`).join("")}</tr>`
    );
  });
  return (
    `<thead><tr><th scope="col">method</th><th scope="col" class="bar">where a device's time ` +
    `goes, ${state.view}, mean of devices</th>` +
    heads.map((h) => `<th scope="col">${h}</th>`).join("") +
    `</tr></thead><tbody>${rows.join("")}</tbody>`
  );
}

/** What a device does during the step, one kind of time after another. */
function bar(view) {
  const work = (encoder) =>
    sum(view.devices, (x) =>
      sum(x.tasks, (t) => (t.kind.startsWith("E") === encoder ? t.end - t.start : 0)),
    ) / view.devices.length;
  const tasks = () => [
    ["B", "LLM tasks", work(false)],
    ["EB", "encoder tasks", work(true)],
  ];
  const epilogue = CLUSTER ? 0 : view.epilogue_s[1] - view.epilogue_s[0];
  const parts = [
    ...(CLUSTER ? spentOn(view) : tasks()),
    ...Object.keys(CAUSES).map((c) => [
      c,
      `idle, ${CAUSES[c][0]}`,
      idleShare(view, c) * view.end_s,
    ]),
    ["epilogue", "epilogue", epilogue],
  ].filter((part) => part[2] > 0);
  let left = 0;
  const rects = parts.map(([cls, what, s]) => {
    const rect =
      `<rect class="${cls}" x="${(99.5 * left) / LONGEST}%" y="1" height="16" ` +
      `width="${(99.5 * s) / LONGEST}%"><title>${what}: ${time(s)}</title></rect>`;
    left += s;
    return rect;
  });
  const text = parts.map(([, what, s]) => `${what} ${time(s)}`).join(", ");
  return `<svg role="img" aria-label="${esc(text)}">${rects.join("")}</svg>`;
}
