"use strict";
// The charts, and search, filter and order of the table. Without scripts the page shows everything but the charts.
(() => {
  for (const key of ["top1", "top5"]) {
    const spec = JSON.parse(document.getElementById(`${key}-spec`).textContent);
    // ast: expressions are interpreted, so that the content policy need not allow eval.
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "report" } };
    if (spec) window.vegaEmbed(`#${key}-chart`, spec, options);
  }
})();
