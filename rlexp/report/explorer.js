// Draws the section of runs. What a user wrote is set as text, or escaped where Plotly would read markup in it.
(() => {
  const at = (id) => document.getElementById(id);
  if (!at("data")) return;
  let data = JSON.parse(at("data").textContent);
  const details = data.details ?? {}, curves = data.curves ?? {};
  const state = { filter: "", sort: "", down: false, ticked: [], by: null, metric: data.metric, setting: null, shown: null, all: false };
  try { Object.assign(state, JSON.parse(decodeURIComponent(location.hash.slice(1)))); } catch { /* another hash */ }
  let byHand = state.by !== null; // else what is grouped by follows the runs, as they come
  const ticked = new Set(state.ticked);
  const COLORS = ["#1f5fbf", "#e08a3c", "#2b9a77", "#b8467c", "#7b61c9", "#4aa3c7", "#8a6d3b", "#7c8594"];
  const MOST_ROWS = 200, MOST_GROUPS = 24, MOST_COMPARED = 12, RESAMPLES = 300;
  const MOST_DRAWN = 1.5e6; // values in all resamples of a group: a page of thousands still answers

  // --- elements, of text ---
  const element = (name, attributes = {}, ...inside) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false && value != null) made.setAttribute(key, value);
    }
    made.append(...inside.map((x) => (x instanceof Node ? x : String(x))));
    return made;
  };
  const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const cut = (text) => (text.length <= 60 ? text : `${text.slice(0, 29)}…${text.slice(-30)}`);
  const number = (x) => (x == null ? "" : String(Number(x.toPrecision(4))));

  // --- columns ---
  const fixed = () => [
    { key: "status", name: "status", of: (run) => run.status },
    { key: "environment", name: "environment", of: (run) => run.environment },
    { key: "algorithm", name: "algorithm", of: (run) => run.algorithm },
  ];
  const settings = () => data.keys.map(({ key, name }) => ({ key, name, of: (run) => run.settings[key], setting: true }));
  const sweep = { key: "sweep", name: "sweep", of: (run) => run.sweep };
  const own = { key: "run", name: "run", of: (run) => run.name };
  const numbers = () => [
    { key: "env_steps", name: "steps", of: (run) => run.env_steps, number: true },
    { key: "objective", name: "return", of: (run) => run.objective, number: true },
  ];
  const columns = () => [own, ...fixed(), ...settings(), ...numbers()];
  const groupable = () => [...fixed(), ...settings(), sweep, own].filter(
    (column) => new Set(data.runs.map(column.of)).size > 1);

  // --- what is shown ---
  const asNumber = (value) => (value == null || value === "" ? NaN : Number(value));
  function wanted(run) {
    return state.filter.split(/\s+/).filter(Boolean).every((word) => {
      const asked = /^([^=<>!]+)(!=|<=|>=|=|<|>)(.*)$/.exec(word);
      const column = asked && [...columns(), sweep].find((c) => c.key === asked[1] || c.name === asked[1]);
      if (!column) {
        return [...columns(), sweep].some((c) => String(c.of(run) ?? "").toLowerCase().includes(word.toLowerCase()));
      }
      const value = column.of(run), text = String(value ?? "").toLowerCase(), other = asked[3].toLowerCase();
      const same = text === other || (other !== "" && asNumber(value) === Number(other));
      if (asked[2] === "=") return same;
      if (asked[2] === "!=") return !same;
      const x = asNumber(value), y = Number(other);
      return { "<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y }[asked[2]];
    });
  }
  function compared(a, b) {
    const [x, y] = [asNumber(a), asNumber(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    if (a == null || a === "") return b == null || b === "" ? 0 : -1;
    if (b == null || b === "") return 1;
    return String(a).localeCompare(String(b));
  }
  function filtered() {
    const runs = data.runs.filter(wanted);
    const column = columns().find((c) => c.key === state.sort);
    if (column) runs.sort((a, b) => (state.down ? -1 : 1) * compared(column.of(a), column.of(b)));
    return runs;
  }
  const chosen = (runs) => (runs.some((run) => ticked.has(run.id)) ? runs.filter((run) => ticked.has(run.id)) : runs);

  // --- the table ---
  function table(runs) {
    const rows = state.all ? runs : runs.slice(0, MOST_ROWS);
    at("table").tHead.replaceChildren(element("tr", {}, element("th"), ...columns().map((c) => element("th", {
      class: c.number && "number", title: c.key, "data-key": c.key,
      onclick: () => { state.down = state.sort === c.key ? !state.down : Boolean(c.number); state.sort = c.key; draw(); },
    }, c.name + (state.sort === c.key ? (state.down ? " ↓" : " ↑") : "")))));
    at("table").tBodies[0].replaceChildren(...rows.map((run) => {
      const tick = element("input", { type: "checkbox", "aria-label": "choose", onchange: () => {
        ticked[tick.checked ? "add" : "delete"](run.id);
        draw();
      } });
      tick.checked = ticked.has(run.id);
      const show = () => { state.shown = state.shown === run.id ? null : run.id; draw(); };
      return element("tr", { "data-run": run.id, class: run.id === state.shown && "shown" }, element("td", {}, tick),
        ...columns().map((c) => {
          const value = c.of(run) ?? "";
          if (c === own) return element("td", { title: value }, element("button", { class: "name", type: "button", onclick: show }, value));
          if (c.key === "status") return element("td", { class: `status-${value.split(" ").at(-1)}` }, value);
          if (c.key === "env_steps") return element("td", { class: "number" }, value.toLocaleString("en"));
          return element("td", { class: c.number && "number", title: value }, c.number && value !== "" ? number(value) : value);
        }));
    }));
    at("more").hidden = rows.length === runs.length;
    at("more").textContent = `show all ${runs.length}`;
    const those = runs.filter((run) => ticked.has(run.id)).length;
    at("count").textContent = `${runs.length} of ${data.runs.length} runs` + (those ? `, ${those} ticked` : "");
    at("untick").hidden = !ticked.size;
  }

  // --- one run ---
  async function oneRun() {
    const run = data.runs.find((x) => x.id === state.shown);
    const where = at("run");
    if (!run) return where.replaceChildren();
    const found = (await detailsOf([run]))[0];
    if (!found || state.shown !== run.id) return;
    const command = (title, text) => (text ? [element("p", { class: "muted" }, title), element("pre", {}, text)] : []);
    const again = found.repeat.startsWith("python -m rlexp -m ") ? "All of its population are repeated" : "It is repeated";
    const goOn = found.resume.includes("rlexp.sweep") ? "The sweep goes on with" : "It goes on with";
    where.replaceChildren(
      element("h4", {}, run.name), element("p", { class: "muted" }, found.directory),
      ...(found.error ? [element("p", { class: "error" }, found.error)] : []),
      ...command(`${again}, in a new directory, by`, found.repeat), ...command(goOn, found.resume),
      element("div", { class: "media" }, ...found.media.map(({ name, video, at: source }) => element("figure", {},
        video ? element("video", { src: source, controls: true, loop: true, muted: true, preload: "metadata" })
          : element("img", { src: source, alt: name, loading: "lazy" }),
        element("figcaption", { class: "muted" }, name)))));
  }
  async function ask(path, query) {
    const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }
  async function detailsOf(runs) {
    const missing = runs.filter((run) => !(run.id in details));
    if (data.live && missing.length) Object.assign(details, await ask("details", { runs: missing.map((run) => run.id) }));
    return runs.map((run) => details[run.id]);
  }
  async function curvesOf(metric, runs) {
    curves[metric] ??= {};
    const missing = runs.filter((run) => !(run.id in curves[metric]));
    for (let i = 0; data.live && i < missing.length; i += 100) {
      const ids = missing.slice(i, i + 100).map((run) => run.id);
      const found = await ask("curves", { metric, runs: ids });
      for (const id of ids) curves[metric][id] = found.curves[id] ?? null;
      if (found.names.some((name) => !data.metrics.includes(name))) {
        data.metrics = [...new Set([...data.metrics, ...found.names])];
        choices();
      }
    }
    return curves[metric];
  }

  // --- curves of groups ---
  // The mean of the middle half, as rlexp.sweep.statistics has it: a quarter, rounded down, is cut off at either end.
  function iqm(values) {
    const sorted = new Float64Array(values).filter((x) => !Number.isNaN(x)).sort(), out = Math.floor(sorted.length / 4);
    let sum = 0;
    for (let i = out; i < sorted.length - out; i++) sum += sorted[i];
    return sum / (sorted.length - 2 * out);
  }
  function random(seed) { // mulberry32: the same page is drawn again to the letter
    return () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }
  function valueAt([steps, values], step) { // between two points on the line; nothing is known outside of them
    if (step < steps[0] || step > steps.at(-1)) return NaN;
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    if (steps[low] === step || low === high) return values[low];
    return values[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (values[high] - values[low]);
  }
  function estimated(own) {
    let steps = [...new Set(own.flatMap(([x]) => x))].sort((a, b) => a - b);
    if (steps.length > 200) steps = Array.from({ length: 200 }, (_, i) => steps[Math.round((i * (steps.length - 1)) / 199)]);
    const draw = random(0);
    const many = Math.max(40, Math.min(RESAMPLES, Math.floor(MOST_DRAWN / (own.length * steps.length || 1))));
    const resamples = own.length < 2 ? [] : Array.from({ length: many }, () => own.map(() => Math.floor(draw() * own.length)));
    const line = { steps, middle: [], low: [], high: [], runs: [] };
    for (const step of steps) {
      const values = own.map((curve) => valueAt(curve, step)), known = values.filter((x) => !Number.isNaN(x));
      line.middle.push(iqm(known));
      line.runs.push(known.length);
      const means = new Float64Array(known.length < 2 ? 0 : resamples.map((who) => iqm(who.map((i) => values[i])))).sort()
        .filter((x) => !Number.isNaN(x));
      const quantile = (q) => means[Math.round(q * (means.length - 1))] ?? NaN;
      line.low.push(quantile(0.025));
      line.high.push(quantile(0.975));
    }
    return line;
  }
  function grouped(runs) {
    const by = groupable().filter((c) => state.by.includes(c.key)), groups = new Map();
    for (const run of runs) {
      const name = by.map((c) => `${c.setting ? `${c.name}=` : ""}${c.of(run) ?? "–"}`).join(", ") || "all";
      groups.set(name, [...(groups.get(name) ?? []), run]);
    }
    return [...groups];
  }
  // Where the page is narrow the names of the groups stand below the plot, which has the whole width.
  const layout = (names, high, more) => {
    const list = innerWidth > 700 ? 0 : 24 * names;
    return {
      template: "none", height: high + (list ? 24 + list : 0), hovermode: "closest", showlegend: true,
      margin: { l: list ? 48 : 64, r: list ? 8 : 24, t: 16, b: list ? 72 + list : 48 },
      legend: list ? { x: 0, y: -64 / (high - 64), yanchor: "top" } : { x: 1.01, y: 1, yanchor: "top" },
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "#1f2430" }, ...more,
    };
  };
  const AXIS = { gridcolor: "#e9ebef", zeroline: false, automargin: true };
  const CONFIG = { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "", displayModeBar: false };
  let drawing = 0; // a later drawing overtakes one that still waits for its data
  async function plots(runs) {
    const mine = ++drawing, metric = state.metric, found = await curvesOf(metric, runs);
    if (mine !== drawing) return;
    const groups = grouped(runs), traces = [], drawn = groups.slice(0, MOST_GROUPS);
    drawn.forEach(([name, members], i) => {
      const own = members.map((run) => found[run.id]).filter((curve) => curve && curve[0].length);
      if (!own.length) return;
      const line = estimated(own), color = COLORS[i % COLORS.length], group = String(i);
      const known = line.steps.map((_, j) => j).filter((j) => !Number.isNaN(line.low[j])), back = [...known].reverse();
      traces.push({
        x: [...known, ...back].map((j) => line.steps[j]), y: [...known.map((j) => line.high[j]), ...back.map((j) => line.low[j])],
        fill: "toself", fillcolor: `${color}24`, line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: group,
      }, {
        x: line.steps, y: line.middle, name: escaped(cut(name)), mode: line.steps.length > 40 ? "lines" : "lines+markers", legendgroup: group,
        line: { color, width: 2.2, dash: ["solid", "dash", "dot"][Math.floor(i / COLORS.length)] }, marker: { size: 5 },
        customdata: line.runs, hovertemplate: "%{y:.4g} (%{customdata} runs)",
      });
    });
    const none = traces.length ? "" : `Nothing has ${metric} yet. `;
    const left = groups.length > drawn.length ? ` Drawn are ${drawn.length} of ${groups.length} groups.` : "";
    at("drawn").textContent = `${none}Interquartile mean over the runs of a group, with its 95% bootstrap interval.${left}`;
    Plotly.react("by-keys", traces, layout(traces.length / 2, 420, {
      xaxis: { ...AXIS, title: { text: "environment steps" } }, yaxis: { ...AXIS, title: { text: escaped(metric) } },
    }), CONFIG);
  }
  function against(runs) {
    const column = settings().find((c) => c.key === state.setting);
    const there = column ? runs.filter((run) => run.objective != null && column.of(run) != null) : [];
    const values = there.map((run) => asNumber(column.of(run))), numeric = values.length && values.every(Number.isFinite);
    const log = numeric && Math.min(...values) > 0 && Math.max(...values) >= 10 * Math.min(...values);
    const traces = grouped(there).slice(0, MOST_GROUPS).map(([name, members], i) => ({
      x: members.map((run) => (numeric ? asNumber(column.of(run)) : escaped(cut(column.of(run))))), y: members.map((run) => run.objective),
      name: escaped(cut(name)), mode: "markers", marker: { color: COLORS[i % COLORS.length], size: 7, opacity: 0.75 },
      text: members.map((run) => escaped(run.name)), hovertemplate: "%{x}: %{y:.4g}<br>%{text}<extra></extra>",
    }));
    Plotly.react("against", traces, layout(traces.length, 360, {
      xaxis: { ...AXIS, type: numeric ? (log ? "log" : "linear") : "category", title: { text: escaped(column?.key ?? "") } },
      yaxis: { ...AXIS, title: { text: "return" } },
    }), CONFIG);
  }

  // --- what differs ---
  async function differences(runs) {
    const where = at("differences");
    if (!runs.some((run) => ticked.has(run.id)) || runs.length < 2) {
      return where.replaceChildren(element("p", { class: "muted" }, "Tick two runs or more to compare their settings, versions and machines."));
    }
    const some = runs.slice(0, MOST_COMPARED), found = (await detailsOf(some)).map((x) => x?.settings ?? {});
    const keys = [...new Set(found.flatMap((x) => Object.keys(x)))].filter((key) => new Set(found.map((x) => x[key])).size > 1);
    where.replaceChildren(
      element("p", { class: "muted" }, keys.length ? `${keys.length} keys differ${some.length < runs.length ? ` between the first ${some.length}` : ""}.` : "Nothing differs."),
      ...(keys.length ? [element("div", { class: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, element("th", {}, "key"), ...some.map((run) => element("th", {}, run.name)))),
        element("tbody", {}, ...keys.map((key) => element("tr", {}, element("td", {}, key), ...found.map((x) => element("td", {}, x[key] ?? "–"))))))) ] : []));
  }

  // --- the choices above the plots ---
  function choices() {
    const pick = (id, values, now) => {
      at(id).replaceChildren(...values.map(([value, text]) => element("option", { value }, text)));
      at(id).value = now;
    };
    pick("metric", data.metrics.map((name) => [name, name]), state.metric);
    pick("setting", settings().map((c) => [c.key, c.name]), state.setting);
    at("groups").replaceChildren("by", ...groupable().map((c) => {
      const box = element("input", { type: "checkbox", value: c.key, onchange: () => {
        byHand = true;
        state.by = box.checked ? [...state.by, c.key] : state.by.filter((key) => key !== c.key);
        draw();
      } });
      box.checked = state.by.includes(c.key);
      return element("label", {}, box, ` ${c.name}`);
    }));
  }
  function byDefault() {
    const runs = data.runs.length;
    if (state.by === null) { // what was varied, as long as there are not too many, and as long as it makes groups
      state.by = groupable().filter((c) => ["environment", "algorithm"].includes(c.key) || c.setting).map((c) => c.key).filter((key) => key !== "seed");
      const many = (keys) => { state.by = keys; return grouped(data.runs).length; };
      let keys = state.by;
      while (keys.length && many(keys) > Math.min(12, Math.max(runs, 2))) keys = keys.slice(0, -1);
      state.by = keys;
    }
    const most = (c) => (c.key === "seed" ? 0 : new Set(data.runs.map(c.of)).size);
    state.setting ??= settings().sort((a, b) => most(b) - most(a))[0]?.key ?? null;
    if (!data.metrics.includes(state.metric)) data.metrics = [state.metric, ...data.metrics];
  }

  function draw() {
    const runs = filtered();
    table(runs);
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify({ ...state, by: byHand ? state.by : null, ticked: [...ticked] }))}`);
    const those = chosen(runs);
    const told = (error) => { at("fresh").textContent = `not reached: ${error.message}`; };
    plots(those).catch(told);
    against(those);
    differences(those).catch(told);
    oneRun().catch(told);
  }
  async function refresh() { // what has changed is asked for anew
    const answer = await fetch("runs.json", { cache: "no-cache" });
    if (!answer.ok) throw new Error(answer.status);
    const fresh = await answer.json(), before = new Map(data.runs.map((run) => [run.id, JSON.stringify(run)]));
    at("fresh").textContent = `as of ${new Date().toLocaleTimeString()}`;
    const changed = fresh.runs.filter((run) => before.get(run.id) !== JSON.stringify(run)).map((run) => run.id);
    if (!changed.length && fresh.runs.length === data.runs.length) return;
    for (const id of changed) { delete details[id]; for (const of of Object.values(curves)) delete of[id]; }
    data = { ...fresh, live: data.live, metrics: data.metrics };
    if (!byHand) state.by = null;
    byDefault();
    choices();
    draw();
  }

  data.metrics ??= [data.metric];
  byDefault();
  choices();
  at("filter").value = state.filter;
  at("filter").addEventListener("input", () => { state.filter = at("filter").value; draw(); });
  at("metric").addEventListener("change", () => { state.metric = at("metric").value; draw(); });
  at("setting").addEventListener("change", () => { state.setting = at("setting").value; draw(); });
  at("untick").addEventListener("click", () => { ticked.clear(); draw(); });
  at("more").addEventListener("click", () => { state.all = true; draw(); });
  window.addEventListener("load", draw);
  if (data.live) setInterval(() => refresh().catch((error) => { at("fresh").textContent = `not reached: ${error.message}`; }), data.live * 1000);
})();
