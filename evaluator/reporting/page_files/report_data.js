// The report's data, in the order written by page_data.py.

const data = JSON.parse(document.getElementById("report-data").textContent);
const [runError1, runError5] = data.errors;

const classes = data.classes.map((row, index) => {
  const [wnid, name, images, evaluated, wrong1, low1, high1, wrong5, low5, high5, confidence, medianRank, views] = row;
  const error = (wrong) => (evaluated ? (100 * wrong) / evaluated : null);
  return {
    index, wnid, name, images, evaluated, refused: images - evaluated,
    wrong1, low1, high1, error1: error(wrong1), wrong5, low5, high5, error5: error(wrong5),
    confidence, medianRank,
    views: { top1: views.slice(0, views.length / 2), top5: views.slice(views.length / 2) },
  };
});

const sharing = new Map(); // class index → the other classes with the same name
for (const group of data.shared) {
  for (const index of group) sharing.set(index, group.filter((other) => other !== index));
}

/** Return what the images of a class are confused with: [class index, count] pairs, most frequent first. */
function confusedWith(index) {
  const flat = data.taken[index];
  return Array.from({ length: flat.length / 2 }, (_, n) => [flat[2 * n], flat[2 * n + 1]]);
}

/** Return the classes whose images are mistaken for this one, in the form of confusedWith. */
let reversed = null;
function mistakenFor(index) {
  if (!reversed) {
    reversed = classes.map(() => []);
    for (const { index: label } of classes) {
      for (const [answer, count] of confusedWith(label)) reversed[answer].push([label, count]);
    }
    for (const pairs of reversed) pairs.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  }
  return reversed[index];
}

/** Return the listed images of a class: mistakes first, then right answers, then refused images. */
function imagesOf(index) {
  const [beginning, end, middles, ranks, width, answers, scores, reasons, capped, also = {}] = data.images[index];
  const cut = new Set(capped);
  return middles.map((middle, n) => {
    const file = beginning + middle + end;
    if (n >= ranks.length) return { file, refused: reasons[n - ranks.length] };
    const top = [];
    for (let place = n * width; place < (n + 1) * width; place++) {
      top.push([answers[place], scores[place] / 1000]);
    }
    return { file, rank: ranks[n], labels: [index, ...(also[n] ?? [])], top, capped: cut.has(n), picture: pictureOf(`${index}-${n}`), heatMaps: data.heatmaps[`${index}-${n}`] };
  });
}

/** Return the URL of a picture: its own tile, or the large picture of the gallery. */
function pictureOf(key) {
  if (!(key in data.large)) return data.tiles[key]; // first: searching the page for each of 50,000 images takes minutes
  return document.querySelectorAll(".gallery figure")[data.large[key]].querySelector("img")?.src;
}

/** Return a link that opens a class, with the wnid if other classes share its name. */
function classLink(index) {
  const link = make("a.name", { href: `#class-${index}` }, classes[index].name);
  return sharing.has(index) ? make("span", null, link, " ", make("span.wnid", null, classes[index].wnid)) : link;
}
