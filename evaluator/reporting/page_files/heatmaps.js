// Heat maps over the pictures of mistakes: where the model sees its answer, and where the true class.

/** Add two buttons to a figure that show its maps over its picture, or alone if it has none. */
function addHeatMaps(figure, [height, width, columns, ...maps]) {
  if (!figure.querySelector(".picture")) figure.prepend(make("div.picture"));
  const picture = figure.querySelector(".picture");
  const canvas = mapCanvas(height, width);
  const range = make("span.range");
  const buttons = ["answer", "true class"].map((label, n) => {
    const bytes = Uint8Array.from(atob(maps[n]), (character) => character.charCodeAt(0));
    const button = make("button", { type: "button", "aria-pressed": false, title: `Heat map of the ${label}` }, label);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "false";
      for (const other of buttons) other.setAttribute("aria-pressed", shown && other === button);
      picture.classList.toggle("mapped", shown);
      if (shown) drawHeatMap(canvas, bytes, columns);
      canvas.setAttribute("aria-label", `Heat map of the ${label}`);
      range.textContent = rangeText(bytes);
    });
    return button;
  });
  picture.append(canvas, range);
  picture.after(make("div.maps", { role: "group", "aria-label": "Heat map" }, buttons));
  if (!picture.querySelector("img")) buttons[0].click();
}

function heatMapLegend() {
  return make("p.about.map-legend", null,
    "Heat maps show the score of the answer, or of the true class, around each point, ", colorScale());
}

/** Add the maps to the gallery of mistakes. */
function startHeatMaps() {
  const figures = document.querySelectorAll("#mistakes .gallery figure");
  for (const [key, n] of Object.entries(data.large)) {
    if (data.heatmaps[key]) addHeatMaps(figures[n], data.heatmaps[key]);
  }
  if (Object.keys(data.heatmaps).length) document.querySelector("#mistakes .gallery").before(heatMapLegend());
}
