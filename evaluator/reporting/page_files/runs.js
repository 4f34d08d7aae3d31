// Sorting of the table of runs. Without JavaScript the rows are by error within dataset and protocol.

const LARGEST_FIRST = ["speed", "date"];
const table = document.querySelector("table.runs");
const values = JSON.parse(document.getElementById("runs-data").textContent); // one per row, in order
const rows = [...(table?.tBodies[0].rows ?? [])].map((row, index) => ({ row, entry: { ...values[index], index } }));

for (const button of table?.tHead.querySelectorAll("button") ?? []) {
  button.addEventListener("click", () => {
    const head = button.parentNode;
    const { key } = head.dataset;
    rows.sort(comparing((entry) => entry[key], turned(head, !LARGEST_FIRST.includes(key))));
    table.classList.toggle("grouped", key === "dataset"); // whose value is the number of the group
    table.tBodies[0].append(...rows.map(({ row }) => row));
  });
}
