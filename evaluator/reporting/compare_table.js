"use strict";
// Search, filter and order of the table of all classes. A head sorts by its data-sort, "text" or "number": of a cell's
// data-value, or else its text; empty ones stay at the end. The <select> keeps the rows that have its value in data-tags.
(() => {
  const FIRST = 25; // rows shown until asked for more
  const table = document.querySelector("table.all");
  const body = table.tBodies[0];
  const name = table.querySelector("th[data-sort=text]").cellIndex;
  const rows = [...body.rows].map((row) => ({
    row,
    text: row.cells[name].textContent.toLowerCase(),
    tags: new Set((row.dataset.tags ?? "").split(" ")),
  }));
  const search = document.querySelector(".tools input");
  const filter = document.querySelector(".tools select");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  let expanded = rows.length <= FIRST + 5;

  function show() {
    const wanted = search.value.trim().toLowerCase();
    const tag = filter.value;
    let hits = 0;
    for (const { row, text, tags } of rows) {
      const hit = text.includes(wanted) && (!tag || tags.has(tag));
      hits += hit;
      row.hidden = !hit;
      row.classList.toggle("later", !expanded && hits > FIRST); // hidden on the screen, not in print
    }
    const all = !wanted && !tag;
    found.textContent = all ? "" : `${hits.toLocaleString("en")} of ${rows.length.toLocaleString("en")} classes`;
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
    const compare = numbers ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en");
    const keyed = rows.map((entry) => [key(entry), entry]);
    keyed.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b)));
    rows.splice(0, rows.length, ...keyed.map(([, entry]) => entry));
    body.append(...rows.map(({ row }) => row));
    show();
  }

  for (const head of table.querySelectorAll("th[data-sort]")) {
    head.querySelector("button").addEventListener("click", () => sort(head));
  }
  search.addEventListener("input", show);
  filter.addEventListener("change", show);
  more.addEventListener("click", () => {
    expanded = true;
    show();
  });
  document.querySelector(".tools").hidden = rows.length <= 12;
  show();
})();
