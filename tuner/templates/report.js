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

  const draw = (isDark, width) =>
    Promise.all(
      plots.map((plot) => {
        let text = document.getElementById(plot.dataset.figure).textContent;
        if (isDark) text = text.replace(/#[0-9a-f]{6}/g, (colour) => palette[colour] || colour);
        const figure = JSON.parse(text);
        if (touch.matches) figure.layout.dragmode = false; // a finger scrolls the page
        if (width) figure.layout.width = width;
        return Plotly.react(plot, figure.data, figure.layout, config);
      }),
    );

  draw(dark.matches);
  dark.addEventListener("change", () => draw(dark.matches));

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
