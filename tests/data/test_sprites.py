"""Data sets as pictures of tiles, written here with Pillow."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unskip.data import DataConfig, sets


def write(root: Path, part: str, images: np.ndarray, columns: int) -> None:
    """One picture, row by row, its last row filled up with black tiles."""
    n, side = images.shape[:2]
    rows = -(-n // columns)
    sheet = np.zeros((rows * side, columns * side, *images.shape[3:]), np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * side, i % columns * side
        sheet[y : y + side, x : x + side] = image
    Image.fromarray(sheet).save(root / f"{part}.png")


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (57, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(57) % 5
    write(tmp_path, "train_a", images[:20], 5)
    write(tmp_path, "train_b", images[20:40], 10)
    write(tmp_path, "val", images[40:], 6)  # 17 tiles of 18
    np.savez(tmp_path / "labels.npz", y_train=labels[:40], y_val=labels[40:])
    return tmp_path, images, labels


def test_tiles_are_the_images_in_order(folder: tuple[Path, np.ndarray, np.ndarray]) -> None:
    root, images, labels = folder
    data = sets.load(DataConfig(dataset="sprites", val_fraction=0.0), root)
    assert torch.equal(data.train.images, torch.from_numpy(images[:40]))
    assert torch.equal(data.test.images, torch.from_numpy(images[40:]))
    assert data.train.labels.tolist() == labels[:40].tolist()
    assert (data.classes, data.image_size, data.channels) == (5, 16, 3)
    assert sets.find_kind(root) == "sprites"


def test_other_numbers_of_labels_are_refused(folder: tuple[Path, np.ndarray, np.ndarray]) -> None:
    root, _, labels = folder
    np.savez(root / "labels.npz", y_train=labels[:30], y_val=labels[40:])
    with pytest.raises(ValueError, match="30 train labels, and its pictures"):
        sets.load(DataConfig(dataset="sprites"), root)


@pytest.mark.parametrize("broken", ["labels.npz", "val.png"])
def test_broken_files_are_a_sentence(folder: tuple[Path, np.ndarray, np.ndarray], broken: str) -> None:
    root, *_ = folder
    (root / broken).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"data: .*(is no \.npz file|val\.png can't be read)"):
        sets.load(DataConfig(dataset="sprites"), root)


def test_pictures_of_a_palette_have_its_colours(folder: tuple[Path, np.ndarray, np.ndarray]) -> None:
    root, *_ = folder
    for path in root.glob("*.png"):
        Image.open(path).quantize(32).save(path)
    data = sets.load(DataConfig(dataset="sprites", val_fraction=0.0), root)
    with Image.open(root / "val.png") as picture:
        tile = np.asarray(picture.convert("RGB"))[:16, 16:32]
    assert torch.equal(data.test.images[1], torch.from_numpy(tile.copy()))


def test_pictures_of_several_modes_are_a_sentence(folder: tuple[Path, np.ndarray, np.ndarray]) -> None:
    root, *_ = folder
    with Image.open(root / "train_b.png") as picture:
        picture.convert("L").save(root / "train_b.png")
    with pytest.raises(ValueError, match=r"the train pictures of .* differ in their channels"):
        sets.load(DataConfig(dataset="sprites"), root)


def test_pictures_that_fit_one_by_one_are_refused_together(
    folder: tuple[Path, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, *_ = folder
    one = 3 * 20 * 16 * 16 * 3  # bytes of the larger picture and its copies
    monkeypatch.setenv("UNSKIP_MAX_GIB", str(1.5 * one / 2**30))
    with pytest.raises(ValueError, match=r"train_b\.png, 160 x 32 px, with those before it, would take .* GiB"):
        sets.load(DataConfig(dataset="sprites"), root)
