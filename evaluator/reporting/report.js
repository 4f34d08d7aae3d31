"use strict";
// The chart, and search and order of the table of all classes. Without scripts the page shows everything but the chart.
(() => {
  const spec = JSON.parse(document.getElementById("error-spec").textContent);
  if (spec) {
    // ast: expressions are interpreted, so that the content policy need not allow eval.
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "report" } };
    window.vegaEmbed("#error-chart", spec, options);
  }

  const FIRST = 25; // rows shown until asked for more
  const table = document.querySelector("table.all");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, text: row.cells[1].textContent.toLowerCase() }));
  const search = document.querySelector(".tools input");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  let expanded = rows.length <= FIRST + 5;

  function show() {
    const wanted = search.value.trim().toLowerCase();
    let hits = 0;
    for (const { row, text } of rows) {
      const hit = text.includes(wanted);
      hits += hit;
      row.hidden = !hit || (!expanded && hits > FIRST);
    }
    found.textContent = wanted ? `${hits.toLocaleString("en")} of ${rows.length.toLocaleString("en")} classes` : "";
    more.hidden = expanded || hits <= FIRST;
    more.textContent = `Show all ${hits.toLocaleString("en")} classes`;
  }

  function sort(head) {
    const column = head.cellIndex;
    const numbers = head.dataset.sort === "number";
    // A first click on a number shows the largest first: the worst classes; on the text and the index the smallest.
    const first = numbers && column > 0 ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? second : first;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const key = ({ row }) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = numbers ? (a, b) => key(a) - key(b) : (a, b) => key(a).localeCompare(key(b), "en");
    rows.sort((a, b) => sign * compare(a, b));
    body.append(...rows.map(({ row }) => row));
    show();
  }

  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => sort(button.parentNode));
  }
  search.addEventListener("input", show);
  more.addEventListener("click", () => {
    expanded = true;
    show();
  });
  document.querySelector(".tools").hidden = rows.length <= 12;
  show();
})();
