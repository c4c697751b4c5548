"""Every method on one 56-layer network and scikit-learn's digits, so that a user can choose (docs/rivals.md).

    python benchmarks/methods_on_digits.py OUT [--seeds 1] [--rates 0.05 0.01] [--rows dirac iso]

The recipe is the demo's, `digits-pnnh-56`, with the same epochs for all; each method runs at each learning rate, for
networks without norms want a lower one. A line of OUT/results.jsonl is one run; a run that is there is not run again.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch

from unskip.methods import method_names
from unskip.train import TrainingDiverged, load_recipe, run

RECIPE = "digits-pnnh-56"
NETWORK = "resnet56"
# What a row is called, its method ('': the residual network) and what its recipe has besides.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "residual": ("", {}),
    **{method: (method, {}) for method in method_names() if method != "rm"},  # which is the residual network
    "iso, orthogonal 1e-4": ("iso", {"orthogonal": 1e-4}),
}


def measure(method: str, changes: dict[str, Any], rate: float, seed: int) -> dict[str, Any]:
    """One run: the test error in percent, None where the loss became no number."""
    recipe = load_recipe(RECIPE, network=NETWORK, method=method, lr=rate, seed=seed, device="cpu", **changes)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run(recipe, out=Path(folder) / "run", silent=True)
        except TrainingDiverged as reason:
            return {"test_error": None, "diverged": str(reason)}
    return {
        "test_error": result.test_error,
        "stuck": result.stuck,
        "parameters": result.parameters,
        "seconds": round(result.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.01])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "results.jsonl"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    (arguments.out / "versions.json").write_text(json.dumps({**versions, "threads": torch.get_num_threads()}) + "\n")
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    there = {(line["row"], line["lr"], line["seed"]) for line in lines}
    for seed in range(arguments.seeds):
        for rate in arguments.rates:
            for row in arguments.rows:
                method, changes = ROWS[row]
                if (row, rate, seed) in there:
                    continue
                line = {"row": row, "lr": rate, "seed": seed}
                line |= measure(method, changes, rate, seed)
                print(json.dumps(line), flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
