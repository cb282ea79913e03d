// Unpacks data and plotly.js, hands the data to `prepare`, and calls what that returns: now, and when colors change.
"use strict";
const drawing = (() => {
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  // No button that goes to a server.
  const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  const config = {responsive: true, displaylogo: false, modeBarButtons: BUTTONS, displayModeBar: "hover"};

  function colors() {
    return dark.matches
      ? {text: "#dce3ea", grid: "#3a444f", none: "#2a323b", edge: "#f1f3f5", note: "rgba(23,28,34,0.8)", lost: "#ff7b72", small: "#f2a541"}
      : {text: "#1c2733", grid: "#e3e8ed", none: "#f1f3f5", edge: "#111111", note: "rgba(255,255,255,0.8)", lost: "#c62828", small: "#b26a00"};
  }

  function template() {
    const {text, grid} = colors(), axis = {gridcolor: grid, linecolor: grid, zerolinecolor: grid};
    const font = {family: "system-ui, sans-serif", size: 12, color: text}, none = "rgba(0,0,0,0)";
    return {layout: {
      font, paper_bgcolor: none, plot_bgcolor: none, xaxis: axis, yaxis: axis,
      modebar: {bgcolor: none, color: grid, activecolor: text}, shapedefaults: {line: {color: text}},
    }};
  }

  // With a height of its own: plotly.js gives what it has drawn again none when the window is resized next.
  function chart(id, traces, layout) {
    document.getElementById(id).style.height = `${layout.height}px`;
    Plotly.react(id, traces, layout, config);
  }

  // Decodes base 85, which is 6% shorter than base 64: five letters for four bytes. "/" stands for "<" (html.py).
  function decoded(text) {
    const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;/=>?@^_`{|}~";
    const values = new Uint8Array(128);
    [...letters].forEach((letter, value) => (values[letter.charCodeAt(0)] = value));
    const length = Math.floor(text.length * 4 / 5), view = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
    for (let at = 0, to = 0; at < text.length; at += 5, to += 4) {
      let word = 0;
      for (let i = at; i < at + 5; i++) word = word * 85 + (i < text.length ? values[text.charCodeAt(i)] : 84);
      view.setUint32(to, word);
    }
    return new Uint8Array(view.buffer, 0, length);
  }

  function unpack(id) {
    const bytes = decoded(document.getElementById(id).textContent);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  async function start(prepare) {
    try {
      const draw = prepare(JSON.parse(await unpack("data"))), script = document.createElement("script");
      script.textContent = await unpack("plotly");
      document.head.append(script);
      draw();
      dark.addEventListener("change", draw);
    } catch (error) {
      const words = `<p class="notes">The charts could not be drawn: ${error}. They need a browser of 2023 or later.</p>`;
      document.querySelector("header").insertAdjacentHTML("afterend", words);
      console.error(error);
    }
    document.body.dataset.drawn = "yes";
  }

  return {start, colors, template, chart};
})();
