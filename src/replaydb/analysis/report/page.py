"""HTML of a report: self-contained, with a restrictive Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence

from replaydb.analysis.report.figures import figures
from replaydb.analysis.report.summary import Sample, Summary, TaskSummary
from replaydb.util.display import visible

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { margin-top: 2em; } p.facts { color: #555; margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3em .6em; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: 1em;
  max-height: 24em; overflow: auto; unicode-bidi: isolate; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em; }
"""

#: Script that draws each plot from the JSON element after it.
_DRAW = """
for (const data of document.querySelectorAll("script[type='application/json']")) {
  const figure = JSON.parse(data.textContent);
  Plotly.newPlot(data.previousElementSibling, figure.data, figure.layout,
    {displaylogo: false, responsive: true});
}
"""


def page_of(summary: Summary) -> str:
    """Return a report as HTML.

    Raises:
        NotSupportedError: plotly is not installed.
    """
    plots = "".join(plot(heading, figure.to_json()) for heading, figure in figures(summary))
    from plotly.offline import get_plotlyjs

    library = f"\n{get_plotlyjs()}\n"
    title = f"{_text(summary.buffer)} · replaydb"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(library, _DRAW)}">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(summary.buffer)}</h1>
<p class="facts">{_facts(summary)}</p>
<h2>Tasks</h2>
{_table(_HEADINGS, [_row(name, task) for name, task in sorted(summary.tasks.items())])}
<div class="plots">{plots}</div>
<h2>Best groups</h2>
{"".join(map(_sample, summary.best)) or "<p>No group has a reward.</p>"}
<h2>Worst groups</h2>
{"".join(map(_sample, summary.worst)) or "<p>No group has a reward.</p>"}
<script>{library}</script>
<script>{_DRAW}</script>
</body>
</html>
"""


def _policy(*scripts: str) -> str:
    """Return the Content-Security-Policy: run only these scripts, load nothing."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def plot(heading: str, figure: str) -> str:
    """Return a section with a plot, whose JSON cannot end its script element."""
    # Only `<` could end the script element; JSON can escape it.
    data = figure.replace("<", "\\u003c")
    return (
        f"<section><h2>{heading}</h2><div></div>"
        f'<script type="application/json">{data}</script></section>\n'
    )


def _facts(summary: Summary) -> str:
    tasks = summary.tasks.values()
    facts = (
        f"{sum(task.groups for task in tasks):,} groups",
        f"{sum(task.tokens for task in tasks):,} tokens",
        f"{summary.trained.total():,} groups trained, counting repeats",
        f"policy version {summary.policy_version:,}",
        f"{summary.at:%Y-%m-%d %H:%M} UTC",
    )
    return " · ".join(facts)


_HEADINGS = (
    *("task", "groups", "tokens", "mean reward", "non-zero variance", "draws", "never drawn"),
    *("trained", "statuses"),
)


def _row(name: str, task: TaskSummary) -> Iterator[str]:
    yield _text(name)
    yield f"{task.groups:,}"
    yield f"{task.tokens:,}"
    yield f"{task.reward / task.rewarded:.4g}" if task.rewarded else "-"
    yield f"{task.varied / task.rewarded:.1%}" if task.rewarded else "-"
    yield f"{task.draws:,}"
    yield f"{task.undrawn:,}"
    yield f"{task.trained:,}"
    yield ", ".join(f"{count:,} {status}" for status, count in sorted(task.statuses.items()))


def _table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _sample(sample: Sample) -> str:
    group = sample.group
    facts = [f"group {group.id}", _text(group.task_name), f"mean reward {group.reward_mean:.4g}"]
    if group.prompt_uid is not None:
        facts.append(f"prompt {_text(group.prompt_uid)}")
    if group.run_name is not None:
        facts.append(f"run {_text(group.run_name)}")
    if group.min_policy_version is not None:
        facts.append(f"policy version {group.min_policy_version}")
    if sample.reward is None:
        what = "<p>Episodes cannot be read.</p>"
    elif sample.text is None:
        what = f"<p>Reward {sample.reward:.4g}: no text stored.</p>"
    else:
        what = f"<p>Reward {sample.reward:.4g}:</p><pre>{_text(sample.text)}</pre>"
    return f"<h3>{' · '.join(facts)}</h3>{what}\n"


def _text(text: str) -> str:
    """Return untrusted text as HTML."""
    return html.escape(visible(text))
