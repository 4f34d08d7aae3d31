// Draws each chart into the element `#NAME-chart`. Clicking the point of a class opens that class.

function drawCharts() {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  for (const [name, spec] of Object.entries(specs)) {
    // ast: interpret expressions, so that the content security policy need not allow eval.
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "report" } };
    window.vegaEmbed(`#${name}-chart`, spec, options).then(({ view }) => {
      view.addEventListener("click", (_, item) => goToClass(item?.datum));
      addChartButtons(name, view);
      document.querySelector(`#${name}-chart svg`).setAttribute("aria-hidden", true); // the element around it has a name
    });
  }
}

function goToClass(datum) {
  const index = datum?.index ?? datum?.datum?.index; // a point, or the area around its nearest point
  if (index === undefined) return;
  if (location.hash === `#class-${index}`) dispatchEvent(new HashChangeEvent("hashchange"));
  location.hash = `class-${index}`;
}
