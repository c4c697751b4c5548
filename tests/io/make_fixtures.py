"""Writes tests/io/fixtures: `python -m tests.io.make_fixtures`. Files that are there are never written again.

They are network files of the version that wrote them, which all later versions must open.
"""

import json
from pathlib import Path

import torch
from torch import nn

import unskip
from tests.ship.test_fold import trained
from unskip.io.network_file import Header, save
from unskip.models.cifar import cifar_resnet

FIXTURES = Path(__file__).parent / "fixtures"


def question(*shape: int) -> torch.Tensor:
    """Inputs that no random generator makes, so that all versions of PyTorch make the same."""
    count = torch.Size((2, *shape)).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64)).view(2, *shape)


def networks() -> dict[str, tuple[nn.Module, Header]]:
    torch.manual_seed(0)
    small = {"widths": (4, 6, 8), "stem": 4, "num_classes": 3, "in_chans": 1}
    image = (1, 8, 8)
    resnet = trained(cifar_resnet(8, **small))
    pnnh = trained(unskip.plainify(cifar_resnet(8, **small), "pnnh"))
    name, options = "plainnet_mlp", {"depth": 3, "width": 8, "num_classes": 3, "img_size": 4}
    return {
        "pnnh8-folded": (unskip.fold(pnnh), Header(network={}, input_size=image, name="PNNH-8", folded="dense")),
        "resnet8-rm": (unskip.plainify(resnet, "rm"), Header(network={}, input_size=image, name="ResNet-8, rm")),
        "named": (
            trained(unskip.create_model(name, **options)),
            Header(network={"model": name, "options": options}, input_size=(1, 4, 4), name=name),
        ),
    }


def main() -> None:
    answers = FIXTURES / "outputs.json"
    outputs = json.loads(answers.read_text()) if answers.is_file() else {}
    for name, (model, header) in networks().items():
        if (FIXTURES / f"{name}.safetensors").exists():
            continue
        save(FIXTURES / f"{name}.safetensors", model, header)
        with torch.no_grad():
            outputs[name] = model.double()(question(*header.input_size)).tolist()
    answers.write_text(json.dumps(outputs, indent=1) + "\n")


if __name__ == "__main__":
    main()
