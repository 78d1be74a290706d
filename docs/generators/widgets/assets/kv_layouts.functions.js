// labkit.engine.memory_budget.required_kv_slots.round_up_to_step
function roundUpToStep(tokens, step) {
  return Math.ceil(tokens / step) * step;
}

// labkit.engine.memory_budget.required_kv_slots.slots_for
function slotsFor(kv, lengths, step) {
  const sum = (slots) => lengths.reduce((total, length) => total + slots(length), 0);
  if (kv.layout === "padded") return lengths.length * roundUpToStep(Math.max(0, ...lengths), step);
  if (kv.layout === "contiguous") return sum((length) => roundUpToStep(Math.max(length, kv.set_aside || 0), kv.growth_step));
  return sum((length) => roundUpToStep(length, kv.block_size));
}
