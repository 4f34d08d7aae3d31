// The table of all classes in the report and the comparison: search, filters, sorting and keyboard navigation.
// Without JavaScript it shows every class.

const FEW = 12; // up to this many classes the table has no search and no filters
const FIRST = 25; // rows shown until "Show all" is clicked; print shows all rows

/**
 * Start the table.
 *
 * entries: one per row, in order, with `index`, `name`, `wnid`; columns: data-key of a header → function that returns the
 * sort value of an entry, or null; smallestFirst: columns that sort ascending on the first click (the others start with
 * the largest value, the worst); filters: [label, predicate on an entry], the first of which accepts all.
 * Returns `order`, which lists the classes that the table shows, and `reveal`, which shows the row of a class.
 */
function startTable({ entries, columns, smallestFirst, filters }) {
  const table = document.querySelector("table.all");
  const body = table.tBodies[0];
  const tools = document.querySelector(".tools");
  const search = tools.querySelector("input");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  const unseen = entries.filter((entry) => !entry.evaluated).length;
  const withUnseen = make("input", { type: "checkbox" });
  const rows = [...body.rows].map((row, place) => ({ row, entry: entries[place], text: searched(entries[place]) }));
  const [[, everything]] = filters;
  let expanded = rows.length <= FIRST + 5;
  let accepts = everything;
  let shown = [];

  function show() {
    const wanted = search.value.trim().toLowerCase();
    const hidesUnseen = !wanted && accepts === everything && !withUnseen.checked;
    const pool = hidesUnseen ? rows.filter(({ entry }) => entry.evaluated) : rows;
    shown = pool.filter(({ entry, text }) => accepts(entry) && (String(entry.index) === wanted || text.includes(wanted)));
    const hits = new Set(shown);
    for (const hit of rows) hit.row.hidden = !hits.has(hit);
    shown.forEach(({ row }, place) => row.classList.toggle("later", !expanded && place >= FIRST));
    found.textContent = shown.length < pool.length ? `${integer(shown.length)} of ${integer(pool.length)} classes` : "";
    more.hidden = expanded || shown.length <= FIRST;
    more.textContent = `Show all ${integer(shown.length)} classes`;
  }

  function sort(head) {
    const { key } = head.dataset;
    rows.sort(comparing(columns[key], turned(head, smallestFirst.includes(key))));
    body.append(...rows.map(({ row }) => row));
    show();
  }

  function reveal(index) {
    const hit = rows.find(({ entry }) => entry.index === index);
    if (!hit) return;
    if (hit.row.hidden) {
      search.value = "";
      tools.querySelector(".chips button")?.click(); // all
      withUnseen.checked ||= !hit.entry.evaluated;
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
  if (unseen) tools.append(make("label.switch", null, withUnseen, `Show ${integer(unseen)} ${unseen === 1 ? "class" : "classes"} without evaluated images`));
  for (const field of [search, withUnseen]) field.addEventListener("input", show);
  more.addEventListener("click", () => {
    expanded = true;
    show();
    shown[FIRST].row.querySelector("a").focus({ preventScroll: true });
  });
  walkByKeys(search, body, () => shown);
  tools.hidden = rows.length <= FEW && !unseen;
  show();
  return { order: () => shown.map(({ entry }) => entry.index), reveal };
}

function searched(entry) {
  return `${entry.name}\n${entry.wnid}`.toLowerCase();
}

/** Mark a heading as the one that sorts, in its usual order or, the second time, in the other; return 1 if ascending. */
function turned(head, ascendingFirst) {
  const [usual, other] = ascendingFirst ? ["ascending", "descending"] : ["descending", "ascending"];
  const order = head.getAttribute("aria-sort") === usual ? other : usual;
  for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  return order === "ascending" ? 1 : -1;
}

/** Return a comparison of rows by a value. Rows without a value come last in either order; ties sort by class index. */
function comparing(value, sign) {
  const collator = new Intl.Collator("en", { numeric: true }); // "class 9" before "class 10"
  return ({ entry: a }, { entry: b }) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null) || a.index - b.index;
    const order = typeof one === "string" ? collator.compare(one, other) : one - other;
    return sign * order || a.index - b.index;
  };
}

/** Return one button per filter that accepts some classes but not all, with their number. The pressed one is active. */
function filterButtons(entries, filters, choose) {
  const buttons = filters.map(([label, accepts], place) => {
    const count = entries.filter(accepts).length;
    if (place && (count === 0 || count === entries.length)) return null;
    const button = make("button", { type: "button", "aria-pressed": place === 0 }, label, place ? [" ", make("small", null, integer(count))] : null);
    button.addEventListener("click", () => {
      for (const other of button.parentNode.children) other.setAttribute("aria-pressed", other === button);
      choose(accepts);
    });
    return button;
  }).filter((button) => button);
  return buttons.length > 1 ? buttons : [];
}

/** "/" focuses the search, up and down move between the rows, enter opens a row (a link) or the first hit. */
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
