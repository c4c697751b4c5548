"""Handmade reports with every kind of value, and with names that try to inject markup."""

import math

from unskip.doctor.report import Report
from unskip.doctor.verdict import Verdict
from unskip.measures.series import LayerInfo, Measured, Series

HOSTILE = (
    "<script>window.broken=1</script>",
    "</script><script>window.broken=1</script>",
    "<img src=x onerror=window.broken=1>",
    '"><svg onload=window.broken=1>',
    "<!--<script>",
    "]]>&lt;&amp;{{data}}",
    "a\u2028b\u2029c\x00d\ne",
    "javascript:window.broken=1",
    "${window.broken=1}`",
    "\ud7ff\U0001f600é",
)


def report(
    name: str = "net",
    *,
    names: tuple[str, ...] = tuple(f"layer{i}.conv" for i in range(12)),
    outcome: str = "fails",
    suspect: int | None = 5,
    scale: float = 1.0,
) -> Report:
    """Five series: ordinary, zeros and infinities on a logarithmic axis, with errors, no number, no layer."""
    n = len(names)

    def series(key: str, values: list[float], layers: tuple[str, ...] = names, **about: object) -> Series:
        fields = {"title": f"The {key}", "label": f"{key} (units)", "healthy": f"Healthy {key}.", "source": "a paper"}
        return Series(name=key, layers=layers, values=tuple(values), **{**fields, **about})  # type: ignore[arg-type]

    rising = [scale * 1.5 ** (i % 60) for i in range(n)]
    broken = [[0.0, math.inf, math.nan, -math.inf][i] if i < 4 else 10.0 ** (i % 60 - 8) for i in range(n)]
    even = names[::2]
    found = [
        series("noise_to_signal", rising),
        series("gradient_norm", broken, log=True),
        series("odd_measure", [0.3 + 0.01 * i for i in range(len(even))], even, errors=tuple([0.05] * len(even))),
        series("nothing", [math.nan] * n),
        series("nowhere", [], ()),
    ]
    verdict = Verdict(
        outcome=outcome,  # type: ignore[arg-type]
        summary=f"{name} will do what it will do.",
        mechanism="dissipating",
        layer=None if suspect is None else names[suspect],
        remedies=("Use <b>fewer</b> layers.", "Ask again."),
        confidence=0.75,
    )
    layers = tuple(LayerInfo(name=x, kind="conv", parameters=9, shape=(8, 4, 4), trunk=True) for x in names)
    measured = Measured(
        series={s.name: s for s in found},
        numbers={"loss": 2.3, "nothing": math.nan, "endless": math.inf},
        layers=layers,
        notes=("A note with <b>markup</b>.",),
    )
    return Report(name=name, verdict=verdict, measured=measured, parameters=1234, batch=(8, 3, 4, 4), data="noise")
