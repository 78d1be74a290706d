const users = Object.keys(data.prompts), form = document.querySelector("form");

function told(moment) {
  const name = moment.event.toUpperCase();
  if (moment.event !== name) return `${name} has ended. What it computed stays cached, and is locked only by others who use it.`;
  if (moment.missing) return `${name} has to wait: ${plural(moment.missing, "block")} more would have to be free or evictable.`;
  const evicted = moment.evicted ? ` ${plural(moment.evicted, "block")} ${moment.evicted === 1 ? "was" : "were"} evicted for it.` : "";
  if (!moment.arrived) return `${name} gets its next token.${evicted}`;
  return `${name} arrives, finds ${plural(moment.found, "token")} and computes ${count(moment.computed)}.${evicted}`;
}

const redraw = connect((state) => {
  const moments = play(state.blocks, state.events, data.prompts), running = new Set();
  for (const moment of moments) {
    const name = moment.event.toUpperCase();
    moment.arrived = moment.event === name && !running.has(name);
    if (moment.event !== name) running.delete(name);
    else if (!moment.missing) running.add(name);
  }
  const now = moments.at(-1) || { nodes: [], free: state.blocks, evictable: 0 };
  for (const name of users) {
    document.querySelector(`[data-user=${name}]`).textContent = running.has(name) ? `${name}: a token` : `${name} arrives`;
    document.querySelector(`[data-ends=${name}]`).disabled = !running.has(name);
  }
  byId("back").disabled = byId("again").disabled = !state.events;
  fill("position", plural(moments.length, "event"));
  fill("answer", moments.length ? told(now) : "The cache is empty.");
  fill("tree", ...now.nodes.map(([depth, tokens, locks]) => element("div", { class: `node ${locks ? "locked" : "idle"}`, style: `margin-left: ${Math.min(depth, 6) * 1.1}rem` },
    element("b", {}, tokens.join(" ")), element("span", {}, locks ? plural(locks, "lock") : "no lock"))));
  const used = state.blocks - now.free - now.evictable;
  const kinds = [["locked", used], ["idle", now.evictable], ["empty", now.free]];
  fill("pool", ...kinds.flatMap(([kind, blocks]) => Array.from({ length: blocks }, () => element("i", { class: kind }))));
  byId("pool").setAttribute("aria-label", `${used} blocks in use, ${now.evictable} evictable, ${now.free} free`);
  fill("note", `${plural(used, "block")} in use, ${count(now.evictable)} evictable, ${count(now.free)} free. Blocks are evicted only if too few are free: ` +
    "from the ends of the nodes without locks, in the order in which their last requests ended. The last token of a prompt is always computed, because the first token of the answer is sampled from it.");
});

function change(events) {
  form.elements.events.value = events;
  redraw();
}

for (const name of users) {
  document.querySelector(`[data-user=${name}]`).addEventListener("click", () => change(form.elements.events.value + name));
  document.querySelector(`[data-ends=${name}]`).addEventListener("click", () => change(form.elements.events.value + name.toLowerCase()));
}
byId("back").addEventListener("click", () => change(form.elements.events.value.slice(0, -1)));
byId("again").addEventListener("click", () => change(""));
