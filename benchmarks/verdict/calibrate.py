"""Calibrates the doctor's verdict: trains the lists of networks.py, then sets what the rules say beside what happened.

    python benchmarks/verdict/calibrate.py train FATES.json --list tune          # continues where it stopped
    python benchmarks/verdict/calibrate.py judge FATES.json --list tune --out tune.md --measured tune.json

README.md has the rules of the game. In short: set the limits in unskip.doctor.verdict by the list `tune`, commit them,
then judge a list that no limit has seen, once. New limits need a new list.
"""

import argparse
import json
import math
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from networks import LISTS, Candidate

from unskip.data import sets
from unskip.doctor.verdict import (
    FAMILIES,
    Verdict,
    dissipating,
    exploding,
    judge,
    rank_collapse,
    saturation,
    singularity,
    vanishing,
)
from unskip.measures import measure
from unskip.train import TrainingDiverged, load_recipe, run

RECIPE = load_recipe("digits-pnnh-56").replace(
    val_fraction=0.0, epochs=10, warmup_epochs=2, batch=64, momentum=0.9, weight_decay=1e-4, decay_all=True,
    device="cpu",
)  # fmt: skip
ENOUGH, CHANCE = 10.0, 90.0  # percent test error: no further rate; a loss that is not finite
BORDER = (10.0, 35.0)  # percent test error of a network that is trained from a second seed
RULES = (dissipating, singularity, exploding, vanishing, saturation, rank_collapse)


def train(candidate: Candidate, lr: float, seed: int) -> dict[str, Any]:
    """Trains once by the recipe; the test error in percent."""
    torch.manual_seed(seed)
    model = candidate.build()
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe = RECIPE.replace(optimizer=candidate.optimizer, lr=lr, seed=seed)
            result = run(recipe, model=model, out=Path(folder) / "run", silent=True)
        except TrainingDiverged:
            return {"rate": lr, "seed": seed, "error": CHANCE}
    return {"rate": lr, "seed": seed, "error": round(result.test_error, 2), "s": round(result.seconds, 1)}


def find_fate(candidate: Candidate) -> dict[str, Any]:
    """Trains at each rate, twice near the border, and returns all runs, the error and the fate that follows."""
    runs: list[dict[str, Any]] = []

    def best(seed: int) -> float:
        lowest = math.inf
        for lr in candidate.rates:
            runs.append(train(candidate, lr, seed))
            lowest = min(lowest, runs[-1]["error"])
            if lowest < ENOUGH:
                break
        return lowest

    errors = [best(0)]
    if BORDER[0] <= errors[0] <= BORDER[1]:
        errors.append(best(1))
    error = round(sum(errors) / len(errors), 2)
    fate = "trains" if error < candidate.limit else "fails"
    return {"fate": fate, "guess": candidate.guess, "error": error, "errors": errors, "runs": runs}


def train_all(name: str, match: str, out: Path) -> None:
    """Adds the fate of every network of the list that the file does not have yet."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    results["about"] = about()
    fates = results.setdefault(name, {})
    for candidate in LISTS[name].values():
        if candidate.name not in fates and match in candidate.name:
            row = fates[candidate.name] = find_fate(candidate)
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{candidate.name:32}{row['guess']:8}{row['fate']:8}{row['errors']}", flush=True)


def examine(candidate: Candidate) -> tuple[Verdict, dict[str, tuple[float, float]]]:
    """The verdict on a freshly built network, and the quantity and the severity of each rule."""
    data = sets.load(RECIPE.data)
    x = data.train.images[: RECIPE.run.batch].permute(0, 3, 1, 2).float() / 255  # (B, 1, 8, 8)
    torch.manual_seed(0)
    model = candidate.build()
    found = measure(model, (x - data.mean[0]) / data.std[0], data.train.labels[: RECIPE.run.batch], families=FAMILIES)
    signs = {rule.__name__: rule(found) for rule in RULES}
    return judge(found), {name: (sign.value, sign.severity) for name, sign in signs.items() if sign is not None}


def judge_all(name: str, fates: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The verdicts on a list as lines of Markdown and as data. `doubtful` counts as wrong."""
    lines = [
        "| network | error % | guess | fate | verdict | confidence | mechanism | noise-to-signal | difference | step "
        "| relative gradient | saturated | token spread |",
        "|---|---:|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    data = {}
    for candidate in LISTS[name].values():
        known = fates.get(candidate.name)
        if known is None:
            continue
        verdict, signs = examine(candidate)
        values = " | ".join(f"{signs[rule.__name__][0]:.2g}" if rule.__name__ in signs else "" for rule in RULES)
        fate = verdict.outcome if verdict.outcome == known["fate"] else f"**{verdict.outcome}**"
        lines.append(
            f"| {candidate.name} | {known['error']:.1f} | {known['guess']} | {known['fate']} | {fate} "
            f"| {verdict.confidence:.2f} | {verdict.mechanism or ''} | {values} |"
        )
        data[candidate.name] = {
            "fate": known["fate"],
            "error": known["error"],
            "verdict": vars(verdict),
            "signs": {rule: {"value": value, "severity": severity} for rule, (value, severity) in signs.items()},
        }
    right = sum(row["verdict"]["outcome"] == row["fate"] for row in data.values())
    return [*lines, "", f"{right} of {len(data)} right.", "", *margins(data)], data


def margins(data: dict[str, Any]) -> list[str]:
    """A line for each rule: how close the networks that train come to its limit, and how many others it finds."""
    lines = []
    for rule in (rule.__name__ for rule in RULES):
        severities = {name: row["signs"][rule]["severity"] for name, row in data.items() if rule in row["signs"]}
        trained = {name: value for name, value in severities.items() if data[name]["fate"] == "trains"}
        found = [value for name, value in severities.items() if data[name]["fate"] == "fails" and value > 0]
        if trained:
            worst = max(trained, key=lambda name: trained[name])
            lines.append(
                f"- {rule}: most severe among those that train {trained[worst]:.2f} ({worst}); finds {len(found)} "
                f"of those that fail, the least severe at {min(found, default=math.nan):.2f}."
            )
    return lines


def about() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "judge"])
    parser.add_argument("fates", type=Path, help="JSON file of the trained networks' fates")
    parser.add_argument("--list", choices=list(LISTS), default="tune")
    parser.add_argument("--match", default="", help="train only networks with this in their name")
    parser.add_argument("--out", type=Path, help="write the table of `judge` as Markdown")
    parser.add_argument("--measured", type=Path, help="write the table of `judge` as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.task == "train":
        train_all(args.list, args.match, args.fates)
        return
    lines, data = judge_all(args.list, json.loads(args.fates.read_text())[args.list])
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if args.measured:
        args.measured.write_text(json.dumps({"about": about(), "networks": data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
