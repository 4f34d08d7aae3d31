// The table of all classes: search, filters, order and keys, in the report and in the comparison. Without scripts it
// shows every class.

const FEW = 12; // classes that need no tools
const FIRST = 25; // rows shown until all are asked for; print has them all

/**
 * Brings the table to life.
 *
 * entries: of the rows, in their order, each with `index`, `name`, `wnid`; columns: by the data-key of a head, what of an
 * entry the column sorts by, null where there is nothing; smallestFirst: columns that ascend at the first click, the others
 * start with the largest, which is the worst; filters: [label, whether it lets an entry through], the first one all.
 * Returns `order`, which tells the classes that the table shows, and `reveal`, which shows the row of a class.
 */
function startTable({ entries, columns, smallestFirst, filters }) {
  const table = document.querySelector("table.all");
  const body = table.tBodies[0];
  const tools = document.querySelector(".tools");
  const search = tools.querySelector("input");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  const rows = [...body.rows].map((row, place) => ({ row, entry: entries[place], text: searched(entries[place]) }));
  const [[, everything]] = filters;
  let expanded = rows.length <= FIRST + 5;
  let accepts = everything;
  let shown = [];

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
    const usual = smallestFirst.includes(key) ? "ascending" : "descending";
    const other = usual === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === usual ? other : usual;
    for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    rows.sort(comparing(columns[key], order === "ascending" ? 1 : -1));
    body.append(...rows.map(({ row }) => row));
    show();
  }

  function reveal(index) {
    const hit = rows.find(({ entry }) => entry.index === index);
    if (!hit) return;
    if (hit.row.hidden) {
      search.value = "";
      tools.querySelector(".chips button")?.click(); // all
    }
    expanded = true;
    show();
    hit.row.scrollIntoView({ block: "center" });
    hit.row.querySelector("a")?.focus({ preventScroll: true });
  }

  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => sort(button.parentNode));
  }
  tools.querySelector(".chips").append(...filterButtons(entries, filters, (filter) => {
    accepts = filter;
    show();
  }));
  search.addEventListener("input", show);
  more.addEventListener("click", () => {
    expanded = true;
    show();
    shown[FIRST].row.querySelector("a").focus({ preventScroll: true });
  });
  walkByKeys(search, body, () => shown);
  tools.hidden = rows.length <= FEW;
  show();
  return { order: () => shown.map(({ entry }) => entry.index), reveal };
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
function filterButtons(entries, filters, choose) {
  const buttons = filters.map(([label, accepts], place) => {
    const count = entries.filter(accepts).length;
    if (place && (count === 0 || count === entries.length)) return null;
    const button = make("button", { type: "button", "aria-pressed": place === 0 }, label, " ", make("small", null, whole(count)));
    button.addEventListener("click", () => {
      for (const other of button.parentNode.children) other.setAttribute("aria-pressed", other === button);
      choose(accepts);
    });
    return button;
  }).filter((button) => button);
  return buttons.length > 1 ? buttons : [];
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
