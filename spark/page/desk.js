"use strict";
// Asks this machine's server for curves, and draws them. Names come from whoever can send a reading: they are only ever
// put into text, where no character of theirs turns the words beside it round.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const ASKED = ["site", "device", "stream", "metric", "namespace", "since", "until", "last", "size"];
const DOTS_MAX = 80, HEIGHT = 360, STRIP = 12, TAP_PX = 8;

// What is asked for, as in the page's address. What is empty is left to the server.
let asked = Object.fromEntries(ASKED.map((name) => [name, new URLSearchParams(location.search).get(name) || ""]));
let curve = null, plot = null, place = -1, aborting = null, explaining = null, choices = null, wasDrag = false;

// -- words ------------------------------------------------------------------------------------

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
function number(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toPrecision(4);
  return String(+value.toPrecision(6)).replace("-", "−");
}
// A decimal that came as text, with every digit.
const whole = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text).replace("-", "−");
const SIZES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
function length(seconds) {
  const [unit, name] = SIZES.find(([unit]) => seconds >= unit && seconds % unit === 0) || [1, "s"];
  return `${seconds / unit} ${name}`;
}
// Microseconds as a time in UTC; the fraction is left out where it is none.
function time(us) {
  const text = new Date(Math.floor(us / 1000)).toISOString();
  return text.slice(0, 19).replace("T", " ") + (us % 1000000 ? text.slice(19, 23) : "");
}
function span(fromUs, toUs) {
  if (fromUs === null && toUs === null) return "At some time";
  if (fromUs === null) return `Before ${time(toUs)}`;
  if (toUs === null) return `After ${time(fromUs)}`;
  const from = time(fromUs), to = time(toUs);
  return `${from} to ${from.slice(0, 10) === to.slice(0, 10) ? to.slice(11) : to}`;
}
const visible = (text) => text.replace(/[\p{Cc}\p{Cf}]/gu, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
const STATUS = { complete: "Final", complete_with_loss: "Final, with a loss", provisional: "Provisional" };

// -- the document -----------------------------------------------------------------------------

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = visible(text);
  return node;
}
function options(select, entries, value) {
  select.replaceChildren(...entries.map(([value, text]) => {
    const option = element("option", "", text);
    option.value = value;
    return option;
  }));
  select.value = value;
}
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// -- asking -----------------------------------------------------------------------------------

function query(names, more = {}) {
  const told = new URLSearchParams();
  for (const name of names) if (asked[name]) told.set(name, asked[name]);
  for (const [name, value] of Object.entries(more)) told.set(name, value);
  return told.toString();
}
async function fetched(path, signal) {
  const answer = await fetch(path, { signal, cache: "no-store" });
  if (!answer.headers.get("content-type").startsWith("application/json")) throw new Error(await answer.text());
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}
function say(level, words, means) {
  $("headline").className = level;
  $("headline").replaceChildren(element("p", "words", words));
  if (means) $("headline").append(element("p", "means", means));
}
async function ask(isOther = true) {
  for (const each of [aborting, explaining]) if (each) each.abort();
  aborting = new AbortController();
  const { signal } = aborting;
  if (isOther) history.replaceState(null, "", `/?${query(ASKED)}`);
  $("headline").classList.add("waits");
  try {
    const found = await fetched(`/curve.json?${query(ASKED)}`, signal);
    curve = found;
    place = -1;
    wasDrag = false;
    show();
  } catch (error) {
    if (signal.aborted) return;
    $("found").hidden = true;
    say("bad", error instanceof TypeError ? "The server does not answer: is sluice-cloud desk still running?" : error.message);
  }
}
async function choose() {
  choices = await fetched(`/choices.json?${query(["site"])}`);
  $("warehouse").textContent = choices.warehouse;
  $("site-label").hidden = !choices.sites.length;
  options($("site"), [["", "all sites"], ...choices.sites.map((site) => [site, site])], asked.site);
  const isTyped = choices.devices_more > 0;
  $("device").hidden = isTyped;
  $("device-name").hidden = !isTyped;
  options($("size"), [["", "automatic"], ...choices.sizes_s.map((size) => [String(size), length(size)])], asked.size);
  showDevice();
}

// -- what is shown ----------------------------------------------------------------------------

function showDevice() {
  const device = curve ? curve.device : asked.device;
  if (choices) {
    const names = choices.devices.includes(device) || !device ? choices.devices : [device, ...choices.devices];
    options($("device"), names.map((name) => [name, name]), device);
  }
  $("device-name").value = device;
}
function show() {
  const { points, series, chosen } = curve;
  showDevice();
  const several = (name) => series.filter((each) => each[2] === name).length > 1;
  const names = series.map(([namespace, stream, metric], index) => [String(index), several(metric) ? `${metric} (${stream}, ${namespace})` : metric]);
  const at = series.findIndex((each) => chosen && each.every((part, index) => part === chosen[index]));
  options($("metric"), at < 0 ? [["", asked.metric || "none here"], ...names] : names, at < 0 ? "" : String(at));
  $("span").value = asked.last || (asked.since || asked.until ? "own" : "");
  showOwn();
  $("since").value = time(curve.since_us).slice(0, 19).replace(" ", "T");
  $("until").value = time(curve.until_us).slice(0, 19).replace(" ", "T");
  $("size").value = asked.size;
  document.title = visible(`${chosen ? `${chosen[2]} of ` : ""}${curve.device} – Sluice desk`);
  $("found").hidden = false;
  showHeadline();
  $("curve-title").textContent = visible(chosen ? `${chosen[2]} of ${curve.device}: mean of each ${length(curve.size_s)}` : curve.device);
  for (const node of document.querySelectorAll("#chart, #legend, #how, #readout")) node.hidden = !points.length;
  $("window").hidden = true;
  $("readout").textContent = "";
  draw();
  showMissing();
  showFiles();
  showTable();
}
function showHeadline() {
  const { points } = curve;
  const where = `${span(curve.since_us, curve.until_us)} UTC`;
  if (!points.length) {
    const words = curve.nothing || "no window in this span";
    say("warn", `${curve.device}: ${words}.`, where);
    for (const us of curve.nearest_us) {
      const button = element("button", "", `Show ${time(us)}`);
      button.type = "button";
      button.addEventListener("click", () => showAround(us));
      $("headline").append(button);
    }
    return;
  }
  const waiting = points.filter((point) => point[6] === "provisional").length;
  const lossy = points.filter((point) => point[6] === "complete_with_loss").length;
  const revised = points.filter((point) => point[8].length).length;
  const open = curve.missing.filter((each) => !each[2]).length, gone = curve.missing.length - open;
  const told = [
    waiting === 0 ? "all are final" : waiting === points.length ? "none is final yet" : `${count(waiting, "window")} still provisional`,
    lossy && `${lossy} with a loss`, revised && `${revised} late or changed`,
  ];
  const missing = [open && `${count(open, "span")} of readings missing without a reason`, gone && `${gone} ${gone === 1 ? "loss" : "losses"} with a reason`].filter(Boolean);
  say(waiting ? "warn" : "well", `${count(points.length, "window")} of ${length(curve.size_s)}: ${told.filter(Boolean).join(", ")}.`,
    `${where}. ${missing.length ? `${missing.join(", ")}: see below.` : "Nothing is known to be missing."}${curve.is_history_searched ? "" : " The history is too large to search for this span: only late readings show as changes."}`);
}
function showMissing() {
  const items = curve.missing.map(([fromUs, toUs, isExplained, words]) => {
    const item = element("li", isExplained ? "explained" : "");
    item.append(element("time", "", `${span(fromUs, toUs)} UTC`), words);
    return item;
  });
  if (curve.missing_more) items.push(element("li", "", `And ${count(curve.missing_more, "more span")}: the CSV has all.`));
  if (!items.length) items.push(element("li", "none", "Nothing is known to be missing in this span."));
  $("missing").replaceChildren(...items);
}
function showFiles() {
  const limits = { device: curve.device, since: iso(curve.since_us), until: iso(curve.until_us) };
  if (curve.chosen) [limits.namespace, limits.stream, limits.metric] = curve.chosen;
  const size = curve.size_s * 1e6, behind = [curve.since_us, curve.until_us].map((us) => iso(Math.ceil(us / size) * size));
  const readings = query(["site"], { ...limits, since: behind[0], until: behind[1] });
  const gaps = query(["site"], limits), windows = query(["site"], { ...limits, size: curve.size_s });
  for (const kind of ["csv", "parquet"]) {
    $(`windows-${kind}`).href = `/windows.${kind}?${windows}`;
    $(`readings-${kind}`).href = `/readings.${kind}?${readings}`;
    $(`gaps-${kind}`).href = `/gaps.${kind}?${gaps}`;
  }
  $("windows-json").href = `/windows.json?${windows}`;
}
function iso(us) { return time(us).replace(" ", "T") + "Z"; }
function showTable() {
  const wide = $("table").lastElementChild;
  wide.replaceChildren();
  if (!$("table").open || !curve) return;
  const table = element("table"), head = element("thead"), body = element("tbody"), line = element("tr");
  for (const name of ["Begins, UTC", "Values", "Mean", "Lowest", "Highest", "Deviation", "Status", "Why"]) {
    const cell = element("th", ["Values", "Mean", "Lowest", "Highest", "Deviation"].includes(name) ? "number" : "", name);
    cell.scope = "col";
    line.append(cell);
  }
  head.append(line);
  body.append(...curve.points.map((point) => {
    const row = element("tr");
    row.append(element("td", "time", time(point[0])), ...[point[1], point[2], point[3], point[4], point[5]].map((value) => element("td", "number", number(value))),
      element("td", "", STATUS[point[6]] + (point[8].length ? `; late or changed: ${point[8].join(", ")}` : "")), element("td", "", point[7] || ""));
    return row;
  }));
  table.append(head, body);
  wide.append(table);
}
function readout(index) {
  const [startUs, n, mean, min, max, deviation, status, why, revised] = curve.points[index];
  const spread = deviation === null ? "" : ` ± ${number(deviation)}`;
  $("readout").textContent = visible(`${span(startUs, startUs + curve.size_s * 1e6)}: mean ${number(mean)}${spread}, from ${number(min)} to ${number(max)}, ` +
    `${count(n, "value")}. ${STATUS[status]}${why ? `: ${why}` : ""}.${revised.length ? ` Late or changed: ${revised.join(", ")}.` : ""}`);
}

// -- the curve --------------------------------------------------------------------------------

// Labels of the time axis, by what lies between two of them: in seconds, then the label, then what stands below where a
// year, a month, a day, an hour or a minute begins.
const DAY = "\n{YYYY}-{MM}-{DD}";
const TIMES = [
  [31536000, "{YYYY}", null, null, null, null, null, null, 1],
  [2419200, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [86400, "{D} {MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", DAY, null, DAY, null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", DAY, null, DAY, null, null, null, 1],
  [0.001, "{ss}.{fff}", DAY, null, DAY, null, "\n{HH}:{mm}", null, 1],
];

// A list for each line, with a hole where no window is.
function columns() {
  const { points, size_s: size } = curve, isOpen = (point) => point && point[6] === "provisional";
  const found = [[], [], [], [], [], [], []];
  points.forEach((point, index) => {
    const [startUs, , mean, min, max, deviation] = point, start = startUs / 1e6;
    const before = points[index - 1], after = points[index + 1];
    if (before && start - before[0] / 1e6 > size * 1.5) for (const [line, value] of [[0, before[0] / 1e6 + size * 1.5], ...[1, 2, 3, 4, 5, 6].map((each) => [each, null])]) found[line].push(value);
    const spread = deviation === null ? 0 : deviation;
    const values = [start + size / 2, min, max, mean - spread, mean + spread, isOpen(point) ? null : mean,
      isOpen(point) || isOpen(before) || isOpen(after) ? mean : null];
    values.forEach((value, line) => found[line].push(value));
  });
  return found;
}
function draw() {
  if (plot) plot.destroy();
  plot = null;
  if (!curve || !curve.points.length) return;
  const accent = colour("accent"), quiet = colour("quiet"), line = colour("line");
  const axis = { stroke: quiet, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, font: "14px system-ui, sans-serif" };
  const edge = { stroke: "transparent", points: { show: false } };
  plot = new uPlot({
    width: $("chart").clientWidth,
    height: HEIGHT,
    tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "Etc/UTC"),
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false },
    scales: { x: { range: () => [curve.points[0][0] / 1e6, curve.points.at(-1)[0] / 1e6 + curve.size_s] } },
    axes: [{ ...axis, values: TIMES, space: 70 }, { ...axis, size: 64, values: (_, splits) => splits.map(number) }],
    series: [{}, edge, edge, edge, edge,
      { stroke: accent, width: 2, points: { show: false } },
      { stroke: accent, width: 2, dash: [7, 5], points: { show: false } }],
    bands: [{ series: [2, 1], fill: colour("range") }, { series: [4, 3], fill: colour("band") }],
    hooks: {
      draw: [marks],
      setCursor: [(self) => { const at = nearest(self); if (at >= 0 && self.cursor.left >= 0) { place = at; readout(at); } }],
      setSelect: [(self) => {
        const { left, width } = self.select;
        if (width < TAP_PX) return;
        wasDrag = true;
        self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        showSpan(self.posToVal(left, "x") * 1e6, self.posToVal(left + width, "x") * 1e6);
      }],
    },
  }, columns(), $("chart"));
  legend();
}
function nearest(self) {
  const at = self.posToVal(self.cursor.left, "x") * 1e6, half = curve.size_s * 5e5;
  let found = -1;
  curve.points.forEach(([startUs], index) => {
    if (found < 0 || Math.abs(startUs + half - at) < Math.abs(curve.points[found][0] + half - at)) found = index;
  });
  return found;
}
// Marks have shapes, so that nobody needs colours to tell them apart.
const SHAPES = {
  final: { path: "M5 0a5 5 0 1 1-10 0a5 5 0 1 1 10 0", colour: "accent", isFull: true },
  provisional: { path: "M5 0a5 5 0 1 1-10 0a5 5 0 1 1 10 0", colour: "accent", isFull: false },
  loss: { path: "M0 -8L8 7L-8 7Z", colour: "down", isFull: true },
  revised: { path: "M0 -8L8 0L0 8L-8 0Z", colour: "waits", isFull: true },
};
function marks(self) {
  const { ctx } = self, dpr = devicePixelRatio, { points, size_s: size } = curve;
  ctx.save();
  const stamp = (shape, x, y) => {
    ctx.save();
    ctx.translate(x, y);
    ctx.scale(dpr, dpr);
    const path = new Path2D(shape.path);
    ctx.lineWidth = 2;
    ctx.setLineDash([]);
    ctx.strokeStyle = shape.isFull ? colour("card") : colour(shape.colour);
    ctx.fillStyle = shape.isFull ? colour(shape.colour) : colour("card");
    ctx.fill(path);
    ctx.stroke(path);
    ctx.restore();
  };
  const waiting = points.filter((point) => point[6] === "provisional").length;
  points.forEach(([startUs, , mean, , , , status, , revised], index) => {
    const x = self.valToPos(startUs / 1e6 + size / 2, "x", true), y = self.valToPos(mean, "y", true);
    const before = points[index - 1], after = points[index + 1];
    const isLone = ![before, after].some((other) => other && Math.abs(other[0] - startUs) <= size * 1.5e6);
    if (revised.length) stamp(SHAPES.revised, x, y);
    else if (status === "complete_with_loss") stamp(SHAPES.loss, x, y);
    else if (points.length <= DOTS_MAX || isLone || (status === "provisional" && waiting <= DOTS_MAX)) stamp(status === "provisional" ? SHAPES.provisional : SHAPES.final, x, y);
    if (revised.length && status === "complete_with_loss") stamp(SHAPES.loss, x, y - 18 * dpr);
  });
  missingStrip(self, dpr);
  ctx.restore();
}
function missingStrip(self, dpr) {
  const { ctx, bbox } = self, top = bbox.top + bbox.height - STRIP * dpr;
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const [fromUs, toUs, isExplained] of curve.missing) {
    const left = fromUs === null ? bbox.left : self.valToPos(fromUs / 1e6, "x", true);
    const right = Math.max(left + 4 * dpr, toUs === null ? bbox.left + bbox.width : self.valToPos(toUs / 1e6, "x", true));
    hatched(ctx, left, top, right - left, STRIP * dpr, isExplained, dpr);
  }
}
function hatched(ctx, left, top, width, height, isExplained, dpr) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = colour(isExplained ? "waits" : "down");
  ctx.lineWidth = 2 * dpr;
  ctx.setLineDash([]);
  if (isExplained) for (let x = left - height; x < left + width + height; x += 6 * dpr) {
    ctx.beginPath();
    ctx.moveTo(x, top + height);
    ctx.lineTo(x + height, top);
    ctx.stroke();
  } else ctx.fillRect(left, top, width, height);
  ctx.strokeRect(left, top, width, height);
  ctx.restore();
}
function legend() {
  const has = (test) => curve.points.some(test), isOpen = (point) => point[6] === "provisional";
  const items = [
    has((point) => !isOpen(point)) && ["line", "mean, final"],
    has(isOpen) && ["open-dash", "mean, provisional: it may still change"],
    has((point) => point[6] === "complete_with_loss") && ["loss", "final, but readings were lost"],
    has((point) => point[8].length) && ["revised", "came late, or changed afterwards"],
    has((point) => point[5] !== null) && ["band", "mean ± standard deviation of the values"],
    has((point) => point[3] !== point[4]) && ["range", "lowest to highest value"],
    curve.missing.some((each) => !each[2]) && ["open", "readings missing, no reason known"],
    curve.missing.some((each) => each[2]) && ["gone", "readings lost, reason known"],
  ];
  $("legend").replaceChildren(...items.filter(Boolean).map(([kind, words]) => {
    const item = element("li");
    item.append(sample(kind), words);
    return item;
  }));
}
function sample(kind) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "-17 -8 34 16");
  svg.setAttribute("aria-hidden", "true");
  const add = (name, attributes) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    svg.append(node);
  };
  const box = { x: -16, y: -6, width: 32, height: 12 };
  if (kind === "line") add("path", { d: "M-16 0H16", stroke: colour("accent"), "stroke-width": 2.5 });
  if (kind === "open-dash") {
    add("path", { d: "M-16 0H16", stroke: colour("accent"), "stroke-width": 2.5, "stroke-dasharray": "7 5" });
    add("path", { d: SHAPES.provisional.path, fill: colour("card"), stroke: colour("accent"), "stroke-width": 2 });
  }
  if (SHAPES[kind]) add("path", { d: SHAPES[kind].path, fill: colour(SHAPES[kind].colour), transform: "scale(.9)" });
  if (kind === "band" || kind === "range") add("rect", { ...box, fill: colour(kind) });
  if (kind === "open") add("rect", { ...box, fill: colour("down") });
  if (kind === "gone") {
    for (let x = -22; x < 16; x += 6) add("path", { d: `M${x} 6L${x + 12} -6`, stroke: colour("waits"), "stroke-width": 2 });
    add("rect", { ...box, fill: "none", stroke: colour("waits"), "stroke-width": 2 });
  }
  return svg;
}

// -- one window explained -------------------------------------------------------------------------

const BASIS = { sequence: "the sensor's own numbers prove it", watermark: "by the word of every gateway that serves it" };
// The place of `heartbeat_us` in a row of `gateways`, which comes as a list.
const HEARTBEAT = 6;
const CAUSE = { readings: "readings came", correction: "a correction of times moved readings", copy: "a better copy took the place of a reading", replay: "the tables were made anew" };
async function explain(index) {
  const told = { device: curve.device, at: iso(curve.points[index][0]), size: curve.size_s };
  [told.namespace, told.stream, told.metric] = curve.chosen;
  if (explaining) explaining.abort();
  explaining = new AbortController();
  const { signal } = explaining, box = $("window");
  box.hidden = false;
  box.replaceChildren(element("p", "aside", "Asking for the reasons…"));
  try {
    showExplained(await fetched(`/explain.json?${new URLSearchParams(told)}`, signal));
  } catch (error) {
    if (!signal.aborted) box.replaceChildren(element("p", "told bad", error.message));
  }
}
function showExplained(found) {
  const { figures, revisions, gateways, places } = found, items = [];
  const add = (name, ...nodes) => { items.push(element("dt", "", name)); const item = element("dd"); item.append(...nodes); items.push(item); };
  const list = (lines) => { const node = element("ul"); node.append(...lines.map((line) => element("li", "", line))); return node; };
  if (figures) add("How final", `${STATUS[figures.status]}${figures.basis ? `, ${BASIS[figures.basis]}` : ""}${figures.why ? `: ${figures.why}` : ""}.`);
  else add("How final", "There is no such window: no reading of that time is here.");
  const more = found.readings_count - found.readings.length;
  const others = [
    more > 0 && `the first ${found.readings.length} are shown`,
    found.unbounded && `${found.unbounded} more are in no window, for nothing bounds their time`,
    found.rejected && `${count(found.rejected, "record")} of that time ${found.rejected === 1 ? "is" : "are"} in the quarantine`,
  ];
  add("Readings", [count(found.readings_count, "value"), ...others.filter(Boolean)].join("; "), readingsTable(found.readings));
  add("In Kafka", list(places.map((each) => `${each.topic}, partition ${each.partition}, ${each.first_offset === each.last_offset ? `offset ${each.first_offset}` : `offsets ${each.first_offset} to ${each.last_offset}`}, by ${each.gateway}, the last at ${time(each.last_kafka_timestamp)}`)));
  const turns = [...new Map(revisions.map((each) => [`${each.at} ${each.cause}`, each])).values()];
  add("Its history", turns.length ? list(turns.map((each) => `${time(each.at)}: ${CAUSE[each.cause] || each.cause}${each.n_then === null ? "" : `, ${count(each.n_then, "value")} then`}${each.late && each.cause === "readings" ? `, ${each.late} of them late` : ""}`)) : "nothing is kept of it");
  add("Missing", found.missing.length ? list(found.missing.map((each) => `${span(each.after_time, each.before_time)}: ${each.first === null ? (each.count === null ? "readings" : count(each.count, "reading")) : `numbers ${each.first} to ${each.last}`}${each.reasons.length ? `, ${each.reasons.join(", ")}` : ", nobody has said why"}`)) : "nothing of about that time");
  add("Gateways", gateways.length ? list(gateways.map((each) => `${each.gateway}: ${count(each.readings, "value")} came through it; ${each.waits.length ? each.waits.join("; ") : "it has brought all of that time"}${each.told && each.told[HEARTBEAT] ? `; last heartbeat ${time(each.told[HEARTBEAT])}` : ""}`)) : "none is known to serve this device");
  const box = $("window"), figuresList = element("dl");
  figuresList.append(...items);
  const title = element("h2", "", `The window ${span(found.from_us, found.until_us)} UTC`);
  title.tabIndex = -1;
  box.replaceChildren(title, figuresList);
}
function readingsTable(readings) {
  const wide = element("div", "wide"), table = element("table"), head = element("thead"), line = element("tr"), body = element("tbody");
  for (const name of ["Taken, UTC", "± s", "Value", "Number", "In Kafka", "Offset", "Note"]) { const cell = element("th", "", name); cell.scope = "col"; line.append(cell); }
  head.append(line);
  body.append(...readings.map((each) => {
    const row = element("tr"), note = [each.doubt, each.correction_version !== null && "time corrected"].filter(Boolean).join(", ");
    const cells = [time(each.event_time), number(each.time_error_us / 1e6), whole(each.value), each.device_sequence === null ? "–" : String(each.device_sequence), time(each.kafka_timestamp), String(each.offset), note];
    row.append(...cells.map((cell) => element("td", "time", cell)));
    return row;
  }));
  table.append(head, body);
  wide.append(table);
  return wide;
}

// -- what a person does -----------------------------------------------------------------------

function showSpan(sinceUs, untilUs) {
  const least = 1e6;
  asked.since = iso(Math.floor(sinceUs / 1e6) * 1e6);
  asked.until = iso(Math.max(Math.ceil(untilUs / 1e6) * 1e6, Math.floor(sinceUs / 1e6) * 1e6 + least));
  asked.last = "";
  ask();
}
function showAround(us) {
  const half = (curve.until_us - curve.since_us) / 2;
  showSpan(us - half, us + half);
}
function move(share) {
  const width = curve.until_us - curve.since_us;
  showSpan(curve.since_us + share * width, curve.until_us + share * width);
}
function showOwn() { for (const node of document.querySelectorAll(".own")) node.hidden = $("span").value !== "own"; }
function go(index) {
  place = Math.max(0, Math.min(curve.points.length - 1, index));
  const [startUs, , mean] = curve.points[place];
  plot.setCursor({ left: plot.valToPos(startUs / 1e6 + curve.size_s / 2, "x"), top: plot.valToPos(mean, "y") }, false);
  readout(place);
}
function copied() { return navigator.clipboard.writeText($("sql").querySelector("pre").textContent); }

$("chart").addEventListener("keydown", (event) => {
  if (!curve || !curve.points.length) return;
  const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: curve.points.length - 1, PageUp: place - 10, PageDown: place + 10 };
  if (event.key in moves) { event.preventDefault(); go(moves[event.key]); }
  if (event.key === "Enter" && place >= 0) explain(place).then(() => $("window").querySelector("h2")?.focus());
});
$("chart").addEventListener("click", () => {
  if (wasDrag) wasDrag = false;
  else if (plot && place >= 0) explain(place);
});
$("site").addEventListener("change", async () => {
  asked = { ...asked, site: $("site").value, device: "", stream: "", metric: "", namespace: "" };
  curve = null;
  await Promise.all([choose(), ask()]);
});
for (const id of ["device", "device-name"]) $(id).addEventListener("change", () => {
  asked = { ...asked, device: $(id).value.trim(), stream: "", metric: "", namespace: "" };
  ask();
});
$("metric").addEventListener("change", () => {
  [asked.namespace, asked.stream, asked.metric] = curve.series[Number($("metric").value)];
  ask();
});
$("span").addEventListener("change", () => {
  showOwn();
  if ($("span").value === "own") { $("since").focus(); return; }
  asked = { ...asked, since: "", until: "", last: $("span").value };
  ask();
});
$("size").addEventListener("change", () => { asked.size = $("size").value; ask(); });
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("span").value === "own") {
    asked.last = "";
    for (const id of ["since", "until"]) asked[id] = $(id).value ? `${$(id).value}Z` : "";
  }
  ask();
});
$("earlier").addEventListener("click", () => move(-0.5));
$("later").addEventListener("click", () => move(0.5));
$("wider").addEventListener("click", () => {
  const width = curve.until_us - curve.since_us;
  showSpan(curve.since_us - width / 2, curve.until_us + width / 2);
});
for (const button of document.querySelectorAll("[data-sql]")) button.addEventListener("click", () => {
  $("sql").querySelector("pre").textContent = curve.sql[button.dataset.sql];
  $("copy").textContent = "Copy";
  $("sql").showModal();
});
$("copy").addEventListener("click", async () => { await copied(); $("copy").textContent = "Copied"; });
$("close").addEventListener("click", () => $("sql").close());
$("table").addEventListener("toggle", showTable);
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", draw);
new ResizeObserver(() => { if (plot) plot.setSize({ width: $("chart").clientWidth, height: HEIGHT }); }).observe($("chart"));

choose().catch((error) => say("bad", error.message));
ask(false);
