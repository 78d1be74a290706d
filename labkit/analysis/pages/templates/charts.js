"use strict";
// Draws the charts that labkit/analysis/document/chart.py declares, at the width of their figures.
// Numbers come from Python; this file only places and formats them.

const NARROW = 560; // below this width (px) rows have their names above them
const labkit = { charts: JSON.parse(document.getElementById("charts").textContent) };

// ---------------------------------------------------------------- numbers, as in number_format.py

labkit.grouped = (value, digits) => value.toLocaleString("en-US", {
  minimumFractionDigits: digits, maximumFractionDigits: digits });

labkit.significant = (value, digits) => {
  const rounded = Number(value.toPrecision(digits));
  if (rounded === 0 || !Number.isFinite(rounded)) return String(rounded);
  const decimals = digits - 1 - Math.floor(Math.log10(Math.abs(rounded)));
  return decimals <= 0 ? labkit.grouped(value, 0)
    : rounded.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 20) });
};

labkit.valueText = (value) => {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return labkit.grouped(value, 1);
  return size >= 1 ? labkit.grouped(value, 2) : labkit.significant(value, 3);
};

labkit.percentText = (value) => {
  const digits = Math.abs(value) >= 0.095 || value === 0 ? 1 : 2;
  const text = labkit.grouped(Math.abs(value), digits);
  const zero = Number(text.replace(/,/g, "")) === 0;
  return `${zero ? "" : value < 0 ? "−" : "+"}${text}%`;
};

labkit.tickText = (value, decimals) => {
  if (value === 0) return "0";
  const digits = Math.min(Math.max(0, decimals), 20);
  return value.toLocaleString("en-US", { maximumFractionDigits: digits }).replace("-", "−");
};

labkit.ticks = (low, high, most) => {
  if (high <= low) return [[low, labkit.significant(low, 4).replace("-", "−")]];
  const rough = (high - low) / most;
  const exponent = Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * 10 ** exponent).find((s) => s >= rough * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) {
    ticks.push([i * step, labkit.tickText(i * step, -exponent)]);
  }
  return ticks;
};

labkit.powerTicks = (low, high) => {
  const ticks = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) {
    for (const m of high - low <= 2 ? [1, 2, 5] : [1]) {
      const place = e + Math.log10(m);
      ticks.push([place, labkit.tickText(10 ** place, -e)]);
    }
  }
  return ticks.filter(([place]) => place >= low - 1e-9 && place <= high + 1e-9);
};

// ---------------------------------------------------------------- SVG

labkit.svg = (name, attributes, parent, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};

const pen = document.createElement("canvas").getContext("2d");
labkit.textWidth = (text) => {
  pen.font = "12px system-ui, sans-serif";
  return pen.measureText(text).width;
};

const MARKS = {
  square: "-4,-4 4,-4 4,4 -4,4", triangle: "0,-5 5,4 -5,4", diamond: "0,-5.5 5.5,0 0,5.5 -5.5,0",
  cross: "-4,-5 0,-1 4,-5 5,-4 1,0 5,4 4,5 0,1 -4,5 -5,4 -1,0 -5,-4",
};

/** A chart in a figure: its picture, its scales, and the targets that a pointer can find. */
class Drawing {
  constructor(figure, chart) {
    this.figure = figure;
    this.chart = chart;
    this.cell = figure.closest(".cell");
    this.view = chart.x; // the part of the x axis that is shown
    this.svg = figure.querySelector("svg:not(.key svg)");
  }

  /** Draw at the figure's width. `off`: the names of the arms that are switched off. */
  draw(off) {
    const style = getComputedStyle(this.figure);
    const width = Math.floor(this.figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
    if (width < 60) return;
    this.width = width;
    this.targets = [];
    this.texts = [];
    this.rows = this.chart.rows || [];
    this.narrow = width < NARROW;
    this.range = this.fitted(off);
    this.layout();
    const svg = labkit.svg("svg", {
      viewBox: `0 0 ${width} ${this.height}`, width, height: this.height, role: "group", tabindex: 0,
      "aria-label": `${this.chart.title}. Arrow keys move between points${this.chart.zooms ? ", plus and minus zoom" : ""}.`,
    });
    this.axes(svg);
    this.panel = labkit.svg("g", {}, svg);
    for (const mark of this.marks()) if (!off.has(mark.a)) this.mark(mark);
    this.over = labkit.svg("g", { "pointer-events": "none" }, svg);
    if (this.svg) this.svg.replaceWith(svg);
    else this.figure.prepend(svg);
    this.svg = svg;
  }

  layout() {
    const { rows, width, chart, narrow } = this;
    this.top = chart.yLabel ? 24 : 12;
    this.bottom = 40;
    this.right = width - 14;
    if (rows.length) {
      const widest = Math.max(...rows.map(labkit.textWidth)) + 16;
      this.stacked = narrow || widest > width / 2;
      this.left = this.stacked ? 6 : widest;
      this.rowHeight = chart.rowHeight + (this.stacked ? 18 : 0);
      this.height = this.top + rows.length * this.rowHeight + this.bottom;
    } else {
      this.height = chart.height;
      const labels = chart.noYTicks ? [] : this.ticks(this.range, 6).map(([, text]) => text);
      this.left = Math.max(14, ...labels.map((text) => labkit.textWidth(text) + 12));
    }
    this.floor = this.height - this.bottom;
  }

  /** The range of y: declared, or of charts of runs and blocks that of the arms that are shown. */
  fitted(off) {
    const { chart } = this;
    const shown = chart.marks.filter((mark) => mark.a && !off.has(mark.a));
    if (!chart.names || shown.length === 0 || shown.length === chart.marks.filter((mark) => mark.a).length) return chart.y;
    const ys = shown.flatMap((mark) => mark.p.filter((_, i) => i % 2));
    const [low, high] = [Math.min(...ys), Math.max(...ys)];
    const padding = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1;
    return [low - padding, high + padding];
  }

  /** The ticks of an axis, each its place and its text. */
  ticks(range, most) {
    return this.chart.log ? labkit.powerTicks(...range) : labkit.ticks(...range, most);
  }

  px(x) {
    const [low, high] = this.view;
    return this.left + (x - low) / ((high - low) || 1) * (this.right - this.left);
  }

  x(px) {
    const [low, high] = this.view;
    return low + (px - this.left) / (this.right - this.left) * (high - low);
  }

  py(y) {
    const [low, high] = this.range;
    if (!this.rows.length) return this.floor - (y - low) / ((high - low) || 1) * (this.floor - this.top);
    const down = low + this.rows.length - y; // rows from the top
    const row = Math.min(this.rows.length - 1, Math.max(0, Math.floor(down)));
    const name = this.stacked ? 18 : 0;
    return this.top + row * this.rowHeight + name + (down - row) * (this.rowHeight - name);
  }

  axes(svg) {
    const { chart, floor, top } = this;
    const most = Math.max(2, Math.floor((this.right - this.left) / 90));
    const [low, high] = this.view;
    const ticks = chart.xTicks ? chart.xTicks.filter(([x]) => x >= low && x <= high)
      : this.ticks(this.view, most);
    let end = -Infinity;
    for (const [x, text] of ticks) {
      const at = this.px(x), half = labkit.textWidth(text) / 2;
      labkit.svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: floor }, svg);
      const middle = Math.min(Math.max(at, half), this.width - half);
      if (middle - half < end + 8) continue;
      labkit.svg("text", { x: middle, y: floor + 16, "text-anchor": "middle" }, svg, text);
      end = middle + half;
    }
    if (!this.rows.length && !chart.noYTicks) for (const [y, text] of this.ticks(this.range, 6)) {
      const at = this.py(y);
      labkit.svg("line", { class: "grid", x1: this.left, x2: this.right, y1: at, y2: at }, svg);
      labkit.svg("text", { x: this.left - 6, y: at, dy: 4, "text-anchor": "end" }, svg, text);
    }
    this.rows.forEach((name, i) => {
      const y = this.top + i * this.rowHeight + (this.stacked ? 9 : this.rowHeight / 2);
      const place = this.stacked ? { x: this.left, "text-anchor": "start" } : { x: this.left - 8, "text-anchor": "end" };
      labkit.svg("text", { ...place, y, dy: 4 }, svg, name);
    });
    if (chart.yLabel) labkit.svg("text", { x: 0, y: 12, "text-anchor": "start" }, svg, chart.yLabel);
    if (chart.xLabel) {
      const half = labkit.textWidth(chart.xLabel) / 2;
      const middle = Math.max(half, Math.min((this.left + this.right) / 2, this.width - half));
      labkit.svg("text", { x: middle, y: this.height - 6, "text-anchor": "middle" }, svg, chart.xLabel);
    }
  }

  /** The marks; of a zoomed chart, the bars in view, drawn over the full height. */
  marks() {
    const { chart } = this;
    if (!chart.zooms || this.view === chart.x) return chart.marks;
    const [low, high] = this.view;
    const inView = (p, i) => p[i] < high && p[i + 1] > low;
    const tops = new Set();
    for (const { k, p } of chart.marks) {
      if (k === "bars") for (let i = 0; i < p.length; i += 4) if (inView(p, i)) tops.add(p[i + 3]);
    }
    const order = [...tops].sort((a, b) => b - a);
    const step = (chart.y[1] - chart.y[0]) / Math.max(order.length, 4);
    const place = new Map(order.map((top, i) => [top, chart.y[1] - i * step]));
    this.inView = order.length;
    return chart.marks.map((mark) => {
      if (mark.k !== "bars") return mark;
      const p = [], t = [];
      for (let i = 0; i < mark.p.length; i += 4) {
        if (!inView(mark.p, i)) continue;
        const top = place.get(mark.p[i + 3]);
        p.push(Math.max(low, mark.p[i]), Math.min(high, mark.p[i + 1]), top - 0.85 * step, top - 0.1 * step);
        if (mark.t) t.push(mark.t[i / 4]);
      }
      return { ...mark, p, t };
    });
  }

  mark(mark) {
    const draw = { line: this.line, dots: this.dots, bars: this.bars, band: this.band, text: this.text, limit: this.limit }[mark.k];
    draw.call(this, mark);
  }

  line({ p, c, a }) {
    const points = [];
    const [low, high] = this.view, [bottom, top] = this.range;
    if (!this.rows.length && p.every((y, i) => i % 2 === 0 || y < bottom || y > top)) return;
    for (let i = 0; i < p.length; i += 2) {
      // Of a zoomed line, the points in view and their neighbours.
      const outside = Math.max(p[i - 2] ?? p[i], p[i], p[i + 2] ?? p[i]) < low || Math.min(p[i - 2] ?? p[i], p[i], p[i + 2] ?? p[i]) > high;
      if (outside) continue;
      const x = Math.min(Math.max(this.px(p[i]), this.left), this.right), y = this.py(p[i + 1]);
      points.push(`${x.toFixed(1)},${y.toFixed(1)}`);
      if (a && p.length > 4) this.target(p[i], x, y, a, this.lineTip(a, p[i], p[i + 1]));
    }
    labkit.svg("polyline", { class: c, points: points.join(" ") }, this.panel);
  }

  lineTip(arm, x, y) {
    const { chart } = this;
    const where = chart.names ? chart.names[Math.round(x) - 1] : `${labkit.valueText(x)} ${chart.xUnit || ""}`.trim();
    return `${arm}, ${where}: ${this.value(y)}`;
  }

  value(y) {
    const { signed, unit } = this.chart;
    return signed ? labkit.percentText(y) : `${labkit.valueText(y)} ${unit || ""}`.trim();
  }

  dots({ p, c, m, a, t, h }) {
    const { chart } = this;
    for (let i = 0; i < p.length; i += 2) {
      if (p[i] < this.view[0] || p[i] > this.view[1]) continue;
      const x = this.px(p[i]), y = this.py(p[i + 1]);
      const run = chart.names && chart.names[Math.round(p[i]) - 1];
      const href = h ? h[i / 2] : run && chart.records !== undefined ? `${chart.records}runs/${run}.json` : "";
      const parent = href ? labkit.svg("a", { href, tabindex: -1 }, this.panel) : this.panel;
      if (m === "circle") labkit.svg("circle", { class: c, cx: x, cy: y, r: 4.5 }, parent);
      else labkit.svg("polygon", { class: c, points: MARKS[m], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, parent);
      this.target(p[i], x, y, a || "", t ? t[i / 2] : this.lineTip(a, p[i], p[i + 1]), href);
    }
  }

  bars({ p, c, a, t }) {
    const phase = this.chart.zooms ? c : "";
    for (let i = 0; i < p.length; i += 4) {
      const left = this.px(p[i]), right = this.px(p[i + 1]);
      const [top, floor] = [this.py(p[i + 3]), this.py(p[i + 2])];
      labkit.svg("rect", { class: `bar ${c}`, x: left.toFixed(1), y: top.toFixed(1), width: Math.max(0, right - left).toFixed(1), height: (floor - top).toFixed(1) }, this.panel);
      const name = t && t.length ? t[i / 4] : "";
      const tip = phase ? `${name}, ${phase}: ${labkit.significant(p[i], 4)} to ${labkit.significant(p[i + 1], 4)} s` : name;
      if (tip) this.target((p[i] + p[i + 1]) / 2, (left + right) / 2, (top + floor) / 2, a || "", tip, "", [left, right]);
    }
  }

  band({ p, c, across }) {
    const [from, to] = across ? [Math.max(p[0], this.range[0]), Math.min(p[1], this.range[1])] : p;
    if (from >= to) return;
    const box = across
      ? { x: this.left, width: this.right - this.left, y: this.py(to), height: this.py(from) - this.py(to) }
      : { x: this.px(from), width: this.px(to) - this.px(from), y: this.top, height: this.floor - this.top };
    labkit.svg("rect", { class: c, ...box }, this.panel);
  }

  text({ p, t, s, d }) {
    let [x, y] = [this.px(p[0]) + d[0], this.py(p[1]) + d[1]];
    const width = labkit.textWidth(t);
    const start = { start: x, middle: x - width / 2, end: x - width }[s];
    const shifted = Math.max(0, Math.min(start, this.width - width));
    // Text that does not fit beside its bar stands in the line of the row's name.
    if (this.stacked && shifted < start - 4) y = this.py(Math.ceil(p[1]) - 1e-6) - 9;
    // Texts do not cover each other: a later one moves up, then down.
    const free = (at) => !this.texts.some((box) => shifted < box[1] && shifted + width > box[0] && Math.abs(at - box[2]) < 13);
    const places = [0, -13, 13, -26, 26, -39, 39].map((dy) => y + dy).filter((at) => at > this.top - 6 && at < this.floor);
    y = places.find(free) ?? y;
    this.texts.push([shifted, shifted + width, y]);
    labkit.svg("text", { x: shifted, y, dy: 4, "text-anchor": "start" }, this.panel, t);
  }

  limit({ p, t }) {
    const at = this.px(p[0]);
    const right = at > this.left + (this.right - this.left) * 0.6;
    labkit.svg("line", { class: "limit", x1: at, x2: at, y1: this.top, y2: this.floor }, this.panel);
    labkit.svg("text", { x: at + (right ? -5 : 5), y: this.top + 8, dy: 4, "text-anchor": right ? "end" : "start" }, this.panel, t);
  }

  target(dataX, x, y, arm, tip, href = "", span = null) {
    this.targets.push({ dataX, x, y, arm, tip, href, span });
  }

  /** The target nearest to a place of the picture, or null. */
  nearest(x, y) {
    let best = null, least = Infinity;
    for (const target of this.targets) {
      const dx = target.span ? Math.max(target.span[0] - x, 0, x - target.span[1]) : target.x - x;
      const distance = dx * dx + (target.y - y) ** 2 * 0.6;
      if (distance < least) [best, least] = [target, distance];
    }
    return best;
  }

  /** Mark a target, or with null a place of the x axis that another chart points at. */
  point(target, dataX) {
    this.over.replaceChildren();
    if (dataX === undefined || dataX < this.view[0] || dataX > this.view[1]) return;
    const at = target ? target.x : this.px(dataX);
    labkit.svg("line", { class: "crosshair", x1: at, x2: at, y1: this.top, y2: this.floor }, this.over);
    if (target) labkit.svg("circle", { class: "ring", cx: target.x, cy: target.y, r: 7 }, this.over);
  }
}

/** The chart that differs from `base` as labkit/analysis/document/chart.py `changes` says. */
labkit.changed = (base, changes) => {
  const { ys, ...others } = changes;
  const chart = { ...base, ...others };
  if (ys) {
    chart.marks = base.marks.map((mark, i) => ys[i]
      ? { ...mark, p: mark.p.map((value, j) => j % 2 ? ys[i][(j - 1) / 2] : value) } : mark);
  }
  return chart;
};
