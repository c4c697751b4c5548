"""The fifth to eighth series (learning rate 0.1), and their queues; several sets make one queue, in this order.

    python jobs4.py plain ladder table4:0,1 > queue.json && python drive.py queue.json ...

A set runs with the seeds that are named behind its colon, or else with those of SETS; --epochs N changes its schedule.

ladder        the wide network (centred 3x) at 20 to 56 layers
plain         ResNet-110 without its skips
table4        papers/pnnh.md, Table 4, in the paper's literal setting; "none": no coder, "pair": ours
table4_start  its fitted coders from Algorithm 1's own start
table4_ours   the rows of Table 4 with our transitions, start and norm before pooling
deep          1,004 layers
long_wide     the wide network on all 50,000 images, 200 epochs
long_resnet   ResNet-110, likewise
long_wide20   the wide network of 20 layers, likewise
he            ResNet-110's widths at equal parameters: pair average, identity, identity with centred transient channels
sixty         the wide network and ResNet-110, 60 epochs
decay         the same at twice the weight decay, 1e-3
"""

import argparse
import json
from collections.abc import Callable

from jobs3 import CENTRED, CENTRED_3X, RESNET

Networks = dict[str, dict]
PAPER = {"transition": "whole", "scale": 1.0}  # section 4 and Figure 2: no coder in transitions, He's scale
PLAIN = {**PAPER, "path": "none", "hidden": [16, 32, 64], "norm2": 1.0}
TASKS = ("rectified_normal", "uniform", "normal")
DEEP = {"blocks": 167, "head_norm": True, "scale": 0.1}


def fitted(name: str) -> dict:
    return {"path": "fitted", "coder": name}


def table4(prefix: str, setting: dict) -> Callable[[int], Networks]:
    def rows(seed: int) -> Networks:
        paths = {task: fitted(task) for task in TASKS}
        paths |= {"identity": {"path": "half"}, "pair": {}, "random": fitted("random_1" if seed % 2 else "random")}
        return {f"{prefix}_{name}": {**setting, **path} for name, path in (paths | {"none": {"path": "none"}}).items()}

    return rows


def same(networks: Networks) -> Callable[[int], Networks]:
    return lambda seed: networks


START = {f"table4_{task}_start": {**PAPER, **fitted(f"{task}_start")} for task in TASKS}
LADDER = {f"ladder_{6 * blocks + 2}": {**CENTRED_3X, "blocks": blocks} for blocks in (9, 7, 5, 3)}
HE = {
    "he_pair": {"head_norm": True},
    "he_identity": {"head_norm": True, "path": "half"},
    "he_centred": {**CENTRED, "widths": [16, 32, 64], "hidden": [15, 29, 57]},
}
SIXTY = {"sixty_wide": CENTRED_3X, "sixty_resnet110": RESNET}
TWICE = {f"{name}_decay": network for name, network in SIXTY.items()}
DECAY = {"weight_decay": 5e-4}
LONG = {**DECAY, "whole": True, "epochs": 200}
SHORT = {"epochs": 15, "weight_decay": 3e-4}  # the paper's decay
SETS: dict[str, tuple[Callable[[int], Networks], dict, list[int], bool]] = {  # networks, training, seeds, save weights
    "ladder": (same(LADDER), {**DECAY, "epochs": 30}, [0, 1, 2], True),
    "he": (same(HE), {**DECAY, "epochs": 30}, [0, 1, 2], False),
    "sixty": (same(SIXTY), {**DECAY, "epochs": 60}, [0, 1], False),
    "decay": (same(TWICE), {"weight_decay": 1e-3, "epochs": 60}, [0, 1], False),
    "plain": (same({"plain110": PLAIN}), {"epochs": 30, "weight_decay": 3e-4}, [0, 1], False),
    "table4": (table4("table4", PAPER), SHORT, [0, 1, 2], False),
    "table4_start": (same(START), SHORT, [0, 1], False),
    "table4_ours": (table4("table4_ours", {"head_norm": True}), SHORT, [0, 1], False),
    "deep": (same({"pnnh1004": DEEP}), {**DECAY, "epochs": 30, "warmup": 2.0}, [0], False),
    "long_wide": (same({"long_wide": CENTRED_3X}), LONG, [0, 1, 2], True),
    "long_resnet": (same({"long_resnet110": RESNET}), LONG, [0, 1, 2], True),
    "long_wide20": (same({"long_wide20": {**CENTRED_3X, "blocks": 3}}), LONG, [0, 1, 2], True),
}


def jobs(words: list[str], epochs: int | None = None) -> list[dict]:
    queue = []
    for word in words:
        name, _, chosen = word.partition(":")
        networks, train, seeds, save = SETS[name]
        train = train if epochs is None else {**train, "epochs": epochs}
        for seed in map(int, chosen.split(",")) if chosen else seeds:
            for network_name, network in networks(seed).items():
                queue.append({
                    "name": f"{network_name}_s{seed}", "network": network, "train": {**train, "seed": seed},
                    "save": save,
                })  # fmt: skip
    return queue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET[:SEEDS]")
    parser.add_argument("--epochs", type=int)
    args = parser.parse_args()
    print(json.dumps(jobs(args.sets, args.epochs), indent=1))


if __name__ == "__main__":
    main()
