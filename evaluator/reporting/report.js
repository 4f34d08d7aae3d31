// Draws the charts and starts the table and the class view. Without scripts the page shows everything but these.

const specs = JSON.parse(document.getElementById("report-charts").textContent);
for (const [name, spec] of Object.entries(specs)) {
  // ast: expressions are interpreted, so that the content policy need not allow eval.
  const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "report" } };
  window.vegaEmbed(`#${name}-chart`, spec, options).then(({ view }) => {
    if (name === "error") view.addEventListener("click", (_, item) => openClass(item?.datum));
  });
}

function openClass(datum) {
  const index = datum?.index ?? datum?.datum?.index; // of a point, or of the area in which a point is the nearest
  if (index !== undefined) location.hash = `class-${index}`;
}

const allViews = document.getElementById("all-views");
if (allViews) {
  const table = document.querySelector("table.views");
  table.classList.add("folded");
  allViews.hidden = false;
  allViews.addEventListener("click", () => {
    table.classList.remove("folded");
    allViews.remove();
  });
}

startClassView(startTable());
