// labkit.workload.video.frame_selection.positions (integers, rounded half to even)
function positions(number, frames) {
  if (frames === 1) return [0];
  return Array.from({ length: frames }, (_, i) => {
    const product = i * (number - 1), divisor = frames - 1;
    const quotient = Math.floor(product / divisor), rest = product % divisor;
    return quotient + (2 * rest > divisor || (2 * rest === divisor && quotient % 2 === 1) ? 1 : 0);
  });
}

function nearestKeyframe(keyframes, position) {
  return keyframes.reduce((best, key) => (Math.abs(key - position) < Math.abs(best - position) ? key : best));
}

// labkit.workload.video.frame_selection.pick_frames
function pickFrames(how, frames, keyframes, budget) {
  if (how === "stream" || how === "seek") return positions(frames, budget);
  if (how === "nearest") return positions(frames, budget).map((position) => nearestKeyframe(keyframes, position));
  const picks = how === "keyframes_unique" ? Math.min(budget, keyframes.length) : budget;
  return positions(keyframes.length, picks).map((i) => keyframes[i]);
}

// labkit.workload.video.frame_selection.decode_runs
function decodeRuns(picks, keyframes) {
  const runs = [];
  for (const pick of [...new Set(picks)].sort((a, b) => a - b)) {
    const start = keyframes.findLast((key) => key <= pick), last = runs.at(-1);
    if (last && start <= last.stops.at(-1) + 1) last.stops.push(pick);
    else runs.push({ start, stops: [pick] });
  }
  return runs;
}

// labkit.workload.video.frame_selection.decoder_runs
function decoderRuns(how, picks, keyframes) {
  if (how === "stream") return [{ start: 0, stops: [...new Set(picks)].sort((a, b) => a - b) }];
  if (how === "seek") return decodeRuns(picks, keyframes);
  return [...new Set(picks)].sort((a, b) => a - b).map((pick) => ({ start: pick, stops: [pick] }));
}

// labkit.workload.video.frame_selection.distances, in frames
function distances(picks, exact) {
  const pairs = exact.map((position, i) => [picks.length === exact.length ? picks[i] : nearestKeyframe(picks, position), position]);
  const frames = pairs.map(([pick, position]) => Math.abs(pick - position));
  return { mean: frames.reduce((a, b) => a + b) / frames.length, max: Math.max(...frames) };
}
