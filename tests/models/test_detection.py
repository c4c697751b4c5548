"""A skip-free network as the backbone of torchvision's Mask R-CNN with an FPN: the recipe of docs/seqnet.md."""

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN

import unskip

SIDE = 64


def detector(name: str, **options: object) -> MaskRCNN:
    network = unskip.create_model(name, **options)
    stages = {f"layer{i}": str(i - 1) for i in range(1, 5)}
    widths = [info["num_chs"] for info in network.feature_info if info["module"] in stages]
    backbone = BackboneWithFPN(network, stages, widths, out_channels=64)
    few = {"box_batch_size_per_image": 16, "rpn_batch_size_per_image": 32}  # of the usual 512 and 256
    few |= {"rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    return MaskRCNN(backbone, num_classes=3, min_size=SIDE, max_size=SIDE, **few)


def shapes(count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of one square and one disc each, with their boxes, labels and masks."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images, targets = [], []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        image = 0.1 * torch.rand(3, SIDE, SIDE, generator=generator)
        masks = []
        for label in (1, 2):
            radius = int(torch.randint(8, 14, (), generator=generator))
            middle = [int(torch.randint(radius, SIDE - radius, (), generator=generator)) for _ in range(2)]
            down, right = rows - middle[0], columns - middle[1]
            mask = (down.abs().maximum(right.abs()) if label == 1 else (down**2 + right**2).sqrt()) <= radius
            image[label] = torch.where(mask, 0.9, image[label])
            masks.append(mask)
        boxes = [[m.any(0).nonzero()[0], m.any(1).nonzero()[0], m.any(0).nonzero()[-1] + 1, m.any(1).nonzero()[-1] + 1]
                 for m in masks]  # fmt: skip
        images.append(image)
        targets.append(
            {
                "boxes": torch.tensor(boxes, dtype=torch.float32),
                "labels": torch.tensor([1, 2]),
                "masks": torch.stack(masks).to(torch.uint8),
            }
        )
    return images, targets


@pytest.mark.full
@pytest.mark.parametrize("name", ["seqnet50", "pnnh_resnet50"])
def test_mask_rcnn_trains_on_generated_shapes(name: str) -> None:
    network = detector(name)
    images, targets = shapes(2)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    losses = []
    for _ in range(10):
        loss = sum(network(images, targets).values())
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 10)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-2:]) < 0.85 * sum(losses[:2]), losses
    assert all(p.grad is not None for p in network.backbone.parameters() if p.requires_grad)
    with torch.no_grad():
        found = network.eval()(images[:1])[0]
    assert {"boxes", "labels", "scores", "masks"} <= set(found)
