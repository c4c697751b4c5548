"""What `unskip doctor` does: loads a network and a batch for it, and makes the report."""

from dataclasses import dataclass
from pathlib import Path

from unskip._core import files
from unskip.doctor.batches import load_batch
from unskip.doctor.report import Report, diagnose
from unskip.io.load import load_model
from unskip.measures import MakeOptimizer


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What networks are measured on, and what is measured; None leaves it to the network."""

    data: str | None = None  # digits, noise, or a path
    batch_size: int | None = None
    input_size: str | None = None  # of one input, for instance "3x32x32"
    seed: int = 0  # of weights, of the choice of images, and of what measuring draws
    measures: tuple[str, ...] = ()  # names of measures beside those of the verdict; () for all
    optimizer: MakeOptimizer | None = None  # whose first updates are looked at, in networks with attention


def examine(
    model_spec: str,
    inputs: InputSpec,
    *,
    against: str | None = None,
    method: str = "",
    weights: Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
) -> list[Report]:
    """The reports of the network that `model_spec` names and of the one that `against` names, if it names one.

    Both are loaded, and read a batch, before either is measured. Method and weights are those of the first.
    """
    seed, size = inputs.seed, inputs.input_size
    networks = [
        load_model(
            model_spec, method=method, weights=weights, pretrained=pretrained, num_classes=num_classes,
            input_size=size, seed=seed,
        )
    ]  # fmt: skip
    if against is not None:
        networks.append(load_model(against, input_size=size, seed=seed))
    batches = [load_batch(loaded, inputs.data, size=inputs.batch_size, seed=seed) for loaded in networks]
    return [
        diagnose(
            loaded.model,
            batch.images,
            batch.targets,
            name=loaded.name,
            data=batch.description,
            trained=loaded.trained,
            measures=inputs.measures or None,
            optimizer=inputs.optimizer,
            seed=seed,
        )
        for loaded, batch in zip(networks, batches, strict=True)
    ]


def check_report_path(out: Path | None, force: bool) -> None:
    """Refuses a page that can't be written, before the measuring, which takes half a minute."""
    if out is not None:
        files.check_free(out, command="doctor", argument="--out", force=force, overwrite="--force")
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"doctor: --out {str(out)!r} must end in .html; --json prints the report for programs.")
