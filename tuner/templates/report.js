"use strict";
(async () => {
  // plotly.js is in this file, compressed.
  try {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  } catch (error) {
    document.querySelectorAll(".plot").forEach((plot) => {
      plot.textContent =
        "This browser cannot unpack the plots: they need Chrome 80, Firefox 113 or Safari 16.4. " +
        "The tables hold the same figures.";
    });
    throw error;
  }
  // Each figure is written in the colours of the light page; the palette says what each becomes
  // on a dark one.
  const palette = JSON.parse(document.getElementById("palette").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const plots = [...document.querySelectorAll(".plot")];
  const config = { displayModeBar: false, responsive: true };

  // The choice under the limits of the sliders, and the limits themselves.
  const limits = document.getElementById("limits");
  const mark = (figure, isDark) => {
    const chosen = limits.choice;
    const green = isDark ? palette["#007a59"] : "#007a59";
    figure.data.push({
      type: "scatter",
      mode: "markers",
      name: chosen.met ? "within your limits" : "nearest to your limits",
      x: [chosen.time],
      y: [chosen.energy],
      marker: { size: 15, symbol: "star", color: green },
      hoverinfo: "skip",
    });
    const line = { color: green, width: 1.5, dash: "dot" };
    const shapes = [];
    if (chosen.deadline !== null) {
      const x = chosen.deadline;
      shapes.push({ type: "line", x0: x, x1: x, yref: "y domain", y0: 0, y1: 1, line });
    }
    if (chosen.budget !== null) {
      const y = chosen.budget;
      shapes.push({ type: "line", y0: y, y1: y, xref: "x domain", x0: 0, x1: 1, line });
    }
    figure.layout.shapes = [...(figure.layout.shapes || []), ...shapes];
  };

  // What the front leaves out at first, and the point whose figures the tiles show.
  const more = document.getElementById("front-more");
  const known = document.getElementById("front-points");
  const clickable = known ? JSON.parse(known.textContent) : [];
  const fillTiles = (event) => {
    const at = event.points[0];
    const point = clickable.find(({ place: [x, y] }) => x === at.x && y === at.y);
    if (!point) return;
    document.getElementById("tiles-of").textContent = point.name;
    document.getElementById("tiles-knobs").innerHTML = point.knobs;
    for (const [name, [value, lines]] of Object.entries(point.tiles)) {
      const tile = document.querySelector(`[data-tile="${name}"]`);
      const [amount, ...unit] = value.split(" ");
      tile.querySelector(".value").firstChild.textContent = `${amount} `;
      tile.querySelector(".unit").textContent = unit.join(" ");
      tile.querySelector(".lines").innerHTML = lines;
    }
  };

  const draw = (isDark, width, some = plots) =>
    Promise.all(
      some.map((plot) => {
        let text = document.getElementById(plot.dataset.figure).textContent;
        if (isDark) text = text.replace(/#[0-9a-f]{6}|rgba\([\d,.]+\)/g, (colour) => palette[colour] || colour);
        const figure = JSON.parse(text);
        if (plot.id === "plot-front" && limits && limits.moved) mark(figure, isDark);
        if (plot.id === "plot-front" && more) {
          figure.data.forEach((trace) => {
            if (trace.visible === "legendonly") trace.visible = more.checked;
          });
        }
        if (touch.matches) figure.layout.dragmode = false; // a finger scrolls the page
        if (width) figure.layout.width = width;
        return Plotly.react(plot, figure.data, figure.layout, config);
      }),
    );

  const front = document.getElementById("plot-front");
  const redraw = () => draw(dark.matches, undefined, [front]);
  draw(dark.matches).then(() => front && front.on("plotly_click", fillTiles));
  if (more) more.addEventListener("change", redraw);
  dark.addEventListener("change", () => draw(dark.matches));
  let waiting = false;
  document.addEventListener("limits", () => {
    if (waiting) return; // a slider moves faster than a figure is drawn
    waiting = true;
    setTimeout(() => {
      waiting = false;
      redraw();
    }, 30);
  });

  // On paper: light, as wide as the page, nothing folded away.
  const folded = [...document.querySelectorAll("details:not([open])")];
  window.addEventListener("beforeprint", () => {
    folded.forEach((part) => (part.open = true));
    draw(false, 660);
  });
  window.addEventListener("afterprint", () => {
    folded.forEach((part) => (part.open = false));
    plots.forEach((plot) => Plotly.purge(plot)); // or the width of the paper would stay
    draw(dark.matches);
  });
})();

// Sliders of a deadline and an energy budget: they look up the choice that is written for each
// pair of values.
(() => {
  const part = document.getElementById("limits");
  if (!part) return;
  const data = JSON.parse(document.getElementById("limit-choices").textContent);
  const names = ["deadline", "budget"];
  const slider = (name) => document.getElementById(`limit-${name}`);

  const show = (moved) => {
    const [row, column] = names.map((name) => Number(slider(name).value));
    const limits = { deadline: data.deadline[row], budget: data.budget[column] };
    const [number, met] = data.cells[row][column];
    const point = data.points[number];
    const given = names.map((name) => limits[name]).filter((limit) => limit.value !== null);
    const asked = given.map((limit) => limit.text).join(" and ");
    let lead = given.length ? `Within ${asked}: ` : "Without limits: ";
    if (!met) lead = `Nothing ${data.found} trains within ${asked}. Nearest: `;
    document.getElementById("limits-choice").textContent = `${lead}${point.text}`;
    document.getElementById("limits-command").textContent =
      `tuner choose ${data.run}${given.map((limit) => limit.option).join("")}`;
    part.classList.toggle("unmet", !met);
    for (const name of names) {
      document.getElementById(`limit-${name}-value`).textContent = limits[name].text;
      slider(name).setAttribute("aria-valuetext", limits[name].text);
    }
    part.choice = {
      deadline: limits.deadline.value,
      budget: limits.budget.value,
      name: point.name,
      time: point.time,
      energy: point.energy,
      met,
    };
    if (!moved) return;
    part.moved = true;
    document.dispatchEvent(new Event("limits"));
  };

  for (const name of names) slider(name).addEventListener("input", () => show(true));
  part.hidden = false;
  show(false);
})();
