// labkit.engine.prefix_cache.radix_tree.RadixPrefixCache with blocks of one token, of which only the number counts.
function newTree(blocks) {
  const root = { tokens: [], children: new Map(), locks: 0, released: 0, parent: null };
  return { root, free: blocks, evictable: 0, evicted: 0, releases: 0, running: new Map() };
}

function commonLength(a, b) {
  const at = a.findIndex((token, i) => token !== b[i]);
  return at < 0 ? a.length : at;
}

// The nodes below a node that match tokens, each with the number of tokens that match.
function matchingNodes(node, tokens) {
  const path = [];
  for (let at = 0; at < tokens.length;) {
    const child = node.children.get(tokens[at]);
    if (!child) break;
    const common = commonLength(child.tokens, tokens.slice(at));
    path.push([child, common]);
    if (common < child.tokens.length) break;
    at += common;
    node = child;
  }
  return path;
}

function lockNode(tree, node, common) {
  if (common < node.tokens.length) {
    const upper = { tokens: node.tokens.slice(0, common), children: new Map([[node.tokens[common], node]]), locks: node.locks, released: 0, uses: node.uses, parent: node.parent };
    node.parent.children.set(node.tokens[0], upper);
    node.parent = upper;
    node.tokens = node.tokens.slice(common);
    node = upper;
  }
  if (!node.locks) tree.evictable -= node.tokens.length;
  node.locks += 1;
  node.uses += 1;
  return node;
}

function nodesOf(tree) {
  const below = (node, depth) => [...node.children.values()].flatMap((child) => [[child, depth], ...below(child, depth + 1)]);
  return below(tree.root, 0);
}

function evict(tree, count) {
  for (tree.evicted += count; count > 0;) {
    const idle = nodesOf(tree).map(([node]) => node).filter((node) => !node.locks);
    const node = idle.reduce((first, other) => (other.released < first.released ? other : first));
    const cut = Math.min(count, node.tokens.length);
    if (cut === node.tokens.length) node.parent.children.delete(node.tokens[0]);
    else node.tokens.splice(-cut);
    tree.evictable -= cut;
    tree.free += cut;
    count -= cut;
  }
}

// A request's tokens enter the tree below the request's end. Of tokens that are there already, its own blocks are freed.
function insertTokens(tree, request, tokens) {
  let end = request.end, depth = 0;
  for (let node = end; node.parent; node = node.parent) depth += node.tokens.length;
  for (const [node, common] of matchingNodes(end, tokens.slice(depth))) {
    end = lockNode(tree, node, common);
    depth += common;
    tree.free += common;
  }
  const rest = tokens.slice(depth);
  if (rest.length && end.parent && !end.children.size && end.uses === 1) end.tokens.push(...rest);
  else if (rest.length) {
    const leaf = { tokens: rest, children: new Map(), locks: 1, uses: 1, released: 0, parent: end };
    end.children.set(rest[0], leaf);
    end = leaf;
  }
  Object.assign(request, { end, tokens });
}

function endRequest(tree, name) {
  for (let node = tree.running.get(name).end; node.parent; node = node.parent) {
    node.locks -= 1;
    if (node.locks) continue;
    tree.evictable += node.tokens.length;
    tree.releases += 1;
    node.released = tree.releases;
  }
  tree.running.delete(name);
}

// docs.generators.widgets.radix_tree.play: the tree after each event.
function play(blocks, events, prompts) {
  const tree = newTree(blocks);
  return [...events].map((event) => {
    const name = event.toUpperCase(), request = tree.running.get(name), before = tree.evicted;
    const moment = { event, found: 0, computed: 0, evicted: 0, missing: 0 };
    if (event !== name && request) endRequest(tree, name);
    if (event === name) {
      const tokens = request ? [...request.tokens, `${name.toLowerCase()}${request.tokens.length - prompts[name].length + 1}`] : prompts[name];
      const path = request ? [] : matchingNodes(tree.root, tokens.slice(0, -1));
      const found = path.reduce((sum, [, common]) => sum + common, 0);
      const kept = path.reduce((sum, [node, common]) => sum + (node.locks ? 0 : common), 0);
      const computed = request ? 1 : tokens.length - found;
      moment.missing = Math.max(0, computed - (tree.free + tree.evictable - kept));
      if (!moment.missing) {
        const mine = request || { end: path.reduce((_, [node, common]) => lockNode(tree, node, common), tree.root) };
        tree.running.set(name, mine);
        evict(tree, Math.max(0, computed - tree.free));
        tree.free -= computed;
        insertTokens(tree, mine, tokens);
        Object.assign(moment, { found, computed });
      }
    }
    moment.evicted = tree.evicted - before;
    return { ...moment, nodes: nodesOf(tree).map(([node, depth]) => [depth, [...node.tokens], node.locks]), free: tree.free, evictable: tree.evictable };
  });
}
