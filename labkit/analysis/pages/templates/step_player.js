(() => {
  const root = document.currentScript.closest(".step-player");
  const runs = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const find = (selector) => root.querySelector(selector);
  const slider = find("input[type=range]"), play = find("[data-move=play]"), select = find("select");
  const KEYFRAME = 50, LANE = 26;
  const PARTS = ["schedule", "draft", "build", "plan", "forward", "sample", "update"];
  const count = (number) => number.toLocaleString("en-US");
  const owner = (request) => `o${request % 8}`;
  let run, states, columns, timer = null;

  function element(tag, attributes, ...children) {
    const svg = /^(rect|path|title)$/.test(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // The block tables and slots during a step: replayed from the nearest state that is stored.
  function stateAt(number) {
    const from = Math.floor(number / KEYFRAME);
    while (states.length <= from) states.push(advance(states.at(-1), (states.length - 1) * KEYFRAME, states.length * KEYFRAME));
    return advance(states[from], from * KEYFRAME, number + 1);
  }

  function advance(state, first, end) {
    const tables = new Map(state);
    for (const step of run.steps.slice(first, end)) {
      for (const request of step.released) tables.delete(request);
      for (const [request, same, ids] of step.blocks) tables.set(request, [...(tables.get(request) ?? []).slice(0, same), ...ids]);
    }
    return tables;
  }

  const tokensOf = (step, prefill) => step.chunks.reduce((sum, chunk) => sum + (chunk[3] === prefill ? chunk[2] : 0), 0);
  const draftsOf = (step) => step.drafts.reduce((sum, draft) => sum + draft[1], 0);

  // A lane for each kind of token, to its own maximum: decodes would not be seen beside prefills.
  function drawOverview() {
    const svg = find(".overview"), steps = run.steps;
    const kinds = { prefill: (step) => tokensOf(step, 1), decode: (step) => tokensOf(step, 0) + draftsOf(step), padding: (step) => step.padding };
    const lanes = Object.entries(kinds).map(([kind, value]) => [kind, steps.map(value)]).map(([kind, values]) => [kind, values, Math.max(...values)]).filter(([, , top]) => top);
    const height = LANE * lanes.length;
    svg.setAttribute("viewBox", `0 0 ${steps.length} ${height}`);
    svg.style.height = `${height}px`;
    const bars = lanes.map(([kind, values, top], lane) => element("path", { class: kind, d: values.map((value, i) => (value ? `M${i} ${LANE * (lane + 1)}h1v${(-(LANE - 3) * value) / top}h-1z` : "")).join("") }));
    svg.replaceChildren(element("rect", { class: "free", width: steps.length, height }), ...bars, element("rect", { class: "cursor", y: 0, height }));
    const text = `Tokens of all steps, each row to its own maximum: ${lanes.map(([kind, , top]) => `${kind} ${count(top)}`).join(", ")}`;
    svg.setAttribute("aria-label", text);
    find(".overview-caption").textContent = text;
  }

  function drawBatch(step) {
    const names = run.requests, drafts = new Map(step.drafts.map(([request, drafted]) => [request, drafted]));
    const total = tokensOf(step, 0) + tokensOf(step, 1) + draftsOf(step) + step.padding;
    const bars = step.chunks.map(([request, , tokens]) => {
      const width = tokens + (drafts.get(request) ?? 0);
      return element("span", { class: owner(request), style: `flex: ${width} 1 0`, title: `${names[request].id}: ${width}` }, width > total / 14 ? names[request].id : "");
    });
    if (step.padding) bars.push(element("span", { class: "padding", style: `flex: ${step.padding} 1 0`, title: `padding: ${step.padding}` }));
    const batch = find(".batch");
    batch.replaceChildren(...bars);
    batch.setAttribute("aria-label", `${count(tokensOf(step, 1))} prefill and ${count(tokensOf(step, 0))} decode tokens of ${step.chunks.length} requests, ${count(step.padding)} of padding`);
  }

  // Drafting is a part of scheduling.
  function partsOf(step) {
    const duration = (part) => step.times_us[part]?.[1] ?? 0;
    return PARTS.map((part) => [part, part === "schedule" ? Math.max(0, duration("schedule") - duration("draft")) : duration(part)]);
  }

  function drawTimes(step) {
    const parts = partsOf(step), total = parts.reduce((sum, [, us]) => sum + us, 0);
    find(".times").replaceChildren(...parts.map(([part, us], i) => element("span", { class: owner(i), style: `flex: ${us} 1 0`, title: `${part}: ${us} µs` })));
    find(".times").setAttribute("aria-label", `${count(Math.round(total))} microseconds`);
    find(".parts").replaceChildren(...parts.map(([part, us], i) => element("span", {}, element("i", { class: owner(i) }), `${part} ${count(Math.round(us))} µs`)));
  }

  // Blocks as cells, in rows; neighbours of one owner are one rectangle.
  function drawBlocks(tables, step) {
    const svg = find(".blocks"), caption = find(".memory figcaption");
    if (run.num_blocks === null) return drawSlots(svg, caption, step);
    const owners = new Map();
    for (const [request, blocks] of tables) for (const block of blocks) owners.set(block, owners.has(block) ? -1 : request);
    const cells = run.cells, rows = Math.ceil(cells / columns), marks = [];
    for (let block = 1; block <= cells; block += 1) {
      const who = owners.get(block), x = (block - 1) % columns, last = marks.at(-1);
      if (who === undefined) continue;
      if (last && x && last.who === who && last.block + last.width === block) last.width += 1;
      else marks.push({ who, block, width: 1 });
    }
    const rects = marks.map(({ who, block, width }) => element("rect", { class: who < 0 ? "shared" : owner(who), x: (block - 1) % columns, y: Math.floor((block - 1) / columns), width, height: 1 },
      element("title", {}, `${who < 0 ? "shared by requests" : run.requests[who].id}: block ${block}${width > 1 ? ` to ${block + width - 1}` : ""}`)));
    const lines = `${Array.from({ length: columns + 1 }, (_, x) => `M${x} 0v${rows}`).join("")}${Array.from({ length: rows + 1 }, (_, y) => `M0 ${y}h${columns}`).join("")}`;
    svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    svg.replaceChildren(element("rect", { class: "free", width: columns, height: rows }), ...rects, element("path", { class: "grid", d: lines }));
    const text = `KV blocks by owner: ${count(owners.size)} held, ${count(step.evictable_blocks)} cached and evictable, ${count(step.free_blocks)} free`;
    caption.textContent = `${text}${cells < run.num_blocks - 1 ? `; the first ${count(cells)} of ${count(run.num_blocks - 1)} blocks, as the others are never held` : ""}`;
    if (marks.some(({ who }) => who < 0)) caption.append(element("span", { class: "keys" }, element("span", {}, element("i", { class: "shared" }), "shared by several requests")));
    svg.setAttribute("aria-label", text);
  }

  // Without blocks: a bar for each request, as long as the tokens for which it has memory.
  function drawSlots(svg, caption, step) {
    const top = Math.max(1, ...run.steps.flatMap((one) => one.slots.map(([, slots]) => slots)));
    const used = new Map(step.chunks.map(([request, first, tokens]) => [request, first + tokens]));
    svg.setAttribute("viewBox", `0 0 100 ${Math.max(1, step.slots.length) * 3}`);
    svg.replaceChildren(...step.slots.flatMap(([request, slots], i) => [
      element("rect", { class: "padding", x: 0, y: i * 3, width: (100 * slots) / top, height: 2.4 }),
      element("rect", { class: owner(request), x: 0, y: i * 3, width: (100 * (used.get(request) ?? 0)) / top, height: 2.4 }, element("title", {}, run.requests[request].id))]));
    caption.textContent = `KV memory of each request: tokens computed, and tokens for which memory is held (at most ${count(top)})`;
    svg.setAttribute("aria-label", caption.textContent);
  }

  function drawTable(tables, step, number) {
    const chunks = new Map(step.chunks.map((chunk) => [chunk[0], chunk])), drafts = new Map(step.drafts.map((draft) => [draft[0], draft]));
    const slots = new Map(step.slots), before = number ? stateAt(number - 1) : new Map();
    const requests = [...new Set([...chunks.keys(), ...tables.keys(), ...step.preempted, ...step.lingering])].sort((a, b) => a - b);
    find("tbody").replaceChildren(...requests.map((request) => {
      const chunk = chunks.get(request), draft = drafts.get(request);
      const held = run.num_blocks === null ? (slots.has(request) ? `${count(slots.get(request))} tokens` : "") : `${count((tables.get(request) ?? []).length)} blocks`;
      const hit = run.num_blocks !== null && chunk && chunk[1] > 0 && chunk[3] && !before.has(request);
      const events = [step.preempted.includes(request) && "preempted", step.lingering.includes(request) && "ended, row still computed", hit && `${count(chunk[1])} tokens from the cache`].filter(Boolean);
      return element("tr", {}, element("td", {}, element("span", { class: owner(request) }, run.requests[request].id)),
        element("td", {}, chunk ? (chunk[3] ? `prefill, tokens ${chunk[1]} to ${chunk[1] + chunk[2] - 1}${chunk[4] ? ", samples" : ""}` : `decode, token ${chunk[1]}`) : "nothing"),
        element("td", { class: "n" }, chunk ? count(chunk[2]) : ""), element("td", { class: "n" }, draft ? `${draft[2]} of ${draft[1]}` : ""),
        element("td", { class: "n" }, held), element("td", { class: "event" }, events.join(", ")));
    }));
  }

  function draw() {
    const number = Number(slider.value), step = run.steps[number];
    const tables = stateAt(number), accepted = step.drafts.reduce((sum, draft) => sum + draft[2], 0), drafted = draftsOf(step);
    find("output").textContent = `${number + 1} of ${run.steps.length}`;
    find(".moment").textContent = `Step ${number + 1}: ${count(tokensOf(step, 1))} prefill and ${count(tokensOf(step, 0))} decode tokens of ${step.chunks.length} requests, ${count(step.waiting)} waiting` +
      `${drafted ? `, ${accepted} of ${drafted} drafts accepted` : ""}${step.padding ? `, ${count(step.padding)} tokens of padding` : ""}${step.preempted.length ? `, ${step.preempted.length} preempted` : ""}.`;
    find(".overview .cursor").setAttribute("x", number);
    find(".overview .cursor").setAttribute("width", Math.max(1, run.steps.length / 300));
    drawBatch(step);
    drawTimes(step);
    drawBlocks(tables, step);
    drawTable(tables, step, number);
    const more = run.steps.length < run.steps_total ? ` The run has ${count(run.steps_total)} steps, of which the first ${count(run.steps.length)} are here.` : "";
    find(".prefix").textContent = `cu_seqlens_q: ${step.cu_seqlens_q.join(", ")}.${more}`;
  }

  function choose() {
    run = runs[Number(select.value)];
    states = [new Map()];
    run.cells ??= Math.min((run.num_blocks ?? 1) - 1, Math.max(0, ...run.steps.flatMap((step) => step.blocks.flatMap(([, , ids]) => ids))));
    slider.max = run.steps.length - 1;
    slider.value = 0;
    drawOverview();
    draw();
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  }

  function move(to) {
    slider.value = to;
    draw();
    if (timer && Number(slider.value) === Number(slider.max)) pause();
  }

  const moves = {
    first: () => 0, last: () => slider.max, next: () => Number(slider.value) + 1, previous: () => Number(slider.value) - 1,
  };
  for (const button of root.querySelectorAll("[data-move]")) {
    if (button === play) continue;
    button.addEventListener("click", () => { pause(); move(moves[button.dataset.move]()); });
  }
  play.addEventListener("click", () => {
    if (timer) return pause();
    if (Number(slider.value) === Number(slider.max)) move(0);
    timer = setInterval(() => move(moves.next()), 200);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
  });
  find(".overview").addEventListener("click", (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    pause();
    move(Math.floor(((event.clientX - box.left) / box.width) * run.steps.length));
  });
  slider.addEventListener("input", () => { pause(); draw(); });
  select.addEventListener("change", () => { pause(); choose(); });
  // Cells of a size that a finger or an eye can tell apart.
  new ResizeObserver(() => {
    const fitting = root.clientWidth < 600 ? 32 : 64;
    if (fitting === columns) return;
    columns = fitting;
    draw();
  }).observe(root);
  columns = root.clientWidth < 600 ? 32 : 64;
  find(".controls").hidden = false;
  choose();
})();
