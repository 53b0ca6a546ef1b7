// Gives a list of what is wrong with the page that is open: it scrolls sideways, text has too little contrast, a link leads nowhere.
(async () => {
  await new Promise((resolve) => setTimeout(resolve, 150));
  const faults = [];
  const root = document.scrollingElement;
  if (root.scrollWidth > window.innerWidth) {
    const wide = [...document.querySelectorAll("main *, article *")].filter((node) => {
      const box = node.getBoundingClientRect();
      if (box.right <= window.innerWidth + 1 || box.width === 0) return false;
      for (let up = node.parentElement; up; up = up.parentElement) {
        if (up !== root && up !== document.body && getComputedStyle(up).overflowX !== "visible") return false;
      }
      return true;
    });
    const names = wide.slice(0, 3).map((node) => `${node.tagName.toLowerCase()}.${node.className}`);
    faults.push(`scrolls sideways: ${root.scrollWidth} px, by ${names.join(", ")}`);
  }

  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let up = node; up; up = up.parentElement) {
      const color = rgba(getComputedStyle(up).backgroundColor);
      layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0, 1] : [255, 255, 255, 1]);
  };
  const drawnBehind = (node, box) => {
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    const shapes = [...node.ownerSVGElement.querySelectorAll("rect, path, polygon, circle")].filter((shape) => {
      const area = shape.getBoundingClientRect();
      const isBefore = shape.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING;
      return isBefore && area.left <= x && x <= area.right && area.top <= y && y <= area.bottom && getComputedStyle(shape).fill !== "none";
    });
    return shapes.reduce((below, shape) => over(rgba(getComputedStyle(shape).fill), below), behind(node));
  };
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(node) || node.closest("script, style, noscript, [disabled], .visually-hidden")) continue;
    seen.add(node);
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    if (!node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || box.width < 2 || box.height < 2) continue;
    let alpha = 1;
    for (let up = node; up; up = up.parentElement) alpha *= Number(getComputedStyle(up).opacity);
    const ground = node instanceof SVGElement ? drawnBehind(node, box) : behind(node);
    const ink = rgba(node instanceof SVGElement ? style.fill : style.color);
    const text = over([ink[0], ink[1], ink[2], ink[3] * alpha], ground);
    const [high, low] = [light(text), light(ground)].sort((one, other) => other - one);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) {
      const words = walker.currentNode.data.trim().slice(0, 30);
      faults.push(`contrast ${ratio.toFixed(2)}: "${words}" (${node.tagName.toLowerCase()}.${String(node.getAttribute("class"))} ${node instanceof SVGElement ? style.fill : style.color})`);
    }
  }

  for (const link of document.querySelectorAll('a[href^="#"]')) {
    const name = decodeURIComponent(link.getAttribute("href").slice(1));
    if (name && !document.getElementById(name)) faults.push(`a link leads nowhere: #${name}`);
  }
  return faults;
})();
