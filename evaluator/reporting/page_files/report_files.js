// What a reader takes from the page: the mistakes and the confusion pairs as CSV files, and the headline to paste.

const named = (index) => [index, classes[index].wnid, classes[index].name];

/** Return a row per listed mistake, by class, most confident first; scores have three decimals; also: other true classes. */
function mistakeRows() {
  const rows = classes.flatMap(({ index }) =>
    imagesOf(index).filter((image) => image.rank > 1).map(({ file, labels: [, ...also], top: [[answer, score]], rank }) =>
      [file, ...named(index), also.join(" "), ...named(answer), score, rank]));
  return [["file", "label", "wnid", "name", "also", "answer", "answer_wnid", "answer_name", "score", "rank"], ...rows];
}

/** Return a row per pair of true class and wrong answer, most frequent first. */
function pairRows() {
  const rows = classes.flatMap(({ index, evaluated }) =>
    confusedWith(index).map(([answer, count]) => [...named(index), ...named(answer), count, evaluated]));
  rows.sort((a, b) => b[6] - a[6] || a[0] - b[0] || a[3] - b[3]);
  return [["label", "wnid", "name", "answer", "answer_wnid", "answer_name", "images", "evaluated"], ...rows];
}

function addCsvButtons() {
  const mistakes = classes.reduce((sum, entry) => sum + entry.wrong1, 0);
  if (!mistakes) return;
  const listed = data.images.reduce((sum, [, , , ranks]) => sum + ranks.filter((rank) => rank > 1).length, 0);
  const missing = listed < mistakes ? `${integer(listed)} of ${integer(mistakes)} mistakes; the run’s predictions.jsonl lists all. ` : "";
  const add = (section, what, name, rows, note) => {
    const buttons = saveButtons(["CSV", what, () => saveFile(name, csvFile(rows()))]);
    buttons.prepend(note);
    document.querySelector(`#${section} .about`).after(buttons);
  };
  add("mistakes", "the mistakes", "mistakes.csv", mistakeRows, missing);
  add("confusions", "all confusion pairs", "confusions.csv", pairRows, "");
}

/** Add the button that copies the headline; where the browser gives no access to the clipboard, by its copy command. */
function addCopyButton() {
  const headline = document.getElementById("headline");
  const said = make("span.quiet", { "aria-live": "polite" });
  const button = make("button", { type: "button", "aria-label": "Copy the headline" }, "Copy");
  button.addEventListener("click", async () => {
    said.textContent = "";
    let copied = await navigator.clipboard?.writeText(headline.textContent).then(() => true, () => false);
    if (!copied) {
      getSelection().selectAllChildren(headline);
      copied = document.execCommand("copy");
    }
    said.textContent = copied ? "copied" : "selected; copy it with your keyboard";
  });
  headline.after(make("p.save", null, said, button));
}
