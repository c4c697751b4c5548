"""The table that the limits in unskip.doctor.verdict are set by: every rule's quantity beside the fate.

    python benchmarks/verdict/tune.py OUT/fates.json [--out OUT/tune.md] [--measured OUT/tune_measured.json]

Reads the first list only.
"""

import argparse
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from networks import TUNE, Candidate

from train import BATCH, digits
from unskip.doctor.verdict import FAMILIES, Verdict, dissipating, exploding, judge, saturation, singularity, vanishing
from unskip.measures import measure

RULES = (dissipating, singularity, exploding, vanishing, saturation)
MEASURED_SEED = 0


def examine(candidate: Candidate) -> tuple[Verdict, dict[str, tuple[float, float]]]:
    """The verdict on a freshly built network, and by rule its quantity and severity."""
    (x, y), _ = digits()
    torch.manual_seed(MEASURED_SEED)
    measured = measure(candidate.build(), x[:BATCH], y[:BATCH], families=FAMILIES)
    signs = {rule.__name__: rule(measured) for rule in RULES}
    return judge(measured), {name: (sign.value, sign.severity) for name, sign in signs.items() if sign is not None}


def table(group: dict[str, Candidate], fates: dict[str, Any]) -> tuple[list[str], dict[str, Any], int]:
    """Lines of a Markdown table, the same as data, and how many verdicts are right. `doubtful` is wrong."""
    lines = [
        "| network | error % | guess | fate | verdict | confidence | mechanism | near/far | difference | step "
        "| relative gradient | saturated |",
        "|---|---:|---|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    data, right = {}, 0
    for name, candidate in group.items():
        known = fates[name]
        verdict, signs = examine(candidate)
        correct = verdict.fate == known["fate"]
        right += correct
        values = " | ".join(f"{signs[rule.__name__][0]:.2g}" if rule.__name__ in signs else "" for rule in RULES)
        said = verdict.fate if correct else f"**{verdict.fate}**"
        lines.append(
            f"| {name} | {known['error']:.1f} | {known['guess']} | {known['fate']} | {said} | {verdict.confidence:.2f} "
            f"| {verdict.mechanism or ''} | {values} |"
        )
        print(lines[-1], flush=True)
        data[name] = {
            "fate": known["fate"],
            "error": known["error"],
            "verdict": vars(verdict),
            "signs": {rule: {"value": value, "severity": severity} for rule, (value, severity) in signs.items()},
        }
    return lines, data, right


def margins(data: dict[str, Any]) -> list[str]:
    """By rule: the most suspicious network that trains, and how many failing networks the rule alone condemns."""
    lines = []
    for rule in (rule.__name__ for rule in RULES):
        severities = {name: row["signs"][rule]["severity"] for name, row in data.items() if rule in row["signs"]}
        trained = {name: value for name, value in severities.items() if data[name]["fate"] == "trains"}
        caught = [name for name, value in severities.items() if data[name]["fate"] == "fails" and value > 0]
        worst = max(trained, key=lambda name: trained[name])
        nearest = min((severities[name] for name in caught), default=math.nan)
        lines.append(
            f"- {rule}: most severe among those that train {trained[worst]:.2f} ({worst}); condemns {len(caught)} of "
            f"those that fail, the least severe at {nearest:.2f}."
        )
    return lines


def write(out: Path | None, measured: Path | None, lines: list[str], data: dict[str, Any]) -> None:
    if out:
        out.write_text("\n".join(lines) + "\n")
    if measured:
        about = {"torch": torch.__version__, "python": platform.python_version(), "batch": BATCH, "seed": MEASURED_SEED}
        measured.write_text(json.dumps({"about": about, "networks": data}, indent=1))


def arguments(doc: str | None, lists: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("fates", type=Path)
    parser.add_argument("--out", type=Path, help="Markdown table")
    parser.add_argument("--measured", type=Path, help="the same as JSON")
    parser.add_argument("--list", choices=lists, default=lists[0])
    return parser.parse_args()


def main() -> None:
    given = arguments(__doc__, lists=["tune"])
    fates = json.loads(given.fates.read_text())["tune"]
    lines, data, right = table({name: TUNE[name] for name in TUNE if name in fates}, fates)
    lines += ["", f"{right} of {len(data)} right.", "", *margins(data)]
    print("\n".join(lines[-8:]))
    write(given.out, given.measured, lines, data)


if __name__ == "__main__":
    main()
