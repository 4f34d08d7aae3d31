// Heat maps: a byte for each point of a grid over the whole picture, in the colors of the page's color map.

const STEPS = 254; // a byte of a map is this many times the score, or UNSEEN where no view looked
const UNSEEN = 255;
const WHITE = [255, 255, 255];
const MAP_PIXELS = 240; // longer side of a drawn map; its few points are interpolated

/** Create a canvas for the maps of a picture of this size. */
function mapCanvas(height, width) {
  const scale = MAP_PIXELS / Math.max(height, width);
  const size = { width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) };
  return make("canvas", { ...size, role: "img", "aria-label": "Heat map" });
}

/** Draw a map onto a canvas of the picture's shape. */
function drawHeatMap(canvas, bytes, columns) {
  const points = document.createElement("canvas");
  [points.width, points.height] = [columns, bytes.length / columns];
  const pixels = points.getContext("2d").createImageData(points.width, points.height);
  bytes.forEach((byte, n) => pixels.data.set([...(byte === UNSEEN ? WHITE : data.inferno[byte]), 255], 4 * n));
  points.getContext("2d").putImageData(pixels, 0, 0);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(points, 0, 0, canvas.width, canvas.height);
}

function peakText(bytes) {
  const highest = bytes.reduce((most, byte) => (byte === UNSEEN ? most : Math.max(most, byte)), 0);
  return `peak ${decimal((100 * highest) / STEPS, 0)} %`;
}

/** Return the scale of the colors as an element. */
function colorScale() {
  const colors = make("i", { "aria-hidden": true });
  colors.style.background = `linear-gradient(to right, ${data.inferno.map((color) => `rgb(${color.join(" ")})`).join(", ")})`;
  return make("span.whole", null, "0 ", colors, " 100 %");
}
