"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PLAY = "M4 2.5v11l9-5.5z", PAUSE = "M4 2.5h3v11H4zM9 2.5h3v11H9z";
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

  const element = (name, attributes) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const line = (flat, end) => {
    let d = "M" + flat[0] + " " + flat[1];
    for (let i = 2; i < Math.min(flat.length, end); i += 2) d += "L" + flat[i] + " " + flat[i + 1];
    return d;
  };
  // index of the last entry that is not after `step`
  const latest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle - 1;
    }
    return low;
  };

  function setUp(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const image = root.querySelector(".frame"), slider = root.querySelector("input");
    const button = root.querySelector(".play"), output = root.querySelector("output");
    const frames = data.frames.map((frame) => "data:image/jpeg;base64," + frame);
    const scenes = [...root.querySelectorAll(".scene")].map((svg, index) => {
      const view = data.views[index];
      const trails = view.movers.map((m) => m.trail ? svg.appendChild(element("path", { class: "trail " + m.css })) : null);
      const fan = svg.appendChild(element("g", {}));
      const shapes = view.movers.map((m) => {
        const group = svg.appendChild(element("g", { class: "mover " + m.css }));
        group.innerHTML = m.shape;
        return group;
      });
      return { view, trails, fan, shapes, shown: -1, steps: view.fans.map((f) => f.step) };
    });

    function drawFan(scene, step) {
      if (!scene.steps.length) return;
      const index = latest(scene.steps, step);
      if (index === scene.shown) return;
      scene.shown = index;
      const fan = scene.view.fans[index];
      const paths = fan.curves.map((c, k) => element("path", { class: "candidate " + fan.modes[k], d: line(c, Infinity) }));
      const chosen = fan.curves[fan.index];
      paths.push(element("path", { class: "chosen", d: line(chosen, Infinity) }));
      paths.push(element("path", { class: "chosen now", d: line(chosen, 2 * data.exec + 2) }));
      scene.fan.replaceChildren(...paths);
    }

    function show(step) {
      slider.value = step;
      output.textContent = "step " + step + " of " + data.steps;
      if (frames.length) image.src = frames[latest(data.frameSteps, step)];
      for (const scene of scenes) {
        scene.view.movers.forEach((mover, i) => {
          const [x, y, angle] = mover.track[step];
          scene.shapes[i].setAttribute("transform", `translate(${x} ${y}) rotate(${angle})`);
          if (scene.trails[i]) {
            scene.trails[i].setAttribute("d", "M" + mover.track.slice(0, step + 1).map((p) => p[0] + " " + p[1]).join("L"));
          }
        });
        drawFan(scene, step);
      }
    }

    let playing = false, started = 0, from = 0;
    const seconds = Math.min(14, Math.max(4, data.steps / 20)); // the whole episode, however long
    function tick(now) {
      if (!playing) return;
      const step = from + ((now - started) / 1000 / seconds) * data.steps;
      if (step >= data.steps + 0.08 * data.steps) { from = 0; started = now; } // rest on the last step, then again
      show(Math.min(data.steps, Math.floor(Math.max(0, step))));
      requestAnimationFrame(tick);
    }
    function play(on) {
      if (on === playing) return;
      playing = on;
      button.setAttribute("aria-label", on ? "Pause" : "Play");
      button.querySelector("path").setAttribute("d", on ? PAUSE : PLAY);
      if (on) {
        from = Number(slider.value) >= data.steps ? 0 : Number(slider.value);
        started = performance.now();
        requestAnimationFrame(tick);
      }
    }
    let touched = false;
    button.addEventListener("click", () => { touched = true; play(!playing); });
    slider.addEventListener("input", () => { touched = true; play(false); show(Number(slider.value)); });
    show(0);
    // Plays by itself while it is in view, until somebody takes over; never for those who asked for calm.
    new IntersectionObserver((entries) => {
      const visible = entries[entries.length - 1].isIntersecting;
      if (!visible) play(false); else if (!calm && !touched) play(true);
    }, { threshold: 0.35 }).observe(root);
  }

  document.querySelectorAll(".player").forEach(setUp);

  document.querySelectorAll("[role=tablist]").forEach((list) => {
    const tabs = [...list.children];
    const choose = (tab) => tabs.forEach((other) => {
      const on = other === tab;
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    });
    tabs.forEach((tab, i) => {
      tab.tabIndex = i ? -1 : 0;
      tab.addEventListener("click", () => choose(tab));
      tab.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!move) return;
        const next = tabs[(i + move + tabs.length) % tabs.length];
        choose(next);
        next.focus();
      });
    });
  });

  document.querySelectorAll("table").forEach((table) => {
    const body = table.tBodies[0];
    const value = (row, i) => parseFloat(row.cells[i].dataset.v ?? row.cells[i].textContent);
    [...table.tHead.rows[0].cells].forEach((cell, i) => cell.firstChild.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => (value(a, i) - value(b, i)) * (down ? -1 : 1));
      body.append(...rows);
    }));
  });
})();
