// Draws the charts of a page in the colours of the theme, and follows the store.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(root) {
  const axis = { color: colour("--soft"), gridcolor: colour("--line"),
    zerolinecolor: colour("--line"), automargin: true };
  for (const data of root.querySelectorAll(".chart script[type='application/json']")) {
    const chart = JSON.parse(data.textContent);
    const layout = { ...chart.layout, autosize: true, margin: { t: 8, r: 8, b: 40, l: 48 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      colorway: ["--one", "--two", "--three", "--four", "--five", "--six"].map(colour),
      font: { color: colour("--fore"), family: "system-ui, sans-serif" },
      dragmode: false,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", ...chart.layout.legend },
      xaxis: { ...axis, ...chart.layout.xaxis }, yaxis: { ...axis, ...chart.layout.yaxis } };
    Plotly.react(data.previousElementSibling, chart.data, layout,
      { displayModeBar: false, responsive: true });
  }
}

// Puts new text in the place of old, and leaves open, scrolled and focused what was.
function replace(region, text) {
  const fresh = document.createElement("template");
  fresh.innerHTML = text;
  const both = (selector, carry) => {
    const old = [...region.querySelectorAll(selector)];
    fresh.content.querySelectorAll(selector).forEach((it, i) => old[i] && carry(old[i], it));
  };
  both("details", (old, it) => { it.open = old.open; });
  const scrolled = [...region.querySelectorAll(".scroll")].map((it) => it.scrollLeft);
  const focused = [...region.querySelectorAll("a, summary, .scroll")].indexOf(document.activeElement);
  region.replaceChildren(fresh.content);
  region.querySelectorAll(".scroll").forEach((it, i) => { it.scrollLeft = scrolled[i] ?? 0; });
  if (focused >= 0) {
    region.querySelectorAll("a, summary, .scroll")[focused]?.focus({ preventScroll: true });
  }
  draw(region);
}

// A screen reader is told when it has changed, and nothing else of what follows.
function tell(id, text) {
  const place = document.getElementById(id);
  if (place.textContent !== text) place.textContent = text;
}

function follow(region, pause) {
  let tag = null;
  const follows = () => pause.getAttribute("aria-pressed") === "false";
  const look = async () => {
    if (!document.hidden && follows()) {
      try {
        const answer = await fetch(region.dataset.live, tag ? { headers: { "If-None-Match": tag } } : {});
        const text = await answer.text();
        if (answer.ok && follows()) { // Pause may have been pressed while it was on its way
          tag = answer.headers.get("ETag");
          replace(region, text);
          const said = region.querySelector("[data-status]");
          if (said) tell("status", said.textContent.trim());
        }
        if (answer.status === 404) {
          tell("problem", "This buffer is not there any more: what is shown is old.");
          return;
        }
        const fine = answer.ok || answer.status === 304;
        tell("problem", fine ? "" : "The store does not answer: what is shown is old.");
      } catch {
        tell("problem", "The pages are not served any more: what is shown is old.");
      }
    }
    setTimeout(look, 1000 * Number(region.dataset.every));
  };
  setTimeout(look, 1000 * Number(region.dataset.every));
}

const regions = document.querySelectorAll("[data-live]");
if (regions.length) {
  const pause = document.getElementById("pause");
  pause.hidden = false;
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(pause.getAttribute("aria-pressed") === "false"));
  });
  regions.forEach((region) => follow(region, pause));
}
if (window.Plotly) {
  draw(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(document));
}
