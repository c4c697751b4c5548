"""The report: the measures of one network and what they mean, as a table, as JSON and as a page."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from unskip._core.files import write_atomically
from unskip.doctor.page import plain, render
from unskip.doctor.table import table
from unskip.doctor.verdict import Verdict, judge
from unskip.measures import Measured, measure
from unskip.measures.layer_types import tensors_in

FORMAT = "unskip-report-1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured in one network, and the verdict."""

    name: str  # of the network, as its reader calls it
    verdict: Verdict
    measured: Measured
    parameters: int  # trained
    batch: tuple[int, ...]  # shape of what the network was shown, of the first tensor if it is several
    data: str  # where that came from, in words

    @property
    def table(self) -> Table:
        """One line for each measure: its course over depth and its ends. `rich.print` and notebooks show it."""
        return table([self])

    def as_dict(self) -> dict[str, Any]:
        """Plain values. What is no number is None, what is infinite the text 'inf' or '-inf', as JSON knows neither."""
        measured = self.measured
        return {
            "format": FORMAT,
            "name": self.name,
            "verdict": asdict(self.verdict),
            "parameters": self.parameters,
            "batch": list(self.batch),
            "data": self.data,
            "numbers": {name: plain(value) for name, value in measured.numbers.items()},
            "layers": [asdict(layer) for layer in measured.layers],
            "series": {
                name: {
                    **asdict(series),
                    "values": [plain(value) for value in series.values],
                    "errors": None if series.errors is None else [plain(error) for error in series.errors],
                }
                for name, series in measured.series.items()
            },
            "notes": list(measured.notes),
        }

    def to_json(self, path: str | Path, against: "Report | None" = None) -> None:
        """Writes everything that was measured, in full precision, as one JSON object."""
        write(path, as_json(self, against) + "\n")

    def to_html(self, path: str | Path, against: "Report | None" = None) -> None:
        """Writes a page that opens in any browser, offline: this network alone, or beside another one."""
        write(path, render([self] if against is None else [self, against]))


def diagnose(
    net: nn.Module,
    images: Any,
    targets: Any = None,
    *,
    name: str | None = None,
    data: str = "a batch of the caller's",
    trained: bool = False,
    seed: int = 0,
) -> Report:
    """Measures what happens to the signal and to the gradient inside a network, and says whether it will train.

    The network is measured as it is now, in training mode, and left exactly as it was.

    Args:
        net: any network that takes `images`.
        images: a batch as training would show it, (B, ...); 32 to 128 inputs are plenty. Token numbers are welcome; a
            tuple is several arguments, a dict keyword arguments.
        targets: their classes, (B,), or a tensor like the output; random classes unless given.
        name: what the report calls the network; its class unless given.
        data: where the batch came from, in words, for the reader of the report.
        trained: whether its weights are trained ones, on which the verdict's limits say nothing.
        seed: of what is drawn to measure: noise, random classes, random directions.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(f"diagnose: net={net!r} is not an nn.Module; build the network first.")
    if not tensors_in(images):
        raise ValueError(
            f"diagnose: images must be a tensor (B, ...), or a tuple or dict of some, not {type(images).__name__}."
        )
    measured = measure(net, images, targets, seed=seed)
    return Report(
        name=name or type(net).__name__,
        verdict=judge(measured, trained=trained),
        measured=measured,
        parameters=sum(p.numel() for p in net.parameters() if p.requires_grad),
        batch=tuple(tensors_in(images)[0].shape),
        data=data,
    )


def as_json(report: Report, against: Report | None = None) -> str:
    """One report, with the other one inside it where there is one."""
    values = report.as_dict()
    if against is not None:
        values["against"] = against.as_dict()
    return json.dumps(values, indent=1, allow_nan=False)


def write(path: str | Path, text: str) -> None:
    """The whole file or, after an error, none and a sentence."""
    write_atomically(Path(path), lambda file: file.write(text.encode()), command="doctor")
