"""Prints what an engine has finished and what is running. Test errors stay in the file unless --test asks for them.

python report.py OUT [--test] [--only PREFIX]
"""

import argparse
import json
from pathlib import Path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def number(value: float | None, digits: int) -> str:
    return "     -" if value is None else f"{value:6.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    named = {r["name"]: r for r in lines(args.out / "results.jsonl") if r["name"].startswith(args.only)}
    results = list(named.values())  # of a run that was paused, the last word
    print(f"{'name':26} {'params':>8} {'ep':>3} {'val%':>6} {'vloss':>6} {'tloss':>6} {'tr%':>6} {'sec':>5}")
    for r in sorted(results, key=lambda r: r.get("val_loss") or 9):
        if r["status"] != "done":
            where = f" after epoch {r['epoch']}, training loss {r['train_loss']:.3f}" if "epoch" in r else ""
            print(f"{r['name']:26} {r['status'][:90]}{where}")
            continue
        test = f" test {r['test_error']:.2f}" if args.test else ""
        print(
            f"{r['name']:26} {r['parameters']:8d} {r['epoch']:3d} {number(r['val_error'], 2)} "
            f"{number(r['val_loss'], 3)} {r['train_loss']:6.3f} {r['train_error']:6.2f} {r['seconds']:5.0f}{test}"
        )
    finished = {r["name"] for r in results}
    latest = {
        r["name"]: r
        for r in lines(args.out / "epochs.jsonl")
        if r["name"] not in finished and r["name"].startswith(args.only)
    }
    for r in latest.values():
        print(
            f"  running {r['name']:22} epoch {r['epoch']:3d} val {number(r['val_error'], 2)} "
            f"train {r['train_loss']:6.3f} {r['seconds']:5.0f} s"
        )


if __name__ == "__main__":
    main()
