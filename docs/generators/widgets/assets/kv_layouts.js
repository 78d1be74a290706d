const LAYOUTS = ["padded", "contiguous", "paged"];
const WIDTH = 960, ROW = 22;

// The parts of each row, in tokens: [first, length, class], and where one row ends.
function rowsOf(kv, lengths) {
  if (kv.layout === "padded") {
    const longest = Math.max(...lengths), end = roundUpToStep(longest, data.step);
    return lengths.map((length, i) => [[0, longest - length, "waste"], [longest - length, length, `owner${i}`], [longest, end - longest, "waste"]]);
  }
  if (kv.layout === "contiguous") {
    return lengths.map((length, i) => [[0, length, `owner${i}`], [length, slotsFor(kv, [length], data.step) - length, "waste"]]);
  }
  if (kv.layout === "packed") return [lengths.map((length, i) => [cuSeqlens(lengths)[i], length, `owner${i}`])];
  let at = 0;
  return [lengths.flatMap((length, i) => {
    const start = at;
    at += slotsFor(kv, [length], data.step);
    return [[start, length, `owner${i}`], [start + length, at - start - length, "waste"]];
  })];
}

// The boundaries of the packed tokens: as many entries as requests, and one more.
function cuSeqlens(lengths) {
  return lengths.reduce((ends, length) => [...ends, ends.at(-1) + length], [0]);
}

function picture(kv, lengths, extent) {
  const rows = rowsOf(kv, lengths), scale = WIDTH / extent;
  const parts = rows.flatMap((row, y) => row.filter(([, length]) => length > 0).map(([start, length, kind]) =>
    element("rect", { class: kind, x: start * scale, y: y * (ROW + 2), width: Math.max(length * scale, kind === "waste" ? 0 : 1.5), height: ROW })));
  const outlines = rows.map((row, y) => element("rect", { x: 0, y: y * (ROW + 2), width: row.at(-1)[0] * scale + row.at(-1)[1] * scale, height: ROW, fill: "none", style: "stroke: var(--edge)" }));
  const tokens = count(slotsFor(kv, lengths, data.step));
  const names = { packed: `Packed: ${count(cuSeqlens(lengths).at(-1))} tokens, cu_seqlens = [${cuSeqlens(lengths).join(", ")}]`, padded: `Padded: one rectangle of ${tokens} tokens`, contiguous: `Contiguous: three arrays of ${tokens} tokens together`, paged: `Paged: blocks in any place of the pool, of ${tokens} tokens together` };
  return element("figure", {}, element("figcaption", {}, names[kv.layout]),
    element("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * (ROW + 2)}`, preserveAspectRatio: "none", style: `height: ${rows.length * (ROW + 2)}px`, role: "img", "aria-label": names[kv.layout] }, ...parts, ...outlines));
}

const redraw = connect((state) => {
  for (const number of document.querySelectorAll("[data-mirrors]")) {
    if (number !== document.activeElement) number.value = state[number.dataset.mirrors];
  }
  const lengths = [1, 2, 3].map((i) => state[`length${i}`]);
  const tokenBytes = data.token_bytes[state.model], used = lengths.reduce((a, b) => a + b);
  const layouts = LAYOUTS.map((layout) => ({ layout, block_size: Number(state.block), growth_step: data.growth_step, set_aside: null }));
  const extent = Math.max(...layouts.flatMap((kv) => rowsOf(kv, lengths).map((row) => row.at(-1)[0] + row.at(-1)[1])));
  const held = layouts.map((kv) => slotsFor(kv, lengths, data.step));
  const bytes = (tokens) => formatBytes(tokens * tokenBytes, data.byte_units);
  fill("pictures", ...[...layouts, { layout: "packed", block_size: 1 }].map((kv) => picture(kv, lengths, extent)));
  const wide = slotsFor(layouts[0], [Math.max(...lengths)], data.step), times = held[0] / used;
  fill("slots", `Padded: 3 rows × ${count(wide)} tokens = ${count(held[0])} slots for ${count(used)} tokens, ${times.toFixed(1)} times as many; paged: ${count(held[2])}. ` +
    (times < 1.1 ? "Requests of about the same length leave little to pad: one long request beside short ones is what costs." : "A longer longest request pads all other rows anew; the packed strip grows by the tokens that are added."));
  tableRows("bytes", layouts.map((kv, i) => [kv.layout, bytes(held[i]), bytes(used), bytes(held[i] - used), percent(1 - used / held[i])]), [1, 2, 3, 4]);
  fill("answer", `Padded holds ${bytes(held[0])} for ${bytes(used)} of keys and values, contiguous ${bytes(held[1])}, paged ${bytes(held[2])}.`);
  fill("note", `${count(used)} tokens of ${bytes(1)} each (${state.model}). Padded and contiguous arrays are enlarged in steps of ${data.step} tokens; a paged request wastes at most one block but one token. ` +
    "While an array is enlarged, the old and the new one exist together, layer by layer; that peak is not shown.");
});

for (const number of document.querySelectorAll("[data-mirrors]")) {
  number.addEventListener("input", (event) => {
    event.stopPropagation();
    if (!number.validity.valid || !number.value) return;
    document.querySelector("form").elements[number.dataset.mirrors].value = number.value;
    redraw();
  });
  number.addEventListener("change", () => { number.blur(); redraw(); });
}
