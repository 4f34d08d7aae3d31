// Heat maps: a byte for each point of a grid over the whole picture, in the colors of the page's color map. The colors
// span each map's own scores: on a common scale, a net that is nowhere sure, or always half sure, would paint one color.

const STEPS = 254; // a byte of a map is this many times the score, or UNSEEN where no view looked
const UNSEEN = 255;
const SPAN = 0.1; // of scores, at least: a map with hardly any differences stays dark, or bright near 1
const WHITE = [255, 255, 255];
const MAP_PIXELS = 240; // longer side of a drawn map; its few points are interpolated

/** Create a canvas for the maps of a picture of this size. */
function mapCanvas(height, width) {
  const scale = MAP_PIXELS / Math.max(height, width);
  const size = { width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) };
  return make("canvas", { ...size, role: "img", "aria-label": "Heat map" });
}

/** Return the lowest and the highest score of a map. */
function rangeOf(bytes) {
  const scores = [...bytes].filter((byte) => byte !== UNSEEN).map((byte) => byte / STEPS);
  return scores.length ? [Math.min(...scores), Math.max(...scores)] : [0, 0];
}

/** Draw a map onto a canvas of the picture's shape. */
function drawHeatMap(canvas, bytes, columns) {
  const [low, high] = rangeOf(bytes);
  const span = Math.max(high - low, SPAN);
  const darkest = Math.min(low, 1 - span);
  const colorOf = (byte) => data.inferno[Math.round((STEPS * (byte / STEPS - darkest)) / span)];
  const points = document.createElement("canvas");
  [points.width, points.height] = [columns, bytes.length / columns];
  const pixels = points.getContext("2d").createImageData(points.width, points.height);
  bytes.forEach((byte, n) => pixels.data.set([...(byte === UNSEEN ? WHITE : colorOf(byte)), 255], 4 * n));
  points.getContext("2d").putImageData(pixels, 0, 0);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(points, 0, 0, canvas.width, canvas.height);
}

function rangeText(bytes) {
  const [low, high] = rangeOf(bytes).map((score) => decimal(100 * score, 0));
  return `${low === high ? "" : `${low} – `}${high} %`;
}

/** Return what the colors mean. */
function colorScale() {
  const colors = make("i", { "aria-hidden": true });
  colors.style.background = `linear-gradient(to right, ${data.inferno.map((color) => `rgb(${color.join(" ")})`).join(", ")})`;
  return ["from the map’s lowest ", make("span.whole", null, colors, " to its highest"), ", or ten points more; its corner states both."];
}
