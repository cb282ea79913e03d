// Draws the charts of a run from the data in the page. Every chart is drawn from what is chosen, when it is chosen.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = id => document.getElementById(id);
  const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];  // none that goes to a server
  const CONFIG = {responsive: true, displaylogo: false, modeBarButtons: BUTTONS, displayModeBar: "hover"};
  const FONT = {family: "system-ui, sans-serif", size: 12, color: "#1c2733"};
  const RED = "#c62828", ORANGE = "#e08600", BLACK = "#111111", BLUE = "#4f7cac", SHIFTED = "#f2a541";
  const RARE = 1e-6, RARE_UPDATE = 1e-3;  // shares that an axis need not show; a weight of zero has updates of 2^100 units
  const POWER = {tickprefix: "2<sup>", ticksuffix: "</sup>"};

  function unpack(text, Kind) {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    return new Kind(bytes.buffer);
  }

  function percent(share) {
    if (!(share > 0)) return "0%";
    if (share < 0.0001) return "under 0.01%";
    if (share > 0.9999 && share < 1) return "over 99.99%";
    return `${Number((100 * share).toPrecision(3))}%`;
  }

  // An axis of whole numbers over so many of them: where they are few, plotly would put labels between them.
  const whole = span => (span < 6 ? {tick0: 0, dtick: 1} : {tickformat: "d"});

  const count = value => value.toLocaleString("en-US", {maximumFractionDigits: 0});
  const scaleOf = shift => (shift < 0 ? (2 ** shift).toPrecision(3) : count(2 ** shift));
  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function choices(select, values, chosen) {
    select.replaceChildren(...values.map((value, index) => new Option(value, String(index))));
    select.value = String(Math.max(0, values.indexOf(chosen)));
  }

  // ---- loss, norm, scale, skips

  function drawTimeline() {
    const {lines, skips, skipped, steps} = data.timeline;
    const line = name => ({x: unpack(lines[name].x, Float64Array), y: unpack(lines[name].y, Float64Array), mode: "lines"});
    const marks = (x, y, name, color, axis, symbol) => ({
      x, y: x.map(() => y), name, mode: "markers", type: "scatter", yaxis: axis,
      marker: {color, symbol, size: 8, line: {color, width: 1.5}}, hovertemplate: `%{x}: ${name}<extra></extra>`,
    });
    const loss = line("loss"), norm = line("grad_norm"), scale = line("scale");
    const lowest = values => values.reduce((low, value) => (value < low ? value : low), Infinity);
    const highest = values => -lowest(values.map(value => -value));
    const firm = value => (isFinite(value) ? value : 1);
    const powers = scale.y.map(Math.log2);
    const traces = [
      {...loss, name: "loss", line: {color: BLUE, width: 1.3}, hovertemplate: "%{x}: loss %{y:.5g}<extra></extra>"},
      {...norm, name: "gradient norm", yaxis: "y2", line: {color: "#5b8f5b", width: 1.3},
        hovertemplate: "%{x}: norm %{y:.5g}<extra></extra>"},
      {...scale, y: powers, customdata: scale.y, name: "loss scale", yaxis: "y3",
        line: {color: ORANGE, width: 1.6, shape: "hv"}, hovertemplate: "%{x}: scale %{customdata}<extra></extra>"},
    ];
    for (const each of [...traces]) {  // a value between two that are not finite is no line
      const alone = (_, at) => isFinite(each.y[at]) && !isFinite(each.y[at - 1]) && !isFinite(each.y[at + 1]);
      const x = each.x.filter(alone), y = each.y.filter(alone);
      if (x.length) traces.push({...each, x, y, mode: "markers", marker: {size: 5, color: each.line.color}, hoverinfo: "skip", hovertemplate: null});
    }
    if (lines.loss.nonfinite.length) {
      traces.push(marks(lines.loss.nonfinite, firm(lowest(loss.y)), "loss not finite", RED, "y", "x-thin"));
    }
    if (skips.length) {
      const flat = lowest(powers);
      traces.push(marks(skips, isFinite(flat) ? flat - 0.6 : 0, "skipped", RED, "y3", "line-ns"));
    }
    const powersSpan = highest(powers) - lowest(powers);
    const axis = (title, domain, more) => ({title: {text: title}, domain, zeroline: false, ...more});
    Plotly.newPlot("timeline", traces, {
      height: 560, font: FONT, margin: {l: 70, r: 20, t: 10, b: 45}, showlegend: false, hovermode: "closest",
      xaxis: {title: {text: "step"}, anchor: "y3", zeroline: false, ...whole(steps)},
      yaxis: axis("loss", [0.62, 1]),
      yaxis2: axis("gradient norm", [0.31, 0.58], {type: "log", exponentformat: "power"}),
      yaxis3: axis("loss scale; | skipped", [0, 0.27], {...POWER, ...whole(powersSpan)}),
    }, CONFIG);
    const shown = skips.length < skipped ? ` (${count(skips.length)} of them drawn)` : "";
    const broken = lines.loss.nonfinite.length ? " The loss was not finite at the red crosses." : "";
    $("timeline-words").textContent = `${count(skipped)} of ${count(steps)} steps were skipped${shown}.${broken}`;
  }

  // ---- histogram of exponents

  // Which share of the values from 2^exponent to 2^(exponent + 1) lies below 2^limit, even in their logarithm.
  const below = (exponent, limit) => Math.min(1, Math.max(0, limit - exponent));

  const topOf = limits => limits.max ?? Infinity;

  // The shares that a format loses, keeps with fewer digits and cannot reach, of values times 2^shift.
  function judge(bins, first, largest, limits, shift) {
    let all = 0, lost = 0, small = 0, beyond = 0;
    bins.forEach((number, index) => {
      const exponent = first + index + shift;
      all += number;
      lost += number * below(exponent, limits.zero);
      small += number * below(exponent, limits.normal);
      beyond += number * (1 - below(exponent, limits.top ?? Infinity));
    });
    if (limits.max !== null && largest * 2 ** shift <= 2 ** limits.zero) lost = all;  // half the smallest subnormal rounds to zero
    beyond = largest * 2 ** shift > topOf(limits) ? Math.max(1, beyond) : 0;
    return {all, lost: lost / all, small: (small - lost) / all, saturated: beyond / all};
  }

  const inWords = (shares, format) => format === null
    ? `<b class="lost">${percent(shares.lost)} lie left of the red line</b>, half a unit in the last place of the weight as it ` +
      "is stored: it cannot follow them. A master adds them up; without one they are lost."
    : `<b class="lost">${percent(shares.lost)} lie left of the red line</b>, where ${format} rounds to zero; ` +
    `<b class="small">${percent(shares.small)}</b> lie between the red and the orange line, where it keeps fewer digits; ` +
    `<b class="saturated">${percent(shares.saturated)}</b> lie right of the black line, beyond its largest value.`;

  function chosenHistogram() {
    const kind = Object.keys(data.kinds)[Number($("kind").value)];
    const found = data.kinds[kind], row = Number($("module").value);
    found.unpacked ??= unpack(found.histogram, Float64Array);
    const bins = found.unpacked.subarray(row * found.bins, (row + 1) * found.bins);
    const total = name => unpack(found.totals[name], Float64Array)[row];
    return {kind, found, row, bins, total, largest: unpack(found.largest, Float64Array)[row]};
  }

  function drawHistogram() {
    const {kind, found, row, bins, total, largest} = chosenHistogram();
    const isUpdate = kind === data.update.kind, format = isUpdate ? null : Object.keys(data.formats)[Number($("format").value)];
    const limits = isUpdate ? data.update : data.formats[format];
    $("format-label").hidden = isUpdate;
    const gradient = data.gradients.includes(kind), shift = gradient ? Number($("shift").value) : 0;
    $("shift-label").hidden = !gradient;
    $("shift-value").textContent = `2^${shift} = ${scaleOf(shift)}`;
    const all = bins.reduce((sum, value) => sum + value, 0) || 1;
    const share = Array.from(bins, value => value / all);
    const places = by => share.map((_, index) => found.first + index + 0.5 + by);
    const bars = (by, name, color, more) => ({
      x: places(by), y: share, name, type: "bar", width: 1, marker: {color, line: {width: 0}}, ...more,
      customdata: share.map((_, index) => [found.first + index + by, found.first + index + by + 1]),
      hovertemplate: "2<sup>%{customdata[0]}</sup> to 2<sup>%{customdata[1]}</sup>: %{y:.3~%}<extra></extra>",
    });
    const traces = [bars(0, gradient ? "as they are (loss scale 1)" : "as they are", BLUE, {opacity: shift ? 0.55 : 0.9})];
    if (shift) traces.push(bars(shift, `times the loss scale 2^${shift}`, SHIFTED, {opacity: 0.75}));
    const seen = share.flatMap((value, index) => (value > (isUpdate ? RARE_UPDATE : RARE) ? [found.first + index] : []));
    const low = Math.min(limits.zero - 2, (seen[0] ?? 0) + Math.min(0, shift));
    const high = Math.max((limits.top ?? 0) + 2, (seen.at(-1) ?? 0) + 1 + Math.max(0, shift));
    const wall = (x, color, text, row) => ({  // each label in a row of its own: a narrow window, or a wide format, has them close
      line: {type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: {color, width: 2}},
      note: {x, xref: "x", yref: "paper", y: 1, yanchor: "bottom", xanchor: x < (low + high) / 2 ? "left" : "right", yshift: 15 * row,
        showarrow: false, text, font: {color, size: 12}},
    });
    const largestValue = count(topOf(limits)).length < 9 ? count(topOf(limits)) : topOf(limits).toPrecision(3);
    const walls = isUpdate ? [wall(limits.zero, RED, "half a unit in the last place", 0)] : [
      wall(limits.zero, RED, `${format}: zero below 2<sup>${limits.zero}</sup>`, 2),
      wall(limits.normal, ORANGE, `smallest normal 2<sup>${limits.normal}</sup>`, 1),
      wall(limits.top, BLACK, `largest ${largestValue}`, 0),
    ];
    const shade = (x0, x1, color) => ({type: "rect", x0, x1, yref: "paper", y0: 0, y1: 1, fillcolor: color, line: {width: 0}, layer: "below"});
    Plotly.react("histogram", traces, {
      height: 450, font: FONT, barmode: "overlay", bargap: 0, margin: {l: 60, r: 20, t: 72, b: 50},
      legend: {orientation: "h", x: 1, xanchor: "right", y: -0.19, yanchor: "top"}, showlegend: gradient,
      xaxis: {title: {text: isUpdate ? "units in the last place of the weight" : "magnitude"}, range: [low, high], ...POWER, tickformat: "d", zeroline: false, ticks: "outside"},
      yaxis: {title: {text: "share of the nonzero values"}, tickformat: ".3~%", rangemode: "tozero"},
      shapes: [shade(low, limits.zero, "rgba(198,40,40,0.08)"), shade(limits.zero, limits.normal, "rgba(224,134,0,0.06)"),
        ...walls.map(each => each.line)],
      annotations: walls.map(each => each.note),
    }, CONFIG);
    $("histogram-words").innerHTML = histogramWords({kind, found, row, bins, total, largest, format, limits, shift, gradient});
  }

  // A tensor that is stored low has lost already what it could not hold.
  function storedLow(found) {
    const stored = found.formats.filter(name => name !== "fp32");
    return stored.length ? `Tensors were stored in ${stored.join(" and ")} here: what that lost is` : "";
  }

  function histogramWords({kind, found, row, bins, total, largest, format, limits, shift, gradient}) {
    const place = escaped(found.modules[row]), number = count(total("nonzero"));
    if (!(total("nonzero") > 0)) return `No nonzero value of ${kind} was observed in ${place}.`;
    const parts = [`Of ${number} nonzero values of ${kind} in ${place}, ${found.sampled ? "a sample, " : ""}as they are: ` +
      inWords(judge(bins, found.first, largest, limits, 0), format)];
    if (shift) parts.push(`Times a loss scale of ${scaleOf(shift)}: ` + inWords(judge(bins, found.first, largest, limits, shift), format));
    if (format === null) return parts.join("<br>");
    const lost = total("lost") / total("nonzero"), small = (total("small") - total("lost")) / total("nonzero");
    parts.push(`As they were in this run${gradient ? ", with the loss scales that they carried" : ""}: ${percent(lost)} of them are ` +
      `lost in ${data.low}, ${percent(small)} kept with fewer digits; ${percent(total("saturated") / total("count"))} of all ` +
      `${count(total("count"))} values were beyond its range or not finite, ${percent(total("zeros") / total("count"))} were zero.`);
    if (storedLow(found)) parts.push(`${storedLow(found)} among the zeros.`);
    return parts.join("<br>");
  }

  // ---- heat maps of module and step

  const EMPTY = -7, LEAST = -6;  // exponents of ten: no value at all, and the least share that has a color of its own
  const COLORS = [[0, "#f1f3f5"], [0.5 / 7, "#f1f3f5"], [0.5 / 7, "#fff3c4"], [3 / 7, "#fdbb63"], [5 / 7, "#ef6548"], [1, "#7f0000"]];

  function drawMap(id, kind, measure, title) {
    const found = data.kinds[kind], modules = found.modules.slice(1), columns = data.columns;
    const share = unpack(found.maps[measure], Float32Array);
    const shown = share.map(value => (value > 0 ? Math.max(LEAST, Math.log10(value)) : value === 0 ? EMPTY : NaN));
    const rows = values => modules.map((_, row) => values.subarray(row * columns.length, (row + 1) * columns.length));
    const none = !share.some(value => value > 0), unseen = share.every(value => isNaN(value));
    const every = Math.ceil(modules.length / (none ? 4 : 60)), labelled = modules.filter((_, row) => row % every === 0);
    const short = name => escaped(name.length > 34 ? `…${name.slice(-33)}` : name);
    const steps = columns.map(([from]) => String(from));  // as names: what was not observed has no place on the axis
    $(id).previousElementSibling.textContent = unseen ? `${title}: no such value was observed` : none ? `${title}: none` : title;
    Plotly.react(id, [{
      type: "heatmap", x: steps, y: modules, z: rows(shown), customdata: rows(share), zmin: EMPTY, zmax: 0, colorscale: COLORS, showscale: !none,
      hoverongaps: false, hovertemplate: "%{y}, step %{x}: %{customdata:.3~%}<extra></extra>",
      colorbar: {tickvals: [EMPTY, -6, -4, -2, -1, 0], ticktext: ["none", "0.0001%", "0.01%", "1%", "10%", "100%"], thickness: 14},
    }], {
      height: none ? 165 : Math.min(900, Math.max(245, 145 + 16 * modules.length)), font: FONT, margin: {l: 10, r: 10, t: 29, b: 45},
      xaxis: {title: {text: "step"}, type: "category", categoryarray: steps, range: [-0.5, steps.length - 0.5], nticks: 12, automargin: true},
      yaxis: {type: "category", categoryarray: modules, range: [modules.length - 0.5, -0.5], automargin: true, tickvals: labelled, ticktext: labelled.map(short)},
    }, CONFIG);
  }

  function drawMaps() {
    const kind = Object.keys(data.kinds)[Number($("map-kind").value)], measure = $("map-measure").value;
    const isUpdate = kind === data.update.kind, less = "smaller than half a unit in the last place of the stored weight";
    const titles = isUpdate ? {lost: `Share of the updates ${less}`, small: `Share of the updates ${less}`, zero: "Share of weights without an update"} : {
      lost: `Share of the nonzero values that ${data.low} rounds to zero`,
      small: `Share of the nonzero values below the smallest normal value of ${data.low}`,
      zero: `Share of values that are zero: at most this was lost where ${data.low} stores them`,
    };
    drawMap("small-map", kind, measure, titles[measure]);
    drawMap("saturated-map", kind, "saturated",
      isUpdate ? "Share of updates that are not finite" : `Share of values beyond the largest value of ${data.low}, or not finite`);
    const stored = isUpdate ? "" : storedLow(data.kinds[kind]);
    const groups = data.columns.some(([from, to]) => from !== to) ? " A column has several observed steps." : "";
    $("maps-words").textContent = (stored ? `${stored} a zero, which does not count as lost here.` : "") + groups;
  }

  // ---- the page

  function openTensors() {
    const kinds = Object.keys(data.kinds), formats = Object.keys(data.formats);
    const modules = () => choices($("module"), data.kinds[kinds[Number($("kind").value)]].modules, $("module").selectedOptions[0]?.text);
    choices($("kind"), kinds, kinds[0]);
    choices($("map-kind"), kinds, kinds[0]);
    choices($("format"), formats, data.low);
    $("map-measure").value = data.kinds[kinds[0]].formats.includes(data.low) ? "small" : "lost";
    Object.assign($("shift"), {min: Math.min(0, data.shift), max: Math.max(24, data.shift)});
    $("shift").value = String(data.shift);
    modules();
    $("kind").addEventListener("change", () => {
      modules();
      drawHistogram();
    });
    for (const id of ["module", "format"]) $(id).addEventListener("change", drawHistogram);
    $("shift").addEventListener("input", drawHistogram);
    for (const id of ["map-kind", "map-measure"]) $(id).addEventListener("change", drawMaps);
    drawHistogram();
    drawMaps();
  }

  const observed = Object.keys(data.kinds).length > 0;
  $("timeline-section").hidden = data.timeline.steps === 0;
  $("histogram-section").hidden = $("maps-section").hidden = !observed;
  if (data.timeline.steps) drawTimeline();
  if (observed) openTensors();
})();
