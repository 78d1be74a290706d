const ROW = 15, NAMES = { static: "Static batches", continuous: "Continuous batching", paged: "Continuous, paged" };
let lanes = [];

// What each request does at each step, in runs of equal steps: {first, length, kind}.
function runsOf(steps, index) {
  const runs = [];
  steps.forEach((step, at) => {
    const tokens = step.computed[index];
    const kind = step.preempted.includes(index) ? "preempted" : tokens < 0 ? "prefill" : tokens > 0 ? "decode"
      : step.finished.includes(index) ? "waste" : step.idle.includes(index) ? "idle" : "";
    const last = runs.at(-1);
    if (last && last.kind === kind && kind !== "preempted") last.length += 1;
    else runs.push({ first: at, length: 1, kind });
  });
  return runs.filter((run) => run.kind);
}

function laneFigure(name, steps, requests, extent) {
  const rows = requests.map((_, index) => element("rect", { class: "row", x: 0, y: index * ROW, width: extent, height: ROW - 2 }));
  const parts = requests.flatMap((_, index) => runsOf(steps, index).map(({ first, length, kind }) => kind === "preempted"
    ? element("rect", { x: first - 1, y: index * ROW, width: 3, height: ROW - 2, class: "preempted" })
    : element("rect", { class: kind, x: first, y: index * ROW, width: length, height: ROW - 2 })));
  const height = requests.length * ROW;
  const cursor = element("line", { class: "cursor", y1: 0, y2: height });
  const ends = steps.reduce((sum, step, at) => sum + Object.keys(step.computed).filter((index) => lastStep(steps, index) === at).length * (at + 1), 0);
  const names = requests.map(([prompt, output], index) => element("div", {}, `${prompt} + ${output}`));
  const figure = element("figure", {}, element("figcaption", {}, `${NAMES[name]}: ${plural(steps.length, "step")}`),
    element("div", { class: "lane" }, element("div", { class: "names", "aria-hidden": "true" }, ...names),
      element("svg", { viewBox: `0 0 ${extent} ${height}`, preserveAspectRatio: "none", style: `height: ${height}px`, role: "img", "aria-label": `${NAMES[name]}: ${requests.length} requests over ${plural(steps.length, "step")}` }, ...rows, ...parts, cursor)));
  return { name, steps, figure, cursor, mean: ends / requests.length };
}

const lastStep = (steps, index) => steps.findLastIndex((step) => index in step.computed);
const sumOf = (step, sign) => Object.values(step.computed).reduce((sum, tokens) => sum + Math.max(sign * tokens, 0), 0);

connect((state) => {
  const requests = data.mixes[state.mix].slice(0, state.requests);
  const served = data.lanes.map((lane) => serve(lane, requests, state.seqs, state.memory, data.sizes));
  const extent = Math.max(...served.map((steps) => steps.length));
  lanes = data.lanes.map((lane, i) => laneFigure(lane, served[i], requests, extent));
  fill("lanes", ...lanes.map((lane) => lane.figure));
  fill("answer", `Static batches take ${plural(served[0].length, "step")}, continuous batching ${count(served[1].length)}, paged ${count(served[2].length)}.`);
  const total = (steps, value) => steps.reduce((sum, step) => sum + value(step), 0);
  compare("totals", lanes, {
    "steps": ({ steps }) => steps.length,
    "steps until a request has ended, mean": ({ mean }) => Math.round(mean),
    "tokens computed for requests": ({ steps }) => total(steps, (step) => sumOf(step, 1) + sumOf(step, -1)),
    "tokens computed for nothing": ({ steps }) => total(steps, (step) => step.padding),
    "KV memory held at the peak, tokens": ({ steps }) => Math.max(...steps.map((step) => step.held)),
    "preemptions": ({ steps }) => total(steps, (step) => step.preempted.length),
  });
  byId("step").max = extent;
  drawMoment();
});

function drawMoment() {
  const at = Math.min(Number(byId("step").value), Number(byId("step").max)) - 1;
  byId("stepNumber").value = `${at + 1} of ${byId("step").max}`;
  for (const { cursor } of lanes) {
    cursor.setAttribute("x1", at + 0.5);
    cursor.setAttribute("x2", at + 0.5);
  }
  const ofStep = (value) => ({ steps }) => (steps[at] ? value(steps[at]) : null);
  compare("composition", lanes, {
    "prefill tokens in this step": ofStep((step) => sumOf(step, -1)),
    "decode tokens": ofStep((step) => sumOf(step, 1)),
    "tokens computed for nothing": ofStep((step) => step.padding),
    "KV memory held, tokens": ofStep((step) => step.held),
    "KV memory used, tokens": ofStep((step) => step.used),
  });
}

// A table with a column for each lane. null: the lane has ended.
function compare(id, lanes, values) {
  tableRows(id, Object.entries(values).map(([name, value]) => [name, ...lanes.map(value).map((number) => (number === null ? "ended" : count(number)))]), [1, 2, 3]);
}

byId("step").addEventListener("input", drawMoment);
