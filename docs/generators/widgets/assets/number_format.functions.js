// Python's f"{number:.1f}" (for 1 decimal): toFixed rounds a tie up, Python to the even digit.
function fixed(number, decimals) {
  const halves = number * 2 ** (decimals + 1), scale = 10 ** decimals;
  if (!Number.isInteger(halves) || halves % 2 === 0) return number.toFixed(decimals);
  const below = Math.floor(number * scale);
  return ((below % 2 === 0 ? below : below + 1) / scale).toFixed(decimals);
}

// labkit.engine.memory_budget.budget_decision.format_bytes
function formatBytes(number, units) {
  for (const [unit, scale, decimals] of units) {
    if (Math.abs(number) >= scale) return `${fixed(number / scale, decimals)} ${unit}`;
  }
  return `${number} bytes`;
}
