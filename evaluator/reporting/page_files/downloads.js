// Files that the page itself makes: its charts as SVG and PNG, and tables as CSV. Nothing is loaded or sent.

/** Save a blob under a name that begins with the page's heading: `model.onnx-on-val-NAME`. */
function saveFile(name, blob) {
  const stem = document.querySelector("h1").textContent.replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^[-.]+|-+$/g, "").slice(0, 80);
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: `${stem}-${name}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Return a line of buttons. actions: [label, what it saves, function] each. */
function saveButtons(...actions) {
  return make("p.save", null, actions.map(([label, what, act]) => {
    const title = `Download ${what} as ${label}`;
    const button = make("button", { type: "button", title, "aria-label": title }, label);
    button.addEventListener("click", act);
    return button;
  }));
}

/** Add the buttons of a chart: below it, or above it where another chart follows on the same axis. */
function addChartButtons(name, view) {
  const chart = document.getElementById(`${name}-chart`);
  const what = `the chart “${chart.parentNode.querySelector("h2, h3").textContent}”`;
  const buttons = saveButtons(
    ["SVG", what, async () => saveFile(`${name}.svg`, await chartSvg(view))],
    ["PNG", what, async () => saveFile(`${name}.png`, await drawPng(await chartSvg(view)))],
  );
  chart.nextElementSibling?.matches(".chart") ? chart.before(buttons) : chart.after(buttons);
}

/** Return a chart as an SVG file in the page's light colors on white, whatever the page shows. */
async function chartSvg(view) {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const light = rules.filter((rule) => rule.selectorText === ":root"); // the dark ones are inside media rules
  const svg = (await view.toSVG())
    .replace(/var\((--[\w-]+)\)/g, (_, name) => light.map((rule) => rule.style.getPropertyValue(name)).join("").trim())
    .replace(/<svg[^>]*>/, '$&<rect width="100%" height="100%" fill="#fff"/>');
  return new Blob([svg], { type: "image/svg+xml" });
}

/** Return an SVG file as a PNG of twice its size. A canvas of vega would not know the page's colors. */
async function drawPng(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(await svg.text())}`;
  await image.decode();
  const canvas = make("canvas", { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

/**
 * Return rows as a CSV file. Every text is quoted. One that begins like a formula gets an apostrophe in front, so that
 * no spreadsheet computes a name (OWASP, "CSV Injection").
 */
function csvFile(rows) {
  const cell = (value) => (typeof value === "string" ? `"${value.replace(/^[=+\-@\t\r\n＝＋－＠]/, "'$&").replaceAll('"', '""')}"` : value);
  return new Blob(rows.map((row) => `${row.map(cell).join(",")}\n`), { type: "text/csv" });
}
