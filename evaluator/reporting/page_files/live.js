// The live page of a server: send a picture, show its classes and where the model sees them.

const byId = (id) => document.getElementById(id);
const percent = (score) => `${decimal(100 * score)} %`;
const inTime = (seconds) => (seconds < 1 ? `${decimal(1000 * seconds, seconds < 0.0995 ? 1 : 0)} ms` : `${decimal(seconds, 2)} s`);
const PROBLEMS = {
  0: "The server cannot be reached, or it closed the connection. Is it still running?",
  "no token": "This server requires a token.",
  "wrong token": "This token is unknown, or has been removed.",
  400: "The server cannot classify this file.",
  403: "This token does not allow that.",
  404: "The server does not have that.",
  413: "The image is too large for this server.",
  429: "The server is busy.",
  503: "The server is starting or stopping.",
  504: "The server did not finish in time.",
};
const AGAIN = [0, 429, 500, 503, 504]; // statuses after which the same call may succeed; 0: no answer
const MOST_FILES = 100; // classified together
const TOKEN_PROBLEMS = ["no token", "wrong token", 403];

let models = []; // as listed; with their details once they are chosen
let token = null; // only here: neither stored nor part of an address
let picture = null; // the file
let shown = null; // resolves once the browser shows the picture, or cannot
const reportTabs = new Map(); // secret of each tab that shows a report, and its path
let running = null; // the AbortController of the call in progress
let files = []; // those that were chosen together

class Problem extends Error {
  constructor(status, detail, retryAfter) {
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
    super(`${PROBLEMS[status] ?? "The server failed."}${wait}\n${detail ? detail[0].toUpperCase() + detail.slice(1) : ""}`);
    this.status = status;
  }
}

/** Call the server and return its answer; a Problem if there is none. path: relative, for a proxy may add a prefix. */
async function call(path, options = {}) {
  const headers = { ...options.headers, ...(token === null ? {} : { Authorization: `Bearer ${token}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return await response[options.kind ?? "json"]();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem(0);
  }
  if (response.status === 401) throw new Problem(token === null ? "no token" : "wrong token");
  const body = await response.json().catch(() => ({}));
  throw new Problem(response.status, body.error, response.headers.get("Retry-After"));
}

/** Show what went wrong; ask for a token if that is the reason. retry: what a button should repeat. */
function showProblem(error, retry) {
  const problem = byId("problem");
  const again = make("button.button", { type: "button" }, "Try again");
  again.addEventListener("click", retry);
  problem.replaceChildren(error.message.trim(), AGAIN.includes(error.status) ? again : "");
  problem.classList.toggle("alarm", error.status !== "no token");
  problem.hidden = false;
  if (TOKEN_PROBLEMS.includes(error.status)) askForToken(retry);
}

function askForToken(retry) {
  byId("token-form").hidden = false;
  byId("token-form").onsubmit = (event) => {
    event.preventDefault();
    token = byId("token").value.trim();
    byId("token-form").hidden = true;
    retry();
  };
  byId("token").focus();
}

/** List the models, describe the chosen one, and classify the picture if there is one. */
async function start() {
  byId("problem").hidden = true;
  try {
    if (!models.length) {
      ({ models } = await call("v1/models"));
      byId("model").replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
      if (!models.length) throw new Problem(503, "no model is loaded.");
    }
    const place = byId("model").selectedIndex;
    byId("protocol").disabled = true; // those shown are another model's
    models[place].protocols ?? (models[place] = await call(`v1/models/${models[place].name}`));
    if (byId("model").selectedIndex !== place) return; // another model has been chosen
    showModel(models[place]);
  } catch (error) {
    showProblem(error, start);
    return;
  }
  if (byId("reports")) listReports();
  if (byId("examples")) listExamples();
  if (picture) choose(picture);
  if (files.length) classifyAll();
}

async function listExamples() {
  if (byId("examples-list").children.length) return;
  const { examples } = await call("examples").catch(() => ({ examples: [] })); // the page works without them
  const blobs = await Promise.all(examples.map((name) => call(`examples/${encodeURIComponent(name)}`, { kind: "blob" }).catch(() => null)));
  const readable = blobs.flatMap((blob, place) => (blob ? [new File([blob], examples[place])] : []));
  byId("examples").hidden = !readable.length;
  byId("examples-list").replaceChildren(...readable.map((file) => shelfItem(file, "")));
}

/** Return a picture on a shelf: a button that chooses it, with a text below. */
function shelfItem(file, text) {
  const image = make("img", { alt: file.name });
  for (const event of ["load", "error"]) image.addEventListener(event, () => URL.revokeObjectURL(image.src));
  image.src = URL.createObjectURL(file);
  const button = make("button", { type: "button" }, image, make("span", null, text));
  button.addEventListener("click", () => choose(file));
  return make("li", null, button);
}

async function listReports() {
  try {
    const { reports } = await call("reports");
    byId("reports-note").textContent = reports.length ? "" : "There is no report yet.";
    byId("reports").replaceChildren(...reports.map(reportItem));
  } catch (error) {
    const another = make("button.button", { type: "button" }, "Use another token");
    another.addEventListener("click", () => askForToken(start));
    byId("reports-note").replaceChildren(error.message, TOKEN_PROBLEMS.includes(error.status) ? another : "");
  }
}

function reportItem({ name, title, summary, modified }) {
  const path = `reports/${name.split("/").map(encodeURIComponent).join("/")}`;
  const link = make("a", { href: path, target: "_blank", rel: "noopener" }, title);
  if (token !== null) { // which no link can carry
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const secret = `?${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
      reportTabs.set(secret, path);
      open(`report-viewer${secret}`);
    });
  }
  const date = new Date(1000 * modified).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
  return make("li", null, link, make("p.about", null, `${name} · ${date}`), make("p.about", null, summary));
}

/** Send a report to the tab that asks for it when it is loaded, also when it is loaded again. */
addEventListener("message", async ({ source, data: secret }) => {
  if (!reportTabs.has(secret)) return;
  try {
    source.postMessage(await call(reportTabs.get(secret), { kind: "text" }), "*"); // its origin has no name
  } catch (error) {
    source.close();
    byId("reports-note").textContent = error.message;
  }
});

function showModel(model) {
  byId("options").hidden = false;
  byId("protocol").disabled = false;
  byId("protocol").replaceChildren(...model.protocols.map((name) => make("option", { value: name }, name)));
  const { provider, precision } = model.circumstances;
  byId("served").replaceChildren(make("em.name", null, model.name), `: architecture ${model.architecture}, ${integer(model.classes.length)} classes, `,
    `${provider}, ${precision}. Images are sent to this server and to nobody else.`);
  byId("calls").hidden = false;
  showCalls();
}

function callPath() {
  const query = new URLSearchParams({ model: byId("model").value, protocol: byId("protocol").value });
  if (byId("exif").checked) query.set("apply_exif", "true");
  return `v1/classify?${query}`;
}

function showCalls() {
  const calls = callCommands(new URL(callPath(), location).href, picture?.name ?? "photo.jpg", typeOf(picture), token !== null);
  for (const [name, text] of Object.entries(calls)) byId(name).textContent = text;
  byId("token-file").hidden = token === null;
  byId("authority").hidden = location.protocol !== "https:";
}

const typeOf = (file) => file?.type || (file ? "application/octet-stream" : "image/jpeg");

/** Show the first of several files, and classify all of them. */
function chooseAll(list) {
  if (!list.length) return;
  files = list.length > 1 ? [...list].slice(0, MOST_FILES) : [];
  byId("files").hidden = !files.length;
  choose(list[0]);
  if (files.length && byId("protocol").value) classifyAll();
  byId("files-note").textContent = list.length > MOST_FILES ? `The first ${MOST_FILES} of ${integer(list.length)} images.` : "";
}

/** Classify the files that were chosen together, one after the other. */
async function classifyAll() {
  const own = (files = [...files]); // others may be chosen meanwhile
  const items = own.map((file) => shelfItem(file, "…"));
  byId("files-list").replaceChildren(...items);
  for (const [place, file] of own.entries()) {
    let text;
    try {
      const { predictions: [best] } = await call(callPath(), { method: "POST", body: file, headers: { "Content-Type": typeOf(file) } });
      text = `${best.name}, ${percent(best.score)}`;
    } catch (error) {
      text = error.message.split("\n")[0];
    }
    if (own !== files) return;
    items[place].querySelector("span").textContent = text;
  }
}

/** Show a picture and classify it. */
function choose(file) {
  if (!file) return;
  picture = file;
  showPicture();
  if (byId("protocol").value) classify();
}

function showPicture() {
  const image = make("img", { alt: picture.name });
  shown = new Promise((resolve) => {
    image.addEventListener("load", () => {
      URL.revokeObjectURL(image.src);
      if (!image.isConnected) return; // another picture has been chosen
      setShape(image.naturalHeight, image.naturalWidth);
      image.classList.toggle("tiny", Math.max(image.naturalHeight, image.naturalWidth) <= 64);
      resolve();
    });
    image.addEventListener("error", () => {
      if (!image.isConnected) return;
      image.remove();
      byId("frame").hidden = true;
      byId("hint").textContent = `This browser cannot show ${image.alt}.`;
      byId("hint").hidden = false;
      resolve();
    });
  });
  image.classList.toggle("stored", !byId("exif").checked);
  image.src = URL.createObjectURL(picture);
  byId("frame").className = "";
  byId("frame").replaceChildren(image);
  byId("frame").hidden = false;
  byId("hint").hidden = true;
  byId("drop").classList.add("full");
  byId("seen").textContent = "";
}

function setShape(height, width) {
  byId("frame").style.setProperty("--ratio", width / height);
}

/** Classify the picture; a call in progress is cancelled. */
async function classify() {
  running?.abort();
  const own = (running = new AbortController());
  byId("problem").hidden = true;
  byId("status").textContent = "Classifying…";
  byId("classes").inert = true;
  byId("details").hidden = true;
  showCalls();
  const started = performance.now();
  try {
    const headers = { "Content-Type": typeOf(picture) };
    const answer = await call(`${callPath()}&heatmap=maps`, { method: "POST", body: picture, headers, signal: own.signal });
    const measured = (performance.now() - started) / 1000;
    const [unsure] = await Promise.all([answer.protocol.apply_exif && isWebpWithExif(picture), shown]);
    if (!own.signal.aborted) showAnswer(answer, measured, unsure);
  } catch (error) {
    if (own.signal.aborted) return;
    byId("status").textContent = "No answer.";
    byId("classes").replaceChildren();
    showProblem(error, classify);
  }
}

/** Return whether a file is WebP with EXIF data, whose orientation Chromium ignores and others apply. */
async function isWebpWithExif(file) {
  const head = new Uint8Array(await file.slice(0, 21).arrayBuffer());
  return String.fromCharCode(...head.slice(8, 16)) === "WEBPVP8X" && (head[20] & 8) !== 0;
}

/** Show an answer. measured: seconds of the call; unsure: the browser may show the picture in another orientation. */
function showAnswer(answer, measured, unsure) {
  const [{ image_height: height, image_width: width }] = answer.maps;
  const frame = byId("frame");
  const image = frame.querySelector("img");
  // The browser and the server read the file independently: draw over the photo only if they see the same shape.
  // Chromium's natural sizes are always those after EXIF orientation, even where it shows the photo as it is stored.
  const isShape = (rows, columns) => image?.naturalHeight === rows && image.naturalWidth === columns;
  const same = !unsure && (isShape(height, width) || (!answer.protocol.apply_exif && isShape(width, height)));
  if (!same) image?.remove();
  setShape(height, width);
  const canvas = mapCanvas(height, width);
  const range = make("span.range");
  frame.replaceChildren(...(same ? [image] : []), canvas, range);
  frame.hidden = false;
  const shapeNote = same ? "" : "The map is shown alone, because this browser may not show the image as the server reads it. ";
  byId("seen").textContent = shapeNote + seenText(answer);

  let pinned = null;
  let pointed = null;
  const buttons = answer.predictions.map((found, place) => classButton(found, place));
  const show = () => {
    const place = pointed ?? pinned;
    frame.classList.toggle("mapped", place !== null);
    for (const [n, button] of buttons.entries()) {
      button.classList.toggle("shown", n === place);
      button.setAttribute("aria-pressed", n === pinned);
    }
    if (place === null) return;
    const bytes = bytesOf(answer.maps[place].scores);
    drawHeatMap(canvas, bytes, answer.maps[place].columns);
    canvas.setAttribute("aria-label", `Heat map of ${answer.predictions[place].name}, ${rangeText(bytes)}`);
    range.textContent = rangeText(bytes);
  };
  for (const [place, button] of buttons.entries()) {
    const point = (on) => {
      pointed = on ? place : null;
      show();
    };
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && point(true));
    button.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(false));
    button.addEventListener("focus", () => button.matches(":focus-visible") && point(true));
    button.addEventListener("blur", () => point(false));
    button.addEventListener("click", () => {
      pinned = pinned === place ? null : place;
      show();
    });
  }
  byId("classes").inert = false;
  byId("classes").replaceChildren(...buttons.map((button) => make("li", null, button)));
  byId("legend").replaceChildren("Point at a class, or tap it, to see where the model sees it: its score around each point, ", ...colorScale());
  const spoken = answer.predictions.slice(0, 3).map((found) => `${found.name} ${percent(found.score)}, `); // the others can see the list
  byId("status").replaceChildren(make("span.unseen", null, spoken), `Answered in ${inTime(measured)}.`);
  showTimes(answer.timings, measured);
  byId("details").hidden = false;
  if (!same) {
    pinned = 0;
    show();
  }
}

/** Return the bytes of a map of scores, 0 to 1, or -1 where no view looked. */
function bytesOf(scores) {
  return Uint8Array.from(scores, (score) => (score < 0 ? UNSEEN : Math.round(STEPS * Math.min(score, 1))));
}

function classButton(found) {
  const bar = make("i");
  bar.style.width = `${(100 * found.score).toFixed(2)}%`;
  return make("button", { type: "button", "aria-pressed": false }, make("span.name", null, found.name),
    make("span.bar", { "aria-hidden": true }, bar), make("span.number", null, percent(found.score)));
}

/** Say what the model saw of the picture. */
function seenText({ maps: [{ image_height: height, image_width: width }], protocol, views, capped }) {
  const windows = views.reduce((sum, view) => sum + view.windows.rows * view.windows.columns, 0);
  const [side] = protocol.scales;
  const squared = { squash: "squashed", pad: "padded" }[protocol.preparation?.resize];
  const kind = squared && protocol.crop === side ? "dense" : protocol.kind;
  const part = { dense: "the whole image", "spp-18": "nine windows of the image", center: "its central crop", "ten-crop": "its corners and center" }[kind];
  const size = squared ? `${squared} to ${side}x${side} px` : `shorter side ${protocol.scales.join(", ")} px`;
  return [
    `${width}x${height} px, EXIF orientation ${protocol.apply_exif ? "applied" : "ignored"}.`,
    `The model saw ${part}: ${views.length === 1 ? "1 view" : `${views.length} views`}, ${size}${protocol.mirror ? ", also mirrored" : ""}; ${integer(windows)} ${windows === 1 ? "window" : "windows"}.`,
    capped ? `The image was cropped to its center, because its long side is more than ${protocol.long_side_cap} times the shorter.` : "",
    protocol.crop ? "A crop has one window, so a map shows the crops, but no place in them." : "",
  ].join(" ");
}

function showTimes(timings, measured) {
  const { queue_seconds: queue, decode_seconds: decode, compute_seconds: compute, total_seconds: total } = timings;
  const parts = [
    ["queue", "waiting in the queue", queue],
    ["decode", "decoding and resizing", decode],
    ["compute", "computing", compute],
    ["rest", "averaging, heat maps and the rest of the server", total - queue - decode - compute],
    ["way", "sending the image and receiving the answer", measured - total],
  ].map(([name, label, seconds]) => [name, label, Math.max(0, seconds)]);
  byId("times").replaceChildren(...parts.map(([name, , seconds]) => {
    const part = make(`i.${name}`);
    part.style.flexGrow = seconds / measured;
    return part;
  }));
  byId("time-list").replaceChildren(...parts.map(([name, label, seconds]) =>
    make("li", null, make(`i.${name}`, { "aria-hidden": true }), label, make("span.number", null, inTime(seconds)))));
}

for (const id of ["file", "camera"]) {
  byId(id).addEventListener("change", (event) => {
    chooseAll([...event.target.files]);
    event.target.value = ""; // so that the same file can be chosen again
  });
}
if (navigator.maxTouchPoints) byId("hint").textContent = "Choose images or take a photo";
else byId("camera").parentNode.remove(); // it would open the same dialog as the other button
byId("drop").addEventListener("click", () => picture ?? byId("file").click());
document.addEventListener("paste", (event) => chooseAll([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? byId("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault(); // otherwise the browser would open the file instead of this page
  byId("drop").classList.remove("over");
  chooseAll([...event.dataTransfer.files]);
});
byId("options").addEventListener("change", (event) => {
  showCalls();
  if (event.target.id === "model") start();
  else {
    if (picture) choose(picture);
    if (files.length) classifyAll();
  }
});
byId("options").addEventListener("submit", (event) => event.preventDefault());
byId("list-reports")?.addEventListener("click", listReports);
for (const button of document.querySelectorAll("[data-call]")) {
  button.addEventListener("click", async () => {
    const text = byId(button.dataset.call);
    try {
      await navigator.clipboard.writeText(text.textContent);
      byId("copied").textContent = `Copied as ${button.dataset.call}.`;
    } catch { // browsers allow it only over TLS and on this machine
      getSelection().selectAllChildren(text);
      byId("copied").textContent = "This browser does not allow copying here; the text is selected.";
    }
  });
}
start();
