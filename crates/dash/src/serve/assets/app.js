// The page over run folders. Text from runs is only ever inserted as text, never as HTML.
"use strict";

const VIEWS = ["Charts", "Doctor", "Ranks", "Timeline", "Logs", "Plan"];
const COLORS = ["#1f77d0", "#d1495b", "#2a9d5c", "#8a5cd1", "#c27c0e", "#0f9aa8", "#d05fa2", "#6b7a2f"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4], [12, 4], [6, 2, 2, 2]];
const state = { runs: [], run: null, view: "Charts", compared: new Set(), x: "step", log: false, smooth: 0, token: 0 };

const $ = (id) => document.getElementById(id);

// An element with attributes and children. Strings become text nodes.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(path + (query ? "?" + query : ""));
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

const number = (value, digits = 4) => (value === null || value === undefined ? "–" : Number(value).toPrecision(digits).replace(/\.?0+$/, ""));
const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const bytes = (value) => (value >= 2 ** 30 ? (value / 2 ** 30).toFixed(2) + " GiB" : (value / 2 ** 20).toFixed(1) + " MiB");
const small = (value) => (value >= 2 ** 20 ? bytes(value) : value >= 1024 ? (value / 1024).toFixed(1) + " KiB" : whole(value) + " B");
const percent = (value) => (100 * value).toFixed(1) + "%";

function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h}h${String(m % 60).padStart(2, "0")}m` : m ? `${m}m${String(s % 60).padStart(2, "0")}s` : `${s}s`;
}

function sparkline(values) {
  const shown = values.filter((value) => value !== null);
  const graph = svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (shown.length > 1) {
    const low = Math.min(...shown), high = Math.max(...shown), range = high - low || 1;
    const at = (value, index) => `${(100 * index) / (shown.length - 1)},${19 - (18 * (value - low)) / range}`;
    graph.append(svg("path", { d: "M" + shown.map(at).join("L"), "vector-effect": "non-scaling-stroke" }));
  }
  return graph;
}

// The list of runs.
async function showRuns() {
  try {
    state.runs = await get("/api/runs");
  } catch (error) {
    $("live").textContent = error.message;
    return;
  }
  const filter = $("filter").value.toLowerCase();
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  const items = state.runs.filter((run) => run.name.toLowerCase().includes(filter)).map((run) => {
    const done = run.steps ? (100 * (run.step || 0)) / run.steps : 0;
    const bar = el("span", { class: "bar" }, el("i"));
    bar.firstChild.style.width = done + "%";
    const button = el("button", { "aria-current": String(run.name === state.run), "data-key": "run:" + run.name, onclick: () => open(run.name) },
      el("span", { class: "name" }, run.name),
      el("span", { class: "meta" }, el("span", { class: "state " + run.state }, run.state), ` step ${whole(run.step)} of ${whole(run.steps)}, loss ${number(run.loss)}`),
      sparkline(run.sparkline), bar);
    const box = el("input", { type: "checkbox", "aria-label": "compare " + run.name, "data-key": "box:" + run.name, onchange: () => compare(run.name) });
    box.checked = state.compared.has(run.name);
    return el("li", {}, box, button);
  });
  const none = el("li", { class: "empty" }, state.runs.length ? "no run matches" : "no runs yet: start one with lockstep train");
  $("runs").replaceChildren(...(items.length ? items : [none]));
  if (focused) {
    const again = [...$("runs").querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused);
    if (again) again.focus();
  }
  if (!state.run && state.runs.length) open(state.runs[0].name);
  if (state.run && !state.runs.some((run) => run.name === state.run)) gone();
}

function gone() {
  $("head").replaceChildren(el("h2", {}, state.run), el("span", { class: "state failed" }, "deleted"));
  $("view").replaceChildren(el("p", { class: "empty" }, "The folder of this run was deleted or renamed."));
}

function compare(name) {
  if (!state.compared.delete(name)) state.compared.add(name);
  if (state.view === "Charts") show();
}

function open(name) {
  state.run = name;
  location.hash = encodeURIComponent(name) + "/" + state.view;
  showRuns();
  show();
}

function tabs() {
  const tab = (view) => el("button", {
    role: "tab", "aria-selected": String(view === state.view), tabindex: view === state.view ? 0 : -1, "data-view": view,
    onclick: () => { state.view = view; location.hash = encodeURIComponent(state.run) + "/" + view; show(); },
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length];
      document.querySelector(`[data-view="${next}"]`).click();
      document.querySelector(`[data-view="${next}"]`).focus();
    },
  }, view);
  // Drawing the tabs again must not take the focus away from them.
  const focused = document.activeElement && document.activeElement.dataset.view;
  $("tabs").replaceChildren(...VIEWS.map(tab));
  if (focused) document.querySelector(`[data-view="${state.view}"]`).focus();
}

function head() {
  const run = state.runs.find((run) => run.name === state.run);
  if (!run) return;
  const left = run.state === "running" && run.step ? ((run.steps - run.step) * run.elapsed_s) / run.step : null;
  $("head").replaceChildren(
    el("h2", {}, run.name), el("span", { class: "state " + run.state }, run.state),
    el("span", { class: "meta" }, `step ${whole(run.step)} of ${whole(run.steps)}, loss ${number(run.loss)}, ${whole(run.tokens_per_s)} tokens/s` +
      (left ? `, ${duration(left)} left` : "") + (run.damaged ? `, ${run.damaged} damaged lines in metrics.jsonl` : "")),
    ...(run.state === "running" ? [el("button", { onclick: () => requestTrace(run.name) }, "Record a timeline")] : []));
}

async function requestTrace(name) {
  const answer = await fetch("/api/run/trace?" + new URLSearchParams({ run: name, steps: 3 }), { method: "POST", headers: { "x-lockstep": "1" } });
  $("live").textContent = answer.ok ? "asked for a timeline of 3 steps" : "the timeline could not be requested";
}

// Shows the current view. A slower answer to an earlier request is dropped.
async function show() {
  if (!state.run) return;
  const token = ++state.token;
  tabs();
  head();
  try {
    const content = await views[state.view]();
    if (token !== state.token) return;
    for (const chart of charts.splice(0)) chart.destroy();
    $("view").replaceChildren(...[content.nodes || content].flat());
    if (content.after) content.after();
  } catch (error) {
    if (token === state.token) $("view").replaceChildren(el("p", { class: "error" }, error.message));
  }
}

const charts = [];

const CHARTS = [
  ["Loss", "loss", (v) => v],
  ["Evaluation loss", "eval", (v) => v],
  ["Throughput (tokens/s)", "tokens_per_s", (v) => v],
  ["Model FLOPs utilization (%)", "mfu", (v) => 100 * v],
  ["Gradient norm", "grad_norm", (v) => v],
  ["Learning rate", "lr", (v) => v],
  ["Peak memory (MiB), planned is dashed", "mem_bytes", (v) => v / 2 ** 20],
];
const PARTS = [["compute", "#1f77d0"], ["data", "#8a5cd1"], ["busy host", "#6b7a2f"], ["exposed: data", "#d1495b"], ["exposed: tensor", "#e07b39"],
  ["exposed: context", "#c2a10e"], ["exposed: expert", "#d05fa2"], ["exposed: pipe", "#0f9aa8"]];

async function chartsView() {
  const names = [...new Set([state.run, ...state.compared])];
  const all = await Promise.all(names.map((run) => get("/api/run/metrics", { run, points: 800 }).then((data) => ({ run, data }))));
  const redraw = (change) => { change(); show(); };
  const select = el("select", { id: "x", onchange: (event) => redraw(() => (state.x = event.target.value)) },
    ...[["step", "steps"], ["tokens", "tokens"], ["elapsed_s", "time"]].map(([value, label]) => el("option", { value, selected: value === state.x }, label)));
  const log = el("input", { type: "checkbox", id: "log", onchange: (event) => redraw(() => (state.log = event.target.checked)) });
  log.checked = state.log;
  const smooth = el("input", { type: "range", id: "smooth", min: 0, max: 0.98, step: 0.02, value: state.smooth, onchange: (event) => redraw(() => (state.smooth = Number(event.target.value))) });
  const controls = el("div", { class: "controls" }, el("label", {}, "by ", select), el("label", {}, log, " logarithmic"), el("label", {}, "smoothing ", smooth),
    el("span", {}, "drag to zoom, double-click to reset; tick runs to compare them"));
  const boxes = CHARTS.map(([title]) => el("div", { class: "panel" }, el("h3", {}, title), el("div", { class: "plot" })));
  const parts = el("div", { class: "panel" }, el("h3", {}, `Step breakdown of ${state.run} (ms)`), el("div", { class: "plot" }));
  const events = el("div", { class: "panel" }, el("h3", {}, "Checkpoints and restarts"), el("div", {}));
  const after = () => {
    CHARTS.forEach(([, key, map], index) => draw(boxes[index].lastChild, all, key, map));
    breakdown(parts.lastChild, all[0].data);
    history(events.lastChild, all[0]);
  };
  return { nodes: [controls, el("div", { class: "charts" }, ...boxes, parts, events)], after };
}

const xLabel = { step: "step", tokens: "tokens", elapsed_s: "seconds" };

function smoothed(values) {
  if (!state.smooth) return values;
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : state.smooth * mean + (1 - state.smooth) * value)));
}

function size(node) {
  return { width: Math.max(260, node.clientWidth), height: 220 };
}

function axes(label) {
  const color = getComputedStyle(document.body).color, line = getComputedStyle(document.documentElement).getPropertyValue("--line");
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const shortest = (tick) => {
    const [size, unit] = (Math.abs(tick) >= 1e4 && units.find(([size]) => Math.abs(tick) >= size)) || [1, ""];
    return String(Number((tick / size).toPrecision(6))) + unit;
  };
  const short = (plot, ticks) => ticks.map((tick) => (tick === null ? "" : shortest(tick)));
  return [{ label, stroke: color, grid: { stroke: line, width: 1 }, labelSize: 18, values: short }, { stroke: color, grid: { stroke: line, width: 1 }, size: 64, values: short }];
}

// One line per run, on the x values of all runs.
function draw(node, all, key, map) {
  const curves = [];
  all.forEach(({ run, data }, index) => {
    const train = data.train, color = COLORS[index % COLORS.length];
    if (key === "eval") {
      const at = new Map(train.step.map((step, i) => [step, train[state.x][i]]));
      curves.push({ run, color, dash: DASHES[index % 8], x: data.evals.map(([step]) => (state.x === "step" ? step : at.get(step) ?? null)), y: data.evals.map(([, loss]) => loss), points: true });
    } else {
      curves.push({ run, color, dash: DASHES[index % 8], x: train[state.x], y: smoothed(train[key].map((v) => (v === null ? null : map(v)))) });
      if (key === "mem_bytes") curves.push({ run: run + " planned", color, dash: [4, 4], x: train[state.x], y: train.mem_planned_bytes.map((v) => (v === null ? null : map(v))) });
    }
  });
  const filled = curves.filter((curve) => curve.x.length);
  if (!filled.length) return node.replaceChildren(el("p", { class: "empty" }, "no values yet"));
  const xs = [...new Set(filled.flatMap((curve) => curve.x.filter((x) => x !== null)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns = filled.map((curve) => {
    const column = new Array(xs.length).fill(null);
    curve.x.forEach((x, index) => { if (x !== null) column[place.get(x)] = curve.y[index]; });
    return column;
  });
  const series = filled.map((curve) => ({ label: curve.run, stroke: curve.color, dash: curve.dash, width: 1.5, spanGaps: true, points: { show: curve.points || xs.length < 40 } }));
  const scales = { x: { time: false }, y: { distr: state.log ? 3 : 1 } };
  charts.push(new uPlot({ ...size(node), scales, axes: axes(xLabel[state.x]), series: [{ label: xLabel[state.x] }, ...series], cursor: { sync: { key: "runs" } } }, [xs, ...columns], node));
}

// Stacked areas: each line is the sum of the parts below it.
function breakdown(node, data) {
  const train = data.train;
  if (!train.step.length) return node.replaceChildren(el("p", { class: "empty" }, "no values yet"));
  const or = (value) => value || 0;
  const values = train.step.map((_, i) => {
    const read = or(train.read_s[i]), queue = Math.min(or(train.queue_s[i]), or(train.compute_s[i]));
    return [Math.max(0, or(train.compute_s[i]) - read - queue), read, queue, or(train.exposed_data[i]), or(train.exposed_tensor[i]), or(train.exposed_context[i]), or(train.exposed_expert[i]), or(train.exposed_pipe[i])];
  });
  const used = PARTS.map((_, part) => values.some((row) => row[part] > 0));
  const sums = PARTS.map((_, part) => values.map((row) => 1e3 * row.slice(0, part + 1).reduce((a, b) => a + b, 0)));
  const shown = PARTS.map((_, part) => part).filter((part) => used[part]).reverse();
  const raw = (part) => (plot, value, series, index) => (index === null ? "–" : (1e3 * values[index][part]).toFixed(1));
  const series = shown.map((part) => ({ label: PARTS[part][0], stroke: PARTS[part][1], fill: PARTS[part][1] + "cc", width: 1, points: { show: false }, value: raw(part) }));
  charts.push(new uPlot({ ...size(node), scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.05] } }, axes: axes("step"), series: [{ label: "step" }, ...series] }, [train.step, ...shown.map((part) => sums[part])], node));
}

async function history(node, { run, data }) {
  const about = await get("/api/run", { run }).catch(() => null);
  const rows = data.saves.slice(-20).map(([step, seconds, stall]) => el("tr", {}, el("td", {}, "checkpoint"), el("td", {}, whole(step)), el("td", {}, seconds.toFixed(2) + " s"), el("td", {}, (1e3 * stall).toFixed(1) + " ms")));
  const failures = ((about && about.failures) || []).map((failure) => el("tr", {}, el("td", { class: "error" }, `failure of rank ${failure.rank}`), el("td", {}, `generation ${failure.generation}`), el("td", {}, failure.exit), el("td", {}, new Date(1e3 * failure.time).toLocaleString())));
  if (!rows.length && !failures.length) return node.replaceChildren(el("p", { class: "empty" }, "none yet"));
  node.replaceChildren(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["event", "step", "time", "stall"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...failures, ...rows))));
}

const CAUSES = { compute: "compute", memory_bandwidth: "memory bandwidth", bubble: "pipeline bubble", data: "data", checkpoint: "checkpoints", busy_host: "busy host", expert_imbalance: "expert imbalance" };
const causeName = (cause) => cause.kind === "communication" ? `exposed communication (${cause.axis})` : cause.kind === "slow_link" ? `slow link (rank ${cause.ranks[0]} to rank ${cause.ranks[1]})` : cause.kind === "straggler" ? `straggler (rank ${cause.rank})` : CAUSES[cause.kind] || cause.kind;

async function doctorView() {
  const verdict = await get("/api/run/doctor", { run: state.run });
  const nodes = [el("div", { class: "panel" }, el("h3", {}, "Verdict"), el("p", {}, verdict.verdict))];
  const problem = verdict.problem;
  if (problem) {
    nodes.push(el("div", { class: "panel" }, el("h3", { class: "error" }, "What went wrong"),
      el("p", {}, problem.message), problem.reason ? el("p", {}, problem.reason) : null, ...problem.samples.map((sample) => el("p", {}, "Caused by " + sample)), el("p", {}, "What to do: " + problem.action),
      problem.operation ? el("p", { class: "meta" }, "Operation: " + problem.operation) : null,
      ...problem.fixes.map((fix) => el("p", {}, el("code", {}, "--set " + fix.set), ` ${bytes(fix.saved)} less per rank, step time ${(100 * fix.slower).toFixed(0)}%`)),
      el("pre", {}, problem.log.join("\n"))));
  }
  if (verdict.limits.length) {
    const limit = (entry) => {
      const bar = el("div", { class: "bar" }, el("i"));
      bar.firstChild.style.width = percent(entry.share);
      return el("div", { class: "limit" }, el("b", {}, percent(entry.share)), el("div", {}, causeName(entry.cause), el("span", { class: "meta" }, ` confidence: ${entry.confidence}`), ...entry.evidence.map((line) => el("div", { class: "meta" }, line))), bar);
    };
    nodes.push(el("div", { class: "panel" }, el("h3", {}, "What limits the step"), ...verdict.limits.map(limit)));
    const advice = (entry) => el("li", {}, el("b", {}, entry.title), entry.gain ? ` – ${(100 * entry.gain).toFixed(0)}% faster` : "", el("div", {}, ...entry.sets.map((set) => el("code", {}, "--set " + set))), el("div", { class: "meta" }, entry.why + (entry.changes_training ? "; changes the result of the training" : "")));
    nodes.push(el("div", { class: "panel" }, el("h3", {}, "What to do next"), verdict.advice.length ? el("ol", { class: "advice" }, ...verdict.advice.map(advice)) : el("p", {}, "Nothing is predicted to make the step clearly faster.")));
    if (verdict.rejected.length) nodes.push(el("div", { class: "panel" }, el("h3", {}, "Considered and not recommended"), ...verdict.rejected.map((entry) => el("p", { class: "meta" }, entry.sets.join(" ") + ": " + entry.why))));
  }
  if (verdict.scaling) nodes.push(el("p", {}, `Scaling efficiency: ${(100 * verdict.scaling.efficiency).toFixed(0)}% of the throughput per core of ${verdict.scaling.run} on ${verdict.scaling.ranks} rank(s).`));
  verdict.notes.forEach((note) => nodes.push(el("p", { class: "meta" }, note)));
  return nodes;
}

// Light to dark orange; the number is printed as well.
const heat = (fraction) => `hsl(28 90% ${92 - 42 * fraction}%)`;

// Loads of the experts by layer, relative to the mean of the layer.
function experts(layers) {
  const most = Math.max(...layers.flat(), 2);
  const row = (loads, layer) => el("tr", {}, el("th", { scope: "row" }, `layer ${layer}`), ...loads.map((load) => {
    const full = load > 1.5 ? " ▲" : load < 0.5 ? " ▽" : "";
    const cell = el("td", {}, load.toFixed(2) + full);
    cell.style.background = heat(load / most);
    cell.style.color = "#1d2126";
    return cell;
  }));
  return el("div", { class: "panel" }, el("h3", {}, "Expert load by layer (1 is the mean; ▲ above 1.5, ▽ below 0.5)"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, ""), ...layers[0].map((_, expert) => el("th", { scope: "col" }, `expert ${expert}`)))), el("tbody", {}, ...layers.map(row)))));
}

async function ranksView() {
  const run = await get("/api/run", { run: state.run });
  if (!run.mesh) return [el("p", { class: "empty" }, "This run has no plan yet.")];
  const times = run.times;
  const kinds = [["compute", times && times.compute_ms, (v) => v.toFixed(1) + " ms"], ["exposed communication", times && times.wait_ms, (v) => v.toFixed(1) + " ms"],
    ["waiting for a core", times && times.queue_ms, (v) => v.toFixed(1) + " ms"], ["memory", times && times.memory, bytes]];
  const nodes = [];
  if (run.device && run.device.kind !== "cpu") nodes.push(el("p", { class: "meta" }, `Device: ${run.device.kind}, TF32 ${run.device.tf32 ? "on" : "off"}, deterministic attention ${run.device.deterministic ? "on" : "off"}`));
  for (const [title, values, format] of kinds) {
    if (!values || !values.length) continue;
    const low = Math.min(...values), high = Math.max(...values);
    // The darkest color is at least a fifth above the lightest, and a time at least a twentieth of the step: smaller differences do not matter.
    const least = Math.max(low / 5, times.compute_ms && title !== "memory" ? Math.max(...times.compute_ms) / 20 : 0);
    const cell = ({ rank, data, tensor, context, pipe }) => {
      const value = values[rank] ?? 0, fraction = high > low ? (value - low) / Math.max(high - low, least) : 0;
      const worst = values.length > 1 && value === high && high - low > least / 2;
      const node = el("div", { class: "cell" + (worst ? " worst" : ""), title: `data=${data} tensor=${tensor} context=${context} pipe=${pipe}` }, el("b", {}, `rank ${rank}`), el("div", {}, format(value)), el("div", {}, `d${data} t${tensor} c${context} p${pipe}` + (worst ? " ◀ most" : "")));
      node.style.background = heat(fraction);
      node.style.color = "#1d2126";
      return node;
    };
    nodes.push(el("div", { class: "panel" }, el("h3", {}, `Ranks by ${title}`), el("div", { class: "map" }, ...run.mesh.ranks.map(cell))));
  }
  if (run.mesh.traffic && run.mesh.ranks.length > 1) {
    const most = Math.max(...run.mesh.traffic.flat(), 1);
    const row = (line, from) => el("tr", {}, el("th", { scope: "row" }, `from ${from}`), ...line.map((value) => {
      const cell = el("td", {}, value ? small(value) : "");
      if (value) { cell.style.background = heat(value / most); cell.style.color = "#1d2126"; }
      return cell;
    }));
    nodes.push(el("div", { class: "panel" }, el("h3", {}, "Planned bytes between ranks per step, collectives as rings"),
      run.comm_bytes === null ? null : el("p", { class: "meta" }, `Measured: rank 0 sends ${small(run.comm_bytes)} per step over its connections; ranks of one host access memory in place.`), el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...run.mesh.traffic.map((_, to) => el("th", { scope: "col" }, `to ${to}`)))), el("tbody", {}, ...run.mesh.traffic.map(row))))));
  }
  if (times && times.experts && times.experts.length) nodes.push(experts(times.experts));
  const measured = run.memory_by_tag || {};
  const most = Math.max(...Object.values(run.memory.planned), ...Object.values(measured), 1);
  const row = (name) => {
    const bar = (value, label) => {
      const line = el("div", { class: "bar", title: label }, el("i"));
      line.firstChild.style.width = percent((value || 0) / most);
      return line;
    };
    const planned = run.memory.planned[name], found = measured[name];
    return el("tr", {}, el("td", {}, name), el("td", {}, planned ? bytes(planned) : "–"), el("td", {}, found ? bytes(found) : "–"), el("td", { class: "wide" }, bar(planned, "planned"), bar(found, "measured")));
  };
  const tags = [...new Set([...Object.entries(run.memory.planned).filter(([, value]) => value).map(([name]) => name), ...Object.keys(measured)])];
  nodes.push(el("div", { class: "panel scroll" }, el("h3", {}, "Memory by tag: planned for the fullest rank, measured on rank 0"), el("table", {}, el("thead", {}, el("tr", {}, ...["tag", "planned", "measured", "planned above measured"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...tags.map(row), el("tr", {}, el("td", {}, "total"), el("td", {}, bytes(run.memory.planned_total)), el("td", {}, run.memory.measured ? bytes(Math.max(...run.memory.measured)) : "–"), el("td", {}))))));
  return nodes.length ? nodes : [el("p", { class: "empty" }, "no times yet")];
}

const SPANS = { forward: "#1f77d0", backward: "#2a9d5c", "backward (inputs)": "#2a9d5c", "backward (weights)": "#8a5cd1", exposed: "#d1495b", optimizer: "#c27c0e", data: "#6b7a2f", input: "#2a9d5c", weights: "#8a5cd1" };

function lane(label, spans, end) {
  const graph = svg("svg", { viewBox: `0 0 ${end} 24`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const [name, text, from, to] of spans) {
    const rect = svg("rect", { x: from, y: 1, width: Math.max(to - from, end / 4000), height: 22, fill: SPANS[name] || "#888" });
    rect.append(svg("title", {}, `${text}: ${(to - from).toFixed(2)}`));
    graph.append(rect);
  }
  return el("div", { class: "lane" }, el("span", {}, label), graph);
}

async function timelineView() {
  const timeline = await get("/api/run/timeline", { run: state.run });
  if (!timeline || !timeline.executed) return [el("p", { class: "empty" }, "This run has no timeline. Record one with lockstep train --trace 20..23, or with the button above while it runs.")];
  const executed = timeline.executed.ranks.map((rank) => ({ ...rank, spans: rank.spans.map(([kind, name, micro, from, to]) => [kind === "pass" ? name : kind, `${kind} ${name}` + (micro === null ? "" : ` of micro-batch ${micro}`), from, to]) }));
  const end = Math.max(...executed.flatMap((rank) => rank.spans.map((span) => span[3])), 1);
  const planned = (timeline.planned || []).map((actions) => actions.map(([act, stage, micro, from, to]) => [act, `${act} of stage ${stage}, micro-batch ${micro}`, from, to]));
  const longest = Math.max(...planned.flatMap((line) => line.map((span) => span[3])), 1);
  const legend = el("div", { class: "legend" }, ...["forward", "backward", "backward (weights)", "exposed", "optimizer", "data"].map((name) => {
    const mark = el("i");
    mark.style.background = SPANS[name];
    return el("span", {}, mark, name);
  }));
  return [
    el("div", { class: "panel" }, el("h3", {}, "Planned schedule, with backward passes twice as long as forward passes"), ...planned.map((line, rank) => lane(`stage rank ${rank}`, line, longest))),
    el("div", { class: "panel" }, el("h3", {}, `Executed step ${timeline.executed.step}: ${end.toFixed(1)} ms; clocks aligned within ${(1e6 * timeline.clock_error_s).toFixed(0)} µs`), legend, ...executed.map((rank) => lane(`rank ${rank.rank}`, rank.spans, end))),
    el("div", { class: "panel scroll" }, el("pre", { class: "table", tabindex: 0 }, timeline.text)),
  ];
}

async function logsView() {
  const read = (rank, search) => get("/api/run/logs", { run: state.run, ...(rank === undefined ? {} : { rank }), ...(search ? { search } : {}) });
  const first = await read();
  if (!first.ranks.length) return [el("p", { class: "empty" }, "This run has no logs.")];
  const text = el("pre", { tabindex: 0, "aria-label": "log" }, first.lines.join("\n"));
  const rank = el("select", { onchange: () => update() }, ...first.ranks.map((value) => el("option", { value }, `rank ${value}` + (value === first.first_failing ? " (failed first)" : ""))));
  const search = el("input", { type: "search", oninput: () => update() });
  const update = async () => {
    const answer = await read(rank.value, search.value).catch((error) => ({ lines: [error.message] }));
    text.textContent = answer.lines.join("\n") || "no lines";
  };
  return [el("div", { class: "controls" }, el("label", {}, "Log of ", rank), el("label", {}, "Search ", search)), el("div", { class: "panel" }, text)];
}

async function planView() {
  const answer = await get("/api/run/plan", { run: state.run });
  if (!answer) return [el("p", { class: "empty" }, "This run has no plan yet.")];
  return [
    el("div", { class: "panel" }, el("h3", {}, "Report: predicted on a machine that is calibrated on this run"), el("pre", { class: "table", tabindex: 0 }, answer.report)),
    el("div", { class: "panel scroll" }, el("h3", {}, "plan.json"), el("pre", {}, JSON.stringify(answer.plan, null, 2))),
  ];
}

const views = { Charts: chartsView, Doctor: doctorView, Ranks: ranksView, Timeline: timelineView, Logs: logsView, Plan: planView };

// Live updates: the list at once, the current view at most once per second.
function listen() {
  const source = new EventSource("/api/events");
  let due = null;
  source.onopen = () => ($("live").textContent = "live");
  source.onerror = () => ($("live").textContent = "disconnected, trying again");
  source.onmessage = (event) => {
    const change = JSON.parse(event.data);
    $("live").textContent = change.step ? `live: ${change.run} at step ${change.step}` : "live";
    if (due) return;
    due = setTimeout(() => {
      due = null;
      const redrawn = ["Charts", "Ranks"].includes(state.view) && (change.run === state.run || state.compared.has(change.run));
      showRuns().then(() => (redrawn ? show() : head()));
    }, 500);
  };
}

function fromHash() {
  const [run, view] = location.hash.slice(1).split("/");
  if (run) state.run = decodeURIComponent(run);
  if (VIEWS.includes(view)) state.view = view;
}

$("filter").addEventListener("input", showRuns);
window.addEventListener("resize", () => charts.forEach((chart) => chart.setSize(size(chart.root.parentNode))));
window.addEventListener("hashchange", () => { fromHash(); show(); });
fromHash();
showRuns().then(show);
listen();
