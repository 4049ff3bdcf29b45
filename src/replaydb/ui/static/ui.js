// Draws charts in the colors of the theme, and polls the parts of the overview for updates.
"use strict";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(root) {
  const axis = { color: color("--soft"), gridcolor: color("--line"),
    zerolinecolor: color("--line"), automargin: true };
  for (const data of root.querySelectorAll(".chart script[type='application/json']")) {
    const chart = JSON.parse(data.textContent);
    const layout = { ...chart.layout, autosize: true, margin: { t: 8, r: 8, b: 40, l: 48 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      colorway: ["--one", "--two", "--three", "--four", "--five", "--six"].map(color),
      font: { color: color("--fore"), family: "system-ui, sans-serif" },
      dragmode: false,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", ...chart.layout.legend },
      xaxis: { ...axis, ...chart.layout.xaxis }, yaxis: { ...axis, ...chart.layout.yaxis } };
    Plotly.react(data.previousElementSibling, chart.data, layout,
      { displayModeBar: false, responsive: true });
  }
}

// Replaces the content of a region; keeps open details, scroll positions and focus.
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

// Updates a live region only if its text has changed, so that screen readers announce it once.
function announce(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

function follow(region, pause) {
  let tag = null;
  const isLive = () => pause.getAttribute("aria-pressed") === "false";
  const poll = async () => {
    if (!document.hidden && isLive()) {
      try {
        const response = await fetch(region.dataset.live, tag ? { headers: { "If-None-Match": tag } } : {});
        const text = await response.text();
        if (response.ok && isLive()) { // Pause may have been pressed during the request
          tag = response.headers.get("ETag");
          replace(region, text);
          const status = region.querySelector("[data-status]");
          if (status) announce("status", status.textContent.trim());
        }
        if (response.status === 404) {
          announce("problem", "This buffer was deleted. The data on this page is out of date.");
          return;
        }
        const fine = response.ok || response.status === 304;
        announce("problem", fine ? "" : "The store does not respond. The data on this page is out of date.");
      } catch {
        announce("problem", "The server does not respond. The data on this page is out of date.");
      }
    }
    setTimeout(poll, 1000 * Number(region.dataset.every));
  };
  setTimeout(poll, 1000 * Number(region.dataset.every));
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
