"""The page: one HTML file that opens offline, with the verdict first and a plot for each measure.

What a network calls itself and its layers is text from outside: it is escaped here, and page.js only ever sets text.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from unskip._core.version import __version__
from unskip.measures import Series

if TYPE_CHECKING:
    from unskip.doctor.report import Report

LIMIT = 1_500_000  # bytes that a page may have
DIGITS = 4  # of the numbers on the page; the JSON report has them all
FATES = {"trains": ("✓", "Should train"), "doubtful": ("?", "Doubtful"), "fails": ("✕", "Most likely won't train")}
MECHANISMS = {
    "dissipating": "each layer forgets a part of what tells inputs apart, until noise counts as much as they do.",
    "singularity": "all inputs come to look alike, so that there is next to nothing to learn from.",
    "exploding gradient": "on its way back the gradient grows from layer to layer, until no learning rate is stable.",
    "vanishing gradient": "on its way back the gradient shrinks from layer to layer, until it moves no weight.",
    "saturation": "non-linearities are driven to their ends, where they pass no gradient back.",
}


@dataclass(frozen=True)
class Group:
    """Measures that tell one part of the story."""

    title: str
    text: str
    measures: tuple[str, ...]


GROUPS = (
    Group(
        "Does the input get through?",
        "What tells one input from another must survive to the last layer: a network can't learn from what it no "
        "longer sees.",
        ("noise_to_signal", "recovery", "cosine_similarity"),
    ),
    Group(
        "Does the gradient come back?",
        "Training changes each layer by its gradient. Where that is a million times larger or smaller than elsewhere, "
        "no learning rate suits all layers.",
        (
            "gradient_norm",
            "activation_gradient_norm",
            "relative_gradient",
            "gradient_blocked",
            "backward_ratio",
            "dominance",
        ),
    ),
    Group(
        "Is the signal of a sound size?",
        "What layers put out, at the start of training.",
        (
            "activation_variance",
            "forward_ratio",
            "activation_mean",
            "activation_maximum",
            "surviving_units",
            "dead_units",
            "share_above_small",
            "share_above_large",
        ),
    ),
)
OTHERS = Group(
    "Are the layers themselves in good shape?",
    "Layers whose units say different things, and whose weights hold against noise, have more to learn with.",
    (),  # whatever else is measured
)
NUMBERS = {
    "loss": "Loss of this batch",
    "dead_units": "Dead units, share in the worst layer",
    "gradient_growth": "Growth of the weights' gradient towards the input, per layer (natural logarithm)",
    "gradient_growth_error": "Its standard error",
    "gradient_range": "Largest over smallest gradient of a layer's weights (powers of ten)",
    "activation_gradient_growth": "Growth of the outputs' gradient towards the input, per layer (natural logarithm)",
    "gradient_blocked": "Gradient stopped by a non-linearity, share in the worst layer",
    "input_dissipation": "Near/far at the last hidden layer (0: the input is known, 1: it is lost)",
    "cosine_similarity": "Mean cosine between two inputs at the last hidden layer",
    "recovery": "R² of the input, read off the last hidden layer",
    "recovery_possible": "R² of the input, read off the input itself",
    "activation_rate": "Growth of the gradient over the signal at a non-linearity (factor)",
    "collinearity": "Mean correlation of two units, in the worst layer",
    "effective_rank": "Effective rank, share of the units, in the worst layer",
    "weight_mean": "Mean of all weights",
    "weight_deviation": "Standard deviation of all weights",
    "weight_mass": "Sum of all weights' sizes",
    "weight_mass_large": "Of these, of large weights",
    "weight_mass_id": "Of these, of weights that carry a channel to itself",
}


def render(reports: Sequence["Report"]) -> str:
    """The page for one report or for two, side by side."""
    text = _fill(reports, step=1)
    for step in (2, 4, 8, 16, 32):
        if len(text.encode()) <= LIMIT:
            break
        text = _fill(reports, step)
    return text


def _fill(reports: Sequence["Report"], step: int) -> str:
    """The page with every step-th layer in its plots."""
    scripts = {name: _asset(name) for name in ("echarts.min.js", "page.js")}
    names = [_text(report.name) for report in reports]
    parts = {
        "script_hashes": " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values()),
        "version": __version__,
        "title": f"{' and '.join(names)} · unskip doctor",
        "css": _asset("page.css"),
        "kind": "single" if len(reports) == 1 else "compare",
        "heading": ' <span class="versus">against</span> '.join(names),
        "verdicts": "\n".join(_verdict(report, which, step) for which, report in enumerate(reports)),
        "numbers": _numbers(reports),
        "notes": _notes(reports, step),
        "footer": f"Made by unskip {__version__} with PyTorch {_text(torch.__version__)}. Plots are drawn by "
        "Apache ECharts, which is part of this file.",
        "data": _script_json(_data(reports, step)),
        "echarts": scripts["echarts.min.js"],
        "js": scripts["page.js"],
    }
    first, *rest = _asset("page.html").split("{{")
    pieces = [first]  # one pass, so that braces in a part stay what they are
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _asset(name: str) -> str:
    return (resources.files("unskip.doctor") / "assets" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(value: str) -> str:
    """Text as HTML shows it: markup escaped, control characters (which HTML forbids) made visible."""
    return html.escape("".join(c if c >= " " and c != "\x7f" else "\N{REPLACEMENT CHARACTER}" for c in value))


def _script_json(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---------------------------------------------------------------- what stands in the page without JavaScript


def _verdict(report: "Report", which: int, step: int) -> str:
    verdict = report.verdict
    sign, words = FATES[verdict.fate]
    rows = []
    if verdict.mechanism:
        rows.append(("What goes wrong", f"<b>{_text(verdict.mechanism.capitalize())}</b>{_meaning(verdict.mechanism)}"))
    if verdict.layer:
        at = _index(report).get(verdict.layer)
        name = f'<span class="name">{_text(verdict.layer)}</span>'
        if at is not None:
            name = (
                f'<button type="button" class="where name" data-network="{which}" data-layer="{at // step}">'
                f"{_text(verdict.layer)}</button>"
            )
        rows.append(("Where", name))
    if verdict.remedies:
        items = "".join(f"<li>{_text(remedy)}</li>" for remedy in verdict.remedies)
        rows.append(("What would help", f"<ul>{items}</ul>"))
    percent = round(100 * min(max(verdict.confidence, 0.0), 1.0))
    meter = (
        f'<div class="sure"><svg aria-hidden="true"><rect width="100%" height="100%" rx="3"/>'
        f'<rect width="{percent}%" height="100%" rx="3"/></svg>{percent} %</div>'
    )
    rows.append(("How sure", meter))
    shape = " × ".join(map(str, report.batch))
    facts = (
        f"{len(report.measured.layers)} layers, {report.parameters:,} trained parameters. "
        f"Looked at with {_text(report.data)}, {shape}."
    )
    dot = "dot b" if which else "dot"
    return (
        f'<article class="verdict {verdict.fate}" aria-label="Verdict on {_text(report.name)}">'
        f'<h2 class="who"><span class="{dot}" aria-hidden="true"></span>{_text(report.name)}</h2>'
        f'<p class="fate"><span aria-hidden="true">{sign}</span> {words}</p>'
        f'<p class="sentence">{_text(verdict.sentence)}</p>'
        f"<dl>{''.join(f'<dt>{term}</dt><dd>{words}</dd>' for term, words in rows)}</dl>"
        f'<p class="facts">{facts}</p></article>'
    )


def _meaning(mechanism: str) -> str:
    return f": {MECHANISMS[mechanism]}" if mechanism in MECHANISMS else ""


def _numbers(reports: Sequence["Report"]) -> str:
    names = dict.fromkeys(name for report in reports for name in report.measured.numbers)
    if not names:
        return ""
    head = "".join(f'<th scope="col">{_text(report.name)}</th>' for report in reports)
    rows = "".join(
        f'<tr><th scope="row">{_text(NUMBERS.get(name, name.replace("_", " ")))}</th>'
        + "".join(f"<td>{_number(report.measured.numbers.get(name, math.nan))}</td>" for report in reports)
        + "</tr>"
        for name in names
    )
    return (
        "<h2>In numbers</h2><p>What a whole network comes to.</p>"
        f'<div class="tidy"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return (f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}").replace("-", "−")


def _notes(reports: Sequence["Report"], step: int) -> str:
    notes = list(dict.fromkeys(note for report in reports for note in report.measured.notes))
    for i, note in enumerate(notes):
        about = [report.name for report in reports if note in report.measured.notes]
        if len(about) < len(reports):
            notes[i] = f"{', '.join(about)}: {note}"
    if step > 1:
        notes.append(f"The plots show one layer of {step}, so that the page stays small; the JSON report has all.")
    if not notes:
        return ""
    return f'<h2>Notes</h2><ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in notes)}</ul>'


# ---------------------------------------------------------------- what page.js draws


def measures(reports: Sequence["Report"]) -> dict[str, None]:
    """The names of what was measured at some layer of some network, in order."""
    found = (series for report in reports for series in report.measured.series.values())
    return {series.name: None for series in found if series.layers}


def _index(report: "Report") -> dict[str, int]:
    """Position of each layer in the order of execution."""
    return {layer.name: i for i, layer in enumerate(report.measured.layers)}


def _data(reports: Sequence["Report"], step: int) -> dict[str, Any]:
    """Everything that page.js needs. Layers are numbered; a series holds numbers of layers."""
    left = measures(reports)
    plots = {name: series for report in reversed(reports) for name, series in report.measured.series.items()}
    groups = []
    for group in (*GROUPS, OTHERS):
        names = [name for name in group.measures or tuple(left) if name in left]
        for name in names:
            del left[name]
        if names:
            about = [_about(plots[name]) for name in names]
            groups.append({"title": group.title, "text": group.text, "plots": about})
    return {"networks": [_network(report, step) for report in reports], "groups": groups}


def _about(series: Series) -> dict[str, Any]:
    return {key: getattr(series, key) for key in ("name", "title", "label", "log", "healthy", "source")}


def _network(report: "Report", step: int) -> dict[str, Any]:
    index = _index(report)
    suspect = None if report.verdict.layer is None else index.get(report.verdict.layer)
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "parameters": layer.parameters,
            "shape": list(layer.shape),
            "trunk": layer.trunk,
        }
        for layer in report.measured.layers[::step]
    ]
    return {
        "name": report.name,
        "layers": layers,
        "suspect": None if suspect is None else suspect // step,
        "series": {name: _points(series, index, step) for name, series in report.measured.series.items()},
    }


def _points(series: Series, index: dict[str, int], step: int) -> dict[str, Any]:
    """A series as x (numbers of layers, rising), y and, where there are some, e (standard errors)."""
    at = sorted((index[name], i) for i, name in enumerate(series.layers))
    at = [(x, i) for x, i in at if x % step == 0]
    return {
        "x": [x // step for x, _ in at],
        "y": [plain(series.values[i], DIGITS) for _, i in at],
        "e": None if series.errors is None else [plain(series.errors[i], DIGITS) for _, i in at],
    }


def plain(value: float, digits: int | None = None) -> float | str | None:
    """A number as JSON can hold it: None for what is no number, text for what is infinite."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value if digits is None else float(f"{value:.{digits}g}")
