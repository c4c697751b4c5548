"""The report: the measures of one model and the verdict, as a table, as JSON and as an HTML page."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from unskip._core.files import write_atomically
from unskip.doctor.page import json_number, render
from unskip.doctor.remedies import tried_on
from unskip.doctor.table import table, verdict_lines
from unskip.doctor.verdict import FAMILIES, Verdict, judge
from unskip.measures import (
    COLLAPSED,
    UPDATES,
    Family,
    MakeOptimizer,
    Measured,
    first_updates,
    last_tokens,
    measure,
    slower,
)
from unskip.measures.layer_types import tensors_in
from unskip.measures.measuring import LayerFunction

FORMAT = "unskip-report-1"
SMALLEST = 4  # inputs in one of the first updates
LOWER = (1 / 3, 1 / 10, 1 / 30)  # of a learning rate that makes tokens alike, tried in this order
WIDTH = 100  # characters of a line of its text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The measures of one model and the verdict."""

    name: str  # of the model
    verdict: Verdict
    measured: Measured
    parameters: int  # trainable
    batch: tuple[int, ...]  # shape of the example; of its first tensor if there are several
    data: str  # where the example came from, as a phrase

    def __str__(self) -> str:
        """The verdict and the measures beyond their limits, as in a terminal."""
        lines = StringIO()
        console = Console(file=lines, width=WIDTH, color_system=None, force_jupyter=False, force_terminal=False)
        console.print(verdict_lines(self))
        if self.verdict.measures:
            console.print(table([self], self.verdict.measures))
        return "\n".join(line.rstrip() for line in lines.getvalue().rstrip().splitlines())

    __repr__ = __str__  # the fields are thousands of numbers

    @property
    def table(self) -> Table:
        """One row per measure, for `rich.print` and notebooks."""
        return table([self])

    def as_dict(self) -> dict[str, Any]:
        """The report as values for JSON: NaN is None, infinity is 'inf' or '-inf'."""
        measured = self.measured
        return {
            "format": FORMAT,
            "name": self.name,
            "verdict": asdict(self.verdict),
            "parameters": self.parameters,
            "batch": list(self.batch),
            "data": self.data,
            "numbers": {name: json_number(value) for name, value in measured.numbers.items()},
            "layers": [asdict(layer) for layer in measured.layers],
            "series": {
                name: {
                    **asdict(series),
                    "values": [json_number(value) for value in series.values],
                    "errors": None if series.errors is None else [json_number(error) for error in series.errors],
                }
                for name, series in measured.series.items()
            },
            "notes": list(measured.notes),
        }

    def to_json(self, path: str | Path, against: "Report | None" = None) -> None:
        """Writes all measures in full precision as one JSON object."""
        write(path, as_json(self, against) + "\n")

    def to_html(self, path: str | Path, against: "Report | None" = None) -> None:
        """Writes an HTML page that opens offline, optionally with another report side by side."""
        write(path, render([self] if against is None else [self, against]))


def diagnose(
    model: nn.Module,
    example: Any,
    targets: Any = None,
    *,
    measures: Sequence[str | Family | LayerFunction] | None = None,
    name: str | None = None,
    data: str = "the given batch",
    trained: bool = False,
    optimizer: MakeOptimizer | None = None,
    seed: int = 0,
) -> Report:
    """Measures the signal and the gradient inside a model, and says whether it will train.

    The model is measured in training mode with its current weights, and left unchanged.

    Args:
        model: any module.
        example: an input batch as in training, (B, ...); 32 to 128 samples are enough. Token ids work too. A tuple is
            passed as several arguments, a dict as keyword arguments.
        targets: class indices (B,) or a tensor like the output; random classes by default.
        measures: the measures of the report beside those that the verdict needs: names (see
            `unskip.measures.measure_names`), or functions as `unskip.measures.register_measure` takes them. By default
            all that are registered, including those of plug-ins.
        name: of the model in the report; its class name by default.
        data: where the example came from, for readers of the report.
        trained: whether the weights are trained. The verdict's limits apply only to untrained models.
        optimizer: makes the optimizer of a model, for instance `lambda model: torch.optim.AdamW(model.parameters(),
            lr=1e-3)`. Then the verdict on a network with attention is for this optimizer, too: its first updates are
            made on a copy. Needs targets.
        seed: for noise, random classes and random directions.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), *[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(20)])
        >>> report = unskip.diagnose(net, torch.randn(32, 1, 8, 8))  # a batch as in training, (B, C, H, W)
        >>> report.verdict.outcome, report.verdict.mechanism
        ('fails', 'vanishing gradient')
        >>> report.measured.series["gradient_norm"].values[0] < 1e-6
        True
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"diagnose: model={model!r} is not an nn.Module. Build the model first.")
    tensors = tensors_in(example)
    if not tensors:
        raise ValueError(
            f"diagnose: example must be a tensor (B, ...), or a tuple or dict of tensors, not {type(example).__name__}."
        )
    if isinstance(measures, str):
        raise ValueError(f"diagnose: measures={measures!r} must be a list, for instance [{measures!r}].")
    chosen = None if measures is None else [*FAMILIES, *measures]
    measured = measure(model, example, targets, families=chosen, seed=seed)
    if optimizer is not None:
        measured = with_first_updates(measured, model, example, targets, optimizer)
    return Report(
        name=name or type(model).__name__,
        verdict=judge(measured, trained=trained, rebuilds=tried_on(model)),
        measured=measured,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        batch=tuple(tensors[0].shape),
        data=data,
    )


def with_first_updates(
    measured: Measured, model: nn.Module, example: Any, targets: Any, optimizer: MakeOptimizer
) -> Measured:
    """The measures with what the first updates make of tokens, and the first lower rate that keeps them apart."""
    layer = last_tokens(measured)
    if layer is None or not isinstance(example, Tensor) or not isinstance(targets, Tensor):
        note = "The first updates of the optimizer are not looked at: that needs attention, one input, and targets."
        return replace(measured, notes=(*measured.notes, note))

    parts = max(1, min(UPDATES, len(example) // SMALLEST))  # one batch again and again would be learnt by heart
    batches = list(zip(example.chunk(parts), targets.chunk(parts), strict=True))

    def lowest(factor: float) -> float:
        return min(first_updates(model, slower(optimizer, factor), batches, layer=layer))

    numbers = {"token_spread_updated": lowest(1.0)}
    if numbers["token_spread_updated"] < COLLAPSED:
        numbers["starting_rate_factor"] = next((f for f in LOWER if lowest(f) >= COLLAPSED), math.nan)
    return replace(measured, numbers=measured.numbers | numbers)


def as_json(report: Report, against: Report | None = None) -> str:
    """A report as JSON, with `against` inside it if given."""
    values = report.as_dict()
    if against is not None:
        values["against"] = against.as_dict()
    return json.dumps(values, indent=1, allow_nan=False)


def write(path: str | Path, text: str) -> None:
    """Writes the whole file, or none and raises a ValueError."""
    write_atomically(Path(path), lambda file: file.write(text.encode()), command="doctor")
