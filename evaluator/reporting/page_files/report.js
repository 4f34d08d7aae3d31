// Draws the charts and starts the heat maps, the table and the class view. Without JavaScript the page shows everything else.

drawCharts();
startHeatMaps();

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

addCopyButton();
addCsvButtons();
startPairs();
startClassView(startReportTable());
