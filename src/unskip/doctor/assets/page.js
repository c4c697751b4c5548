// The doctor's page: one plot per measure, and one selected layer that all plots show. Names are only ever set as text.
"use strict";
(() => {
  const { networks, groups } = JSON.parse(document.getElementById("data").textContent);
  const COLORS = ["var(--a)", "var(--b)"];
  const INK = { soft: "var(--soft)", faint: "var(--faint)", line: "var(--line)", grid: "var(--grid)", pick: "var(--pick)" };

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children); // strings become text nodes
    return node;
  }

  // ---------------------------------------------------------------- numbers as text
  const SUPERSCRIPT = { "-": "\u207b", 0: "\u2070", 1: "\u00b9", 2: "\u00b2", 3: "\u00b3", 4: "\u2074", 5: "\u2075", 6: "\u2076", 7: "\u2077", 8: "\u2078", 9: "\u2079" };
  const power = (exponent) => "10" + [...String(exponent)].map((c) => SUPERSCRIPT[c]).join("");
  function show(value) {
    if (value === null || value === undefined) return "not measured";
    if (value === "inf") return "infinity";
    if (value === "-inf") return "minus infinity";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) {
      const exponent = Math.floor(Math.log10(size));
      return `${(value / 10 ** exponent).toFixed(1)}\u00b7${power(exponent)}`.replace("-", "\u2212");
    }
    return String(Number(value.toPrecision(3))).replace("-", "\u2212");
  }
  const count = (n) => n.toLocaleString("en");
  const about = (layer) =>
    [layer.kind, layer.parameters ? `${count(layer.parameters)} parameters` : "", layer.shape.length ? `output ${layer.shape.join(" \u00d7 ")}` : ""]
      .filter(Boolean).join(" \u00b7 ");

  // ---------------------------------------------------------------- scales shared by both networks
  function niceStep(range) {
    const rough = range / 4, unit = 10 ** Math.floor(Math.log10(rough));
    return unit * [1, 2, 5, 10].find((m) => m * unit >= rough);
  }
  function scale(plot) {
    const finite = networks.flatMap((n) => [...(n.series[plot.name]?.y ?? []), ...(n.series[plot.name] ? n.bands[plot.name] ?? [] : [])].filter((v) => typeof v === "number"));
    const positive = finite.filter((v) => v > 0);
    if (plot.log && positive.length) {
      // A point just beyond a power of ten needs no decade of its own.
      let low = Math.floor(Math.log10(Math.min(...positive)) + 0.05), high = Math.ceil(Math.log10(Math.max(...positive)) - 0.05);
      if (finite.length > positive.length) low -= 1; // room for zeros at the bottom
      if (low === high) { low -= 1; high += 1; }
      const interval = Math.max(1, Math.ceil((high - low) / 5));
      high = low + interval * Math.ceil((high - low) / interval); // the last tick is the end of the axis
      return { log: true, min: 10 ** low, max: 10 ** high, interval };
    }
    if (!finite.length) return { log: false, min: 0, max: 1, interval: 0.5 };
    let low = Math.min(...finite), high = Math.max(...finite);
    if (low > 0 && low < 0.6 * high) low = 0;
    if (high < 0 && high > 0.6 * low) high = 0;
    if (low === 0 && high === 0) high = 1;
    if (low === high) { const room = Math.abs(low); low -= room / 2; high += room / 2; }
    const step = niceStep(high - low);
    return { log: false, min: Math.floor(low / step + 1e-9) * step, max: Math.ceil(high / step - 1e-9) * step, interval: step };
  }
  // Values outside the axis are triangles at its edge.
  const atEdge = (value, axis) => value === "inf" || value === "-inf" || (axis.log && typeof value === "number" && value <= 0);
  const edge = (value, axis) => (value === "inf" ? axis.max : axis.min);

  // ---------------------------------------------------------------- kinds of layers
  // Convolutions, norms and activations differ a lot, so each kind of layer has its own line and can be hidden.
  const KINDS = {
    conv: ["circle", "solid"], linear: ["circle", "solid"], attention: ["roundRect", "solid"], recurrent: ["roundRect", "solid"],
    norm: ["rect", [5, 3]], activation: ["triangle", [1.5, 2]], block: ["diamond", [8, 2, 2, 2]],
  };
  const style = (kind) => KINDS[kind] ?? ["emptyCircle", [2, 4]];
  const kinds = [...new Set(networks.flatMap((network) => network.layers.map((layer) => layer.kind)))].sort(
    (a, b) => (Object.keys(KINDS).indexOf(a) + 99) % 99 - (Object.keys(KINDS).indexOf(b) + 99) % 99);
  const hidden = new Set();
  // So has each role in repeated blocks (conv1, conv2): the last part of a path, if at least three layers share it.
  for (const { layers } of networks) {
    const role = (layer) => `${layer.kind} ${layer.name.split(".").pop().replace(/#\d+$/, "")}`; // "act#2" is the second call of act
    const often = new Map();
    for (const layer of layers) often.set(role(layer), (often.get(role(layer)) ?? 0) + 1);
    for (const layer of layers) layer.line = often.get(role(layer)) >= 3 ? role(layer) : layer.kind;
  }

  // ---------------------------------------------------------------- one plot
  const charts = []; // {chart, network, plot, now, rows, lookup}
  function options(plot, network, which, axis) {
    const series = network.series[plot.name], layers = network.layers, color = COLORS[which];
    const inside = new Map(), outside = [], bars = [], far = Math.max(8, layers.length / 4);
    series.x.forEach((x, i) => {
      const y = series.y[i], { kind, line } = layers[x];
      if (hidden.has(kind)) return;
      if (!inside.has(line)) inside.set(line, { kind, data: [] });
      const off = y !== null && atEdge(y, axis);
      const data = inside.get(line).data, before = data.at(-1);
      if (before && x - before[0] > far) data.push([before[0], "-"]); // no line across a long gap without measurements
      data.push([x, y === null || off ? "-" : y]);
      if (off) outside.push({ value: [x, edge(y, axis)], symbolRotate: y === "inf" ? 0 : 180 });
      const error = series.e?.[i];
      if (y !== null && !off && typeof error === "number" && error > 0) bars.push([x, Math.max(y - error, axis.min), Math.min(y + error, axis.max)]);
    });
    const band = network.bands[plot.name], crossed = network.suspect !== null && network.crossed.includes(plot.name);
    const last = layers.length - 1, interval = Math.max(1, niceStep(Math.max(1, last)));
    const text = { color: INK.soft, fontSize: 12, fontFamily: "inherit" };
    return {
      animation: false,
      grid: { left: 8, right: 14, top: 18, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      tooltip: {
        trigger: "axis", confine: true, transitionDuration: 0, padding: [6, 10],
        backgroundColor: "var(--card)", borderColor: INK.line, extraCssText: "box-shadow:0 2px 10px rgba(0,0,0,.15)",
        axisPointer: { type: "line", snap: true, lineStyle: { color: INK.faint, type: "solid" } },
        formatter: (points) => {
          const x = points[0].value[0], at = series.x.indexOf(x), error = series.e?.[at];
          return el("div", { class: "tip" },
            el("b", { class: "name" }, layers[x].name),
            el("div", {}, show(series.y[at]) + (typeof error === "number" ? ` \u00b1 ${show(error)}` : "")),
            el("span", {}, about(layers[x])));
        },
      },
      xAxis: {
        type: "value", min: 0, max: Math.max(1, last), minInterval: 1, splitLine: { show: false },
        axisLine: { onZero: false, lineStyle: { color: INK.line } }, axisTick: { show: false },
        interval, name: "layer", nameLocation: "middle", nameGap: 21, nameTextStyle: { ...text, color: INK.faint },
        axisLabel: { ...text, color: INK.faint, hideOverlap: true, showMaxLabel: last % interval > interval / 2 || last % interval === 0, formatter: (v) => (Number.isInteger(v) && layers[v] ? String(layers[v].depth || v + 1) : "") },
      },
      yAxis: {
        type: axis.log ? "log" : "value", min: axis.min, max: axis.max, interval: axis.interval, logBase: 10,
        axisLabel: { ...text, color: INK.faint, formatter: (v) => (axis.log ? power(Math.round(Math.log10(v))) : show(v)) },
        axisLine: { show: false }, axisTick: { show: false }, splitLine: { lineStyle: { color: INK.grid } },
      },
      series: [
        ...[...inside.values()].map(({ kind, data }) => ({
          type: "line", data, connectNulls: false, showSymbol: data.length <= 300, showAllSymbol: true, symbol: style(kind)[0], z: 3,
          symbolSize: series.x.length > 60 ? 3 : 4, lineStyle: { color, width: 1.5, type: style(kind)[1] }, itemStyle: { color }, emphasis: { disabled: true },
        })),
        { id: "edge", type: "scatter", data: outside, symbol: "triangle", symbolSize: 7, itemStyle: { color: "var(--card)", borderColor: color, borderWidth: 1.4 }, emphasis: { disabled: true }, z: 4 },
        {
          id: "errors", type: "custom", silent: true, tooltip: { show: false }, data: bars, z: 2,
          renderItem: (_, api) => {
            const [x, low] = api.coord([api.value(0), api.value(1)]), high = api.coord([api.value(0), api.value(2)])[1];
            return { type: "line", shape: { x1: x, x2: x, y1: low, y2: high }, style: { stroke: color, lineWidth: 1, opacity: 0.45 } };
          },
        },
        ...(!band ? [] : [{
          id: "band", type: "custom", silent: true, tooltip: { show: false }, data: [[0, band[0] ?? axis.min, band[1] ?? axis.max]], z: 0,
          renderItem: (params, api) => {
            const { x, y, width, height } = params.coordSys;
            const within = (v) => Math.min(Math.max(api.coord([0, v])[1], y), y + height);
            const top = within(api.value(2)), bottom = within(api.value(1));
            return { type: "rect", shape: { x, y: top, width, height: bottom - top }, style: { fill: "var(--band)" } };
          },
        }]),
        ...(network.suspect === null ? [] : [{
          id: "suspect", type: "scatter", data: [], silent: true, tooltip: { show: false }, z: 1,
          markLine: { silent: true, symbol: "none", animation: false, data: [{ xAxis: network.suspect }],
            lineStyle: { color: "var(--bad)", type: [4, 3], width: 1.2 },
            label: { show: crossed, formatter: "limit crossed", color: "var(--bad)", fontSize: 11, fontFamily: "inherit", rotate: 0, position: "insideEndTop" } },
        }]),
        { id: "picked", type: "scatter", data: [], symbol: "circle", symbolSize: 10, silent: true, tooltip: { show: false }, itemStyle: { color: "transparent", borderColor: INK.pick, borderWidth: 2 }, z: 5,
          markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: INK.pick, type: "solid", width: 1, opacity: 0.7 }, data: [] } },
      ],
    };
  }
  function summary(plot, network) {
    const series = network.series[plot.name], layers = network.layers;
    const known = series.y.map((y, i) => [y, layers[series.x[i]].name]).filter(([y]) => typeof y === "number");
    if (!known.length) return `${plot.title}, ${network.name}: no finite value at any layer.`;
    const at = ([y, name]) => `${show(y)} at ${name}`;
    const sorted = [...known].sort((p, q) => p[0] - q[0]);
    return `${plot.title}, ${network.name}, ${known.length} layers: from ${at(known[0])} to ${at(known[known.length - 1])}; lowest ${at(sorted[0])}, highest ${at(sorted[sorted.length - 1])}. The table below has all values.`;
  }
  function table(plot, network, rows) {
    const series = network.series[plot.name];
    const body = el("tbody");
    series.x.forEach((x, i) => {
      const error = series.e?.[i], row = el("tr", {}, el("th", { scope: "row", class: "name" }, network.layers[x].name), el("td", {}, show(series.y[i])));
      if (series.e) row.append(el("td", {}, typeof error === "number" ? show(error) : ""));
      rows.set(x, row);
      body.append(row);
    });
    const head = el("tr", {}, el("th", { scope: "col" }, "layer"), el("th", { scope: "col" }, plot.label));
    if (series.e) head.append(el("th", { scope: "col" }, "standard error"));
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${plot.title} of ${network.name}, by layer` }, el("table", {}, el("thead", {}, head), body));
  }
  function figure(plot, network, which, axis) {
    const box = el("figure"), caption = el("figcaption");
    if (networks.length > 1) caption.append(el("span", { class: which ? "dot b" : "dot", "aria-hidden": "true" }), el("b", {}, network.name));
    const now = el("span", { class: "now" });
    caption.append(now);
    box.append(caption);
    const series = network.series[plot.name];
    if (!series) {
      box.append(el("div", { class: "plot absent" }, "not measured for this network"));
      return box;
    }
    const place = el("div", { class: "plot", role: "img", "aria-label": summary(plot, network), "data-plot": plot.name, "data-network": which });
    const rows = new Map(), details = el("details", {}, el("summary", {}, "Values"));
    details.addEventListener("toggle", () => {
      if (!details.open || rows.size) return;
      details.append(table(plot, network, rows));
      mark(entry);
    });
    box.append(el("p", { class: "unit", "aria-hidden": "true" }, plot.label), place, details);
    const entry = { place, network, which, plot, axis, now, rows, lookup: new Map(series.x.map((x, i) => [x, i])) };
    charts.push(entry);
    return box;
  }
  function draw(entry) {
    const { place, network, which, plot, axis } = entry;
    entry.chart = echarts.init(place, null, { renderer: "svg" });
    entry.chart.setOption(options(plot, network, which, axis));
    entry.chart.getZr().on("click", (event) => {
      const x = entry.chart.convertFromPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [event.offsetX, event.offsetY])[0];
      const drawn = network.series[plot.name].x.filter((i) => !hidden.has(network.layers[i].kind));
      if (drawn.length) pick(which, drawn.reduce((best, i) => (Math.abs(i - x) < Math.abs(best - x) ? i : best)));
    });
    fitPrint(entry);
  }
  // Scripts don't know the width of the paper. A viewBox lets the print stylesheet scale the plot.
  function fitPrint({ place, chart }) {
    place.querySelector("svg")?.setAttribute("viewBox", `0 0 ${chart.getWidth()} ${chart.getHeight()}`);
  }

  // ---------------------------------------------------------------- the selected layer
  const picked = networks.map(() => 0);
  const pickers = [];
  function counterpart(which, at, other) {
    const name = networks[which].layers[at].name, twin = networks[other].layers.findIndex((layer) => layer.name === name);
    if (twin >= 0) return twin;
    const here = networks[which].layers.length - 1, there = networks[other].layers.length - 1;
    const depth = here > 0 ? (at / here) * there : 0, { trunk } = networks[which].layers[at];
    const distance = (i) => Math.abs(i - depth) + (networks[other].layers[i].trunk === trunk ? 0 : there);
    return networks[other].layers.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
  }
  function mark(entry) {
    const at = picked[entry.which], i = entry.lookup.get(at), series = entry.network.series[entry.plot.name];
    const y = i === undefined ? null : series.y[i];
    entry.now.textContent = `${entry.network.layers[at].name}: ${show(y)}`;
    entry.now.setAttribute("data-layer", entry.network.layers[at].name);
    for (const [x, row] of entry.rows) row.classList.toggle("picked", x === at);
    const point = y === null ? [] : [[at, atEdge(y, entry.axis) ? edge(y, entry.axis) : y]];
    entry.chart?.setOption({ series: [{ id: "picked", data: point, markLine: { data: [{ xAxis: at }] } }] });
  }
  let waiting = false;
  function pick(which, at) {
    networks.forEach((network, other) => {
      picked[other] = other === which ? Math.min(Math.max(at, 0), network.layers.length - 1) : counterpart(which, Math.min(Math.max(at, 0), networks[which].layers.length - 1), other);
      const { select, range, output } = pickers[other], layer = network.layers[picked[other]];
      select.value = range.value = String(picked[other]);
      range.setAttribute("aria-valuetext", layer.name);
      output.textContent = [layer.depth ? `layer ${layer.depth} of ${network.depth}` : "", about(layer)].filter(Boolean).join(" \u00b7 ");
    });
    if (waiting) return; // a slider sends events faster than forty plots can be drawn
    waiting = true;
    requestAnimationFrame(() => { waiting = false; charts.forEach(mark); });
  }
  function picker(network, which) {
    const select = el("select", { "aria-label": `Layer of ${network.name}` }, ...network.layers.map((layer, i) => el("option", { value: i }, layer.name)));
    const range = el("input", { type: "range", min: 0, max: network.layers.length - 1, step: 1, value: 0, "aria-label": `Position in ${network.name}` });
    const output = el("output");
    select.addEventListener("change", () => pick(which, Number(select.value)));
    range.addEventListener("input", () => pick(which, Number(range.value)));
    pickers.push({ select, range, output });
    return el("div", { class: "pick" }, el("span", { class: which ? "dot b" : "dot", "aria-hidden": "true" }), select, range, output);
  }
  function sketch(kind) {
    const [symbol, dash] = style(kind), shapes = { circle: "M4 0a4 4 0 1 0 .01 0z", emptyCircle: "M4 1a3 3 0 1 0 .01 0z", rect: "M0 0h8v8h-8z", roundRect: "M1 0h6v8h-6z", triangle: "M4 0l4 8h-8z", diamond: "M4 -1l5 5l-5 5l-5 -5z" };
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of Object.entries({ viewBox: "0 -4 32 16", width: 32, height: 16, "aria-hidden": "true" })) svg.setAttribute(key, value);
    for (const [d, more] of [["M0 4h32", { stroke: "currentColor", "stroke-width": 1.6, "stroke-dasharray": Array.isArray(dash) ? dash.join(" ") : "none" }], [shapes[symbol], { transform: "translate(13 1.5) scale(.65)", fill: symbol === "emptyCircle" ? "none" : "currentColor", stroke: "currentColor" }]]) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", d);
      for (const [key, value] of Object.entries(more)) path.setAttribute(key, value);
      svg.append(path);
    }
    return svg;
  }
  function kindBox(kind) {
    const box = el("input", { type: "checkbox" });
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(kind); else hidden.add(kind);
      charts.forEach((entry) => { entry.chart.setOption(options(entry.plot, entry.network, entry.which, entry.axis), true); mark(entry); });
    });
    return el("label", {}, box, sketch(kind), kind);
  }
  document.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target instanceof Element && event.target.closest("input:not([type=checkbox]), select, textarea, .scroll")) return;
    event.preventDefault();
    pick(0, picked[0] + step);
  });

  // ---------------------------------------------------------------- the page
  if (networks.some((network) => !network.layers.length)) return;
  document.getElementById("picker").append(
    el("div", { class: "picks" }, ...networks.map(picker)),
    ...(kinds.length > 1 ? [el("fieldset", { class: "kinds" }, el("legend", {}, "Layers shown in the plots"), ...kinds.map(kindBox))] : []),
    el("p", { class: "hint" }, "Select a layer with ", el("kbd", {}, "\u2190"), " ", el("kbd", {}, "\u2192"), " or by clicking in a plot. All plots show it."));
  const plots = document.getElementById("plots");
  if (groups.length > 1) {
    const link = (group, i) => el("a", { href: `#group-${i}` }, group.title);
    plots.append(el("nav", { "aria-label": "Groups of plots" }, ...groups.map(link)));
  }
  for (const [i, group] of groups.entries()) {
    const place = el("div", { class: "measures" });
    for (const plot of group.plots) {
      const axis = scale(plot), id = `measure-${charts.length}`;
      place.append(el("section", { class: "measure", "aria-labelledby": id },
        el("h3", { id }, plot.title),
        el("p", { class: "healthy" }, el("b", {}, "Healthy: "), plot.healthy, ...(networks.some((n) => n.bands[plot.name]) ? [" ", el("span", { class: "band" }, "The shaded band."), ] : [])),
        el("div", { class: "pair" }, ...networks.map((network, which) => figure(plot, network, which, axis))),
        el("p", { class: "source" }, plot.source)));
    }
    plots.append(el("h2", { id: `group-${i}` }, group.title), ...(group.text ? [el("p", {}, group.text)] : []), place);
  }
  charts.forEach(draw);
  const fit = (size) => charts.forEach((entry) => {
    entry.chart.resize(size);
    entry.chart.getZr().flush(); // printing does not wait for the next frame
    fitPrint(entry);
  });
  let width = plots.clientWidth;
  new ResizeObserver(() => {
    if (matchMedia("print").matches || plots.clientWidth === width) return;
    width = plots.clientWidth;
    fit();
  }).observe(plots);
  addEventListener("beforeprint", () => fit({ width: networks.length > 1 ? 330 : 480, height: 150 }));
  addEventListener("afterprint", () => fit({ width: "auto", height: "auto" }));
  document.querySelectorAll("button.where").forEach((button) =>
    button.addEventListener("click", () => { pick(Number(button.dataset.network), Number(button.dataset.layer)); plots.scrollIntoView(); }));
  const first = networks.findIndex((network) => network.suspect !== null);
  pick(Math.max(first, 0), first < 0 ? 0 : networks[first].suspect);
})();
