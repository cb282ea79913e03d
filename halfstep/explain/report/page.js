// Draws the charts of a run from the data in the page, each from what is chosen, when it is chosen. All shares are
// computed in Python (explain/report/page.py); here they are looked up, put in words and drawn.
"use strict";
drawing.start(data => {
  const $ = id => document.getElementById(id);
  const RED = "#c62828", ORANGE = "#e08600", BLUE = "#4f7cac", GREEN = "#5b8f5b";
  const SHIFTED = "#f2a541";
  const POWER = {tickprefix: "2<sup>", ticksuffix: "</sup>"};

  // ---- numbers and words

  const numbers = list => list.map(value => value ?? NaN);

  function percent(share) {
    if (!(share > 0)) return "0%";
    if (share < 0.0001) return "under 0.01%";
    if (share > 0.9999 && share < 1) return "over 99.99%";
    return `${Number((100 * share).toPrecision(3))}%`;
  }

  const count = value => value.toLocaleString("en-US", {maximumFractionDigits: 0});
  const scaleOf = shift => (shift < 0 ? (2 ** shift).toPrecision(3) : count(2 ** shift));
  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const lowest = values => values.reduce((low, value) => (value < low ? value : low), Infinity);
  const highest = values => -lowest(values.map(value => -value));
  const kindOf = control => Object.keys(data.kinds)[Number($(control).value)];

  // An axis of whole numbers over so many of them: where they are few, plotly would put labels between them.
  const whole = span => (span < 6 ? {tick0: 0, dtick: 1} : {tickformat: "d"});

  function choices(select, values, chosen) {
    select.replaceChildren(...values.map((value, index) => new Option(value, String(index))));
    select.value = String(Math.max(0, values.indexOf(chosen)));
  }

  // ---- loss, norm, scale, skips, verdicts

  function timelineLine(name) {
    const line = data.timeline.lines[name];
    return {x: line.x, y: numbers(line.y), mode: "lines"};
  }

  // The numbers of a step that have no chart of their own above, each of which gets one below.
  function others() {
    return Object.keys(data.timeline.lines).filter(name => !["loss", "grad_norm", "scale"].includes(name));
  }

  function timelineMarks(x, y, name, yaxis, symbol) {
    return {
      x, y: x.map(() => y), name, yaxis, mode: "markers", type: "scatter",
      marker: {color: RED, symbol, size: 8, line: {color: RED, width: 1.5}},
      hovertemplate: `%{x}: ${name}<extra></extra>`,
    };
  }

  // The values between two that are not finite, which are no line.
  function lonelyPoints(trace) {
    const alone = (_, at) =>
      isFinite(trace.y[at]) && !isFinite(trace.y[at - 1]) && !isFinite(trace.y[at + 1]);
    const marker = {size: 5, color: trace.line.color};
    const x = trace.x.filter(alone), y = trace.y.filter(alone);
    return {...trace, x, y, mode: "markers", marker, hoverinfo: "skip", hovertemplate: null};
  }

  function timelineTraces(loss, norm, scale, powers) {
    const lines = [
      {...loss, name: "loss", line: {color: BLUE, width: 1.3},
        hovertemplate: "%{x}: loss %{y:.5g}<extra></extra>"},
      {...norm, name: "gradient norm", yaxis: "y2", line: {color: GREEN, width: 1.3},
        hovertemplate: "%{x}: norm %{y:.5g}<extra></extra>"},
      {...scale, y: powers, customdata: scale.y, name: "loss scale", yaxis: "y3",
        line: {color: ORANGE, width: 1.6, shape: "hv"},
        hovertemplate: "%{x}: scale %{customdata}<extra></extra>"},
    ];
    lines.push(...others().map((name, at) => ({
      ...timelineLine(name), name, yaxis: `y${at + 4}`, line: {color: BLUE, width: 1.3},
      hovertemplate: `%{x}: ${name} %{y:.5g}<extra></extra>`,
    })));
    const traces = [...lines, ...lines.map(lonelyPoints).filter(points => points.x.length)];
    const {skips, broken} = data.timeline;
    const bottom = lowest(loss.y), flat = lowest(powers);
    if (broken.length) {
      traces.push(timelineMarks(broken, isFinite(bottom) ? bottom : 1, "loss not finite", "y", "x-thin"));
    }
    if (skips.length) {
      traces.push(timelineMarks(skips, isFinite(flat) ? flat - 0.6 : 0, "skipped", "y3", "line-ns"));
    }
    return traces;
  }

  // A line across all three charts at the step of each verdict, with the kinds of the last ones beside it.
  function verdictMarks() {
    const {verdicts, first, last} = data.timeline;
    const shapes = verdicts.map(([step]) => ({
      type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: {color: RED, width: 1.5, dash: "dash"},
    }));
    const annotations = verdicts.slice(-3).map(([step, kind], row) => ({
      x: step, yref: "paper", y: 1, yanchor: "top", yshift: -15 * row, showarrow: false,
      xanchor: step - first > last - step ? "right" : "left", bgcolor: drawing.colors().note,
      text: `verdict: ${escaped(kind)}`, font: {color: drawing.colors().lost, size: 12},
    }));
    return {shapes, annotations};
  }

  function timelineWords() {
    const {skips, skipped, steps, broken} = data.timeline;
    const shown = skips.length < skipped ? ` (${count(skips.length)} of them drawn)` : "";
    const crosses = broken.length ? " The loss was not finite at the red crosses." : "";
    return `${count(skipped)} of ${count(steps)} steps were skipped${shown}.${crosses}`;
  }

  function drawTimeline() {
    const loss = timelineLine("loss"), norm = timelineLine("grad_norm"), scale = timelineLine("scale");
    const powers = scale.y.map(Math.log2), marks = verdictMarks();
    const below = others(), total = 1 + 0.31 * below.length;
    const axis = (title, domain, more) => {
      const moved = domain.map(y => (y + 0.31 * below.length) / total);
      return {title: {text: title}, domain: moved, zeroline: false, ...more};
    };
    const axes = below.map((name, at) => [`yaxis${at + 4}`, axis(name, [-0.31 * at - 0.31, -0.31 * at - 0.04])]);
    drawing.chart("timeline", timelineTraces(loss, norm, scale, powers), {
      height: 560 * total, template: drawing.template(), margin: {l: 70, r: 20, t: 30, b: 45}, showlegend: false, hovermode: "closest",
      ...marks,
      xaxis: {title: {text: "step"}, anchor: `y${below.length + 3}`, zeroline: false, ...whole(data.timeline.steps)},
      yaxis: axis("loss", [0.62, 1], {type: $("log-loss").checked ? "log" : "linear"}),
      yaxis2: axis("gradient norm", [0.31, 0.58], {type: "log", exponentformat: "power"}),
      yaxis3: axis("loss scale; | skipped", [0, 0.27], {...POWER, ...whole(highest(powers) - lowest(powers))}),
      ...Object.fromEntries(axes),
    });
    $("timeline-words").textContent = timelineWords();
  }

  // ---- histogram of exponents

  // What is chosen: kind and row of tensors, the format that they are judged by (null for updates), the loss scale.
  function chosenHistogram() {
    const kind = kindOf("kind"), found = data.kinds[kind], row = Number($("module").value);
    const isUpdate = kind === data.update.kind, gradient = data.gradients.includes(kind);
    const format = isUpdate ? null : Object.keys(data.formats)[Number($("format").value)];
    const limits = isUpdate ? data.update : data.formats[format];
    const share = found.share.slice(row * found.bins, (row + 1) * found.bins);
    return {kind, found, row, share, format, limits, gradient, shift: gradient ? Number($("shift").value) : 0};
  }

  // The shares that a format loses, keeps with fewer digits and cannot reach, of values times 2^shift.
  function judged({found, row, format, gradient}, shift) {
    const moves = gradient ? data.shifts[1] - data.shifts[0] + 1 : 1;
    const move = gradient ? shift - data.shifts[0] : 0;
    const [lost, small, saturated] = found.judged[format ?? data.update.kind].slice(3 * (row * moves + move));
    return {lost, small, saturated};
  }

  const inWords = (shares, format) => format === null
    ? `<b class="lost">${percent(shares.lost)} lie left of the red line</b>, half a unit in the last place of the ` +
      "weight as it is stored: it cannot follow them. A master adds them up; without one they are lost."
    : `<b class="lost">${percent(shares.lost)} lie left of the red line</b>, where ${format} rounds to zero; ` +
      `<b class="small">${percent(shares.small)}</b> lie between the red and the orange line, where it keeps fewer ` +
      `digits; <b class="saturated">${percent(shares.saturated)}</b> lie right of the last line, beyond its ` +
      "largest value.";

  function histogramBars({found, share}, by, name, color, opacity) {
    const from = index => found.first + index + by;
    return {
      x: Array.from(share, (_, index) => from(index) + 0.5), y: Array.from(share), name, type: "bar", width: 1,
      opacity, marker: {color, line: {width: 0}},
      customdata: Array.from(share, (_, index) => [from(index), from(index) + 1]),
      hovertemplate: "2<sup>%{customdata[0]}</sup> to 2<sup>%{customdata[1]}</sup>: %{y:.3~%}<extra></extra>",
    };
  }

  // The exponents that the axis shows: the limits of the format, and what is not rare. A weight of zero has updates of
  // 2^100 units.
  function histogramRange({found, share, format, limits, shift}) {
    const rare = format === null ? 1e-3 : 1e-6;
    const seen = Array.from(share.keys()).filter(index => share[index] > rare).map(index => found.first + index);
    return [
      Math.min(limits.zero - 2, (seen[0] ?? 0) + Math.min(0, shift)),
      Math.max((limits.top ?? 0) + 2, (seen.at(-1) ?? 0) + 1 + Math.max(0, shift)),
    ];
  }

  // The limits of the format as lines, each label in a row of its own: in a narrow window, or a wide format, they are
  // close.
  function histogramWalls({format, limits}, [low, high]) {
    const wall = (x, color, text, row) => ({
      line: {type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: {color, width: 2}},
      note: {
        x, xref: "x", yref: "paper", y: 1, yanchor: "bottom", xanchor: x < (low + high) / 2 ? "left" : "right",
        yshift: 15 * row, showarrow: false, text, font: {color, size: 12},
      },
    });
    if (format === null) return [wall(limits.zero, drawing.colors().lost, "half a unit in the last place", 0)];
    const {lost, small, edge} = drawing.colors(), largest = count(limits.max).length < 9 ? count(limits.max) : limits.max.toPrecision(3);
    return [
      wall(limits.zero, lost, `${format}: zero below 2<sup>${limits.zero}</sup>`, 2),
      wall(limits.normal, small, `smallest normal 2<sup>${limits.normal}</sup>`, 1),
      wall(limits.top, edge, `largest ${largest}`, 0),
    ];
  }

  const shade = (x0, x1, color) => ({
    type: "rect", x0, x1, yref: "paper", y0: 0, y1: 1, fillcolor: color, line: {width: 0}, layer: "below",
  });

  function histogramLayout(chosen) {
    const {format, limits, gradient} = chosen, range = histogramRange(chosen), walls = histogramWalls(chosen, range);
    const title = format === null ? "units in the last place of the weight" : "magnitude";
    return {
      height: 450, template: drawing.template(), barmode: "overlay", bargap: 0, margin: {l: 60, r: 20, t: 72, b: 50},
      legend: {orientation: "h", x: 1, xanchor: "right", y: -0.19, yanchor: "top"}, showlegend: gradient,
      xaxis: {title: {text: title}, range, ...POWER, tickformat: "d", zeroline: false, ticks: "outside"},
      yaxis: {title: {text: "share of the nonzero values"}, tickformat: ".3~%", rangemode: "tozero"},
      shapes: [
        shade(range[0], limits.zero, "rgba(198,40,40,0.08)"),
        shade(limits.zero, limits.normal, "rgba(224,134,0,0.06)"),
        ...walls.map(each => each.line),
      ],
      annotations: walls.map(each => each.note),
    };
  }

  function drawHistogram() {
    const chosen = chosenHistogram(), {gradient, shift} = chosen;
    $("format-label").hidden = chosen.format === null;
    $("shift-label").hidden = !gradient;
    $("shift-value").textContent = `2^${shift} = ${scaleOf(shift)}`;
    const plain = gradient ? "as they are (loss scale 1)" : "as they are";
    const traces = [histogramBars(chosen, 0, plain, BLUE, shift ? 0.55 : 0.9)];
    if (shift) traces.push(histogramBars(chosen, shift, `times the loss scale 2^${shift}`, SHIFTED, 0.75));
    drawing.chart("histogram", traces, histogramLayout(chosen));
    $("histogram-words").innerHTML = histogramWords(chosen);
  }

  // A tensor that is stored low has lost already what it could not hold.
  function storedLow(found) {
    const stored = found.formats.filter(name => name !== "fp32");
    return stored.length ? `Tensors were stored in ${stored.join(" and ")} here: what that lost is` : "";
  }

  function histogramWords(chosen) {
    const {kind, found, row, format, shift} = chosen, place = escaped(found.modules[row]);
    if (!(found.nonzero[row] > 0)) return `No nonzero value of ${kind} was observed in ${place}.`;
    const sample = found.sampled ? "a sample, " : "";
    const parts = [
      `Of ${count(found.nonzero[row])} nonzero values of ${kind} in ${place}, ${sample}as they are: ` +
      inWords(judged(chosen, 0), format),
    ];
    if (shift) parts.push(`Times a loss scale of ${scaleOf(shift)}: ${inWords(judged(chosen, shift), format)}`);
    if (format !== null) parts.push(runWords(chosen));
    if (format !== null && storedLow(found)) parts.push(`${storedLow(found)} among the zeros.`);
    return parts.join("<br>");
  }

  function runWords({found, row, gradient}) {
    const of = name => percent(found.run[name][row]);
    const scales = gradient ? ", with the loss scales that they carried" : "";
    return `As they were in this run${scales}: ${of("lost")} of them are lost in ${data.low}, ${of("subnormal")} ` +
      `kept with fewer digits; ${of("saturated")} of all ${count(found.count[row])} values were beyond its range or ` +
      `not finite, ${of("zero")} were zero.`;
  }

  // ---- heat maps of module and step

  const EMPTY = -7, LEAST = -6;  // exponents of ten: no value at all, and the least share with a color of its own
  const colorscale = none => [
    [0, none], [0.5 / 7, none], [0.5 / 7, "#fff3c4"], [3 / 7, "#fdbb63"], [5 / 7, "#ef6548"], [1, "#7f0000"],
  ];
  const COLORBAR = {
    tickvals: [EMPTY, -6, -4, -2, -1, 0], ticktext: ["none", "0.0001%", "0.01%", "1%", "10%", "100%"], thickness: 14,
  };

  const colorOf = value => {
    if (value > 0) return Math.max(LEAST, Math.log10(value));
    return value === 0 ? EMPTY : NaN;
  };

  // The rows of a map that have a label: not all where they are many or the map is empty, always the one in focus.
  function rowLabels(modules, none, focus) {
    const every = Math.ceil(modules.length / (none ? 4 : 60)), only = none && modules.includes(focus);
    const short = name => escaped(name.length > 34 ? `…${name.slice(-33)}` : name);
    const shown = modules.filter((name, row) => (row % every === 0 && !only) || name === focus);
    return {tickvals: shown, ticktext: shown.map(name => (name === focus ? `<b>▸ ${short(name)}</b>` : short(name)))};
  }

  function rowMark(modules, focus) {
    const row = modules.indexOf(focus), line = {color: RED, width: 2};
    return row < 0 ? [] : [{type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line}];
  }

  function mapLayout(modules, steps, none, focus) {
    return {
      height: none ? 165 : Math.min(900, Math.max(245, 145 + 16 * modules.length)),
      template: drawing.template(), margin: {l: 10, r: 10, t: 29, b: 45}, shapes: rowMark(modules, focus),
      xaxis: {title: {text: "step"}, type: "category", categoryarray: steps, range: [-0.5, steps.length - 0.5],
        nticks: 12, automargin: true},
      yaxis: {type: "category", categoryarray: modules, range: [modules.length - 0.5, -0.5], automargin: true,
        ...rowLabels(modules, none, focus)},
    };
  }

  function drawMap(id, kind, measure, title) {
    const found = data.kinds[kind], modules = found.modules.slice(1), width = data.columns.length;
    const share = numbers(found.maps[measure] ?? found.maps.lost);  // of updates all small ones are lost
    const rows = values => modules.map((_, row) => values.slice(row * width, (row + 1) * width));
    const none = !share.some(value => value > 0), unseen = share.every(value => isNaN(value));
    // Steps as names: what was not observed has no place on the axis.
    const steps = data.columns.map(([from]) => String(from));
    const ending = unseen ? ": no such value was observed" : none ? ": none" : "";
    $(id).previousElementSibling.textContent = title + ending;
    drawing.chart(id, [{
      type: "heatmap", x: steps, y: modules, z: rows(share.map(colorOf)), customdata: rows(share),
      zmin: EMPTY, zmax: 0, colorscale: colorscale(drawing.colors().none), showscale: !none, colorbar: COLORBAR, hoverongaps: false,
      hovertemplate: "%{y}, step %{x}: %{customdata:.3~%}<extra></extra>",
    }], mapLayout(modules, steps, none, data.focus?.module));
  }

  function mapTitle(measure, isUpdate, low) {
    const less = "Share of the updates smaller than half a unit in the last place of the stored weight";
    const titles = isUpdate ? {
      lost: less, small: less, zero: "Share of weights without an update",
      saturated: "Share of updates that are not finite",
    } : {
      lost: `Share of the nonzero values that ${low} rounds to zero`,
      small: `Share of the nonzero values below the smallest normal value of ${low}`,
      zero: `Share of values that are zero: at most this was lost where ${low} stores them`,
      saturated: `Share of values beyond the largest value of ${low}, or not finite`,
    };
    return titles[measure];
  }

  function drawMaps() {
    const kind = kindOf("map-kind"), measure = $("map-measure").value, isUpdate = kind === data.update.kind;
    const isOperand = kind === "operand", low = isOperand ? "the recipe's cast" : data.low;  // it counts no other small ones
    drawMap("small-map", kind, measure, mapTitle(isOperand && measure === "small" ? "lost" : measure, isUpdate, low));
    drawMap("saturated-map", kind, "saturated", mapTitle("saturated", isUpdate, low));
    const stored = isUpdate ? "" : storedLow(data.kinds[kind]);
    const groups = data.columns.some(([from, to]) => from !== to) ? " A column has several observed steps." : "";
    $("maps-words").textContent = (stored ? `${stored} a zero, which does not count as lost here.` : "") + groups;
  }

  // ---- the page

  function chooseModules(chosen) {
    choices($("module"), data.kinds[kindOf("kind")].modules, chosen);
  }

  // What a verdict is about is shown first.
  function openControls() {
    const kinds = Object.keys(data.kinds), opened = data.focus?.kind ?? kinds[0];
    choices($("kind"), kinds.filter(kind => kind !== "operand"), opened);  // the last kind, and no values
    choices($("map-kind"), kinds, opened);
    choices($("format"), Object.keys(data.formats), data.low);
    chooseModules(data.focus?.module);
    $("map-measure").value = data.kinds[opened].formats.includes(data.low) ? "small" : "lost";
    Object.assign($("shift"), {min: data.shifts[0], max: data.shifts[1]});
    $("shift").value = String(data.shift);
    if (data.focus?.saturated) $("maps-section").insertBefore($("saturated-figure"), $("small-figure"));
  }

  function openTensors() {
    openControls();
    $("kind").addEventListener("change", () => {
      chooseModules($("module").selectedOptions[0]?.text);
      drawHistogram();
    });
    for (const id of ["module", "format"]) $(id).addEventListener("change", drawHistogram);
    $("shift").addEventListener("input", drawHistogram);
    for (const id of ["map-kind", "map-measure"]) $(id).addEventListener("change", drawMaps);
  }

  function drawTensors() {
    drawHistogram();
    drawMaps();
  }

  // Copies an edit; it stays selected, so that a browser without a clipboard for files leaves it to the keyboard.
  async function copyEdit(button) {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
    }
  }

  for (const button of document.querySelectorAll(".edit button")) {
    button.addEventListener("click", () => copyEdit(button));
  }
  addEventListener("beforeprint", () => {
    document.querySelector("details").open = true;
  });
  const observed = Object.keys(data.kinds).length > 0;
  $("timeline-section").hidden = data.timeline.steps === 0;
  $("histogram-section").hidden = $("maps-section").hidden = !observed;
  $("log-loss").addEventListener("change", drawTimeline);
  if (observed) openTensors();
  return () => {
    if (data.timeline.steps) drawTimeline();
    if (observed) drawTensors();
  };
});
