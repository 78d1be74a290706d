// docs.generators.widgets.batching.serve: labkit.engine.scheduler.scheduler.Scheduler with the options of a
// lane, and the KV manager of its layout. Requests are [prompt, output], in tokens.
function serve(lane, requests, maxNumSeqs, kvTokens, sizes) {
  const memory = MEMORIES[lane](kvTokens, sizes);
  const states = requests.map(([prompt, output], index) => ({ index, prompt, output, known: prompt, computed: 0, reserved: 0 }));
  const scheduler = { waiting: [...states], running: [], memory, maxNumSeqs, sizes, isStatic: lane === "static", optimistic: lane === "paged" };
  const steps = [];
  while (scheduler.waiting.length + scheduler.running.length) steps.push(runStep(scheduler));
  return steps;
}

function runStep(scheduler) {
  const step = schedule(scheduler), { memory, running } = scheduler;
  const chunks = [...step.decodes, ...step.prefills], total = step.tokens;
  const padding = memory.prepare(chunks, running);
  const scheduled = new Set(chunks.map((chunk) => chunk.state));
  const result = {
    computed: Object.fromEntries(chunks.map(({ state, start, length }) => [state.index, start < Math.max(state.prompt, state.known - 1) ? -length : length])),
    idle: running.filter((state) => !scheduled.has(state)).map((state) => state.index),
    finished: memory.lingering(),
    preempted: step.preempted,
    padding,
    held: memory.held(),
    used: running.reduce((sum, state) => sum + state.computed, 0) + total,
  };
  for (const { state, start, length } of chunks) {
    state.computed = start + length;
    if (state.computed === state.known) state.known += 1;
    if (state.known - state.prompt >= state.output) {
      running.splice(running.indexOf(state), 1);
      memory.release(state, running);
    }
  }
  return result;
}

// Scheduler.schedule: decodes, then prompts; a static batch computes only prompts while it has any.
function schedule(scheduler) {
  const isPrefill = (state) => state.computed < Math.max(state.prompt, state.known - 1);
  const running = [...scheduler.running];
  const step = { tokens: 0, decodes: [], prefills: [], preempted: [] };
  const decodes = () => running.filter((state) => !isPrefill(state)).forEach((state) => scheduleChunk(scheduler, step, step.decodes, state));
  const prefills = () => {
    running.filter(isPrefill).forEach((state) => scheduleChunk(scheduler, step, step.prefills, state));
    while (scheduler.isStatic ? running.length === 0 : step.tokens < scheduler.sizes.token_budget) {
      const admitted = admitFirst(scheduler);
      if (!admitted) break;
      scheduleChunk(scheduler, step, step.prefills, admitted);
    }
  };
  if (!scheduler.isStatic) decodes();
  prefills();
  if (scheduler.isStatic && !step.prefills.length) decodes();
  return step;
}

function scheduleChunk(scheduler, step, chunks, state) {
  if (!scheduler.running.includes(state)) return;
  const length = Math.min(state.known - state.computed, scheduler.sizes.token_budget - step.tokens), stop = state.computed + length;
  if (length <= 0) return;
  if (stop > state.reserved) {
    while (!scheduler.memory.grow(state, stop)) {
      const victim = scheduler.running.reduce((last, other) => (other.index > last.index ? other : last));
      preempt(scheduler, step, victim);
      if (victim === state) return;
    }
    state.reserved = stop;
  }
  chunks.push({ state, start: state.computed, length });
  step.tokens += length;
}

function preempt(scheduler, step, victim) {
  scheduler.running.splice(scheduler.running.indexOf(victim), 1);
  scheduler.memory.release(victim, scheduler.running);
  victim.computed = 0;
  scheduler.waiting.push(victim);
  scheduler.waiting.sort((a, b) => a.index - b.index);
  for (const phase of ["decodes", "prefills"]) {
    step.tokens -= step[phase].reduce((sum, chunk) => sum + (chunk.state === victim ? chunk.length : 0), 0);
    step[phase].splice(0, Infinity, ...step[phase].filter((chunk) => chunk.state !== victim));
  }
  step.preempted.push(victim.index);
}

function admitFirst(scheduler) {
  const state = scheduler.waiting[0], { running, memory, sizes } = scheduler;
  if (!state || running.length >= scheduler.maxNumSeqs) return null;
  const tokens = scheduler.optimistic ? state.known : state.prompt + state.output - 1;
  if (!memory.reserve(state, tokens, scheduler.optimistic && running.length ? sizes.watermark : 0)) return null;
  scheduler.waiting.shift();
  state.reserved = tokens;
  running.push(state);
  return state;
}

const MEMORIES = {
  // kv_layout.padded: rows of one rectangle, which stay until the whole batch has ended
  static: (kvTokens, { growth_step }) => {
    const round = (tokens) => Math.ceil(tokens / growth_step) * growth_step;
    let rows = [], capacity = 0;
    return {
      reserve(state, tokens) {
        const all = [...rows, { prompt: state.known, output: tokens - state.known }];
        const columns = Math.max(...all.map((row) => row.prompt)) + Math.max(...all.map((row) => row.output));
        if (all.length * round(columns) > kvTokens) return false;
        rows.push({ state, live: true, ...all.at(-1) });
        return true;
      },
      grow: () => true,
      prepare(chunks, running) {
        const longest = Math.max(...rows.map((row) => row.prompt)), width = Math.max(...chunks.map((chunk) => chunk.length));
        const columns = chunks.map(({ state, start, length }) => longest - state.prompt + start + length);
        if (!capacity) capacity = round(longest);
        if (Math.max(...columns) > capacity) capacity = round(Math.max(...columns));
        const computed = chunks.length + rows.filter((row) => !row.live).length;
        return computed * width - chunks.reduce((sum, chunk) => sum + chunk.length, 0);
      },
      release(state, running) {
        rows.find((row) => row.state === state).live = false;
        if (!running.length) [rows, capacity] = [[], 0];
      },
      held: () => rows.length * capacity,
      lingering: () => rows.filter((row) => !row.live).map((row) => row.state.index).sort((a, b) => a - b),
    };
  },
  // kv_layout.contiguous: a promise for the whole request, an array that grows to it
  continuous: (kvTokens, { growth_step }) => {
    const round = (tokens) => Math.ceil(tokens / growth_step) * growth_step;
    const promised = new Map(), capacity = new Map();
    const sum = (map) => [...map.values()].reduce((a, b) => a + b, 0);
    return {
      reserve(state, tokens) {
        if (sum(promised) + round(tokens) > kvTokens) return false;
        promised.set(state, round(tokens));
        return true;
      },
      grow: () => true,
      prepare(chunks) {
        for (const { state, start, length } of chunks) capacity.set(state, Math.max(capacity.get(state) ?? 0, round(start + length)));
        return 0;
      },
      release(state) {
        promised.delete(state);
        capacity.delete(state);
      },
      held: () => sum(capacity),
      lingering: () => [],
    };
  },
  // kv_layout.paged: blocks of a pool
  paged: (kvTokens, { block_size }) => {
    const total = Math.floor(kvTokens / block_size), blocks = new Map();
    const free = () => total - [...blocks.values()].reduce((a, b) => a + b, 0);
    const needed = (tokens) => Math.ceil(tokens / block_size);
    return {
      reserve(state, tokens, spare) {
        if (needed(tokens) + Math.ceil(spare * total) > free()) return false;
        blocks.set(state, needed(tokens));
        return true;
      },
      grow(state, tokens) {
        if (needed(tokens) - blocks.get(state) > free()) return false;
        blocks.set(state, Math.max(needed(tokens), blocks.get(state)));
        return true;
      },
      prepare: () => 0,
      release: (state) => blocks.delete(state),
      held: () => (total - free()) * block_size,
      lingering: () => [],
    };
  },
};
