// The panel of one class: its numbers, its confusions, its error for each view, its images; or that of one pair.
// The URL fragment names the class: #class-123. So links open classes, and the browser's "back" closes them.

const CONFUSIONS_SHOWN = 8;
const TILES_SHOWN = 12;
const ROWS_SHOWN = 100;

/** order: returns the classes that the table shows, in which "next" and "previous" step. */
function startClassView(order) {
  const dialog = document.getElementById("class-view");

  function route() {
    const index = Number(/^#class-(\d{1,7})$/.exec(location.hash)?.[1] ?? -1);
    const content = classes[index] ? classContent(classes[index], neighbors(index, order())) : pairContent(location.hash);
    if (!content) {
      dialog.close();
      return;
    }
    dialog.replaceChildren(...content);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    dialog.querySelector("h2").focus({ preventScroll: true });
  }

  // A new history entry: the page keeps its scroll position, and "back" reopens the class. Not on "close", which comes
  // a frame later, when the address may already name another class.
  const clearAddress = () => history.pushState(null, "", location.pathname + location.search);
  dialog.addEventListener("cancel", clearAddress);
  dialog.addEventListener("click", (event) => {
    // A click that selects text ends in the dialog; its own padding is of the dialog, too.
    const outside = event.target === dialog && event.clientX < dialog.getBoundingClientRect().left;
    if (!outside && !event.target.closest(".close")) return;
    clearAddress();
    dialog.close();
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(".scroll")) return;
    const direction = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
    if (direction) dialog.querySelector(`a[rel=${direction}]`)?.click();
  });
  // Stepping between classes replaces the history entry, so that "back" leaves the panel.
  dialog.addEventListener("click", (event) => {
    const step = event.target.closest("a[rel]");
    if (!step) return;
    event.preventDefault();
    location.replace(step.getAttribute("href"));
  });
  addEventListener("hashchange", route);
  route();
}

/** Return the classes before and after this one in the table, or by index if the table does not show this one. */
function neighbors(index, shown) {
  const order = shown.includes(index) ? shown : classes.map((entry) => entry.index);
  const place = order.indexOf(index);
  return { previous: order[place - 1], next: order[place + 1], place: place + 1, of: order.length };
}

function classContent(entry, around) {
  return [
    classBar(around),
    classHead(entry),
    classFigures(entry),
    ...classImages(entry, entry.evaluated ? classConfusions(entry) : null),
    entry.evaluated && data.views.length > 1 ? classViews(entry) : null,
  ].filter((part) => part);
}

function classBar({ previous, next, place, of }) {
  const step = (index, rel, sign, label) =>
    index === undefined
      ? make("span.step.none", { "aria-hidden": true }, sign)
      : make("a.step", { href: `#class-${index}`, rel, "aria-label": label, title: classes[index].name }, sign);
  return make(
    "div.class-bar",
    null,
    step(previous, "prev", "←", "Previous class"),
    make("span.quiet", null, `${integer(place)} of ${integer(of)}`),
    step(next, "next", "→", "Next class"),
    make("span.quiet.keys", null, "← → to browse, Esc to close"),
    make("button.close", { type: "button" }, "Close"),
  );
}

function classHead(entry) {
  const others = (sharing.get(entry.index) ?? []).map((index) => [
    ", ",
    make("a.wnid", { href: `#class-${index}` }, classes[index].wnid),
  ]);
  return make(
    "header",
    null,
    make("h2.name", { id: "class-title", tabindex: -1 }, entry.name),
    make("p.quiet", null, make("span.wnid", null, entry.wnid), ` · index ${entry.index}`,
      others.length ? [" · same name as ", ...others.flat().slice(1)] : null),
  );
}

function classFigures(entry) {
  const figure = (label, value, ...notes) =>
    make("div", null, make("h3", null, label), make("p.value", null, value), ...notes.map((note) => make("p.note", null, note)));
  if (!entry.evaluated) {
    return make("div.class-figures", null, figure("Images", integer(entry.images), "none evaluated"));
  }
  const error = (label, value, wrong, low, high, all) =>
    figure(label, [decimal(value), make("small", null, " %")],
      [`${integer(wrong)} of ${integer(entry.evaluated)} `, make("span.whole", null, `(${decimal(low)} – ${decimal(high)})`)], besideAverage(value - all));
  return make(
    "div.class-figures",
    null,
    error("Top-1 error", entry.error1, entry.wrong1, entry.low1, entry.high1, runError1),
    error("Top-5 error", entry.error5, entry.wrong5, entry.low5, entry.high5, runError5),
    figure("Median rank", rankText(entry.medianRank), "of the true class"),
    figure("Confidence", [decimal(entry.confidence), make("small", null, " %")], "mean score of the answers",
      entry.refused ? make("span.refused", null, `${integer(entry.refused)} of ${integer(entry.images)} images refused`) : null),
  );
}

function besideAverage(points) {
  const text = decimal(Math.abs(points));
  return text === "0.0" ? "average" : `${text} points ${points > 0 ? "above" : "below"} average`;
}

function classConfusions(entry) {
  const side = (title, none, pairs, all) => {
    const pairOf = (index) => (all ? `#pair-${entry.index}-${index}` : `#pair-${index}-${entry.index}`);
    const reach = Math.max(...pairs.map(([, count]) => count), 1);
    const list = make("ol.taken-for");
    const rows = pairs.map(([index, count]) =>
      make("li", null, classLink(index), make("span.bar", { "aria-hidden": true }, make("i", { style: `width:${((100 * count) / reach).toFixed(1)}%` })),
        make("a.number", { href: pairOf(index), title: "Show the images" }, integer(count), all ? make("small", null, ` · ${decimal((100 * count) / all)} %`) : null)));
    return make("div", null, make("h3", null, title), pairs.length ? list : make("p.quiet", null, none), ...paged(list, rows, CONFUSIONS_SHOWN, "classes"));
  };
  return make(
    "section.columns",
    null,
    side("Confused with", "None: all answers are right.", confusedWith(entry.index), entry.evaluated),
    side("Mistaken for this class", "No image of another class.", mistakenFor(entry.index), 0),
  );
}

function classViews(entry) {
  const cell = (value) => make("td.number", null, value);
  const quiet = (value) => make("td.number.quiet.wide", null, value); // hidden on phones
  const rows = data.views.map(([view, all1, all5], place) => {
    const [own1, own5] = [entry.views.top1[place], entry.views.top5[place]];
    return make("tr", null, make("td", null, `scale ${view}`),
      cell(decimal(own1)), cell(signed(own1 - entry.error1)), quiet(signed(all1 - runError1, 2)),
      cell(decimal(own5)), cell(signed(own5 - entry.error5)), quiet(signed(all5 - runError5, 2)));
  });
  const heads = ["top-1", "gain", "gain, all classes", "top-5", "gain", "gain, all classes"].map((head) =>
    make(head.endsWith("classes") ? "th.number.wide" : "th.number", null, head));
  return make(
    "section",
    null,
    make("h3", null, "Scales and mirroring"),
    make("p.about", null, "Error of each view alone, and the gain from averaging all views", make("span.wide", null, ", next to the gain over all images"), "."),
    make("div.scroll", { tabindex: 0, role: "region", "aria-label": "Scales and mirroring" },
      make("table.class-views", null,
        make("thead", null, make("tr", null, make("th", null, "view"), heads)),
        make("tbody", null, rows,
          make("tr.total", null, make("td", null, "average of all"), cell(decimal(entry.error1)), cell(""), quiet(""), cell(decimal(entry.error5)), cell(""), quiet(""))))),
  );
}

/** Return the images of a class, with its confusions between its mistakes and its right answers. */
function classImages(entry, confusions) {
  const images = imagesOf(entry.index);
  const refused = images.filter((image) => image.refused !== undefined);
  const seen = images.filter((image) => image.refused === undefined);
  const wrong = seen.filter((image) => image.rank > 1);
  const right = seen.filter((image) => image.rank === 1);
  const rest = entry.images - images.length;
  return [
    imageSection(entry, "Mistakes", entry.wrong1, wrong, "Most confident first."),
    confusions,
    imageSection(entry, "Right answers", entry.evaluated - entry.wrong1, right, "Least confident first."),
    refused.length ? make("section", null, make("h3", null, `Refused (${integer(entry.refused)})`),
      make("ul.refused-files", null, refused.map((image) => make("li", null, fileName(image.file), " ", make("span.quiet", null, image.refused))))) : null,
    rest > 0 ? make("p.quiet", null, `${integer(rest)} more images are not on this page. The run’s predictions.jsonl lists all of them.`) : null,
  ];
}

function imageSection(entry, title, count, images, about) {
  if (!count) return null;
  const hasTile = (image) => image.picture || image.heatMaps;
  const tiles = make("div.gallery");
  const list = make("ul.shots");
  const pictured = images.filter(hasTile).map((image) => imageTile(entry, image));
  const plain = images.filter((image) => !hasTile(image)).map((image) => imageRow(entry, image));
  return make(
    "section",
    null,
    make("h3", null, `${title} (${integer(count)})`),
    images.length > 1 ? make("p.about", null, about) : null,
    images.some((image) => image.heatMaps) ? heatMapLegend() : null,
    pictured.length ? tiles : null,
    ...paged(tiles, pictured, TILES_SHOWN, "pictures"),
    plain.length ? list : null,
    ...paged(list, plain, ROWS_SHOWN, "images"),
  );
}

/** Return a tile like those of the page's gallery. */
function imageTile(entry, image) {
  const tag = image.picture?.startsWith("data:image/png") ? "img.tiny" : "img";
  const figure = make(
    "figure",
    null,
    image.picture ? make("div.picture", null, make(tag, { src: image.picture, alt: `${entry.name}, ${image.file}` })) : null,
    make("figcaption", null, make("p.truth", null, alsoTrue(image), make("small", null, imageNote(image))),
      make("ol", null, image.top.map(([index, score]) =>
        make(image.labels.includes(index) ? "li.right" : "li", null, classLink(index),
          make("i", { style: `--part:${(100 * Math.min(score, 1)).toFixed(1)}` }), make("span.number", null, decimal(score, 3))))),
      make("p.file", null, fileName(image.file))),
  );
  if (image.heatMaps) addHeatMaps(figure, image.heatMaps);
  return figure;
}

function imageRow(entry, image) {
  const answers = image.top.flatMap(([index, score], place) => [
    place ? " · " : "",
    make(image.labels.includes(index) ? "span.answer.right" : "span.answer", null, classLink(index), ` ${decimal(score, 3)}`),
  ]);
  const confidence = 100 * Math.min(image.top[0][1], 1);
  return make(
    "li",
    null,
    make("p.file", null, fileName(image.file)),
    make("span.number.quiet", null, imageNote(image)),
    make("span.bar", { "aria-hidden": true, class: image.rank > 1 ? "bar second" : "bar" }, make("i", { style: `width:${confidence.toFixed(1)}%` })),
    make("p.answers", null, answers, image.labels.length > 1 ? `; ${alsoTrue(image)}` : ""),
  );
}

function imageNote(image) {
  return `rank ${integer(image.rank)}${image.capped ? ", capped" : ""}`;
}

/** Return the further true classes of an image in words, "" if it has none. */
function alsoTrue(image) {
  return image.labels.slice(1).map((index) => `also ${classes[index].name}`).join(", ");
}

/** Return a file name that may wrap after each folder. */
function fileName(file) {
  const parts = file.split("/");
  return make("span.file", null, parts.flatMap((part, n) => (n < parts.length - 1 ? [`${part}/`, make("wbr")] : [part])));
}

/** Append the first elements to a parent. Return a button that appends the next ones, if there are any. */
function paged(parent, elements, portion, unit) {
  let shown = 0;
  const button = make("button.more", { type: "button" });
  const next = () => {
    parent.append(...elements.slice(shown, shown + portion));
    shown += portion;
    button.textContent = `Show ${integer(Math.min(portion, elements.length - shown))} of ${integer(elements.length - shown)} more ${unit}`;
    if (shown >= elements.length) button.remove();
  };
  next();
  button.addEventListener("click", next);
  return shown < elements.length ? [button] : [];
}
