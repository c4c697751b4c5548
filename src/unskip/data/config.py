"""DataConfig: which data set is read, how it is split, and what happens to its training images."""

from dataclasses import dataclass
from typing import Annotated, Literal

from unskip._core.config import BelowOne, Free, Positive, Probability, Range, Section

Crop = Literal["none", "pad", "resized"]
MAX_SIDE, MAX_REPEATS, MAX_WORKERS, MAX_ALPHA = 8192, 1000, 1024, 1000.0  # more than that is a slip
Side = Annotated[int, Range(lambda value: 0 <= value <= MAX_SIDE, f"0 to {MAX_SIDE} px")]
Repeats = Annotated[int, Range(lambda value: 1 <= value <= MAX_REPEATS, f"1 to {MAX_REPEATS}")]
Workers = Annotated[int, Range(lambda value: 0 <= value <= MAX_WORKERS, f"0 to {MAX_WORKERS}")]
Alpha = Annotated[float, Range(lambda value: 0 <= value <= MAX_ALPHA, f"0 to {MAX_ALPHA:g}")]
Share = Annotated[float, Range(lambda value: 0.01 <= value <= 1, "a share, 0.01 to 1")]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What a network reads."""

    dataset: str = "digits"  # what is read, and how `--data` is laid out: a name of unskip.data.sets.DATASETS
    val_fraction: BelowOne = 0.1  # of the training images (of a whole text), held out for choosing; 0 holds none out
    image_size: Side = 0  # px, what images are brought to; 0: as they come (imagefolder: 224)
    tokens: Literal["characters", "bytes"] = "characters"  # text: what a network predicts the next one of
    context: Positive[int] = 256  # text: tokens in a row
    test_crop: Share = 0.875  # imagefolder: the centre crop's share of the resized image's side when testing
    check_files: Free[bool] = True  # imagefolder: decode each file once before the first step
    cache_gib: Free[Positive[float]] = 8.0  # GiB, the largest set that is held on the device as uint8
    crop: Crop = "none"  # pad: zeros around, then a random crop; resized: a random area and aspect ratio (Inception)
    pad: Side = 4  # px of zeros on each side, for crop = "pad"
    crop_scale: Share = 0.08  # smallest share of the area, for crop = "resized"
    flip: Probability = 0.0  # probability of a mirror image
    color_jitter: Alpha = 0.0  # strength of random brightness, contrast and saturation
    rand_augment: str = ""  # timm's RandAugment, for instance "rand-m9-mstd0.5-inc1"; '' is off
    erase: Probability = 0.0  # probability of random erasing (timm, filled with noise)
    mixup: Alpha = 0.0  # alpha of timm's mixup
    cutmix: Alpha = 0.0  # alpha of timm's cutmix
    mix_prob: Probability = 1.0  # probability that a batch is mixed, where mixup or cutmix is on
    repeats: Repeats = 1  # of each image in an epoch (repeated augmentation); an epoch stays as long as it is
    workers: Free[Workers] = 4  # processes that read and augment, for what is not on the device

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed in pairs, so that labels are soft."""
        return bool(self.mixup or self.cutmix)
