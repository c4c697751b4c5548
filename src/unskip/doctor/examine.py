"""What `unskip doctor` does: a network from a word, a batch for it, a report."""

from dataclasses import dataclass
from pathlib import Path

from unskip._core import files
from unskip.doctor.batches import load_batch
from unskip.doctor.report import Report, diagnose
from unskip.io.load import load_network, parse_shape


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What networks are shown; None leaves it to the network."""

    data: str | None = None  # digits, noise, or a path
    batch_size: int | None = None
    input_size: str | None = None  # of one input, for instance "3x32x32"
    seed: int = 0  # of weights, of the images taken, and of what measuring draws
    measures: tuple[str, ...] = ()  # names of measures beside those of the verdict; () for all

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"doctor: --seed {self.seed} must not be negative.")


def examine(
    word: str, showing: InputSpec, *, method: str = "", weights: Path | None = None, pretrained: bool = False
) -> Report:
    """The report of a network that is given in words, as `unskip doctor` takes them."""
    seed = showing.seed
    shape = None if showing.input_size is None else parse_shape(showing.input_size, command="doctor")
    subject = load_network(word, method=method, weights=weights, pretrained=pretrained, input_size=shape, seed=seed)
    batch = load_batch(subject, showing.data, size=showing.batch_size, seed=seed)
    return diagnose(
        subject.network,
        batch.images,
        batch.targets,
        name=subject.name,
        data=batch.words,
        trained=subject.trained,
        measures=showing.measures or None,
        seed=seed,
    )


def check_free(out: Path | None, force: bool) -> None:
    """Refuses a page that could not be written, before half a minute goes into measuring."""
    if out is not None:
        files.check_free(out, command="doctor", argument="--out", force=force, overwrite="--force")
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"doctor: --out {str(out)!r} must end in .html; --json prints the report for programs.")
