// The panel of one confusion pair: all images of a class that got the same wrong answer. Its URL fragment: #pair-12-17.

/** Return the elements of the pair that a URL fragment names; null if it names none, or no image is confused so. */
function pairContent(fragment) {
  const [label, answer] = /^#pair-(\d{1,7})-(\d{1,7})$/.exec(fragment)?.slice(1).map(Number) ?? [];
  const count = classes[label] ? countOf(label, answer) : 0;
  if (!count) return null;
  const entry = classes[label];
  const images = imagesOf(label).filter((image) => image.rank > 1 && image.top[0][0] === answer);
  const [reverse, rest] = [countOf(answer, label), count - images.length];
  return [
    make("div.class-bar", null, make("span.quiet.keys", null, "Esc to close"), make("button.close", { type: "button" }, "Close")),
    make("header", null,
      make("h2", { id: "class-title", tabindex: -1 }, classLink(label), make("span.arrow", null, " → "), classLink(answer)),
      make("p.quiet", null, classLink(answer), ` is the answer to ${integer(count)} of ${integer(entry.evaluated)} images `,
        `(${decimal((100 * count) / entry.evaluated)} %) of `, classLink(label), ". ",
        reverse ? make("a", { href: `#pair-${answer}-${label}` }, `${integer(reverse)} the other way round`) : "None the other way round", ".")),
    imageSection(entry, "Images", count, images, "Most confident first."),
    rest > 0 && make("p.quiet", null, `${integer(rest)} more images are not on this page. The run’s predictions.jsonl lists all of them.`),
  ].filter((part) => part);
}

function countOf(label, answer) {
  return confusedWith(label).find(([index]) => index === answer)?.[1] ?? 0;
}

/** Make every pair of the list clickable as a whole. */
function startPairs() {
  document.querySelector(".pairs")?.addEventListener("click", (event) => {
    const link = event.target.closest("li")?.querySelector("a.number");
    if (link && !event.target.closest("a") && getSelection().isCollapsed) link.click();
  });
}
