"""Hostile data files end in a sentence before they take memory. Each is read in a process that may not have much."""

import gzip
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import sandbox
from tests.data.test_sets import write_folder
from tests.train.small import arrays, write_npz

READ = """
from pathlib import Path
from unskip.data.config import DataConfig
from unskip.data.sets import load

load(DataConfig(dataset=argv[0], val_fraction=0.0, workers=0), Path(argv[1]))
"""


def read_in_little_memory(dataset: str, path: Path, gib: str = "") -> tuple[str, int]:
    """What the reader says, and the bytes that it took."""
    return sandbox.run(READ, dataset, path, gib=gib)


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    """The header of an array without the array."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz_with(path: Path, **members: bytes) -> Path:
    """A good .npz file but for these members."""
    write_npz(path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents |= {f"{name}.npy": raw for name, raw in members.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in contents.items():
            archive.writestr(name, raw)
    return path


def bomb(path: Path) -> Path:
    """600 KB that are 600 MiB of zeros."""
    write_npz(path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, raw in contents.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(npy((600, 1024, 1024, 1)) if name == "x_train.npy" else raw)
                for _ in range(600 if name == "x_train.npy" else 0):
                    file.write(bytes(2**20))
    assert path.stat().st_size < 2**22
    return path


def label(value: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        labels = arrays()["y_train"].astype(np.int64)
        labels[0] = value
        return write_npz(path, y_train=labels)

    return write


HOSTILE_NPZ: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "label 10^12": (label(10**12), "labels up to 1000000000000, but no training image of class", ""),
    "label 2^62": (label(2**62), "no training image of class", ""),
    "shape 2^60": (lambda path: npz_with(path, x_train=npy((2**60,))), "x_train announces the shape", ""),
    "shape 2^33": (lambda path: npz_with(path, y_test=npy((2**33,), "<i8")), "y_test announces the shape", ""),
    "shape below zero": (lambda path: npz_with(path, x_train=npy((-1, 8, 8, 3))), "x_train announces the shape", ""),
    "zip bomb": (bomb, "would take 0.586 GiB of memory, and at most 0.25 are allowed.*UNSKIP_MAX_GIB", "0.25"),
    "limit that is no number": (write_npz, "UNSKIP_MAX_GIB='much' must be a number of GiB", "much"),
}


@pytest.mark.parametrize("case", HOSTILE_NPZ)
def test_hostile_npz(case: str, tmp_path: Path) -> None:
    write, sentence, limit = HOSTILE_NPZ[case]
    said, took = read_in_little_memory("npz", write(tmp_path / "a.npz"), limit)
    assert said.startswith("UNSKIP" if limit == "much" else "data: ")
    assert re.search(sentence, said), said
    assert took < 2**27


def pickled(call: str, *arguments: Any) -> bytes:
    """A pickle that calls numpy's or Python's function with these arguments."""
    module, _, name = call.rpartition(".")
    body = pickle.dumps(arguments, protocol=2)[2:-1]
    return b"\x80\x02}X\x04\x00\x00\x00data" + f"c{module}\n{name}\n".encode() + body + b"Rs."


def hex_of_hex(times: int) -> bytes:
    """'aa' in hex, in hex, in hex: a few bytes each time, and twice as long."""
    text = b"X\x02\x00\x00\x00aa"
    for _ in range(times):
        text = b"c_codecs\nencode\n(" + text + b"X\x03\x00\x00\x00hextR"
    return b"\x80\x02" + text + b"."


HOSTILE_PICKLES = {
    "an array of 2^40": pickled("numpy.ndarray", (2**40,)),
    "an array of 2^33 to be filled": pickled("numpy.core.multiarray._reconstruct", (2**33,), b"b"),
    "a void of 2 GB": pickled("numpy.core.multiarray.scalar", np.dtype("V2147483647")),
    "a module that runs when imported": pickled("numpy.f2py.__main__.dtype", "u1"),
    "bytes of 2^33": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "a memo of 2^31": b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".",
    "hex of hex": hex_of_hex(40),
    "nested": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_hostile_cifar(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(HOSTILE_PICKLES[case])
    said, took = read_in_little_memory("cifar10", tmp_path)
    assert "data_batch_1 can't be read as a CIFAR batch" in said
    assert took < 2**27


def idx(*shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)


def test_hostile_fashion_mnist(tmp_path: Path) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    squeeze = zlib.compressobj(1, wbits=31)
    parts = [squeeze.compress(idx(600, 1024, 1024))] + [squeeze.compress(bytes(2**20)) for _ in range(600)]
    file.write_bytes(b"".join(parts) + squeeze.flush())
    said, took = read_in_little_memory("fashion_mnist", tmp_path, "0.25")
    assert "would take 0.586 GiB of memory" in said
    assert took < 2**27
    file.write_bytes(gzip.compress(idx(2**32 - 1, 2**32 - 1, 2**32 - 1)))
    said, took = read_in_little_memory("fashion_mnist", tmp_path)
    assert "would take over a billion GiB of memory" in said
    assert took < 2**27


def test_hostile_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    file = root / "train" / "cat" / "0.jpg"
    file.unlink()
    os.mkfifo(file)
    (root / "train" / "cat" / "9.png").mkdir()
    large = root / "train" / "dog" / "7.png"
    Image.new("1", (13_000, 13_000)).save(large)  # which Pillow would take
    said, took = read_in_little_memory("imagefolder", root, "0.5")
    assert "3 of 14 images can't be read" in said
    assert "0.jpg can't be read: it is no file" in said
    assert "an image of 13000 x 13000 px would take 0.63 GiB of memory" in said
    assert took < 2**27


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    for dataset, name in (
        ("npz", "a.npz"),
        ("fashion_mnist", "train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
    ):
        path = tmp_path / dataset / name
        path.parent.mkdir(parents=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        said, took = read_in_little_memory(dataset, tmp_path / dataset)
        assert f"{path} can't be read: it is no file" in said
        assert took < 2**27
