"""The packed CIFAR-10 of `pack_data.py` as cifar-10-batches-py, which `unskip train` and `unskip reproduce` read.

    python to_batches.py DATA OUT        then: unskip reproduce pnnh-table1 --data OUT

Pixels and labels are those of DATA. The pickles are not byte for byte the published files, so the library notes that
they differ; whether the pixels are bit-exact is what pack_data.py has printed.
"""

import pickle
import sys
from pathlib import Path

import numpy as np
from engine import tiles


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2]) / "cifar-10-batches-py"
    target.mkdir(parents=True, exist_ok=True)
    labels = np.load(source / "labels.npz")
    parts = [(f"data_batch_{i + 1}", labels["y_train"][10000 * i : 10000 * (i + 1)]) for i in range(5)]
    for name, y in [*parts, ("test_batch", labels["y_test"])]:
        (sprite,) = source.glob(f"{name}.*")
        x = np.ascontiguousarray(tiles(sprite).transpose(0, 3, 1, 2)).reshape(10000, -1)
        (target / name).write_bytes(pickle.dumps({"data": x, "labels": y.tolist()}))
    print(target)


if __name__ == "__main__":
    main()
