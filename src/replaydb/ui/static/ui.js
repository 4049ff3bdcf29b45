// Draws the charts of a page, in the colours of the theme.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(root) {
  const axis = { color: colour("--soft"), gridcolor: colour("--line"), zerolinecolor: colour("--line"),
    automargin: true };
  for (const data of root.querySelectorAll(".chart script[type='application/json']")) {
    const chart = JSON.parse(data.textContent);
    const layout = { ...chart.layout, autosize: true, margin: { t: 8, r: 8, b: 40, l: 48 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--fore"), family: "system-ui, sans-serif" },
      xaxis: { ...axis, ...chart.layout.xaxis }, yaxis: { ...axis, ...chart.layout.yaxis } };
    Plotly.react(data.previousElementSibling, chart.data, layout,
      { displayModeBar: false, responsive: true });
  }
}

if (window.Plotly) {
  draw(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(document));
}
