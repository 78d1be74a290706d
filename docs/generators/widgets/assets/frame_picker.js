function timeline(id, state, runs, picks) {
  const decoded = new Set(runs.flatMap((run) => Array.from({ length: run.stops.at(-1) - run.start + 1 }, (_, i) => run.start + i)));
  const picked = new Set(picks);
  const groups = Array.from({ length: state.keyframes }, (_, group) => element("span", {}, ...Array.from({ length: state.gop }, (_, i) => {
    const frame = group * state.gop + i;
    return element("i", { class: `${i ? "delta" : "key"}${decoded.has(frame) ? " decoded" : ""}${picked.has(frame) ? " pick" : ""}`, title: `frame ${frame}` });
  })));
  fill(id, ...groups);
  byId(id).setAttribute("aria-label", `${decoded.size} of ${state.keyframes * state.gop} frames are decoded, ${picked.size} of them picked`);
  return decoded.size;
}

connect((state) => {
  const frames = state.keyframes * state.gop;
  const keyframes = Array.from({ length: state.keyframes }, (_, i) => i * state.gop);
  const exact = pickFrames(state.exact, frames, keyframes, state.budget), lossy = pickFrames(state.lossy, frames, keyframes, state.budget);
  const many = timeline("exactTimeline", state, decoderRuns(state.exact, exact, keyframes), exact);
  const few = timeline("lossyTimeline", state, decoderRuns(state.lossy, lossy, keyframes), lossy);
  const far = distances(lossy, exact);
  fill("exactTitle", `${state.exact}: ${plural(many, "frame")} decoded for ${plural(exact.length, "pick")}`);
  fill("lossyTitle", `${state.lossy}: ${plural(few, "frame")} decoded for ${plural(lossy.length, "pick")}`);
  fill("answer", `${state.lossy} decodes ${plural(few, "frame")}, ${state.exact} ${many}: ${(many / few).toFixed(1)} times as many.`);
  fill("note", `The picked keyframes are ${far.mean.toFixed(1)} frames from the exact positions on average, at most ${far.max}. ` +
    `The clip has ${plural(frames, "frame")}. Work is counted in decoded frames, not in time.`);
  const times = new Map(keyframes.map((key) => [key, lossy.filter((pick) => pick === key).length]));
  fill("indices", `Entries of the list of keyframes: [${lossy.map((pick) => keyframes.indexOf(pick)).join(", ")}]; positions in the clip, as reported to the model: [${lossy.join(", ")}].`);
  fill("badges", ...[...times].map(([key, n]) => element("span", { class: n ? undefined : "none" }, `frame ${key}`, element("b", {}, `×${n}`))));
});
