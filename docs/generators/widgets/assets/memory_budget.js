const WORDS = {
  fits: ["Fits", "good", "That is free, and within Metal’s working set."],
  slows: ["Slows", "warn", "macOS compresses or swaps memory and may evict GPU buffers, without an error; it can also end in a crash."],
  dies: ["Dies", "bad", "That is more than the machine has."],
};

connect((state) => {
  const machine = data.machines[state.machine], model = data.models[state.model];
  const plan = planBudget(machine, model, state.policy, state.percent / 100, data.constants, data.byte_units);
  const bytes = (number) => formatBytes(number, data.byte_units);
  // An engine that starts needs a pool, even where the ceiling has no room for one.
  const blocks = Math.max(plan.blocks, data.constants.min_blocks), pool = blocks * model.block;
  const needed = model.weights + model.activations + pool;
  const outcome = memoryOutcome(machine, needed), [word, tone, meaning] = WORDS[outcome];
  fill("answer", element("span", { class: tone }, word), `: ${bytes(needed)} on ${machine.label}. ${meaning}`);
  const tokens = count((plan.blocks - 1) * data.block_size);
  fill("decision", plan.refused === null ? `labkit starts with ${count(plan.blocks)} KV blocks: ${tokens} tokens.`
    : plan.refused.fraction === null ? `labkit refuses to start: ${plan.refused.otherwise}.`
    : `labkit refuses to start: set engine.budget.fraction=${plan.refused.fraction} ${plan.refused.direction}. ` +
      (plan.blocks < data.constants.min_blocks ? "The share leaves no room for KV blocks." : "That much is not free. An engine that does not check goes on as above."));
  drawBar(machine, [model.weights, model.activations, pool], plan.ceiling);
  const mark = (kind, text) => element("span", {}, element("span", { class: `mark ${kind}` }), text);
  tableRows("sizes", [["weights", model.weights], ["activations (512 tokens, 16 requests)", model.activations], [`${count(blocks)} KV blocks`, pool],
    [mark("", "ceiling of the policy"), plan.ceiling], [mark("dashed", "free now (assumed)"), machine.available], [mark("dotted", "Metal’s working set"), machine.working_set], ["RAM", machine.total]]
    .map(([name, size]) => [name, bytes(size), percent(size / machine.total)]), [1, 2]);
  const advice = advise(machine, needed, data);
  fill("advice", ...advice.map(([finding, command, risk]) => element("div", {}, element("p", {}, `${finding[0].toUpperCase()}${finding.slice(1)}.`),
    element("p", {}, element("code", {}, command)), element("p", {}, `Risk: ${risk}.`))));
  if (outcome === "dies") fill("advice", element("p", {}, "No setting helps: the machine has too little memory. Take a smaller model or a smaller share."));
});

function drawBar(machine, parts, ceiling) {
  const extent = Math.max(machine.total, parts.reduce((a, b) => a + b));
  const at = (number) => `${(100 * number) / extent}%`;
  let start = 0;
  const spans = parts.map((size, i) => {
    const span = element("span", { class: `owner${i}`, style: `left: ${at(start)}; width: ${at(size)}` });
    start += size;
    return span;
  });
  const ram = element("span", { class: "empty", style: `left: 0; width: ${at(machine.total)}; border-right: 3px solid var(--edge)` });
  const lines = [["", ceiling], ["dashed", machine.available], ["dotted", machine.working_set]].map(([kind, size]) => element("i", { class: kind, style: `left: ${at(size)}` }));
  fill("bar", ram, ...spans, ...lines);
  byId("bar").setAttribute("aria-label", `${percent(start / machine.total)} of RAM needed`);
}
