// The table of all classes: search, filters and order. Without scripts it shows every class.

const COLUMNS = {
  index: (entry) => entry.index,
  name: (entry) => entry.name,
  evaluated: (entry) => entry.evaluated,
  error1: (entry) => entry.error1,
  low1: (entry) => (entry.evaluated ? entry.low1 : null),
  error5: (entry) => entry.error5,
  low5: (entry) => (entry.evaluated ? entry.low5 : null),
  medianRank: (entry) => entry.medianRank,
  confidence: (entry) => entry.confidence,
  taken: (entry) => data.taken[entry.index][1] ?? null,
};
const SMALLEST_FIRST = new Set(["index", "name", "confidence"]); // at the first click; else the worst, which is largest
const FILTERS = [
  ["All", () => true],
  ["With errors", (entry) => entry.wrong1 > 0],
  ["Worse than average", (entry) => entry.evaluated && entry.low1 > runError1],
  ["Better than average", (entry) => entry.evaluated && entry.high1 < runError1],
  ["Without error", (entry) => entry.evaluated && entry.wrong1 === 0],
  ["Refused images", (entry) => entry.refused > 0],
  ["Shared names", (entry) => sharing.has(entry.index)],
  ["No images", (entry) => !entry.evaluated],
];
const FEW = 12; // classes that need no tools
const FIRST = 25; // rows shown until all are asked for; print has them all

/** Brings the table to life; returns a function that tells the classes it shows, in its order. */
function startTable() {
  const table = document.querySelector("table.all");
  const body = table.tBodies[0];
  const tools = document.querySelector(".tools");
  const search = tools.querySelector("input");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  const rows = [...body.rows].map((row, index) => ({ row, entry: classes[index], text: searched(classes[index]) }));
  let expanded = rows.length <= FIRST + 5;
  let [, accepts] = FILTERS[0];
  let shown = [];
  for (const { row } of rows) row.removeAttribute("id"); // an address with #class-7 opens the class, and scrolls nowhere

  function show() {
    const wanted = search.value.trim().toLowerCase();
    shown = rows.filter(({ entry, text }) => accepts(entry) && (String(entry.index) === wanted || text.includes(wanted)));
    const hits = new Set(shown);
    for (const hit of rows) hit.row.hidden = !hits.has(hit);
    shown.forEach(({ row }, place) => row.classList.toggle("later", !expanded && place >= FIRST));
    found.textContent = shown.length < rows.length ? `${whole(shown.length)} of ${whole(rows.length)} classes` : "";
    more.hidden = expanded || shown.length <= FIRST;
    more.textContent = `Show all ${whole(shown.length)} classes`;
  }

  function sort(head) {
    const { key } = head.dataset;
    const usual = SMALLEST_FIRST.has(key) ? "ascending" : "descending";
    const other = usual === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === usual ? other : usual;
    for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    rows.sort(comparing(COLUMNS[key], order === "ascending" ? 1 : -1));
    body.append(...rows.map(({ row }) => row));
    show();
  }

  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => sort(button.parentNode));
  }
  tools.querySelector(".chips").append(...filterButtons((filter) => {
    accepts = filter;
    show();
  }));
  search.addEventListener("input", show);
  more.addEventListener("click", () => {
    expanded = true;
    show();
    shown[FIRST].row.querySelector("a").focus({ preventScroll: true });
  });
  openRowsByClick(body);
  walkByKeys(search, body, () => shown);
  tools.hidden = rows.length <= FEW;
  document.getElementById("table-about").hidden = false;
  show();
  return () => shown.map(({ entry }) => entry.index);
}

function searched(entry) {
  return `${entry.name}\n${entry.wnid}`.toLowerCase();
}

/** Compares rows by a value, those without one last in either order, equal ones by class index. */
function comparing(value, sign) {
  const collator = new Intl.Collator("en", { numeric: true }); // "class 9" before "class 10"
  return ({ entry: a }, { entry: b }) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null) || a.index - b.index;
    const order = typeof one === "string" ? collator.compare(one, other) : one - other;
    return sign * order || a.index - b.index;
  };
}

/** One button per filter that lets some classes through, not all; the pressed one holds. */
function filterButtons(choose) {
  const buttons = FILTERS.map(([label, accepts], place) => {
    const count = classes.filter(accepts).length;
    if (place && (count === 0 || count === classes.length)) return null;
    const button = make("button", { type: "button", "aria-pressed": place === 0 }, label, " ", make("small", null, whole(count)));
    button.addEventListener("click", () => {
      for (const other of button.parentNode.children) other.setAttribute("aria-pressed", other === button);
      choose(accepts);
    });
    return button;
  }).filter((button) => button);
  return buttons.length > 1 ? buttons : [];
}

function openRowsByClick(body) {
  body.addEventListener("click", (event) => {
    const link = event.target.closest("tr")?.querySelector("a");
    if (link && !event.target.closest("a") && getSelection().isCollapsed) link.click();
  });
}

/** "/" goes to the search; up and down walk through the rows, enter opens one (they are links), or the first hit. */
function walkByKeys(search, body, shown) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, dialog");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
    }
  });
  search.addEventListener("keydown", (event) => {
    const first = shown()[0]?.row.querySelector("a");
    if (event.key === "Enter") first?.click();
    if (event.key === "ArrowDown") {
      event.preventDefault();
      first?.focus();
    }
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest("tr");
    if (!step || !row) return;
    event.preventDefault();
    const rows = shown().map((hit) => hit.row);
    const next = rows[rows.indexOf(row) + step];
    (next && !next.classList.contains("later") ? next.querySelector("a") : step < 0 ? search : null)?.focus();
  });
}
