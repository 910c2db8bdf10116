// The page of `bayesadam play`: points and sliders in, bands out, line by line as the server has them.

const EXAMPLES = { paper: "The paper's", gap: "A gap", cubic: "A cubic", few: "A few" };
const KEYS = { n_data: "n", prior_precision: "d", noise: "s", dropout: "o", width: "w" };
const SVG = "http://www.w3.org/2000/svg";
const UNIT = 100; // user units a unit of the plane
const REACH = { mouse: 13, pen: 13, touch: 22 }; // CSS pixels within which a point is meant
const page = Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");

const config = await (await fetch("/config")).json();
const [left, right] = config.x, [bottom, top] = config.y;
const across = Array.from({ length: config.grid }, (_, i) => left + ((right - left) * i) / (config.grid - 1));
const state = {};
const panels = new Map();

// --- small things ----------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const px = (x) => (x - left) * UNIT;
const py = (y) => (top - y) * UNIT;
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const short = (v) => String(+v.toPrecision(3));

function make(name, attributes = {}, parent = null, text = "") {
  const inSvg = parent?.namespaceURI === SVG || name === "svg";
  const element = inSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  parent?.append(element);
  return element;
}

// --- sliders: equal ways are equal factors where they are logarithmic ------------------------------------------------

const TICKS = 1000;

function toTick(slider, value) {
  const { low, high, logarithmic } = slider;
  const share = logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  return Math.round(TICKS * share);
}

function fromTick(slider, tick) {
  const { low, high, logarithmic, whole } = slider;
  const value = logarithmic ? low * (high / low) ** (tick / TICKS) : low + ((high - low) * tick) / TICKS;
  return clamp(whole ? Math.round(value) : +value.toPrecision(3), low, high);
}

function buildSliders() {
  for (const slider of config.sliders) {
    const box = make("div", { class: "slider" }, byId("sliders"));
    const row = make("div", { class: "top" }, box);
    make("label", { for: slider.name }, row, slider.label);
    if (slider.name === "n_data") {
      const label = make("label", { class: "follow", title: "N is the number of points" }, row);
      const tick = make("input", { type: "checkbox", id: "follow" }, label);
      label.append("the points'");
      tick.addEventListener("change", () => { state.follow = tick.checked; changed(); });
    }
    make("output", { id: `${slider.name}-value`, for: slider.name }, row);
    const input = make("input", { type: "range", id: slider.name, min: 0, max: TICKS, step: 1 }, box);
    make("small", {}, box, slider.about);
    input.addEventListener("input", () => {
      state[slider.name] = fromTick(slider, +input.value);
      if (slider.name === "n_data") state.follow = false;
      changed();
    });
  }
}

function showSliders() {
  for (const slider of config.sliders) {
    const input = byId(slider.name), value = state[slider.name];
    if (document.activeElement !== input || fromTick(slider, +input.value) !== value) input.value = toTick(slider, value);
    input.setAttribute("aria-valuetext", short(value));
    byId(`${slider.name}-value`).textContent = slider.whole ? value : short(value);
  }
  byId("follow").checked = state.follow;
  byId("units").value = state.units;
  const n = state.points.length;
  byId("count").textContent = n === 1 ? "1 point" : `${n} points`;
}

// --- planes ----------------------------------------------------------------------------------------------------------

function buildPanel({ method, title, exact }) {
  const box = make("section", { class: "panel", "data-method": method }, byId("panels"));
  const head = make("div", { class: "head" }, box);
  make("h2", {}, head, title);
  const said = make("span", { class: "said" }, head, "");
  const wide = (right - left) * UNIT, high = (top - bottom) * UNIT;
  const svg = make("svg", {
    class: "plane", viewBox: `0 0 ${wide} ${high}`, tabindex: 0, role: "application",
    "aria-label": `${title}: a plane of points. Arrows move a cross, Enter adds or removes a point.`,
  }, box);
  make("rect", { class: "back", width: wide, height: high }, svg);
  for (let x = left; x <= right; x++) {
    make("path", { class: x === 0 ? "axis" : "gridline", d: `M${px(x)} 0V${high}` }, svg);
    if (x > left && x < right) make("text", { x: px(x) + 4, y: high - 5 }, svg, String(x).replace("-", "−"));
  }
  for (let y = bottom; y <= top; y++) {
    make("path", { class: y === 0 ? "axis" : "gridline", d: `M0 ${py(y)}H${wide}` }, svg);
    if (y > bottom && y < top) make("text", { x: 5, y: py(y) - 4 }, svg, String(y).replace("-", "−"));
  }
  const curves = make("g", { class: "curves" }, svg);
  const paths = Object.fromEntries(["band2", "band1", "noise", "mean"].map((k) => [k, make("path", { class: k }, curves)]));
  const hint = make("text", { class: "hint", x: wide / 2, y: high / 2 - 14, "text-anchor": "middle" }, svg, "Click to add data");
  const dots = make("g", {}, svg);
  const cross = make("path", { class: "cross" }, svg);
  const bar = make("i", {}, make("div", { class: "bar" }, box));
  panels.set(method, { exact, box, said, svg, paths, dots, hint, cross, bar, at: [0, 0] });
  attend(svg, method);
}

function draw(method, { mean, std }) {
  const { paths } = panels.get(method);
  const line = (values) => values.map((v, i) => `${i ? "L" : "M"}${px(across[i]).toFixed(1)} ${py(v).toFixed(1)}`).join("");
  const edge = (k, sign) => mean.map((m, i) => clamp(m + sign * k * std[i], -50, 50));
  const around = (k) => {
    const low = edge(k, -1), backwards = across.map((x, i) => `L${px(x).toFixed(1)} ${py(low[i]).toFixed(1)}`).reverse();
    return `${line(edge(k, 1))}${backwards.join("")}Z`;
  };
  const total = (sign) => mean.map((m, i) => clamp(m + sign * 2 * Math.hypot(std[i], state.noise), -50, 50));
  paths.band2.setAttribute("d", around(2));
  paths.band1.setAttribute("d", around(1));
  paths.noise.setAttribute("d", line(total(1)) + line(total(-1)));
  paths.mean.setAttribute("d", line(mean));
}

function showPoints() {
  for (const { dots, hint } of panels.values()) {
    dots.replaceChildren();
    for (const [x, y] of state.points) make("circle", { class: "dot", cx: px(x), cy: py(y), r: 7 }, dots);
    hint.style.visibility = state.points.length ? "hidden" : "visible";
  }
}

function place(event, svg) {
  const box = svg.getBoundingClientRect();
  const x = left + ((event.clientX - box.left) / box.width) * (right - left);
  const y = top - ((event.clientY - box.top) / box.height) * (top - bottom);
  return { at: inside(x, y), reach: ((REACH[event.pointerType] ?? REACH.mouse) / box.width) * (right - left) };
}

const inside = (x, y) => [+clamp(x, left, right).toFixed(2), +clamp(y, bottom, top).toFixed(2)];

function nearest([x, y], reach) {
  let best = -1, least = reach;
  state.points.forEach(([a, b], i) => {
    const far = Math.hypot(a - x, b - y);
    if (far <= least) [best, least] = [i, far];
  });
  return best;
}

function add(point) {
  if (state.points.length >= config.most_points) return tell(`${config.most_points} points are the most: remove some, or clear.`);
  state.points = [...state.points, point];
  changed();
}

function remove(index) {
  state.points = state.points.filter((_, i) => i !== index);
  changed();
}

function attend(svg, method) {
  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const { at, reach } = place(event, svg);
    held = { index: nearest(at, reach), from: [event.clientX, event.clientY], moved: false };
    if (held.index >= 0) svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held) return;
    held.moved ||= Math.hypot(event.clientX - held.from[0], event.clientY - held.from[1]) > 4;
    if (held.moved && held.index >= 0) {
      const { at } = place(event, svg);
      state.points = state.points.map((p, i) => (i === held.index ? at : p));
      changed();
    }
  });
  svg.addEventListener("pointerup", (event) => {
    if (!held) return;
    const { index, moved } = held;
    held = null;
    if (moved) return;
    if (index >= 0) remove(index);
    else add(place(event, svg).at);
  });
  svg.addEventListener("pointercancel", () => { held = null; });
  const panel = () => panels.get(method);
  const showCross = () => {
    const [x, y] = panel().at;
    panel().cross.setAttribute("d", `M${px(x) - 14} ${py(y)}h28M${px(x)} ${py(y) - 14}v28`);
  };
  svg.addEventListener("focus", showCross);
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const at = panel().at;
    if (way) {
      const far = event.shiftKey ? 0.5 : 0.1;
      panel().at = inside(at[0] + far * way[0], at[1] + far * way[1]);
      showCross();
    } else if (event.key === "Enter" || event.key === " ") {
      const index = nearest(at, 0.07);
      if (index >= 0) remove(index);
      else add(at);
    } else return;
    event.preventDefault();
  });
}

// --- the state in the address, so that a picture can be shared -------------------------------------------------------

function writeHash() {
  const parts = [`p=${state.points.map((p) => p.join(",")).join(";")}`, `u=${state.units}`];
  for (const [name, key] of Object.entries(KEYS)) parts.push(`${key}=${name === "n_data" && state.follow ? "auto" : state[name]}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

function readHash() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (!found.has("p")) return false;
  state.points = found.get("p").split(";").map((pair) => pair.split(",").map(Number))
    .filter((p) => p.length === 2 && p.every(Number.isFinite)).map(([x, y]) => inside(x, y)).slice(0, config.most_points);
  if (!found.get("p")) state.points = [];
  if (config.units.includes(found.get("u"))) state.units = found.get("u");
  state.follow = !Number.isFinite(parseFloat(found.get("n")));
  for (const slider of config.sliders) {
    const value = parseFloat(found.get(KEYS[slider.name]));
    if (Number.isFinite(value)) state[slider.name] = clamp(slider.whole ? Math.round(value) : value, slider.low, slider.high);
  }
  return true;
}

// --- requests: the newest request wins, but not before the one under way has said its first word ------------

let flight = null, waiting = false, restart = false;

function changed() {
  if (state.follow) state.n_data = Math.max(1, state.points.length);
  tell("");
  showSliders();
  showPoints();
  writeHash();
  for (const { box } of panels.values()) box.classList.add("stale");
  send();
}

function send() {
  if (flight && !flight.heard) { waiting = true; return; }
  flight?.abort.abort();
  waiting = false;
  fetchBands();
}

async function fetchBands() {
  const own = (flight = { abort: new AbortController(), heard: false, began: performance.now() });
  const body = { page, points: state.points, units: state.units, restart };
  for (const { name } of config.sliders) body[name] = state[name];
  restart = false;
  try {
    const answer = await fetch("/bands", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: own.abort.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error);
    await hear(answer.body, own);
  } catch (error) {
    if (error.name !== "AbortError") tell(error instanceof TypeError ? "The server has stopped: start bayesadam play again." : error.message);
  }
  own.heard = true;
  if (flight === own) flight = null;
  if (waiting) send();
}

async function hear(stream, own) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) take(JSON.parse(line), own);
    own.heard = true;
    if (waiting) send();
  }
}

function take(message, own) {
  if (flight !== own) return;
  document.documentElement.dataset.last = message.type;
  if (!state.points.length) return clearCurves();
  if (message.type !== "bands" && message.type !== "failed") return;
  const { box, said, bar } = panels.get(message.method);
  box.classList.remove("stale");
  box.classList.toggle("failed", message.type === "failed");
  if (message.type === "failed") { said.textContent = message.error; return; }
  draw(message.method, message);
  const whole = message.steps + message.left;
  bar.style.transform = `scaleX(${whole ? message.steps / whole : 1})`;
  said.textContent = `${told(message)} · ${message.seconds < 0.1 ? "<0.1" : message.seconds.toFixed(1)} s`;
  box.dataset.steps = message.steps;
  box.dataset.updates = 1 + +(box.dataset.updates ?? 0);
  if (message.method === config.panels[0].method && !own.first) box.dataset.latency = Math.round((own.first = performance.now() - own.began));
}

function told({ method, steps, left }) {
  if (panels.get(method).exact) return "exact";
  const [taken, whole] = [steps, steps + left].map((n) => n.toLocaleString("en"));
  return left ? `${taken} of ${whole}` : `${taken} steps`;
}

function clearCurves() {
  for (const { paths, box, said, bar } of panels.values()) {
    for (const path of Object.values(paths)) path.removeAttribute("d");
    box.classList.remove("stale");
    said.textContent = "";
    bar.style.transform = "scaleX(0)";
  }
}

function tell(trouble) {
  byId("trouble").textContent = trouble;
  byId("trouble").hidden = !trouble;
}

function atStart() {
  Object.assign(state, { points: config.examples.paper.map(([x, y]) => inside(x, y)), follow: true, units: config.units[0] });
  for (const slider of config.sliders) state[slider.name] = slider.default;
}

// --- begin -----------------------------------------------------------------------------------------------------------

buildSliders();
for (const panel of config.panels) buildPanel(panel);
for (const unit of config.units) make("option", { value: unit }, byId("units"), unit);
for (const [name, points] of Object.entries(config.examples)) {
  const button = make("button", { type: "button", "data-example": name }, byId("examples"), EXAMPLES[name] ?? name);
  button.addEventListener("click", () => { state.points = points.map(([x, y]) => inside(x, y)); changed(); });
}
byId("units").addEventListener("change", (event) => { state.units = event.target.value; changed(); });
byId("clear").addEventListener("click", () => { state.points = []; changed(); });
byId("restart").addEventListener("click", () => { restart = true; changed(); });
byId("reset").addEventListener("click", () => { restart = true; atStart(); changed(); });
addEventListener("hashchange", () => { if (readHash()) changed(); });
atStart();
readHash();
changed();
