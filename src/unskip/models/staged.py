"""What our own networks have in common: stages one after the other, pooling, a linear classifier, timm's interface."""

from typing import Any

from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F


class StagedNet(nn.Module):
    """A network of stages, `stage_names` in order. Its classes build them and say how features are pooled."""

    stage_names: tuple[str, ...]
    feature_info: list[dict[str, Any]]  # timm's: width, reduction and path of each stage
    num_features: int  # width of the last stage
    num_classes: int
    in_chans: int
    drop_rate: float  # of the dropout before the classifier
    fc: nn.Module
    global_pool = "avg"  # '' returns the features unpooled, without a classifier
    grad_checkpointing = False

    @property
    def head_hidden_size(self) -> int:
        return self.num_features

    def stem(self, x: Tensor) -> Tensor:
        """The input of the first stage."""
        return x

    def tail(self, x: Tensor) -> Tensor:
        """The input of pooling, from the output of the last stage."""
        return x

    def pool(self, x: Tensor) -> Tensor:
        """The features of an image, from the output of the tail."""
        raise NotImplementedError

    def make_classifier(self, num_classes: int) -> nn.Module:
        if not num_classes:
            return nn.Identity()
        weight = next(iter(self.parameters()))  # whose device and type the classifier shares
        return nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype).train(self.training)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups of parameters, for learning rates that fall with the distance to the output."""
        block = r"^(?:layer|stage)(\d+)" if coarse else r"^(?:layer|stage)(\d+)\.(\d+)"
        return {"stem": r"^(?:conv1|bn1)", "blocks": [(block, None), (r"^norm", (99999,))]}

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        now = "avg" if num_classes else self.global_pool  # a classifier needs pooling
        pool = now if global_pool is None else global_pool
        if pool not in ("avg", "") or (num_classes and not pool):
            raise ValueError(
                f"{type(self).__name__}: global_pool={global_pool!r} must be 'avg', or '' for unpooled features "
                "without a classifier (num_classes=0)."
            )
        self.num_classes, self.global_pool = num_classes, pool
        self.fc = self.make_classifier(num_classes)

    def _stage(self, name: str, x: Tensor) -> Tensor:
        stage: nn.Module = getattr(self, name)  # the compiler of PyTorch 2.6 does not know get_submodule
        result: Tensor = checkpoint_seq(stage, x) if self.grad_checkpointing and self.training else stage(x)
        return result

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The outputs of stages, and before them the features unless `intermediates_only`: timm's interface.

        Args:
            x: images.
            indices: stages; a number n means the last n, None all.
            norm: whether the last stage's output goes through the tail.
            stop_early: whether stages after the last one in `indices` are left out.
            output_fmt: 'NCHW', the only one there is.
            intermediates_only: whether to return the list alone.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"{type(self).__name__}: output_fmt={output_fmt!r} must be 'NCHW', the only one there is.")
        take, last = feature_take_indices(len(self.feature_info), indices)
        names = self.stage_names[: last + 1] if stop_early else self.stage_names
        found = []
        x = self.stem(x)
        for index, name in enumerate(names):
            x = self._stage(name, x)
            if index in take:
                found.append(self.tail(x) if norm and index == len(self.feature_info) - 1 else x)
        return found if intermediates_only else (self.tail(x), found)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the stages after the last of `indices` and returns the indices of stages: timm's interface."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        shorter = self.stage_names[last + 1 :]
        for name in shorter:
            delattr(self, name)
        self.stage_names = self.stage_names[: last + 1]
        self.num_features = self.feature_info[last]["num_chs"]
        if shorter or prune_norm:
            self.remove_tail()
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)

    def remove_tail(self) -> None:
        """Makes the tail the identity."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.stage_names:
            x = self._stage(name, x)
        return self.tail(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
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
