"""Data sets: each layout is read, and each kind of bad data is refused before the first step, with a way out."""

import gzip
import hashlib
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.small import arrays, write_npz
from unskip.data import readers, sets
from unskip.data.config import DataConfig
from unskip.data.sets import Split, find_kind, hold_out, load


def config(dataset: str, **changes: Any) -> DataConfig:
    return DataConfig(dataset=dataset, **changes)


# ---------------------------------------------------------------- the registry


def test_a_data_set_of_ones_own_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "DATASETS", dict(sets.DATASETS))

    @sets.register_dataset(
        "bright", layout="must hold bright.npz.", found_at=lambda root: (root / "bright.npz").is_file()
    )
    def bright(config: DataConfig, root: Path) -> sets.DataSet:
        with np.load(root / "bright.npz") as file:
            train, test = (sets.make_split("bright", file[f"x_{p}"], file[f"y_{p}"]) for p in ("train", "test"))
        return sets.from_splits(config, train, test, classes=4)

    write_npz(tmp_path / "bright.npz")
    assert sets.find_kind(tmp_path) == "bright"
    data = load(config("bright", val_fraction=0.2), tmp_path)
    assert (data.name, len(data.train), len(data.val), data.classes) == ("bright", 32, 8, 4)
    with pytest.raises(ValueError, match=r"dataset='bright' needs --data DIR, which must hold bright\.npz"):
        load(config("bright"))


def test_a_name_that_nobody_registered_is_refused_when_it_is_read() -> None:
    with pytest.raises(ValueError, match=r"dataset='cifar11' is not known\. Did you mean 'cifar10'"):
        load(config("cifar11"))


# ---------------------------------------------------------------- digits


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = load(config("digits"))
    assert (len(data.train) + len(data.val), len(data.test)) == (1442, 355)
    assert (data.classes, data.channels, data.image_size) == (10, 1, 8)
    images = torch.cat([split.images for split in (data.train, data.val, data.test)]).double()[..., 0] * 16 / 255
    assert images.round().sum() == load_digits().images.sum()  # every image is in one of the three, unchanged
    assert data.chance_loss == pytest.approx(np.log(10), abs=1e-3)
    assert data.chance_error == pytest.approx(90, abs=1)


def test_validation_images_are_apart_and_the_same_each_time() -> None:
    one, two = load(config("digits")), load(config("digits"))
    assert torch.equal(one.val.images, two.val.images)
    assert (len(load(config("digits", val_fraction=0.0)).train), load(config("digits", val_fraction=0.0)).val) == (
        1442,
        None,
    )
    counts = torch.bincount(one.val.labels)
    assert counts.min() >= 13  # of each class a tenth
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint() != load(config("digits", val_fraction=0.2)).fingerprint()


def test_a_class_of_one_image_is_learnt_from() -> None:
    images = torch.zeros(11, 4, 4, 1, dtype=torch.uint8)
    train, val = hold_out(Split(images, torch.tensor([0] * 5 + [1] * 5 + [2])), 0.1)
    assert train.labels.bincount().tolist() == [4, 4, 1]
    assert val is not None
    assert val.labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"val_fraction=0.1 holds out no image, since every class has one alone"):
        hold_out(Split(images[:3], torch.arange(3)), 0.1)


def test_digits_with_a_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'digits' is embedded"):
        load(config("digits"), tmp_path)


def test_mean_and_std_are_numpys(tmp_path: Path) -> None:
    data = load(config("npz", val_fraction=0.0), write_npz(tmp_path / "a.npz"))
    x = arrays()["x_train"] / 255
    np.testing.assert_allclose(data.mean, x.mean((0, 1, 2)), atol=1e-12)
    np.testing.assert_allclose(data.std, x.std((0, 1, 2)), atol=1e-12)


# ---------------------------------------------------------------- npz


@pytest.mark.parametrize("how", ["nhwc", "nchw", "nhw", "float"])
def test_npz_layouts(tmp_path: Path, how: str) -> None:
    a = arrays(channels=1 if how == "nhw" else 3)
    for key in ("x_train", "x_test"):
        a[key] = {
            "nhwc": a[key],
            "nchw": a[key].transpose(0, 3, 1, 2),
            "nhw": a[key][..., 0],
            "float": (a[key] / 255).astype(np.float32),
        }[how]
    data = load(config("npz", val_fraction=0.0), write_npz(tmp_path / "a.npz", **a))
    assert torch.equal(data.train.images, torch.from_numpy(arrays(channels=1 if how == "nhw" else 3)["x_train"]))
    assert data.classes == 4


def test_npz_resized(tmp_path: Path) -> None:
    data = load(config("npz", image_size=16), write_npz(tmp_path / "a.npz"))
    assert data.train.images.shape[1:] == (16, 16, 3)
    assert data.image_size == 16


A = arrays()
BAD_NPZ = {
    "missing": ({"y_test": None}, "has no y_test"),
    "empty": ({"x_train": A["x_train"][:0], "y_train": A["y_train"][:0]}, "has no images"),
    "two axes": ({"x_train": A["x_train"].reshape(40, -1)}, "images of shape (40, 192)"),
    "channels": ({"x_train": np.zeros((40, 5, 5, 5), np.uint8)}, "neither the last nor the second axis"),
    "negative": ({"y_train": A["y_train"] - 1}, "a training label is -1"),
    "gap": ({"y_train": np.where(A["y_train"] == 3, 99, A["y_train"])}, "no training image of class 3, 4, 5"),
    "test only": ({"y_test": A["y_test"] + 3}, "a test label is 6"),
    "labels as floats": ({"y_train": A["y_train"] / 1.0}, "labels of type float64"),
    "one-hot": ({"y_train": np.eye(4, dtype=int)[A["y_train"]]}, "labels of shape (40, 4)"),
    "too few labels": ({"y_train": A["y_train"][:-1]}, "40 images but labels of shape (39,)"),
    "range": ({"x_train": A["x_train"] * 1.0}, "float64 images from 0 to"),
    "nan": ({"x_train": np.full((40, 8, 8, 3), np.nan)}, "must be finite"),
    "int32": ({"x_train": A["x_train"].astype(np.int32)}, "int32 images"),
    "sizes": ({"x_test": np.zeros((20, 9, 9, 3), np.uint8)}, "but test images are (9, 9, 3)"),
    "oblong": ({k: np.zeros((n, 8, 9, 3), np.uint8) for k, n in (("x_train", 40), ("x_test", 20))}, "8 x 9 px"),
    "one class": ({"y_train": A["y_train"] * 0, "y_test": A["y_test"] * 0}, "only one class"),
    "objects": ({"x_train": np.array([None] * 40, dtype=object)}, "can't be read"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_npz(tmp_path: Path, case: str) -> None:
    changes, message = BAD_NPZ[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
        load(config("npz"), write_npz(tmp_path / "bad.npz", **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith("data: ")


def test_truncated_unreadable_and_missing_npz(tmp_path: Path) -> None:
    whole = write_npz(tmp_path / "a.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "nothing.npz").write_bytes(b"")
    for name in ("short", "text", "nothing"):
        with pytest.raises(ValueError, match=f"{name}.npz.*x_train, y_train, x_test and y_test"):
            load(config("npz"), tmp_path / f"{name}.npz")
    np.save(tmp_path / "one.npy", np.zeros((4, 8, 8)))
    for name in ("text.npz", "one.npy"):
        with pytest.raises(ValueError, match=f"{name} is no .npz file. It must be a .npz file with x_train"):
            load(config("npz"), tmp_path / name)
    with pytest.raises(ValueError, match=r"--data .* does not exist; it must be a \.npz file"):
        load(config("npz"), tmp_path / "none.npz")
    with pytest.raises(ValueError, match="needs --data DIR, which must be"):
        load(config("npz"))
    with pytest.raises(ValueError, match=r"with 4 \.npz files"):
        load(config("npz"), tmp_path)


def test_a_flipped_bit_in_an_npz_is_noticed(tmp_path: Path) -> None:
    file = write_npz(tmp_path / "a.npz")
    raw = bytearray(file.read_bytes())
    raw[400] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="CRC"):
        load(config("npz"), file)


# ---------------------------------------------------------------- CIFAR, in torchvision's layout


def write_cifar(root: Path, name: str, **changes: object) -> Path:
    """Files as torchvision lays them out, with the sizes of the real ones."""
    random = np.random.default_rng(0)
    if name == "cifar10":
        folder, files, key, classes = (
            root / "cifar-10-batches-py",
            [f"data_batch_{i}" for i in range(1, 6)],
            "labels",
            10,
        )
        sizes = dict.fromkeys([*files, "test_batch"], 10_000)
    else:
        folder, key, classes = root / "cifar-100-python", "fine_labels", 100
        sizes = {"train": 50_000, "test": 10_000}
    folder.mkdir()
    for file, n in sizes.items():
        x = np.zeros((n, 3072), np.uint8)
        x[:, :8] = random.integers(0, 256, (n, 8), dtype=np.uint8)
        entry = {"data": x, key: (np.arange(n) % classes).tolist()}
        (folder / file).write_bytes(pickle.dumps(entry, protocol=2))
    return folder


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cifar")
    write_cifar(root, "cifar10")
    return root


def test_cifar10_agrees_with_torchvision(cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)  # these are not the published files
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    data = load(config("cifar10", val_fraction=0.0), cifar10)
    for split, train in ((data.train, True), (data.test, False)):
        theirs = datasets.CIFAR10(str(cifar10), train=train)
        assert np.array_equal(split.images.numpy(), theirs.data)
        assert split.labels.tolist() == theirs.targets
    assert "differ from the published files" in data.notes[0]
    assert load(config("cifar10"), cifar10 / "cifar-10-batches-py").fingerprint()  # the folder itself will do


def test_only_other_pixels_and_labels_are_noted(cifar10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another pickle of the same: the sums are of the layout of the published .bin files."""
    folder = tmp_path / "cifar-10-batches-py"
    shutil.copytree(cifar10 / "cifar-10-batches-py", folder)
    for file in readers.RECORDS:
        entry = pickle.loads((folder / file).read_bytes())
        records = (bytes([label]) + bytes(x) for label, x in zip(entry["labels"], entry["data"], strict=True))
        monkeypatch.setitem(readers.RECORDS, file, hashlib.md5(b"".join(records)).hexdigest())
    assert not load(config("cifar10"), tmp_path).notes
    for file, key, where in (("data_batch_2", "labels", 7), ("test_batch", "data", (9_999, 3071))):
        entry = pickle.loads((folder / file).read_bytes())
        entry[key][where] ^= 1
        (folder / file).write_bytes(pickle.dumps(entry))
    (note,) = load(config("cifar10"), tmp_path).notes
    assert note.startswith("data_batch_2, test_batch differ from the published files, so errors can't be compared")


def test_cifar100_has_its_own_layout(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100")
    data = load(config("cifar100"), tmp_path)
    assert (data.classes, len(data.train), len(data.val), len(data.test)) == (100, 45_000, 5_000, 10_000)


def test_bad_cifar(cifar10: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data_batch_1 is missing; \S+ must hold the folder cifar-10-batches-py with"):
        load(config("cifar10"), tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file in (cifar10 / "cifar-10-batches-py").iterdir():
        (folder / file.name).symlink_to(file)
    victim = folder / "data_batch_3"
    good = victim.read_bytes()
    victim.unlink()

    def refused(raw: bytes, message: str) -> None:
        victim.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            load(config("cifar10"), tmp_path)

    refused(good[: len(good) // 2], "data_batch_3 can't be read as a CIFAR batch")
    refused(b"", "data_batch_3 can't be read as a CIFAR batch")
    entry = pickle.loads(good)
    refused(pickle.dumps({**entry, "data": entry["data"][:-1]}), r"shape \(9999, 3072\)")
    refused(pickle.dumps({**entry, "data": entry["data"].astype(float)}), "type float64")
    refused(pickle.dumps({**entry, "labels": [10] * 10_000}), "has 10 classes, 0 to 9, but a training label is 10")
    refused(pickle.dumps({**entry, "labels": entry["labels"][:-1]}), "images but labels of shape")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("evil-was-here"),)  # type: ignore[return-value]


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(ValueError, match="which no CIFAR file needs"):
        load(config("cifar10"), tmp_path)
    assert not Path("evil-was-here").exists()


# ---------------------------------------------------------------- Fashion-MNIST


def write_fashion(folder: Path, zipped: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for kind, n in (("train", 60), ("t10k", 20)):
        x = random.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        y = (np.arange(n) % 10).astype(np.uint8)
        files = {
            f"{kind}-images-idx3-ubyte": struct.pack(">4I", 0x803, n, 28, 28) + x.tobytes(),
            f"{kind}-labels-idx1-ubyte": struct.pack(">2I", 0x801, n) + y.tobytes(),
        }
        for name, raw in files.items():
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(raw) if zipped else raw)


def test_fashion_mnist_agrees_with_torchvision(tmp_path: Path) -> None:
    from torchvision import datasets

    write_fashion(tmp_path / "FashionMNIST" / "raw", zipped=False)
    data = load(config("fashion_mnist", val_fraction=0.0), tmp_path)
    theirs = datasets.FashionMNIST(str(tmp_path), train=True)
    assert torch.equal(data.train.images[..., 0], theirs.data)
    assert torch.equal(data.train.labels, theirs.targets)
    write_fashion(tmp_path / "zipped", zipped=True)
    assert torch.equal(
        load(config("fashion_mnist", val_fraction=0.0), tmp_path / "zipped").test.images, data.test.images
    )


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-100], "is truncated: it announces"),
        ("train-images-idx3-ubyte", lambda raw: raw[:7], "is no idx file"),
        ("t10k-labels-idx1-ubyte", lambda raw: b"<html>not found</html>", "is no idx file"),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0a", "a training label is 10"),
    ],
)
def test_bad_fashion_mnist(tmp_path: Path, name: str, spoil: object, message: str) -> None:
    write_fashion(tmp_path, zipped=False)
    file = tmp_path / name
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        load(config("fashion_mnist"), tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"{name} .or .gz. is missing.*t10k-images-idx3-ubyte"):
        load(config("fashion_mnist"), tmp_path)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"abc" * 100)[:-9])
    with pytest.raises(ValueError, match="is no whole gzip file"):
        load(config("fashion_mnist"), tmp_path)


# ---------------------------------------------------------------- ImageFolder


def write_folder(root: Path, parts: tuple[str, ...] = ("train", "val"), n: int = 6) -> Path:
    random = np.random.default_rng(0)
    for part in parts:
        for c, name in enumerate(("cat", "dog")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(n):
                x = random.integers(0, 100, (20, 24, 3)) + 100 * c
                Image.fromarray(x.astype(np.uint8)).save(folder / f"{i}.{'png' if i % 2 else 'jpg'}")
    return root


def test_imagefolder_agrees_with_torchvision(tmp_path: Path) -> None:
    from torchvision import datasets

    root = write_folder(tmp_path)
    data = load(config("imagefolder", val_fraction=0.0), root)
    theirs = datasets.ImageFolder(str(root / "train"))
    assert [(str(p), int(c)) for p, c in zip(data.train.images, data.train.labels, strict=True)] == theirs.samples
    assert (data.classes, data.val, len(data.test), data.image_size) == (2, None, 12, 224)
    with_test = load(config("imagefolder"), write_folder(tmp_path / "b", ("train", "val", "test"), 4))
    assert (len(with_test.train), len(with_test.val), len(with_test.test)) == (8, 8, 8)


def test_an_image_folder_without_test_images_holds_some_out(tmp_path: Path) -> None:
    """Of each class alike, and the same ones every time."""
    write_folder(tmp_path / "split", ("train",), 10)
    flat = write_folder(tmp_path / "flat", ("",), 10)
    for root in (tmp_path / "split", flat):
        assert find_kind(root) == "imagefolder"
        data = load(config("imagefolder", val_fraction=0.25), root)
        assert [split.labels.bincount().tolist() for split in (data.train, data.val, data.test)] == [
            [6, 6], [2, 2], [2, 2]
        ]  # fmt: skip
        parts = [set(split.images) for split in (data.train, data.val, data.test)]
        assert sorted(set.union(*parts)) == sorted(p for p in root.rglob("*.*") if p.is_file())
        assert data.notes == ("4 of the images, 20% of each class, were held out to test on",)
        assert load(config("imagefolder", val_fraction=0.25), root).fingerprint() == data.fingerprint()
    write_folder(tmp_path / "split", ("test",), 3)
    data = load(config("imagefolder", val_fraction=0.0), tmp_path / "split")
    assert (len(data.train), data.val, len(data.test), data.notes) == (20, None, 6, ())


def test_bad_imagefolder(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "a")
    file = root / "val" / "dog" / "2.jpg"
    whole = file.read_bytes()
    for spoiled in (whole[: len(whole) // 2], b"", b"no image"):
        file.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"1 of 12 images can't be read: .*2\.jpg"):
            load(config("imagefolder"), root)
    file.write_bytes(whole)
    (root / "val" / "bird").mkdir()
    with pytest.raises(ValueError, match=r"bird is a class that .*train does not have"):
        load(config("imagefolder"), root)
    (root / "val" / "bird").rmdir()
    (root / "train" / "ant").mkdir()
    with pytest.raises(ValueError, match=r"train/ant has no image"):
        load(config("imagefolder"), root)
    with pytest.raises(ValueError, match=r"has 0 class folders; .* must hold a folder of images for each class"):
        load(config("imagefolder"), tmp_path)  # "a" holds no images itself
    (tmp_path / "train" / "only").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match="has 1 class folders"):
        load(config("imagefolder"), tmp_path)
