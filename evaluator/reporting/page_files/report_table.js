// Columns and filters of the report's table of all classes.

const COLUMNS = {
  index: (entry) => entry.index,
  name: (entry) => entry.name,
  evaluated: (entry) => entry.evaluated,
  error1: (entry) => entry.error1,
  low1: (entry) => entry.low1,
  error5: (entry) => entry.error5,
  low5: (entry) => entry.low5,
  medianRank: (entry) => entry.medianRank,
  confidence: (entry) => entry.confidence,
  taken: (entry) => data.taken[entry.index][1] ?? null,
};
const FILTERS = [
  ["All", () => true],
  ["With errors", (entry) => entry.wrong1 > 0],
  ["Worse than average", (entry) => entry.evaluated && entry.low1 > runError1],
  ["Better than average", (entry) => entry.evaluated && entry.high1 < runError1],
  ["Without error", (entry) => entry.evaluated && entry.wrong1 === 0],
  ["Refused images", (entry) => entry.refused > 0],
  ["Shared names", (entry) => sharing.has(entry.index)],
];

/** Start the table; a click anywhere in a row opens its class. Return a function that lists the classes shown. */
function startReportTable() {
  const smallestFirst = ["index", "name", "confidence"];
  const [body] = document.querySelector("table.all").tBodies;
  const entries = [...body.rows].map((row) => classes[row.id.replace("class-", "")]);
  const { order } = startTable({ entries, columns: COLUMNS, smallestFirst, filters: FILTERS });
  for (const row of body.rows) row.removeAttribute("id"); // so that #class-7 opens the class without scrolling
  body.addEventListener("click", (event) => {
    const link = event.target.closest("tr")?.querySelector("a");
    if (link && !event.target.closest("a") && getSelection().isCollapsed) link.click();
  });
  document.getElementById("table-about").hidden = false;
  return order;
}
