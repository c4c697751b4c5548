"""What our own networks have in common: stages one after the other, pooling, a linear classifier, timm's interface."""

from typing import Any

from timm.models import checkpoint_seq
from torch import Tensor, nn
from torch.nn import functional as F


class StagedNet(nn.Module):
    """A network of stages, `stage_names` in order. Its classes build them and say how features are pooled."""

    stage_names: tuple[str, ...]
    feature_info: list[dict[str, Any]]  # timm's: width, reduction and path of each stage
    num_features: int  # width of the last stage
    num_classes: int
    drop_rate: float  # of the dropout before the classifier
    fc: nn.Module
    grad_checkpointing = False

    def pool(self, x: Tensor) -> Tensor:
        """The features of an image, from what the last stage gives."""
        raise NotImplementedError

    def make_classifier(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool not in (None, "avg"):
            raise ValueError(
                f"{type(self).__name__}: global_pool={global_pool!r} must be 'avg', the only one there is."
            )
        self.num_classes = num_classes
        self.fc = self.make_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        for name in self.stage_names:
            stage = getattr(self, name)  # the compiler of PyTorch 2.6 does not know get_submodule
            x = checkpoint_seq(stage, x) if self.grad_checkpointing and self.training else stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        if self.drop_rate:
            x = F.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def check_count(name: str, field: str, value: object, least: int = 1) -> None:
    """Refuses an argument `field` of the network `name` that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: {field}={value!r} must be a whole number of at least {least}.")
