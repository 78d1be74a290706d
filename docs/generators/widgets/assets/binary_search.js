const MAX_TOKENS = 400;
const view = { unit: 50, step: 0, found: null, keys: [] };
let requests = data.requests;

function parseLengths(text) {
  const words = text.trim().split(/[\s,]+/);
  if (!words.every((word) => /^[1-9]\d*$/.test(word))) return "Query lengths must be integers above 0, such as 1 1 40.";
  const lengths = words.map(Number);
  if (lengths.length < 2 || lengths.length > 16) return `This page draws 2 to 16 requests, not ${lengths.length}.`;
  const total = lengths.reduce((a, b) => a + b);
  return total > MAX_TOKENS ? `This page draws up to ${MAX_TOKENS} query tokens, not ${count(total)}.` : lengths;
}

connect((state, form) => {
  if (state.requests !== requests) form.elements.lengths.value = data.batches[state.requests].join(" ");
  requests = state.requests;
  const lengths = parseLengths(form.elements.lengths.value);
  fill("mistake", typeof lengths === "string" ? lengths : "");
  if (typeof lengths === "string") return;
  const prefix = prefixSums(lengths), tiled = state.unit === "qblock";
  view.keys = tiled ? qblockKeys(prefix, data.rows) : prefix;
  const total = prefix[prefix.length - 1];
  const units = tiled ? Math.floor(total / data.rows) + lengths.length : total;
  const all = Array.from({ length: units }, (_, unit) => search(view.keys, unit));
  const rowsOf = (found) => (tiled ? qblockRows(found, lengths, view.keys, data.rows) : [0, 1]);
  fill("unitsTitle", tiled ? `${count(units)} Q-blocks of ${data.rows} rows` : `${count(units)} packed query tokens`);
  fill("keysTitle", tiled ? `The keys: cu_seqlens_q[i] // ${data.rows} + i` : "The keys: cu_seqlens_q");
  const steps = all.reduce((sum, found) => sum + found.steps.length, 0), bound = maxSteps(lengths.length);
  fill("total", `All ${count(units)} ${tiled ? "Q-blocks" : "tokens"} take ${plural(steps, "step")}, ${(steps / units).toFixed(2)} each, in every column of the grid: ` +
    "each head, or group of heads, that has units of its own searches anew. The counter attention.search_iterations adds up all columns. " +
    `A host-built map (resolver=seq_map) takes none: one load per unit.`);
  fill("owners", ...lengths.map((length, i) => element("span", {}, element("span", { class: `swatch owner${i}` }), `request ${i}: ${plural(length, "token")}`)),
    ...(tiled ? [element("span", {}, element("span", { class: "swatch waste" }), "surplus block, exits")] : []));
  const cells = all.map((found) => {
    const rows = rowsOf(found), owner = rows ? `request ${found.owner}` : "surplus";
    return element("button", { class: rows ? `owner${found.owner}` : "waste", "aria-label": `${tiled ? "Q-block" : "token"} ${found.unit}, ${owner}`, title: owner }, String(found.unit));
  });
  selectable(byId("units"), cells, view.unit, (unit) => {
    Object.assign(view, { unit, step: 0, found: all[unit] });
    const { owner } = view.found, rows = rowsOf(view.found), name = tiled ? "Q-block" : "Token";
    const result = !rows ? "is surplus: it lies after its request's last row and exits"
      : tiled ? `belongs to request ${owner}, rows ${rows[0]} to ${rows[1] - 1}` : `belongs to request ${owner}`;
    fill("answer", `${name} ${unit} ${result}: ${plural(view.found.steps.length, "step")}, at most ${bound}.`);
    fill("bound", `At most ⌈log₂(${lengths.length} + 1)⌉ = ${plural(bound, "step")} for ${lengths.length} requests. All threads of a threadgroup take the same steps.`);
    drawSteps();
  });
});

function drawSteps() {
  const { found, keys, step } = view, current = found.steps[step];
  fill("position", `step ${step + 1} of ${found.steps.length}`);
  byId("previous").disabled = step === 0;
  byId("next").disabled = step >= found.steps.length - 1;
  fill("keysArray", ...keys.map((key, i) => {
    const inside = i >= current.low && i <= current.high;
    const marks = [i === current.low && "low", i === current.middle && "middle", i === current.high && "high"].filter(Boolean);
    return element("span", { class: `${inside ? "" : "outside"} ${i === current.middle ? "middle" : ""}` },
      element("small", {}, `[${i}]`), element("b", {}, String(key)), element("small", {}, marks.join(" ") || " "));
  }));
  fill("steps", ...found.steps.map((one, i) => {
    const cells = [i + 1, one.low, one.high, one.middle].map((number) => element("td", { class: "n" }, String(number)));
    const then = one.right ? `owner is ${one.middle} or later: low = ${one.middle}` : `owner is before ${one.middle}: high = ${one.middle - 1}`;
    return element("tr", { class: i === step ? "current" : undefined, "aria-current": i === step ? "step" : undefined }, ...cells,
      element("td", {}, `${one.value} ${one.right ? "≤" : ">"} ${found.unit}`), element("td", {}, then));
  }));
}

for (const [id, move] of [["previous", -1], ["next", 1]]) {
  byId(id).addEventListener("click", () => { view.step += move; drawSteps(); });
}
