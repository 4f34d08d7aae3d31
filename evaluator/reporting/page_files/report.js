// Draws the charts and starts the heat maps, the table and the class view. Without JavaScript the page shows everything else.

const STRIP = 4; // pictures beside a class of the worst

drawCharts();
startHeatMaps();
for (const cell of document.querySelectorAll(".strip")) {
  const mistakes = imagesOf(Number(cell.dataset.class)).filter((image) => image.rank > 1 && image.picture);
  cell.append(...mistakes.slice(0, STRIP).map(({ picture, labels: [label], top: [[answer]] }) =>
    make("a", { href: `#pair-${label}-${answer}` }, make("img", { src: picture, alt: `answered ${classes[answer].name}`, title: `answered ${classes[answer].name}` }))));
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

addCopyButton();
addCsvButtons();
startPairs();
startClassView(startReportTable());
