"""What `unskip doctor` does: a network from a word, a batch for it, a report."""

from dataclasses import dataclass
from pathlib import Path

from unskip._core import files
from unskip.doctor.batches import load_batch
from unskip.doctor.report import Report, diagnose
from unskip.io.load import load_model


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What networks are shown; None leaves it to the network."""

    data: str | None = None  # digits, noise, or a path
    batch_size: int | None = None
    input_size: str | None = None  # of one input, for instance "3x32x32"
    seed: int = 0  # of weights, of the images taken, and of what measuring draws
    measures: tuple[str, ...] = ()  # names of measures beside those of the verdict; () for all


def examine(
    model_spec: str, showing: InputSpec, *, method: str = "", weights: Path | None = None, pretrained: bool = False
) -> Report:
    """The report of a network that is given in words, as `unskip doctor` takes them."""
    loaded = load_model(
        model_spec, method=method, weights=weights, pretrained=pretrained, input_size=showing.input_size,
        seed=showing.seed,
    )  # fmt: skip
    batch = load_batch(loaded, showing.data, size=showing.batch_size, seed=showing.seed)
    return diagnose(
        loaded.model,
        batch.images,
        batch.targets,
        name=loaded.name,
        data=batch.words,
        trained=loaded.trained,
        measures=showing.measures or None,
        seed=showing.seed,
    )


def check_report_path(out: Path | None, force: bool) -> None:
    """Refuses a page that could not be written, before half a minute goes into measuring."""
    if out is not None:
        files.check_free(out, command="doctor", argument="--out", force=force, overwrite="--force")
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"doctor: --out {str(out)!r} must end in .html; --json prints the report for programs.")
