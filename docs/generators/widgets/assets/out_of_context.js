function thumbnail(clip, frame, copies) {
  const scene = sceneOf(clip, frame, data.colours.length), { width, height, size } = clip;
  const lane = Math.floor(height / 3), row = (i) => lane * i + Math.floor(lane / 4), middle = Math.floor(width / 2);
  const disc = (left, top, fill) => element("circle", { cx: left + size / 2, cy: top + size / 2, r: size / 2, style: `fill: ${fill}` });
  const times = copies > 1 ? ` ×${copies}` : "";
  return element("figure", {}, element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `frame ${frame}${times}` },
    disc(scene.disc, row(0), data.colours[scene.colour]),
    element("rect", { x: scene.square, y: row(1), width: size, height: size, style: `fill: ${data.colours[2]}` }),
    disc(middle - size - scene.gap, row(2), data.colours[1]), disc(middle + scene.gap, row(2), data.colours[3])),
  element("figcaption", {}, `${(frame / clip.fps).toFixed(2)} s${times}`));
}

function strip(id, clip, picks) {
  fill(id, ...[...new Set(picks)].map((frame) => thumbnail(clip, frame, picks.filter((pick) => pick === frame).length)));
}

connect((state) => {
  const clip = data.clips[state.clip], shown = (picks) => clip.events.filter((event) => eventVisible(event, picks)).length;
  const exact = (budget) => pickFrames("seek", clip.length, clip.keyframes, budget);
  const lossy = (budget) => pickFrames(state.lossy, clip.length, clip.keyframes, budget);
  const [many, few] = [exact(state.budget), lossy(state.budget)];
  const all = clip.events.length, distinct = new Set(few).size;
  fill("answer", `Of ${plural(all, "event")}, exact frames show ${shown(many)}, ${state.lossy} ${shown(few)}.`);
  fill("note", `The clip has ${plural(clip.length, "frame")} and ${plural(clip.keyframes.length, "keyframe")}: however many frames are asked for, ` +
    `no more than ${plural(clip.keyframes.length, "different one")} can come from keyframes.`);
  fill("exactTitle", `stream or seek: ${plural(new Set(many).size, "frame")}`);
  fill("lossyTitle", `${state.lossy}: ${plural(distinct, "different frame")}`);
  fill("lossyHead", state.lossy);
  strip("exactFrames", clip, many);
  strip("lossyFrames", clip, few);
  const verdict = (event, picks) => eventVisible(event, picks) ? element("span", { class: "good" }, "yes") : element("span", { class: "bad" }, "not sure");
  tableRows("verdicts", clip.events.map((event) => [data.questions[event.kind], `${(event.frame / clip.fps).toFixed(2)} s`, verdict(event, many), verdict(event, few)]), [1]);
  const budgets = Array.from({ length: 16 }, (_, i) => i + 1);
  fill("countsHead", state.lossy);
  fill("counts", ...budgets.map((budget) => element("tr", { class: budget === state.budget && "now" },
    ...[budget, shown(exact(budget)), shown(lossy(budget))].map((number) => element("td", { class: "n" }, `${number}`)))));
});
