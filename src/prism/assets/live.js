"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, css) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (css) node.className = css;
    return node;
  };
  const put = (id, text) => { const node = $(id); if (node.textContent !== text) node.textContent = text; };
  const number = (value, digits = 3) => {
    if (!Number.isFinite(value)) return "";
    const size = Math.abs(value);
    return value.toFixed(size >= 100 ? 0 : size >= 10 ? Math.min(1, digits - 1) : size >= 1 ? digits - 1 : digits);
  };
  // For the test that looks at this page: how often each picture was drawn with data in it.
  const drawn = {};
  window.prismLive = { snapshots: 0, drawn };

  let hello = null, latest = null, socket = null, wanted = null, key = null, locked = false, colors = {};
  const theme = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "line", "accent", "good", "bad", "stage", "surface", "m0", "m1", "m2", "m3"]) {
      colors[name] = style.getPropertyValue("--" + name).trim();
    }
  };
  const modeColor = (mode) => colors["m" + (mode % 4)];

  // A canvas as sharp as the screen, cleared; null while it has no size.
  function stage(canvas) {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    const width = Math.round(box.width), height = Math.round(box.height);
    if (!width || !height) return null;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.lineJoin = pen.lineCap = "round";
    pen.font = "12px system-ui, sans-serif";
    return { pen, width, height };
  }
  function polyline(pen, points, color, width, alpha = 1, dash = []) {
    if (points.length < 2) return;
    pen.globalAlpha = alpha;
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.setLineDash(dash);
    pen.beginPath();
    points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.stroke();
    pen.globalAlpha = 1;
    pen.setLineDash([]);
  }
  function label(pen, text, x, y, align = "left", color = colors.soft) {
    pen.fillStyle = color;
    pen.textAlign = align;
    pen.fillText(text, x, y);
  }
  function nothing(canvas, text) {
    const at = stage(canvas);
    if (at) label(at.pen, text, at.width / 2, at.height / 2, "center");
  }

  // As the dataset calls the dimensions of an action, or by their number.
  const dimension = (dim, unnamed) => {
    const name = ((hello.action || {}).names || [])[dim];
    return name ? (name.length > 16 ? name.slice(0, 15) + "…" : name) : unnamed + dim;
  };
  // At least a quarter of an action's range in the demonstrations is shown: closer, one would look at noise.
  const leastSpan = (dim) => 0.5 * hello.action_scale[dim];
  const grow = (low, high, least) => {
    const middle = (low + high) / 2, half = Math.max(0.56 * (high - low), least / 2, 1e-9);
    return [middle - half, middle + half];
  };

  // The candidate fan. The frame follows the data slowly, so that the picture does not jump with every plan.
  let frame = null, frameKey = "";
  function drawFan(view) {
    const canvas = $("fan"), plan = view.plan;
    if (!plan) return nothing(canvas, "no plan yet");
    const at = stage(canvas);
    if (!at) return;
    const { pen, width, height } = at, dims = hello.action_dim;
    const plane = $("layout").value === "plane" && dims > 1;
    const dx = Number($("dim-x").value) || 0, dy = Math.min(dims - 1, Number($("dim-y").value) || 0);
    const delta = ["delta", "velocity"].includes((hello.action || {}).kind);
    $("dim-x").hidden = !plane;
    // Changes of pose add up to a path; positions are one.
    const path = (rows, from) => {
      if (!plane) return rows.map((row, i) => [from + i, row[dy]]);
      if (!delta) return rows.map((row) => [row[dx], row[dy]]);
      let x = 0, y = 0;
      return [[0, 0], ...rows.map((row) => [(x += row[dx]), (y += row[dy])])];
    };
    const candidates = plan.candidates.map((rows) => path(rows, 0));
    const chosen = path(plan.actions, 0), exec = hello.exec_horizon;
    const now = chosen.slice(0, (plane && delta ? 1 : 0) + exec);
    const old = plan.remainder ? path(plan.remainder, 0) : [];
    const past = view.trace.slice(-12);
    const before = plane ? (delta ? [] : past.map((row) => [row[dx], row[dy]])) : past.map((row, i) => [i - past.length, row[dy]]);
    const all = [...candidates.flat(), ...chosen, ...old, ...before];
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of all) { left = Math.min(left, x); right = Math.max(right, x); low = Math.min(low, y); high = Math.max(high, y); }
    const margin = 28;
    [left, right] = grow(left, right, plane ? leastSpan(dx) : 0);
    [low, high] = grow(low, high, leastSpan(dy));
    if (plane) { // one unit is as long in both directions
      const unit = Math.max((right - left) / (width - 2 * margin), (high - low) / (height - 2 * margin));
      const cx = (left + right) / 2, cy = (low + high) / 2;
      [left, right] = [cx - unit * (width / 2 - margin), cx + unit * (width / 2 - margin)];
      [low, high] = [cy - unit * (height / 2 - margin), cy + unit * (height / 2 - margin)];
    }
    const key = [plane, dx, dy, width, height, view.number].join();
    const goal = [left, right, low, high];
    if (!frame || frameKey !== key || goal.some((v) => !Number.isFinite(v))) frame = goal;
    else frame = frame.map((value, i) => value + 0.25 * (goal[i] - value));
    frameKey = key;
    window.prismLive.frame = frame;
    const px = (x) => margin + (x - frame[0]) / (frame[1] - frame[0]) * (width - 2 * margin);
    const py = (y) => height - margin - (y - frame[2]) / (frame[3] - frame[2]) * (height - 2 * margin);
    const put = (points) => points.map(([x, y]) => [px(x), py(y)]);
    grid(pen, frame, px, py, width, height, margin);
    polyline(pen, put(before), colors.soft, 1.5, 0.7, [1, 5]);
    const order = candidates.map((_, i) => i).filter((i) => i !== plan.index);
    for (const i of order) polyline(pen, put(candidates[i]), modeColor(plan.modes[i]), 1.6, 0.55);
    polyline(pen, put(old), colors.soft, 2, 0.9, [6, 5]);
    polyline(pen, put(chosen), colors.ink, 2.5);
    polyline(pen, put(now), colors.accent, 5);
    const [sx, sy] = put(chosen)[0];
    pen.fillStyle = colors.surface;
    pen.strokeStyle = colors.accent;
    pen.lineWidth = 3;
    pen.beginPath();
    pen.arc(sx, sy, 5.5, 0, 2 * Math.PI);
    pen.fill();
    pen.stroke();
    label(pen, plane ? `${dimension(dx, "action ")}${delta ? ", added up" : ""}` : "steps from now", width - 8, height - 8, "right");
    label(pen, `${dimension(dy, "action ")}${plane && delta ? ", added up" : ""}`, 8, 16);
    drawn.fan = (drawn.fan || 0) + 1;
  }
  function ticks(low, high, count) {
    const span = high - low, power = 10 ** Math.floor(Math.log10(span / count));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count) || 10 * power;
    const list = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) list.push(i * step);
    return list;
  }
  function grid(pen, [left, right, low, high], px, py, width, height, margin) {
    if (!(right > left && high > low)) return;
    pen.strokeStyle = colors.line;
    pen.lineWidth = 1;
    const tidy = (v) => String(Number(v.toPrecision(6)));
    for (const v of ticks(left, right, 5)) {
      const x = Math.round(px(v)) + 0.5;
      pen.beginPath(); pen.moveTo(x, 24); pen.lineTo(x, height - 24); pen.stroke();
      if (x < width - 130) label(pen, tidy(v), x, height - 8, "center");
    }
    for (const v of ticks(low, high, 5)) {
      const y = Math.round(py(v)) + 0.5;
      pen.beginPath(); pen.moveTo(8, y); pen.lineTo(width - 8, y); pen.stroke();
      if (y > 34) label(pen, tidy(v), 10, y - 4);
    }
  }

  // One strip an action dimension, each on its own scale, the newest value at the right.
  function drawTrace(view) {
    const canvas = $("trace"), rows = view.trace, dims = hello.action_dim;
    const shown = Math.min(dims, 16), height = Math.max(110, 44 * shown + 12);
    if (Math.abs(canvas.getBoundingClientRect().height - height) > 1) canvas.style.height = height + "px";
    put("trace-note", rows.length ? `the last ${number(rows.length / hello.fps, 2)} s of commands${dims > shown ? `, ${shown} of ${dims} dimensions` : ""}` : "");
    if (rows.length < 2) return nothing(canvas, "none yet: a plan counts as executed when the next one is asked for");
    const at = stage(canvas);
    if (!at) return;
    const names = Array.from({ length: shown }, (_, d) => dimension(d, "a"));
    const { pen, width } = at, strip = (at.height - 12) / shown, to = width - 74, points = 240;
    const from = Math.max(34, ...names.map((name) => 20 + pen.measureText(name).width));
    for (let d = 0; d < shown; d++) {
      const top = 6 + d * strip + 5, bottom = 6 + (d + 1) * strip - 5;
      const values = rows.map((row) => row[d]);
      const [low, high] = grow(Math.min(...values), Math.max(...values), leastSpan(d));
      pen.strokeStyle = colors.line;
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(from, Math.round(bottom) + 4.5); pen.lineTo(to, Math.round(bottom) + 4.5); pen.stroke();
      const line = values.map((v, i) => [to - (values.length - 1 - i) / (points - 1) * (to - from), bottom - (v - low) / (high - low) * (bottom - top)]);
      polyline(pen, line, modeColor(d), 1.8);
      pen.fillStyle = modeColor(d);
      pen.beginPath(); pen.arc(line[line.length - 1][0], line[line.length - 1][1], 2.8, 0, 7); pen.fill();
      label(pen, names[d], 10, (top + bottom) / 2 + 4);
      label(pen, number(values[values.length - 1]), width - 10, (top + bottom) / 2 + 4, "right", colors.ink);
    }
    drawn.trace = (drawn.trace || 0) + 1;
  }
  function drawJerk(view) {
    const canvas = $("jerk"), values = view.jerk;
    if (values.length < 1) return nothing(canvas, "needs four actions");
    const at = stage(canvas);
    if (!at) return;
    const { pen, width, height } = at, top = Math.max(...values, 1e-6), points = 237;
    const step = (width - 52) / points, base = height - 14;
    for (const v of ticks(0, top, 3)) {
      const y = Math.round(base - v / top * (height - 36)) + 0.5;
      pen.strokeStyle = colors.line; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(42, y); pen.lineTo(width - 10, y); pen.stroke();
      label(pen, number(v, 2), 36, y + 4, "right");
    }
    pen.fillStyle = colors.m0;
    values.forEach((v, i) => {
      const x = width - 10 - (values.length - i) * step, h = Math.max(1, v / top * (height - 36));
      pen.fillRect(x, base - h, Math.max(1, step - 0.6), h);
    });
    drawn.jerk = (drawn.jerk || 0) + 1;
  }
  function drawLatency(latency) {
    const canvas = $("latency");
    if (!latency.counts.length) return nothing(canvas, "no plans yet");
    const at = stage(canvas);
    if (!at) return;
    const { pen, width, height } = at, top = Math.max(...latency.counts, 1), from = 12, to = width - 12, base = height - 22;
    const x = (ms) => from + ms / latency.high * (to - from), step = (to - from) / latency.counts.length;
    pen.fillStyle = colors.m2;
    latency.counts.forEach((count, i) => {
      if (!count) return;
      const h = Math.max(2, count / top * (base - 26));
      pen.fillRect(from + i * step, base - h, Math.max(1, step - 1.5), h);
    });
    pen.strokeStyle = colors.line; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(from, base + 0.5); pen.lineTo(to, base + 0.5); pen.stroke();
    for (const v of ticks(0, latency.high, 6)) label(pen, Number(v.toPrecision(4)) + (v ? "" : " ms"), x(v) + (v ? 0 : 8), height - 7, "center");
    for (const [name, ms, row] of [["p50", latency.p50, 0], ["p99", latency.p99, 1]]) {
      const at = Math.round(x(ms)) + 0.5, right = at > width * 0.75;
      pen.strokeStyle = colors.ink; pen.setLineDash([3, 3]);
      pen.beginPath(); pen.moveTo(at, 8); pen.lineTo(at, base); pen.stroke();
      pen.setLineDash([]);
      label(pen, `${name} ${number(ms, 2)}`, at + (right ? -6 : 6), 18 + 14 * row, right ? "right" : "left", colors.ink);
    }
    drawn.latency = (drawn.latency || 0) + 1;
  }
  function drawBars(canvas, values) {
    const at = stage(canvas);
    if (!at) return;
    const { pen, width, height } = at, top = Math.max(...values.map(Math.abs), 1e-9), step = (width - 12) / values.length;
    pen.strokeStyle = colors.line; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(6, height / 2); pen.lineTo(width - 6, height / 2); pen.stroke();
    pen.fillStyle = colors.m0;
    values.forEach((v, i) => {
      const h = v / top * (height / 2 - 4), w = Math.min(10, Math.max(1, step - 1.5));
      pen.fillRect(6 + i * step + (step - w) / 2, Math.min(height / 2, height / 2 - h), w, Math.max(1, Math.abs(h)));
    });
    drawn.sensors = (drawn.sensors || 0) + 1;
  }

  // Lists are built once and then filled: nothing flickers, and a selection stays.
  function sensors(view) {
    const list = $("sensors"), cameras = $("cameras");
    const images = view.sensors.filter((s) => ["rgb", "depth", "tactile"].includes(s.kind));
    const key = view.sensors.map((s) => s.name).join("\n");
    if (list.dataset.key !== key) {
      list.dataset.key = key;
      list.replaceChildren(...view.sensors.map((s) => {
        const row = make("li");
        row.append(make("i"), make("b", s.name), make("span", "", "what"));
        if (s.kind === "text") row.append(make("q"));
        else if (!images.includes(s)) row.append(make("canvas"));
        return row;
      }));
      cameras.replaceChildren(...images.map((s) => {
        const figure = make("figure"), image = make("img");
        image.alt = s.name;
        figure.append(image, make("figcaption", s.name));
        return figure;
      }));
      $("cameras-panel").hidden = !images.length;
    }
    let absent = 0;
    view.sensors.forEach((s, i) => {
      const row = list.children[i], bad = Boolean(s.fault);
      absent += bad;
      row.className = bad ? "bad" : "";
      const lost = s.count ? `, absent at ${s.count} steps` : "";
      const needed = hello.needs.includes(s.name) ? ": the policy requires it" : "";
      row.querySelector(".what").textContent = bad ? `${s.fault}${needed || lost}` : `${s.kind} ${s.shape.join(" × ")}${lost}`;
      if (s.values && row.querySelector("canvas")) drawBars(row.querySelector("canvas"), s.values);
      if (row.querySelector("q")) row.querySelector("q").textContent = s.text || "";
    });
    images.forEach((s, i) => {
      const figure = cameras.children[i];
      figure.className = s.fault ? "bad" : "";
      figure.lastChild.textContent = s.fault ? `${s.name}: ${s.fault}` : s.name;
      if (s.picture && figure.firstChild.src !== s.picture) { figure.firstChild.src = s.picture; drawn.cameras = (drawn.cameras || 0) + 1; }
    });
    put("health", absent ? `${absent} of ${view.sensors.length} absent` : "all well");
  }
  function robots(data, view) {
    const select = $("clients"), key = data.clients.map((c) => c.number).join();
    if (select.dataset.key !== key) {
      select.dataset.key = key;
      select.replaceChildren(...data.clients.map((c) => {
        const option = make("option", c.who);
        option.value = c.number;
        return option;
      }));
    }
    if (document.activeElement !== select) select.value = String(view.number);
  }
  function clock(seconds) {
    const s = Math.floor(seconds), pad = (v) => String(v).padStart(2, "0");
    return s >= 3600 ? `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
  }
  function state(css, text) {
    $("state").className = "state " + css;
    $("state").lastChild.textContent = text;
  }

  let planned = -1;
  function show() {
    const data = latest;
    if (!data || !hello) return;
    const view = data.view;
    $("empty").hidden = Boolean(view);
    $("view").hidden = !view;
    state("on", `${data.connected} robot${data.connected === 1 ? "" : "s"}`);
    put("foot", `up ${clock(data.up)}`);
    if (!view) return;
    robots(data, view);
    put("episode", `episode ${view.episode}, step ${view.steps}, ${view.requests} requests`);
    if (view.plan) {
      put("age", number(view.plan.age_ms, 1));
      put("modes", String(view.plan.count));
      put("spread", `spread ${number(view.plan.spread)}`);
    }
    const late = view.plan && view.plan.age_ms > 1500 * hello.pred_horizon / hello.fps;
    $("age").closest("div").className = late ? "bad" : "";
    put("p50", number(data.latency.p50, 2));
    const jerk = view.jerk.length ? view.jerk.reduce((a, b) => a + b) / view.jerk.length : 0;
    put("jerk-mean", number(jerk));
    put("rate", number(data.rate, 2));
    put("errors", String(data.errors));
    $("errors").closest("div").className = data.errors ? "bad" : "";
    put("totals", `in ${data.requests}`);
    put("latency-note", `of plans, all robots, ${number(data.batch, 2)} a pass`);
    sensors(view);
    drawFan(view);
    if (planned !== view.requests + "," + view.number) { // the rest changes with requests only
      planned = view.requests + "," + view.number;
      drawTrace(view);
      drawJerk(view);
      drawLatency(data.latency);
    }
  }
  function greet(message) {
    hello = message.hello;
    put("policy", `${hello.policy}, ${hello.method}`);
    document.title = `${hello.policy} · PRISM live`;
    put("address", `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}`);
    for (const [id, chosen] of [["dim-x", 0], ["dim-y", Math.min(1, hello.action_dim - 1)]]) {
      if ($(id).options.length === hello.action_dim) continue;
      $(id).replaceChildren(...Array.from({ length: hello.action_dim }, (_, i) => {
        const option = make("option", dimension(i, "a"));
        option.value = i;
        return option;
      }));
      $(id).value = chosen;
    }
    $("expects").tBodies[0].replaceChildren(...hello.sensors.map((s) => {
      const row = make("tr");
      row.append(...[s.name, s.kind, s.shape.join(" × "), s.dtype].map((text) => make("td", text)));
      return row;
    }));
  }
  function connect() {
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/live`);
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      locked = Boolean(message.locked);
      if (locked && key !== null) return socket.send(JSON.stringify({ key }));
      if (locked) { $("lock").hidden = false; $("key").focus(); return socket.close(); } // again with the key
      if (message.hello) return greet(message);
      if (!latest && wanted !== null) socket.send(JSON.stringify({ client: wanted }));
      latest = message;
      window.prismLive.snapshots += 1;
      $("lock").hidden = true;
    };
    socket.onclose = (event) => {
      latest = null;
      if (event.code === 1008) { key = null; $("lock").hidden = false; put("lock-note", "That is not its key."); }
      if (locked && key === null) return state("", "locked");
      state("off", "not connected");
      setTimeout(connect, 1000);
    };
  }
  // Draw when the screen does, at most once a snapshot: a hidden tab draws nothing.
  let shown = null;
  const paint = () => {
    if (latest !== shown) { shown = latest; show(); }
    requestAnimationFrame(paint);
  };
  $("clients").addEventListener("change", (event) => {
    wanted = Number(event.target.value);
    event.target.blur();
    socket.send(JSON.stringify({ client: wanted }));
  });
  $("lock").addEventListener("submit", (event) => {
    event.preventDefault();
    put("lock-note", "");
    key = $("key").value;
    connect();
  });
  const again = () => { planned = -1; theme(); show(); };
  for (const id of ["layout", "dim-x", "dim-y"]) $(id).addEventListener("change", again);
  window.addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  theme();
  connect();
  requestAnimationFrame(paint);
})();
