"""A comparison as a table, as JSON and as a picture of ratios."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from unskip._core import files
from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, PNNH, RESIDUAL, dress, panels
from unskip.bench.compare import Comparison
from unskip.bench.networks import AS_TRAINED

WAY_OUT = "Choose another one (--out)."
COLOURS = (FAINT, PNNH, PLAIN, RESIDUAL, OTHER, "#E69F00")  # grey is the reference
OVER_OWN = "over own layers"
SPARE = ("floor", "lowest to highest", "ms", "memory ratio")  # what a narrow terminal does without, the first first


def table(comparison: Comparison) -> Iterable[Table]:
    """The networks, then the rows; ratios are to the first network with the same layers, then to it as it was built."""
    found = comparison.to_dict()
    own = any(line["ratio"]["speed_over_own_layers"] for line in found["rows"])
    fits = ["batch\nthat fits"] if found["setting"]["fit"] else []
    networks = Table(caption=_caption(found))
    networks.add_column("network", overflow="fold")
    for column in ("trained\n(M)", "frozen\n(M)", *fits):
        networks.add_column(column, justify="right", no_wrap=True)
    networks.add_column("MACs an image (M)", justify="right")
    counted = [line for line in found["rows"] if line.get("macs")]
    for about in found["networks"]:
        lines = [line for line in counted if line["network"] == about["name"]]
        infer = [f"{line['form']} {line['macs'] / 1e6:,.0f}" for line in lines if line["mode"] == "infer"]
        macs = dict.fromkeys(infer or [f"training {line['macs'] / 1e6:,.0f}" for line in lines])
        largest = [_number(about["largest_batch"], ",d")] if fits else []
        counts = (f"{about['trained'] / 1e6:.2f}", f"{about['frozen'] / 1e6:.2f}", *largest, "; ".join(macs))
        networks.add_row(about["name"], *counts)
    yield networks

    rows = Table(caption=_explain(found["networks"][0]["name"], own))
    rows.add_column("network", overflow="fold")
    rows.add_column("how")
    over_own = [OVER_OWN] if own else []
    for column in ("images/s", "lowest to highest", "ratio", *over_own, "memory\n(MiB)", "memory ratio", "ms", "floor"):
        rows.add_column(column, justify="right", no_wrap="\n" in column or " " not in column)
    kind = None
    for line in found["rows"]:
        how = _kind(line)
        if kind not in (None, how):
            rows.add_section()
        kind = how
        form = f", {line['form']}" if line["mode"] == "infer" else ""
        if line["error"]:
            rows.add_row(line["network"], how + form, "failed")
            continue
        floor = line.get("floor_milliseconds")
        rows.add_row(
            line["network"],
            how + form,
            *_speeds(line),
            _number(line["ratio"]["speed"], ".2f"),
            *([_number(line["ratio"]["speed_over_own_layers"], ".2f")] if own else []),
            _number(line["memory_bytes"] and line["memory_bytes"] / 2**20, ",.0f"),
            _number(line["ratio"]["memory"], ".2f"),
            _number(line["milliseconds"], ",.2f"),
            "" if floor is None else f"{floor['arithmetic']:,.2f} | {floor['traffic']:,.2f}",
        )
    yield rows


def _explain(first: str, own: bool) -> str:
    text = "images/s: median of the rounds. floor: ms by arithmetic | by traffic."
    return f"{text} ratio: to {first} with the same layers. {OVER_OWN}: to {first} as it was built." if own else text


def _caption(found: dict[str, Any]) -> str:
    machine, setting, rates = found["machine"], found["setting"], found["rates"]
    layout = "channels last" if setting["channels_last"] else "channels first"
    parts = [
        f"{machine['device']}, PyTorch {machine['torch']}, {setting['precision']}, {layout}",
        f"batch {setting['batch']}, images {'x'.join(map(str, found['input']))}",
    ]
    if not setting["device"].startswith("cuda"):
        threads = setting["threads"] or machine["threads"]
        parts.append(f"{threads} thread{'' if threads == 1 else 's'}")
    elif setting["graph"]:
        parts.append("each step one CUDA graph")
    if rates is not None:
        parts.append(f"reached here: {_rate(rates['flops'])}FLOP/s, {_rate(rates['bytes'])}B/s")
    if found["compile_seconds"] is not None:
        parts.append(f"compiled in {found['compile_seconds']:.0f} s by {setting['compile_workers']} processes")
    return "; ".join(parts)


def _rate(a_second: float) -> str:
    """A rate with the prefix that leaves digits for a slow CPU too."""
    value, prefix = (a_second / 1e12, "T") if a_second >= 1e12 else (a_second / 1e9, "G")
    return f"{value:,.1f} {prefix}"


def _speeds(line: dict[str, Any]) -> tuple[str, str]:
    """Median and range."""
    if line["images_per_s"] is None:
        return "", ""
    digits = ",.0f" if line["images_per_s"] >= 100 else ".1f"
    return f"{line['images_per_s']:{digits}}", f"{line['low']:{digits}} to {line['high']:{digits}}"


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def make_results_folder(folder: Path, *, force: bool = False) -> None:
    """Makes the folder that `write` will fill, or refuses it before the work."""
    files.make_folder(folder, command="bench", way_out=WAY_OUT)
    files.check_free(folder / "bench.json", command="bench", argument="--out", force=force, overwrite="--force")


def write(comparison: Comparison, folder: Path, *, picture: bool = True) -> None:
    """bench.json, and bench.png once there is a ratio to draw."""
    found = comparison.to_dict()
    text = json.dumps(found, indent=1) + "\n"
    with files.explained("the folder", folder, command="bench", way_out=WAY_OUT):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_atomically(
            folder / "bench.json", lambda file: file.write(text.encode()), command="bench", way_out=WAY_OUT
        )
        if picture and any(line["ratio"]["speed"] is not None for line in found["rows"]):
            draw(found, folder / "bench.png")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws images/s and memory over the first network's, with the same layers, for every kind of run.

    Of several forms the fastest is drawn; its name is below."""
    names = [about["name"] for about in found["networks"] if not about["own_layers"]]
    lines = [line for line in found["rows"] if line["network"] in names and line["ratio"]["speed"] is not None]
    lines.sort(key=lambda line: line["ratio"]["speed"])  # the fastest comes last, and stays
    best = {(_kind(line), line["network"]): line for line in lines}
    kinds = list(dict.fromkeys(_kind(line) for line in found["rows"] if line in lines))
    under = [
        kind.replace(", ", "\n") + _forms([best[kind, n]["form"] for n in names if (kind, n) in best]) for kind in kinds
    ]
    caption = _caption({**found, "rates": None, "compile_seconds": None})
    figure, axes = panels(1, 2, size=(max(7.0, 2.2 * len(kinds) + 3), 3.8), title="")
    figure.suptitle(caption, fontsize=9, color=INK, wrap=True)
    width = 0.8 / len(names)
    titles = {"speed": "images/s, more is better", "memory": "peak memory, less is better"}
    for ax, (what, title) in zip(axes, titles.items(), strict=True):
        for i, name in enumerate(names):
            at = [k for k, kind in enumerate(kinds) if (kind, name) in best]
            heights = [best[kinds[k], name]["ratio"][what] or 0.0 for k in at]
            places = [k + (i - (len(names) - 1) / 2) * width for k in at]
            bars = ax.bar(places, heights, width * 0.94, label=name, color=COLOURS[i % len(COLOURS)])
            for label in ax.bar_label(bars, fmt="%.2f", fontsize=7, color=INK, padding=1):
                label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})
        ax.axhline(1, color=INK, lw=0.8, zorder=0.9)  # behind bars and their numbers
        dress(ax, x="", y=f"ratio to {names[0]}", title=title)
        ax.set_xticks(range(len(kinds)), under, fontsize=8)
        ax.grid(False, axis="x")
    handles, labels = axes[0].get_legend_handles_labels()
    a_line = max(1, int(14 * figure.get_figwidth()) // (6 + max(map(len, names))))  # 14 letters an inch
    figure.legend(handles, labels, loc="outside lower center", ncols=min(a_line, len(names)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _kind(line: dict[str, Any]) -> str:
    return f"{line['mode']}, {'compiled' if line['compiled'] else 'eager'}"


def _forms(names: list[str]) -> str:
    """The forms that were timed, a line each; '' where all networks are as they were trained."""
    told = [] if set(names) == {AS_TRAINED} else list(dict.fromkeys(names))
    return "".join(f"\n{name}" for name in told)
