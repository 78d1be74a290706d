// An expression: what is wrong with the page as it is shown, one line each (see HeadlessBrowser.problems).
(() => {
  const problems = [];
  const about = (element) => `<${element.tagName.toLowerCase()} ${element.id || element.className.baseVal || element.className}>`;
  const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });

  // A computed color as [red, green, blue, alpha] with values of 0 to 1.
  const parse = (text) => {
    const numbers = text.match(/-?[\d.]+(e-?\d+)?/g)?.map(Number) ?? [0, 0, 0, 0];
    const [r, g, b, alpha = 1] = text.startsWith("color(") ? numbers : [...numbers.slice(0, 3).map((x) => x / 255), ...numbers.slice(3)];
    return [r, g, b, alpha];
  };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const luminance = ([r, g, b]) => {
    const linear = [r, g, b].map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const canvas = getComputedStyle(document.documentElement).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches ? [0.07, 0.07, 0.07] : [1, 1, 1];
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(parse(getComputedStyle(e).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [...canvas, 1]);
  };

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || /^(SCRIPT|STYLE|NOSCRIPT|TITLE|OPTION)$/.test(element.tagName) || !shown(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 1 && box.height > 1);
    if (boxes.length) texts.push({ node, element, boxes, text: node.textContent.trim().slice(0, 40) });
  }

  for (const { element, text } of texts) {
    if (element.closest(":disabled, [aria-disabled=true]")) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const behind = background(element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), behind);
    const [low, high] = [luminance(ink), luminance(behind)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) problems.push(`contrast ${ratio.toFixed(2)}: "${text}" in ${about(element)}`);
  }

  const boxes = texts.flatMap(({ node, text, boxes }) => boxes.map((box) => ({ node, text, box }))).sort((a, b) => a.box.top - b.box.top);
  boxes.forEach((one, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].box.top < one.box.bottom - 3; j += 1) {
      const other = boxes[j];
      const width = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const height = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (one.node !== other.node && width > 2 && height > 3) problems.push(`text over text: "${one.text}" and "${other.text}"`);
    }
  });

  // Not innerWidth: a phone zooms out until a wide page fits.
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth > clientWidth) problems.push(`the page is ${scrollWidth} px wide, the window ${clientWidth}`);
  for (const element of document.querySelectorAll(".scroll")) {
    if (shown(element) && element.scrollWidth > element.clientWidth + 1) problems.push(`${about(element)} scrolls sideways`);
  }
  for (const control of document.querySelectorAll("input, select, textarea, button, a[href], [role=radio], [role=img], [role=group], [role=radiogroup]")) {
    const name = control.getAttribute("aria-label") || control.labels?.[0]?.textContent || control.textContent || control.title
      || document.getElementById(control.getAttribute("aria-labelledby"))?.textContent;
    if (!name?.trim()) problems.push(`no name: ${about(control)}`);
  }
  return problems;
})()
