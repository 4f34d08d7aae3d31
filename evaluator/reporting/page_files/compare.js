// The comparison's table of all classes and its charts. Without JavaScript the page shows everything but the charts.

const METRICS = ["top1", "top5"];

// In the order of the table rows, as written by compare_page.py.
const compared = JSON.parse(document.getElementById("compare-data").textContent).map(
  ([index, wnid, name, evaluated, ...figures]) => ({
    index, wnid, name, evaluated,
    ...Object.fromEntries(METRICS.map((metric, n) => {
      const [a, b, difference, stands] = figures[n];
      return [metric, { a, b, difference, stands }];
    })),
  }),
);

const COLUMNS = {
  index: (entry) => entry.index,
  name: (entry) => entry.name,
  evaluated: (entry) => entry.evaluated,
};
const FILTERS = [["All", () => true]];
for (const metric of METRICS) {
  const title = metric.replace("top", "top-");
  for (const figure of ["a", "b", "difference"]) COLUMNS[`${metric}-${figure}`] = (entry) => entry[metric][figure];
  FILTERS.push(
    [`Improved by ${title}`, (entry) => entry[metric].difference !== null && entry[metric].difference < 0],
    [`Worse by ${title}`, (entry) => entry[metric].difference > 0],
    [`Significant by ${title}`, (entry) => entry[metric].stands],
  );
}

drawCharts();
const { reveal } = startTable({ entries: compared, columns: COLUMNS, smallestFirst: ["index", "name"], filters: FILTERS });

/** Show the row of the class in the URL fragment. */
function route() {
  const index = /^#class-(\d{1,7})$/.exec(location.hash)?.[1];
  if (index !== undefined) reveal(Number(index));
}
addEventListener("hashchange", route);
addEventListener("click", ({ target }) => target.closest("a[href^='#']")?.hash === location.hash && route()); // no hashchange then
route();
