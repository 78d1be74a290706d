// labkit.engine.memory_budget.budget_policies: fraction, vllm and mistralrs, with apply_ceiling
function planBudget(machine, model, policy, share, constants, units) {
  const fixedBytes = policy === "mistralrs" ? model.weights : model.weights + model.activations;
  if (policy === "mistralrs") {
    const missing = mistralrsMissing(machine, model, constants);
    if (missing > 0) return { ceiling: 0, blocks: 0, refused: noSetting(missing, units) };
  }
  const base = ceilingBase(machine, policy, constants);
  const free = { fraction: machine.available, vllm: Math.min(machine.available, machine.working_set) }[policy];
  const ceiling = Math.floor(base * share), blocks = Math.floor((ceiling - fixedBytes) / model.block);
  if ((free === undefined || ceiling <= free) && blocks >= constants.min_blocks) return { ceiling, blocks, refused: null };
  const tooSmall = blocks < constants.min_blocks, need = fixedBytes + constants.min_blocks * model.block;
  const limit = free === undefined ? base : Math.min(base, free);
  const fitting = shortestFraction(need + 1, limit, base, tooSmall, constants.decimals);
  const refused = fitting === null ? noSetting(Math.max(1, need - limit), units) : { fraction: fitting, direction: tooSmall ? "or more" : "or less", otherwise: "" };
  return { ceiling, blocks, refused };
}

function ceilingBase(machine, policy, constants) {
  const { total, working_set } = machine;
  if (policy === "fraction") return total;
  if (policy === "vllm") return working_set;
  return Math.min(working_set, Math.floor(total <= constants.small_machine ? (total * 2) / 3 : (total * 3) / 4));
}

function mistralrsMissing(machine, model, constants) {
  const headroom = Math.max(Math.floor(machine.working_set / 50), constants.min_headroom);
  return model.weights - (machine.working_set - headroom);
}

// labkit.engine.memory_budget.budget_decision.make_refusal, where no setting fits
function noSetting(missing, units) {
  return { fraction: null, direction: "", otherwise: `no setting fits, because ${formatBytes(missing, units)} are missing; choose another engine.budget.machine or use a smaller model` };
}

// labkit.engine.memory_budget.budget_policies._shortest_fraction
function shortestFraction(low, high, base, smallest, decimals) {
  for (const digits of decimals) {
    const scale = 10 ** digits;
    const steps = smallest ? Math.ceil((low / base) * scale) : Math.floor((high / base) * scale);
    const value = steps / scale;
    if (low / base <= value && value <= Math.min(high / base, 1) && value > 0) return value;
  }
  return null;
}

// docs.generators.widgets.memory_budget.memory_outcome
function memoryOutcome(machine, needed) {
  if (needed > machine.total) return "dies";
  return needed > Math.min(machine.available, machine.working_set) ? "slows" : "fits";
}

// labkit.machine.facts.wired_advice.advise
function advise(machine, needed, texts) {
  const gib = (bytes) => `${fixed(bytes / 2 ** 30, 1)} GiB`;
  const advice = [];
  if (needed > machine.total) return advice;
  if (needed > machine.working_set) {
    const setBy = machine.limit_mb ? `${machine.limit_mb} MiB` : "the default";
    advice.push([`${gib(needed)} are needed, but Metal wires only ${gib(machine.working_set)} (wired limit: ${setBy})`,
      `sudo sysctl iogpu.wired_limit_mb=${Math.ceil(needed / 2 ** 20)}`,
      `macOS and all programs get the other ${gib(machine.total - needed)}; ${texts.reset_note}`]);
  }
  if (machine.collector) {
    advice.push(["the wired collector is on: under memory pressure macOS evicts GPU buffers", texts.collector_off,
      `with little memory left the Mac may freeze instead of slowing down; ${texts.reset_note}`]);
  }
  return advice;
}
