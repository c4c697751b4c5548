"""Speed and memory of PNNH beside timm's residual networks, all in one call.

    python benchmarks/speed.py OUT                                   # the table of docs/bench.md, most important first
    python benchmarks/speed.py OUT --family resnet34 --blocks fast lean     # one family, ways to compute the block
    python benchmarks/speed.py OUT --device cpu --batch 2 --size 32 --rounds 1 --eager --workers 0    # to try it out

For each family: timm's residual network, the same with the stem that ours has (in MobileNet-V2 with our depthwise
convolutions too; what is left is the blocks),
PNNH with its default coder (in closed form), and PNNH with a dense coder of the kernel that a fitted one has (3x3 in
vanilla blocks). Its weights are random: a fitted one computes the same, and fitting takes minutes that tell nothing
about speed. bf16, channels last, batch 256 at 224 px, compiled on all sides,
each step one CUDA graph. All networks are compiled first, several at once; OUT/FAMILY/bench.json is written as it goes.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import textwrap
import time
import traceback
from pathlib import Path

from unskip.bench import Comparison, Setting, prepare, write

FAMILIES = {
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "resnet18": "resnet18",
    "mobilenetv2": "mobilenetv2_100",
    "resnet101": "resnet101",
}  # ours: timm's
STEMS = {"mobilenetv2": "stem=fast,depthwise=fast"}  # what else timm's network gets of ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--blocks", nargs="+", choices=("plain", "fast", "lean"), default=[], help="ways to compute it")
    parser.add_argument("--dense", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), help="with a dense coder")
    parser.add_argument(
        "--blocks-of", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), help="families of those"
    )
    parser.add_argument(
        "--stem", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), help="timm's with our stem"
    )
    parser.add_argument("--without", nargs="*", default=[], help="forms for inference to leave out, for instance dense")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--eager", action="store_true", help="eager instead of compiled")
    parser.add_argument("--no-train", action="store_true", help="inference only")
    parser.add_argument("--no-infer", action="store_true", help="training only")
    parser.add_argument("--wait", type=Path, help="time nothing before this file exists; compile until then")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 4), help="processes that compile")
    parser.add_argument("--wave", type=int, default=3, help="families that are compiled at once, then timed")
    parser.add_argument(
        "--stop-after", type=float, default=330, help="seconds; a wave that would begin later is left out"
    )
    args = parser.parse_args()
    began = time.perf_counter()

    def say(words: str) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {words}", flush=True)

    setting = Setting(
        device=args.device,
        batch=args.batch,
        size=args.size,
        precision="bf16" if args.device.startswith("cuda") else "fp32",
        eager=args.eager,
        compiled=not args.eager,
        train=not args.no_train,
        infer=not args.no_infer,
        rounds=args.rounds,
        seconds=args.seconds,
        compile_workers=0 if args.eager else args.workers,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "setting.json").write_text(json.dumps(dataclasses.asdict(setting), indent=1) + "\n")
    # A wave is compiled at once and timed before the next one, so that a cut leaves the most important ones whole.
    for first in range(0, len(args.family), args.wave):
        comparisons = {}
        for family in args.family[first : first + args.wave]:
            if time.perf_counter() - began > args.stop_after:
                say(f"no time is left for {family}")
                continue
            blocks = [f"pnnh_{family}:block={block}" for block in args.blocks if family in args.blocks_of]
            dense = [f"pnnh_{family}:pretext=random"] if family in args.dense else []
            stem = [f"{FAMILIES[family]}:{STEMS.get(family, 'stem=fast')}"] if family in args.stem else []
            words = [FAMILIES[family], *stem, f"pnnh_{family}", *blocks, *dense]
            comparisons[family] = Comparison(words, setting, say, train_only=blocks, without=args.without)
        if comparisons:
            run(comparisons, args.out, args.wait)


def run(comparisons: dict[str, Comparison], out: Path, wait: Path | None) -> None:
    """Compiles all of them and times one after another."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(list(comparisons.values()), Path(folder))
        while wait is not None and not wait.exists():
            time.sleep(0.5)
        for family, comparison in comparisons.items():
            try:
                # Without pictures, whose drawing would keep the GPU waiting.
                comparison.run(lambda c=comparison, f=family: write(c, out / f, picture=False))
            except Exception:  # one family that fails must not take the others with it
                traceback.print_exc()
            write(comparison, out / family)
            show(comparison)


def show(comparison: Comparison) -> None:
    """Short lines, since only the end of a long output may be kept."""
    for line in comparison.to_dict()["rows"]:
        found, ratio = line["images_per_s"], line["ratio"]
        if found is None:
            print(f"  {line['network']:32} {line['mode']:6} {line['form']:12} failed:", flush=True)
            print(textwrap.indent(textwrap.fill(line["error"], 116), "    "), flush=True)
            continue
        memory = f"{line['memory_bytes'] / 2**30:6.2f} GiB {ratio['memory'] or 0:.3f}"
        floor = line.get("floor_milliseconds", {})
        floors = f"{floor.get('arithmetic', 0):.2f} | {floor.get('traffic', 0):.2f}"
        print(
            f"  {line['network']:32} {line['mode']:6} {line['form']:12} {found:9,.0f}/s {ratio['speed'] or 0:.3f}  "
            f"{memory}  {line['milliseconds']:.2f} ms, floor {floors}",
            flush=True,
        )


if __name__ == "__main__":
    main()
