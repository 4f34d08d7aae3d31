// Draws each chart of the page into the element `#NAME-chart`; a click on a class's point goes to that class.

function drawCharts() {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  for (const [name, spec] of Object.entries(specs)) {
    // ast: expressions are interpreted, so that the content policy need not allow eval.
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "report" } };
    window.vegaEmbed(`#${name}-chart`, spec, options).then(({ view }) => {
      view.addEventListener("click", (_, item) => goToClass(item?.datum));
    });
  }
}

function goToClass(datum) {
  const index = datum?.index ?? datum?.datum?.index; // of a point, or of the area in which a point is the nearest
  if (index !== undefined) location.hash = `class-${index}`;
}
