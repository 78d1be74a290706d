// What all pages share: elements, numbers as text, controls whose state is in the address.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const svg = /^(svg|g|rect|text|line|path|title|circle)$/.test(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const count = (number) => number.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function fill(id, ...children) {
  byId(id).replaceChildren(...children);
}

function tableRows(id, rows, numeric) {
  fill(id, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, i) =>
    element("td", numeric.includes(i) ? { class: "n" } : {}, cell)))));
}

// Read every control of the form, show the values of sliders, and keep them in the address.
function formState(form) {
  const state = {};
  for (const control of form.elements) {
    if (!control.name || (control.type === "radio" && !control.checked)) continue;
    state[control.name] = control.type === "range" ? Number(control.value) : control.value;
  }
  return state;
}

function restore(form) {
  const saved = new URLSearchParams(location.hash.slice(1));
  for (const control of form.elements) {
    if (!saved.has(control.name)) continue;
    if (control.type === "radio") control.checked = control.value === saved.get(control.name);
    else control.value = saved.get(control.name);
  }
}

// Draw at every change of the form, which starts as the address says.
function connect(draw) {
  const form = document.querySelector("form");
  const redraw = () => {
    const state = formState(form);
    for (const output of form.querySelectorAll("output")) {
      const control = form.elements[output.htmlFor[0] || output.getAttribute("for")];
      output.value = output.dataset.scale ? `${Math.round(control.value * output.dataset.scale)} ${output.dataset.unit}` : count(Number(control.value));
    }
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    draw(state, form);
  };
  restore(form);
  form.addEventListener("input", redraw);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { restore(form); redraw(); });
  redraw();
  return redraw;
}

// Cells of which one is selected: arrow keys, Home and End move the selection.
function selectable(group, cells, selected, onSelect) {
  group.replaceChildren(...cells);
  const select = (index, focus) => {
    cells.forEach((cell, i) => {
      cell.setAttribute("aria-checked", i === index);
      cell.tabIndex = i === index ? 0 : -1;
    });
    if (focus) cells[index].focus();
    onSelect(index);
  };
  cells.forEach((cell, index) => {
    cell.setAttribute("role", "radio");
    cell.type = "button";
    cell.addEventListener("click", () => select(index, true));
    cell.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1, Home: 0, End: cells.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      select(Math.min(Math.max(moves[event.key], 0), cells.length - 1), true);
    });
  });
  select(Math.min(selected, cells.length - 1), false);
}
