// Sorting of the table of runs. Without JavaScript the rows are by error within dataset and protocol.

const LARGEST_FIRST = ["speed", "date"];
const table = document.querySelector("table.runs");
const values = JSON.parse(document.getElementById("runs-data").textContent); // one per row, in order
const rows = [...(table?.tBodies[0].rows ?? [])].map((row, index) => ({ row, entry: { ...values[index], index } }));

for (const button of table?.tHead.querySelectorAll("button") ?? []) {
  button.addEventListener("click", () => {
    const head = button.parentNode;
    const { key } = head.dataset;
    const usual = LARGEST_FIRST.includes(key) ? "descending" : "ascending";
    const other = usual === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === usual ? other : usual;
    for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    rows.sort(comparing((entry) => entry[key], order === "ascending" ? 1 : -1));
    table.classList.toggle("grouped", key === "dataset"); // whose value is the number of the group
    table.tBodies[0].append(...rows.map(({ row }) => row));
  });
}
