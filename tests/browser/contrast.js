// [number of texts, those whose contrast to what is behind them is below 4.5, or 3 where they are large].
const numbers = (color) => color.match(/[\d.]+/g).map(Number);
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  if (!node) return [255, 255, 255];
  const [r, g, b, alpha = 1] = numbers(getComputedStyle(node).backgroundColor);
  if (alpha === 1) return [r, g, b];
  const below = behind(node.parentElement);
  return [r, g, b].map((value, place) => alpha * value + (1 - alpha) * below[place]);
};
const low = [];
let checked = 0;
for (const node of document.querySelectorAll("body *")) {
  const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data).join("").trim();
  const style = getComputedStyle(node);
  if (!text || !node.checkVisibility() || ["SCRIPT", "OPTION"].includes(node.tagName)) continue;
  checked += 1;
  const [one, two] = [luminance(numbers(style.color).slice(0, 3)), luminance(behind(node))];
  const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  if (contrast < (large ? 3 : 4.5)) low.push(`${text.slice(0, 40)}: ${contrast.toFixed(2)}`);
}
return [checked, low];
