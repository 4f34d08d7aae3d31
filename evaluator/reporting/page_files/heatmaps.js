// Heat maps over the pictures of mistakes: where the model sees its answer, and where the true class.

const STEPS = 254; // a byte of a map is this many times the score, or UNSEEN where no view looked
const UNSEEN = 255;
const WHITE = [255, 255, 255];
const MAP_PIXELS = 240; // longer side of a drawn map; its few points are interpolated

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

/** Add two buttons to a figure that show its maps over its picture, or alone if it has none. */
function addHeatMaps(figure, [height, width, columns, ...maps]) {
  if (!figure.querySelector(".picture")) figure.prepend(make("div.picture"));
  const picture = figure.querySelector(".picture");
  const scale = MAP_PIXELS / Math.max(height, width);
  const size = { width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) };
  const canvas = make("canvas", { ...size, role: "img", "aria-label": "Heat map" });
  const peak = make("span.peak");
  const buttons = ["answer", "true class"].map((label, n) => {
    const bytes = Uint8Array.from(atob(maps[n]), (character) => character.charCodeAt(0));
    const highest = bytes.reduce((most, byte) => (byte === UNSEEN ? most : Math.max(most, byte)), 0);
    const button = make("button", { type: "button", "aria-pressed": false, title: `Heat map of the ${label}` }, label);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "false";
      for (const other of buttons) other.setAttribute("aria-pressed", shown && other === button);
      picture.classList.toggle("mapped", shown);
      if (shown) drawHeatMap(canvas, bytes, columns);
      canvas.setAttribute("aria-label", `Heat map of the ${label}`);
      peak.textContent = `peak ${decimal((100 * highest) / STEPS, 0)} %`;
    });
    return button;
  });
  picture.append(canvas, peak);
  picture.after(make("div.maps", { role: "group", "aria-label": "Heat map" }, buttons));
  if (!picture.querySelector("img")) buttons[0].click();
}

function heatMapLegend() {
  const colors = data.inferno.map((color) => `rgb(${color.join(" ")})`).join(", ");
  return make("p.about.map-legend", null,
    "Heat maps: the score of the answer or of the true class in the windows around each point, mean over the views; “peak” is the highest. ",
    make("span.whole", null, "0 ", make("i", { style: `background:linear-gradient(to right, ${colors})`, "aria-hidden": true }), " 100 %"));
}

/** Add the maps to the gallery of mistakes. */
function startHeatMaps() {
  const figures = document.querySelectorAll("#mistakes .gallery figure");
  for (const [key, n] of Object.entries(data.large)) {
    if (data.heatmaps[key]) addHeatMaps(figures[n], data.heatmaps[key]);
  }
  if (Object.keys(data.heatmaps).length) document.querySelector("#mistakes .gallery").before(heatMapLegend());
}
