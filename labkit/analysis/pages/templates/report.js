"use strict";
// What the page does: draw charts when they come into view, point at them, zoom, switch arms, sort
// tables, choose rows, and keep the view in the link. Without this file the page is complete.

(() => {
  const drawings = new Map(); // by figure
  const state = { off: new Map(), rows: new Map(), zoom: new Map(), sort: new Map() };
  const cells = [...document.querySelectorAll(".cell")];
  const tables = [...document.querySelectorAll("table.sortable")];
  const folds = [...document.querySelectorAll("details.chapter, details.section")];
  const folded = new Map(folds.map((fold) => [fold, fold.open])); // as the page was written
  const offOf = (cell) => state.off.get(cell) || new Set();

  // -------------------------------------------------------------- drawing

  const redraw = (drawing) => drawing.draw(offOf(drawing.cell));
  const redrawCell = (cell) => { for (const d of drawings.values()) if (d.cell === cell && d.svg.isConnected && d.width) redraw(d); };

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const drawing = drawings.get(target);
      if (drawing && target.clientWidth && drawing.figureWidth !== target.clientWidth) {
        drawing.figureWidth = target.clientWidth;
        redraw(drawing);
      }
    }
  });
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || !target.clientWidth) continue;
      seen.unobserve(target);
      show(target, labkit.charts[Number(target.dataset.chart)]);
    }
  }, { rootMargin: "300px" });

  function show(figure, chart) {
    const drawing = new Drawing(figure, chart);
    const zoom = chart.link === "time" && state.zoom.get(drawing.cell);
    if (zoom) drawing.view = zoom;
    drawings.set(figure, drawing);
    drawing.figureWidth = figure.clientWidth;
    if (chart.zooms) addZoom(drawing);
    redraw(drawing);
    if (!figure.dataset.bound) bind(figure);
    sizes.observe(figure);
    return drawing;
  }
  for (const figure of document.querySelectorAll("figure[data-chart]")) seen.observe(figure);

  // -------------------------------------------------------------- pointing

  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  document.body.append(tip);

  function pointAt(drawing, target) {
    for (const other of drawings.values()) {
      const linked = other !== drawing && other.cell === drawing.cell && other.chart.link && other.chart.link === drawing.chart.link;
      if (other.over && (other === drawing || linked)) other.point(other === drawing ? target : null, target ? target.dataX : undefined);
    }
    drawing.target = target;
    tip.hidden = !target;
    if (!target) return;
    tip.textContent = target.tip;
    const box = drawing.svg.getBoundingClientRect();
    const x = Math.min(Math.max(box.left + target.x - tip.offsetWidth / 2, 4), document.documentElement.clientWidth - tip.offsetWidth - 4);
    let y = box.top + target.y - tip.offsetHeight - 12;
    if (y < 4) y = box.top + target.y + 14;
    tip.style.left = `${x + scrollX}px`;
    tip.style.top = `${y + scrollY}px`;
  }

  const place = (drawing, event) => {
    const box = drawing.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  function bind(figure) {
    figure.dataset.bound = "yes";
    const drawing = () => drawings.get(figure);
    const inside = (event) => event.target.closest("svg") === drawing().svg;
    let start = null; // where a selection began
    figure.addEventListener("pointermove", (event) => {
      if (!inside(event)) return;
      const d = drawing(), [x, y] = place(d, event);
      if (start !== null) return select(d, start, x);
      pointAt(d, d.nearest(x, y));
    });
    figure.addEventListener("pointerleave", () => { start = null; pointAt(drawing(), null); });
    figure.addEventListener("pointerdown", (event) => {
      if (drawing().chart.zooms && inside(event) && event.button === 0) start = place(drawing(), event)[0];
    });
    figure.addEventListener("pointerup", (event) => {
      const d = drawing(), from = start;
      start = null;
      if (from === null || !inside(event)) return;
      const to = place(d, event)[0];
      if (Math.abs(to - from) > 8) zoomTo(d, [d.x(Math.min(from, to)), d.x(Math.max(from, to))]);
      else d.over.replaceChildren();
    });
    figure.addEventListener("dblclick", () => { if (drawing().chart.zooms) zoomTo(drawing(), null); });
    figure.addEventListener("focusout", () => pointAt(drawing(), null));
    figure.addEventListener("keydown", (event) => { if (inside(event) && key(drawing(), event)) event.preventDefault(); });
  }

  function key(d, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    if (d.chart.zooms && "+=-0".includes(event.key)) {
      const [low, high] = d.view, middle = d.target ? d.target.dataX : (low + high) / 2;
      const half = (high - low) / 2 * (event.key === "-" ? 2 : 0.5);
      zoomTo(d, event.key === "0" ? null : [middle - half, middle + half]);
      return true;
    }
    if (event.key === "Escape") { pointAt(d, null); return true; }
    if (event.key === "Enter" && d.target && d.target.href) { location.href = d.target.href; return true; }
    const target = step(d, event.key);
    if (target) pointAt(d, target);
    return Boolean(target);
  }

  /** The target that an arrow key leads to: along the arm's points, or to the next arm. */
  function step(d, pressed) {
    const sideways = { ArrowRight: 1, ArrowLeft: -1 }[pressed];
    const across = { ArrowDown: 1, ArrowUp: -1 }[pressed];
    if (!d.targets.length || (!sideways && !across && pressed !== "Home" && pressed !== "End")) return null;
    const arms = [...new Set(d.targets.map((t) => t.arm))];
    const current = d.target || d.targets[0];
    if (across) {
      if (arms.length < 2) return onward(d.targets, current, across, (t) => t.y);
      const arm = arms[(arms.indexOf(current.arm) + across + arms.length) % arms.length];
      return d.targets.filter((t) => t.arm === arm).reduce((a, b) => Math.abs(b.dataX - current.dataX) < Math.abs(a.dataX - current.dataX) ? b : a);
    }
    const own = d.targets.filter((t) => t.arm === current.arm);
    if (pressed === "Home") return own[0];
    if (pressed === "End") return own[own.length - 1];
    return d.target ? onward(own, current, sideways, (t) => (d.rows.length ? t.y : t.x)) : current;
  }
  const onward = (targets, current, by, of) => {
    const order = [...targets].sort((a, b) => of(a) - of(b) || a.x - b.x);
    return order[Math.min(Math.max(order.indexOf(current) + by, 0), order.length - 1)];
  };

  // -------------------------------------------------------------- zoom

  function select(d, from, to) {
    d.over.replaceChildren();
    labkit.svg("rect", { class: "selection", x: Math.min(from, to), width: Math.abs(to - from), y: d.top, height: d.floor - d.top }, d.over);
  }

  /** Show a part of the time axis in all charts of the cell that share it; null: all of it. */
  function zoomTo(d, view) {
    const [low, high] = d.chart.x, least = (high - low) / 1000;
    if (view) view = [Math.max(low, view[0]), Math.min(high, view[1])];
    if (view && (view[1] - view[0] >= (high - low) * 0.999 || view[1] - view[0] < least)) view = null;
    if (view) state.zoom.set(d.cell, view);
    else state.zoom.delete(d.cell);
    for (const other of drawings.values()) {
      if (other.cell !== d.cell || other.chart.link !== d.chart.link) continue;
      other.view = view || other.chart.x;
      redraw(other);
      if (other.status) other.status.textContent = view ? `${other.inView ?? 0} in view` : "";
    }
    save();
  }

  function addZoom(drawing) {
    const { figure } = drawing;
    if (figure.querySelector(".tools")) return;
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    const zoom = (by) => () => {
      const d = drawings.get(figure), [low, high] = d.view;
      const middle = (low + high) / 2, half = (high - low) / 2 * by;
      zoomTo(d, [middle - half, middle + half]);
    };
    const move = (by) => () => {
      const d = drawings.get(figure), [low, high] = d.view, [first, last] = d.chart.x;
      const shift = Math.max(first - low, Math.min(last - high, (high - low) * by));
      zoomTo(d, [low + shift, high + shift]);
    };
    const buttons = [["+", "Zoom in", zoom(0.5)], ["−", "Zoom out", zoom(2)], ["←", "Earlier", move(-0.5)],
      ["→", "Later", move(0.5)], ["all", "Show all", () => zoomTo(drawings.get(figure), null)]];
    for (const [text, label, action] of buttons) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: action });
      button.setAttribute("aria-label", label);
      tools.append(button);
    }
    drawing.status = tools.appendChild(document.createElement("span"));
    tools.append(Object.assign(document.createElement("small"), { textContent: "or drag over the times to show" }));
    figure.prepend(tools);
  }

  // -------------------------------------------------------------- one row's chart at a time

  const pickers = [...document.querySelectorAll("[data-rows]")].map((holder) => {
    const set = labkit.charts[Number(holder.dataset.rows)];
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    const select = document.createElement("select");
    const id = `rows${holder.dataset.rows}`;
    tools.innerHTML = `<label for="${id}">Row</label>`;
    select.id = id;
    for (const [index, name] of set.rows) select.append(new Option(name, index));
    tools.append(select);
    for (const [text, label, by] of [["←", "Previous row", -1], ["→", "Next row", 1]]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
      button.setAttribute("aria-label", label);
      button.onclick = () => choose(holder.closest(".cell"), set.rows[(select.selectedIndex + by + set.rows.length) % set.rows.length][0]);
      tools.append(button);
    }
    const picker = { cell: holder.closest(".cell"), set, figure, caption, select, shown: false };
    select.onchange = () => choose(picker.cell, Number(select.value));
    figure.append(tools, holder.querySelector("svg"), caption);
    holder.replaceChildren(figure);
    caption.textContent = set.captions[0];
    new IntersectionObserver((entries, own) => {
      if (!entries.some((e) => e.isIntersecting)) return;
      own.disconnect();
      picker.shown = true;
      update(picker);
    }, { rootMargin: "300px" }).observe(figure);
    return picker;
  });

  function update(picker) {
    const at = Math.max(0, picker.set.rows.findIndex(([index]) => index === state.rows.get(picker.cell)));
    picker.select.selectedIndex = at;
    picker.caption.textContent = picker.set.captions[at];
    if (picker.shown) show(picker.figure, labkit.changed(picker.set.chart, picker.set.changes[at]));
  }

  /** Show a row's charts in all pickers of a cell that have it. */
  function choose(cell, index) {
    state.rows.set(cell, index);
    for (const picker of pickers) {
      if (picker.cell === cell && picker.set.rows.some(([own]) => own === index)) update(picker);
    }
    save();
  }

  // -------------------------------------------------------------- arms

  function applyArms(cell) {
    const off = offOf(cell);
    for (const button of cell.querySelectorAll("[data-switch]")) button.setAttribute("aria-pressed", String(!off.has(button.dataset.switch)));
    for (const element of cell.querySelectorAll("[data-arm]")) element.classList.toggle("off", off.has(element.dataset.arm));
    for (const table of cell.querySelectorAll("table:not(.matrix)")) {
      const column = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.trim() === "arm");
      if (column >= 0) for (const row of table.tBodies[0].rows) row.classList.toggle("off", off.has(row.cells[column].textContent.trim()));
    }
    redrawCell(cell);
  }

  for (const cell of cells) {
    for (const key of cell.querySelectorAll("[data-switch]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "key";
      button.dataset.switch = key.dataset.switch;
      button.title = "Show or hide this arm everywhere";
      button.setAttribute("aria-pressed", "true");
      button.append(...key.childNodes);
      button.onclick = () => {
        const off = new Set(offOf(cell));
        if (!off.delete(button.dataset.switch)) off.add(button.dataset.switch);
        state.off.set(cell, off);
        applyArms(cell);
        save();
      };
      key.replaceWith(button);
    }
  }

  // -------------------------------------------------------------- tables

  const number = (text) => parseFloat(text.replace(/−/g, "-").replace(/,/g, ""));
  function sortValue(row, column, numeric) {
    const cell = row.cells[column];
    if (!cell) return numeric ? NaN : "";
    const text = (cell.querySelector(".v") && numeric ? cell.querySelector(".v") : cell).textContent.trim();
    return numeric ? number(text) : text;
  }
  const compare = (a, b, up) => typeof a === "string" ? up * a.localeCompare(b, undefined, { numeric: true })
    : Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : up * (a - b);

  /** Sort a table by a column; the rows of a group stay together, below its name. */
  function sort(table, column, up) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => i === column ? head.setAttribute("aria-sort", up ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    const numeric = heads[column].classList.contains("n");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      const keyed = rows.map((row) => [sortValue(row, column, numeric), row]);
      body.append(...keyed.sort(([a], [b]) => compare(a, b, up ? 1 : -1)).map(([, row]) => row));
    }
  }
  tables.forEach((table, index) => [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent.trim()) return; // a column of pictures
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      sort(table, column, up);
      state.sort.set(index, `${column}${up ? "a" : "d"}`);
      save();
    };
  }));

  // -------------------------------------------------------------- the link

  /** Write the view behind the anchor: #cell0-runs?off=cell0:seq_map&row=cell0:3&open=cell0-latency */
  function save() {
    const query = new URLSearchParams();
    for (const cell of cells) {
      for (const arm of offOf(cell)) query.append("off", `${cell.id}:${arm}`);
      if (state.rows.has(cell)) query.append("row", `${cell.id}:${state.rows.get(cell)}`);
      if (state.zoom.has(cell)) query.append("zoom", `${cell.id}:${state.zoom.get(cell).map((x) => x.toPrecision(5)).join(":")}`);
    }
    folds.forEach((fold, index) => { if (fold.open !== folded.get(fold)) query.append(fold.open ? "open" : "shut", index); });
    for (const [table, how] of state.sort) query.append("sort", `${table}:${how}`);
    const anchor = location.hash.slice(1).split("?")[0], text = query.toString();
    const hash = `#${anchor}${text ? `?${text}` : ""}`;
    if (hash !== location.hash && !(hash === "#" && !location.hash)) history.replaceState(null, "", hash);
  }

  function load(query) {
    const cellOf = (text) => [cells.find((cell) => cell.id === text.split(":")[0]), text.slice(text.indexOf(":") + 1)];
    for (const text of query.getAll("off")) {
      const [cell, arm] = cellOf(text);
      if (cell) state.off.set(cell, new Set([...offOf(cell), arm]));
    }
    for (const text of query.getAll("zoom")) {
      const [cell, ends] = cellOf(text), view = ends.split(":").map(Number);
      if (cell && view.length === 2 && view[0] < view[1]) state.zoom.set(cell, view);
    }
    for (const text of query.getAll("row")) {
      const [cell, index] = cellOf(text);
      if (cell) state.rows.set(cell, Number(index));
    }
    for (const how of ["open", "shut"]) for (const index of query.getAll(how)) if (folds[index]) folds[index].open = how === "open";
    for (const text of query.getAll("sort")) {
      const [index, how] = text.split(":"), table = tables[index], column = parseInt(how, 10);
      if (table && table.tHead.rows[0].cells[column]) {
        sort(table, column, how.endsWith("a"));
        state.sort.set(Number(index), how);
      }
    }
    for (const cell of cells) if (offOf(cell).size) applyArms(cell);
    for (const picker of pickers) update(picker);
  }

  /** Open what an anchor lies in, go there, and show the row that it names. */
  function go(anchor) {
    const target = anchor && document.getElementById(anchor);
    if (!target) return;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    const row = /^(cell\d+)r(\d+)$/.exec(anchor);
    if (row) choose(document.getElementById(row[1]), Number(row[2]));
    (target.closest("details.row, details.chapter") || target).scrollIntoView();
  }
  const anchorOf = (hash) => decodeURIComponent(hash.slice(1).split("?")[0]);

  load(new URLSearchParams(location.hash.split("?")[1] || ""));
  go(anchorOf(location.hash));
  addEventListener("hashchange", () => { go(anchorOf(location.hash)); save(); });
  for (const fold of folds) fold.addEventListener("toggle", save);

  // -------------------------------------------------------------- tables on narrow screens

  /** Show a table that a narrow screen would cut as a block for each line. */
  const narrow = matchMedia("(max-width: 40rem)"), widths = new Map();
  function stack(box) {
    const table = box.querySelector("table.sortable:not(.matrix)");
    if (!table || !box.clientWidth || widths.get(box) === box.clientWidth) return;
    widths.set(box, box.clientWidth);
    table.classList.remove("stacked");
    if (!narrow.matches || box.scrollWidth <= box.clientWidth + 1) return;
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => {
      cell.dataset.head = heads[i];
      cell.classList.toggle("blank", !cell.textContent.trim());
    });
    table.classList.add("stacked");
  }
  const boxes = new ResizeObserver((entries) => { for (const { target } of entries) stack(target); });
  for (const box of document.querySelectorAll(".scroll")) boxes.observe(box);

  // -------------------------------------------------------------- contents and print

  const links = new Map();
  for (const link of document.querySelectorAll(".contents a")) {
    const target = document.getElementById(link.hash.slice(1));
    if (target) links.set(target.closest("details.chapter") || target, link);
  }
  const inView = new Set();
  const reading = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target);
    let current = false;
    for (const [target, link] of links) {
      const here = inView.has(target) && !current;
      link.toggleAttribute("aria-current", here);
      current ||= here;
    }
  }, { rootMargin: "-90px 0px -40% 0px" });
  for (const target of links.keys()) reading.observe(target);

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const fold of closed) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of closed) fold.open = false; });
})();
