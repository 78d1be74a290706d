// docs.generators.binary_search_steps.prefix_sums
function prefixSums(lengths) {
  const sums = [0];
  for (const length of lengths) sums.push(sums[sums.length - 1] + length);
  return sums;
}

// docs.generators.binary_search_steps.qblock_keys
function qblockKeys(prefix, rows) {
  return prefix.map((start, index) => Math.floor(start / rows) + index);
}

// docs.generators.binary_search_steps.search, which BinarySearchResolver compiles into the kernels
function search(keys, unit) {
  let low = 0, high = keys.length - 1;
  const steps = [];
  while (low < high) {
    const middle = Math.floor((low + high + 1) / 2);
    const right = keys[middle] <= unit;
    steps.push({ low, high, middle, value: keys[middle], right });
    if (right) low = middle;
    else high = middle - 1;
  }
  return { unit, steps, owner: low };
}

// docs.generators.binary_search_steps.qblock_rows
function qblockRows(found, lengths, keys, rows) {
  const first = (found.unit - keys[found.owner]) * rows;
  if (found.owner >= lengths.length || first >= lengths[found.owner]) return null;
  return [first, Math.min(first + rows, lengths[found.owner])];
}

// docs.generators.binary_search_steps.max_steps
function maxSteps(requests) {
  return Math.ceil(Math.log2(requests + 1));
}
