"""The HTML report: one file that opens offline, with the verdict first and a plot for each measure.

Names of models and layers are untrusted text. They are escaped here, and page.js only ever sets text.
"""

import base64
import hashlib
import html
import json
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from unskip._core.version import __version__
from unskip.doctor.verdict import bands
from unskip.measures import Measure, Series

if TYPE_CHECKING:
    from unskip.doctor.report import Report

MAX_BYTES = 1_500_000  # of a page
DIGITS = 4  # of the numbers on the page; the JSON report has them all


def _asset(name: str) -> str:
    return (resources.files("unskip.doctor") / "assets" / name).read_text(encoding="utf-8")


TEXTS = tomllib.loads(_asset("texts.toml"))


def render(reports: Sequence["Report"]) -> str:
    """The page for one report or for two, side by side. Long models show every 2nd, 4th, ... layer in the plots."""
    for step in (1, 2, 4, 8, 16, 32):
        text = _fill(reports, step)
        if len(text.encode()) <= MAX_BYTES:
            break
    return text


def _fill(reports: Sequence["Report"], step: int) -> str:
    """The page with every step-th layer in its plots."""
    echarts, js = _asset("echarts.min.js"), _asset("page.js")
    names = [_escape(report.name) for report in reports]
    parts = {
        "script_hashes": " ".join(f"'sha256-{_digest(script)}'" for script in (echarts, js)),
        "version": __version__,
        "title": f"{' and '.join(names)} · unskip doctor",
        "css": _asset("page.css"),
        "kind": "single" if len(reports) == 1 else "compare",
        "heading": ' <span class="versus">against</span> '.join(names),
        "verdicts": "\n".join(_verdict(report, which, step) for which, report in enumerate(reports)),
        "numbers": _numbers(reports),
        "notes": _notes(reports, step),
        "footer": f"Made by unskip {__version__} with PyTorch {_escape(torch.__version__)}. Plots are drawn by "
        "Apache ECharts, which is part of this file.",
        "data": _script_json(_data(reports, step)),
        "echarts": echarts,
        "js": js,
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _asset("page.html"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escape(text: str) -> str:
    """Text for HTML: markup escaped, control characters (which HTML forbids) replaced."""
    return html.escape(re.sub(r"[\x00-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", text))


def _script_json(value: Any) -> str:
    """JSON that can't close the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---------------------------------------------------------------- parts that work without JavaScript


def _verdict(report: "Report", which: int, step: int) -> str:
    verdict, name = report.verdict, _escape(report.name)
    symbol, outcome = TEXTS["outcomes"][verdict.outcome]
    rows = {}
    if verdict.mechanism:
        meaning = TEXTS["mechanisms"][verdict.mechanism]
        rows["What goes wrong"] = f"<b>{verdict.mechanism.capitalize()}</b>: {meaning}"
    if verdict.layer:
        index, layer = _index(report).get(verdict.layer), _escape(verdict.layer)
        rows["Where"] = f'<span class="name">{layer}</span>'
        if index is not None:
            place = f'data-network="{which}" data-layer="{index // step}"'
            rows["Where"] = f'<button type="button" class="where name" {place}>{layer}</button>'
    if verdict.remedies:
        rows["What would help"] = _list(verdict.remedies)
    percent = round(100 * min(max(verdict.confidence, 0.0), 1.0))
    rows["Confidence"] = (
        f'<div class="sure"><svg aria-hidden="true"><rect width="100%" height="100%" rx="3"/>'
        f'<rect width="{percent}%" height="100%" rx="3"/></svg>{percent} %</div>'
    )
    return (
        f'<article class="verdict {verdict.outcome}" aria-label="Verdict on {name}">'
        f'<h2 class="who"><span class="dot{" b" if which else ""}" aria-hidden="true"></span>{name}</h2>'
        f'<p class="outcome"><span aria-hidden="true">{symbol}</span> {outcome}</p>'
        f'<p class="summary">{_escape(verdict.summary)}</p>'
        f"<dl>{''.join(f'<dt>{term}</dt><dd>{text}</dd>' for term, text in rows.items())}</dl>"
        f'<p class="facts">{report.measured.depth} layers, {report.parameters:,} trainable parameters. '
        f"Measured on {_escape(report.data)}, {' × '.join(map(str, report.batch))}.</p></article>"
    )


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escape(item)}</li>' for item in items)}</ul>"


def _numbers(reports: Sequence["Report"]) -> str:
    names = dict.fromkeys(name for report in reports for name in report.measured.numbers)
    if not names:
        return ""
    head = "".join(f'<th scope="col">{_escape(report.name)}</th>' for report in reports)
    rows = "".join(
        f'<tr><th scope="row">{_escape(TEXTS["numbers"].get(name, name.replace("_", " ")))}</th>'
        + "".join(f"<td>{_number(report.measured.numbers.get(name, math.nan))}</td>" for report in reports)
        + "</tr>"
        for name in names
    )
    return (
        "<h2>Numbers</h2><p>Values for the whole network.</p>"
        f'<div class="tidy"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return (f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}").replace("-", "−")


def _notes(reports: Sequence["Report"], step: int) -> str:
    notes = []
    for note in dict.fromkeys(note for report in reports for note in report.measured.notes):
        about = [report.name for report in reports if note in report.measured.notes]
        notes.append(note if len(about) == len(reports) else f"{', '.join(about)}: {note}")
    if step > 1:
        notes.append(f"The plots show one layer in {step}, to keep the page small. The JSON report has all layers.")
    return f'<h2>Notes</h2><div class="notes">{_list(notes)}</div>' if notes else ""


# ---------------------------------------------------------------- data for page.js


def measures(reports: Sequence["Report"]) -> list[str]:
    """The names of all measures with a value at some layer of some model, in order."""
    found = (series for report in reports for series in report.measured.series.values())
    return list(dict.fromkeys(series.name for series in found if series.layers))


def _index(report: "Report") -> dict[str, int]:
    """The position of each layer in the order of execution."""
    return {layer.name: i for i, layer in enumerate(report.measured.layers)}


def _data(reports: Sequence["Report"], step: int) -> dict[str, Any]:
    """Everything that page.js needs. Series refer to layers by number."""
    left = measures(reports)
    all_series = {name: series for report in reversed(reports) for name, series in report.measured.series.items()}
    groups = []
    for group in TEXTS["groups"]:
        names = [name for name in group.get("measures", list(left)) if name in left]
        left = [name for name in left if name not in names]
        if names:
            plots = [{each.name: getattr(all_series[name], each.name) for each in fields(Measure)} for name in names]
            groups.append({"title": group["title"], "text": group["text"], "plots": plots})
    return {"networks": [_model(report, step) for report in reports], "groups": groups}


def _model(report: "Report", step: int) -> dict[str, Any]:
    index = _index(report)
    suspect = index.get(report.verdict.layer or "")
    return {
        "name": report.name,
        "depth": report.measured.depth,
        "layers": [asdict(layer) for layer in report.measured.layers[::step]],
        "suspect": None if suspect is None else suspect // step,
        "crossed": report.verdict.measures[:1],  # the measure whose limit is crossed there
        "bands": bands(report.measured),
        "series": {name: _points(series, index, step) for name, series in report.measured.series.items()},
    }


def _points(series: Series, index: dict[str, int], step: int) -> dict[str, Any]:
    """A series as x (numbers of layers, rising), y and e (standard errors, if any)."""
    order = sorted((index[name], i) for i, name in enumerate(series.layers))
    order = [(x, i) for x, i in order if x % step == 0]
    return {
        "x": [x // step for x, _ in order],
        "y": [json_number(series.values[i], DIGITS) for _, i in order],
        "e": None if series.errors is None else [json_number(series.errors[i], DIGITS) for _, i in order],
    }


def json_number(value: float, digits: int | None = None) -> float | str | None:
    """A number for JSON, which has no NaN and no infinity: None for NaN, 'inf' or '-inf' for infinity."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return str(value)
    return value if digits is None else float(f"{value:.{digits}g}")
