"use strict";
// Asks the gateway every other second how it is, and shows it. What it says comes from whoever can send a reading: it is
// only ever put into text.

const POLL_MS = 2000, CURVES_MS = 10000, TIMEOUT_MS = 8000, STALE_S = 6, SHOWN = 50, SHOWN_MAX = 200;
const SVG = "http://www.w3.org/2000/svg";
const SIGNS = { well: "✓", note: "i", warn: "!", bad: "✕" };
const $ = (id) => document.getElementById(id);

let state = null, curves = null, limit = SHOWN, query = "";
let heardAt = 0, askedCurves = 0, timer = 0, running = false;

// -- words ------------------------------------------------------------------------------------

function span(seconds) {
  if (seconds >= 63115200) return `${(seconds / 31557600).toFixed(1)} years`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  let whole = Math.max(0, Math.round(seconds));
  for (let i = 0; i < units.length - 1; i++) {
    const [unit, name] = units[i], [smaller, less] = units[i + 1];
    if (whole >= unit) {
      const rest = Math.floor((whole % unit) / smaller);
      return `${Math.floor(whole / unit)} ${name}` + (rest && smaller >= 60 ? ` ${rest} ${less}` : "");
    }
  }
  return `${whole} s`;
}
const count = (number) => number.toLocaleString("en");
function rate(perS) {
  if (perS === null) return "";
  if (perS >= 1) return `${perS >= 100 ? count(Math.round(perS)) : +perS.toPrecision(2)}/s`;
  if (perS * 60 >= 1) return `${+(perS * 60).toPrecision(2)}/min`;
  return perS ? `${+(perS * 3600).toPrecision(2)}/h` : "0/min";
}
function number(value) {
  if (typeof value !== "number") return value;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toPrecision(4);
  return String(+value.toPrecision(6)).replace("-", "−");
}
function clockTime(agoS) {
  const then = new Date(Date.now() - agoS * 1000), now = new Date();
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return then.toDateString() === now.toDateString() ? time : `${then.toLocaleDateString()} ${time}`;
}

// -- the document -----------------------------------------------------------------------------

function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function drawn(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

// Of the last hour, what there is; ten minutes at the least.
let share = 1;
function recent(points) { return points.slice(points.length - Math.round(points.length * share)); }

// A line through the points that there are.
function path(points, width, height, low, high) {
  let line = "", isDown = false;
  const step = (width - 4) / Math.max(1, points.length - 1), range = high - low || 1;
  points.forEach((value, index) => {
    if (value === null) { isDown = false; return; }
    const x = (2 + index * step).toFixed(1), y = (height - 3 - ((value - low) / range) * (height - 6)).toFixed(1);
    const isLone = !isDown && (index + 1 >= points.length || points[index + 1] === null);
    line += `${isDown ? "L" : "M"}${x} ${y}${isLone ? "h.1" : ""}`;
    isDown = true;
  });
  return line;
}
function chart(svg, points, label) {
  const known = points.filter((value) => value !== null), high = Math.max(1e-9, ...known);
  svg.setAttribute("viewBox", "0 0 360 46");
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(drawn("path", { d: path(points, 360, 46, 0, high) }));
  return known.length ? high : null;
}
function strip(svg, states, names) {
  svg.setAttribute("viewBox", `0 0 ${states.length} 10`);
  const bars = [];
  for (let from = 0; from < states.length;) {
    let to = from;
    while (to < states.length && states[to] === states[from]) to++;
    const name = names[states[from]];
    // Down stands out by its height too, not by its colour alone.
    if (name !== "unknown") {
      const height = name === "down" ? 10 : name === "waits" ? 7 : 4;
      bars.push(drawn("rect", { x: from, y: 10 - height, width: to - from, height, class: `${name}-bar` }));
    }
    from = to;
  }
  svg.replaceChildren(...bars);
  const known = states.filter((each) => each).length, down = states.filter((each) => names[each] === "down").length;
  svg.setAttribute("aria-label", known ? `Down for ${Math.round((100 * down) / known)} % of the time shown` : "Not known yet");
}

// -- what is shown ----------------------------------------------------------------------------

function showHeadline(top) {
  const box = $("headline"), told = top.level + top.words + top.means + top.todo;
  box.className = top.level;
  if (box.dataset.told === told) return;
  box.dataset.told = told;
  const sign = element("span", "sign", SIGNS[top.level]);
  sign.setAttribute("aria-hidden", "true");
  box.replaceChildren(sign, element("p", "words", top.words));
  if (top.means) box.append(element("p", "means", top.means));
  if (top.todo) box.append(element("p", "todo", top.todo));
}
function showAlarms(alarms, more) {
  // The first one is the headline, unless nothing is worse than a note.
  const rest = ["well", "note"].includes(state.headline.level) ? alarms : alarms.slice(1);
  const items = rest.map((alarm) => {
    const item = element("li", `alarm ${alarm.level}`);
    item.append(element("b", "", alarm.subject), alarm.words);
    if (alarm.means) item.append(" ", alarm.means);
    if (alarm.todo) item.append(" ", element("span", "todo", alarm.todo));
    return item;
  });
  if (more) items.push(element("li", "alarm", `And ${count(more)} more: sluice status has all.`));
  const told = items.map((item) => item.className + item.textContent).join("\n");
  if ($("alarms").dataset.told === told) return;
  $("alarms").dataset.told = told;
  $("alarms").replaceChildren(...items);
}
function showCards() {
  const { uplink, buffer, intake, clock, disk } = state;
  const names = { up: "Up", down: "DOWN", waits: "Waits", unknown: "Connecting" };
  set($("uplink"), names[uplink.state]);
  $("uplink").className = `figure ${uplink.state}`;
  const since = uplink.since_s === null ? "" : `since ${clockTime(uplink.since_s)} (${span(uplink.since_s)})`;
  const told = [since, uplink.sent && `${count(uplink.sent)} taken by Kafka`, uplink.link && `link carries ${uplink.link} or more`];
  set($("uplink-more"), told.filter(Boolean).join(", "));
  set($("rows"), count(buffer.rows));
  const lasts = buffer.lasts_s === null ? "" : `, room for ${span(buffer.lasts_s)} offline`;
  set($("rows-more"), `${buffer.used} of ${buffer.most} used (${(buffer.share * 100).toFixed(1)} %)${lasts}`);
  $("rows").className = `figure ${buffer.full ? "down" : ""}`;
  set($("intake"), intake.per_s === null ? "…" : rate(intake.per_s) || "0/s");
  const lost = intake.lost ? `, ${count(intake.lost)} LOST` : ", none lost";
  set($("intake-more"), `${count(intake.readings)} ${intake.readings === 1 ? "reading" : "readings"} since the start${lost}`);
  const box = [
    ["Clock", clock.synced ? clock.words : "NOT SYNCED"],
    ["Disk", disk.failing ? "FAILING" : disk.worn ? "see above" : disk.free ? `${disk.free} free` : "not known"],
    ["Writes a day", disk.per_day || "not known yet"],
    ["A card lasts", disk.card_s === null ? "–" : span(disk.card_s)],
    ["Running for", span(state.up_s)],
    ...(state.update ? [["Last update", state.update]] : []),
  ];
  const shown = JSON.stringify(box);
  if ($("box").dataset.told !== shown) {
    $("box").dataset.told = shown;
    $("box").replaceChildren(...box.flatMap(([term, value]) => [element("dt", "", term), element("dd", "", value)]));
  }
  const clauses = [disk.spared, disk.first].filter(Boolean).map(clause => clause[0].toUpperCase() + clause.slice(1) + ".");
  set($("disk"), [disk.what, ...clauses].filter(Boolean).join(" "));
  $("cards").hidden = false;
}
// One body for each device: a row of figures, and one of what is to be said of it.
function bodyOf(name) {
  const body = element("tbody"), line = element("tr"), said = element("tr", "said"), words = element("td", "note");
  body.dataset.device = name;
  line.append(element("th", "name", name));
  line.firstChild.scope = "row";
  for (const kind of ["heard", "reading", "curve", "number", "number", "number drift", "where"]) line.append(element("td", kind));
  line.children[4].dataset.label = "rate";
  line.children[5].dataset.label = "missing";
  line.children[6].dataset.label = "drift";
  words.colSpan = 8;
  said.append(words);
  body.append(line, said);
  return body;
}
function showReading(cell, device) {
  const told = JSON.stringify(device.values);
  if (cell.dataset.told === told) return;
  cell.dataset.told = told;
  cell.replaceChildren(...device.values.flatMap(([label, value], index) => {
    const shown = element(index ? "span" : "b", "", number(value));
    return label ? [element("span", "", label), " ", shown, " "] : [shown, " "];
  }));
}
function showDevices() {
  const { devices } = state, table = $("table");
  const kept = new Map([...table.tBodies].map((body) => [body.dataset.device, body]));
  const bodies = devices.shown.map((device) => {
    const body = kept.get(device.device) || bodyOf(device.device);
    const [, , reading, , perS, missing, drift, where] = body.firstChild.children;
    body.className = (device.silent ? "silent " : "") + (device.finding || device.silent ? "trouble" : "");
    const note = device.finding && device.note ? device.note : device.silent ? "silent: check its power, line or radio" : "";
    set(body.lastChild.firstChild, note);
    body.lastChild.hidden = !note;
    showReading(reading, device);
    set(perS, rate(device.per_s));
    const gone = [device.missing && `≥ ${count(device.missing)}`, device.lost && `${count(device.lost)} lost`];
    set(missing, gone.filter(Boolean).join(", "));
    missing.classList.toggle("lost", gone.some(Boolean));
    set(drift, device.drift === "-" ? "" : device.drift);
    drift.title = device.drift && device.bound !== "-" ? `bound of a reading's time: ${device.bound}` : "";
    set(where, `${device.serial === null ? "" : device.serial ? "serial " : "MQTT "}${device.place || ""}`);
    return body;
  });
  if (bodies.length !== table.tBodies.length || bodies.some((body, index) => table.tBodies[index] !== body)) table.replaceChildren(table.tHead, ...bodies);
  const silent = devices.silent ? `, ${count(devices.silent)} silent` : "";
  const found = query ? `, ${count(devices.matching)} found` : "";
  const known = devices.total ? `${count(devices.total)} known, ${count(devices.heard)} heard${silent}${found}` : "none yet: none has sent a reading";
  set($("devices-count"), devices.not_heard ? `${known}; ${devices.not_heard}` : known);
  $("more").hidden = devices.shown.length >= devices.matching || limit >= SHOWN_MAX;
  $("devices").hidden = false;
}
function showCurves() {
  if (!curves) return;
  const first = curves.rows.findIndex((value) => value !== null), all = curves.rows.length;
  share = first < 0 ? 1 : Math.max(1 / 6, (all - first) / all);
  for (const node of document.querySelectorAll(".from")) set(node, `${span(share * 3600)} ago`);
  set($("window"), share === 1 ? "Last hour" : `Last ${span(share * 3600)}`);
  strip($("uplink-hour"), recent(curves.uplink), curves.uplink_states);
  const most = chart($("rows-hour"), recent(curves.rows), "Rows that waited in the last hour");
  set($("rows-most"), most === null ? "" : `at most ${count(Math.round(most))}`);
  const fastest = chart($("intake-hour"), recent(curves.per_s), "Readings a second in the last hour");
  set($("intake-most"), fastest === null || fastest < 1e-6 ? "" : `at most ${rate(fastest)}`);
  for (const body of $("table").tBodies) {
    const of = curves.devices[body.dataset.device], cell = body.firstChild.children[3];
    const known = of ? of.points.filter((value) => value !== null) : [];
    if (known.length < 2) { cell.replaceChildren(); continue; }
    const low = Math.min(...known), high = Math.max(...known), pad = high === low ? Math.abs(high) * 0.1 || 1 : 0;
    const svg = drawn("svg", { class: "spark", viewBox: "0 0 120 30", preserveAspectRatio: "none", role: "img" });
    svg.setAttribute("aria-label", `${of.metric[1] || "reading"} in the last hour: from ${number(low)} to ${number(high)}`);
    svg.append(drawn("path", { d: path(recent(of.points), 120, 30, low - pad, high + pad) }));
    cell.replaceChildren(svg);
  }
}
// Ages go on between two answers, and while none comes.
function showAges() {
  const sinceS = (Date.now() - heardAt) / 1000, isLost = heardAt ? sinceS > STALE_S : running && performance.now() > STALE_S * 1000;
  $("link").className = isLost ? "lost" : "";
  set($("link"), !heardAt ? (isLost ? "the gateway does not answer" : "connecting…") : isLost ? `the gateway does not answer: last heard ${span(sinceS)} ago` : "live");
  $("headline").classList.toggle("stale", isLost && !!heardAt);
  if (!state) return;
  state.devices.shown.forEach((device, index) => {
    const body = $("table").tBodies[index];
    if (body) set(body.firstChild.children[1], device.heard_s === null ? "not since the start" : `${span(device.heard_s + sinceS)} ago`);
  });
}
function show() {
  set($("gateway"), state.gateway);
  document.title = `${SIGNS[state.headline.level]} ${state.gateway} – Sluice`;
  showHeadline(state.headline);
  showAlarms(state.alarms, state.alarms_more);
  showCards();
  showDevices();
  const { versions } = state;
  set($("versions"), `Sluice ${versions.sluice} on ${versions.host}: ${versions.system}, Linux ${versions.kernel}, ${versions.machine}, Python ${versions.python}, SQLite ${versions.sqlite}`);
  showAges();
}

// -- asking -----------------------------------------------------------------------------------

async function ask(what) {
  const answer = await fetch(`/api/${what}?limit=${limit}&q=${encodeURIComponent(query)}`, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (answer.status === 401) { location.replace("/"); throw new Error("logged out"); }
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}
async function poll() {
  clearTimeout(timer);
  if (running || document.hidden) return;
  running = true;
  const asked = query + limit;
  try {
    const found = await ask("state");
    state = found;
    heardAt = Date.now();
    show();
    if (Date.now() - askedCurves > CURVES_MS) {
      askedCurves = Date.now();
      curves = await ask("curves");
      showCurves();
    }
  } catch (error) {
    console.error(error);
    showAges();
  } finally {
    running = false;
    timer = setTimeout(poll, query + limit === asked ? POLL_MS : 0);
  }
}
function again() { askedCurves = 0; poll(); }

$("search").addEventListener("input", (event) => { query = event.target.value.trim(); limit = SHOWN; again(); });
$("more").addEventListener("click", () => { limit = SHOWN_MAX; again(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(() => { if (!document.hidden) showAges(); }, 1000);
poll();
