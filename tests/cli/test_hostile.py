"""Hostile input to every command: absurd numbers, empty words, odd places and networks end in a sentence."""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from unskip.cli import commands, main
from unskip.reproduce import REPRODUCTIONS

Run = Callable[..., tuple[int, str, str]]

# Words with which each command would do something, and little of it.
BENCH = "bench resnet20 plain_resnet20 --device cpu --batch 2 --size 8 --rounds 1 --seconds 0.01 --no-compile --infer"
COMMANDS = {
    "bench": [*BENCH.split(), "--no-fold"],
    "demo": ["demo"],
    "doctor": ["doctor", "resnet20", "--batch-size", "4"],
    "export": ["export", "plain_resnet20", "-o", "net.pt2"],
    "fold": ["fold", "plain_resnet20", "-o", "net.safetensors"],
    "models": ["models", "resnet20"],
    "plainify": ["plainify", "resnet20", "--dry-run"],
} | {f"reproduce {name}": ["reproduce", name] for name in REPRODUCTIONS}
ABSURD = ("1e300", str(10**18), "nan", "-1")
# Numbers that look absurd and are right: they change nothing, or stand for "no limit".
ALLOWED = {("plainify", "--limit", "1e300"), ("plainify", "--limit", str(10**18))}


ARGUMENTS = ("network", "networks", "pattern")  # by place; all others are options


def parameters(name: str) -> Iterator[tuple[str, set[type]]]:
    """The options of a command with the types that they take; '' is an argument."""
    command, _, figure = name.partition(" ")
    if figure:
        hints = {"out": Path, "record": Path | None, **get_type_hints(REPRODUCTIONS[figure].settings)}
    else:
        hints = get_type_hints(getattr(commands, command))
        del hints["return"]
    for key, hint in hints.items():
        yield "" if key in ARGUMENTS else f"--{key.replace('_', '-')}", set(get_args(hint) or (hint,)) - {type(None)}


NUMBERS = [
    (name, option, value)
    for name in COMMANDS
    for option, types in parameters(name)
    if types & {int, float}
    for value in ABSURD
    if not (option == "--seed" and value == str(10**18))  # a seed like any other
]
TEXTS = [(name, option) for name in COMMANDS for option, types in parameters(name) if types != {bool}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in a folder of its own; returns exit code, stdout and stderr. An exception is a failure."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unskip", *words])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def is_sentence(text: str) -> bool:
    return bool(text.strip()) and "Traceback" not in text


def test_all_numbers_are_tried() -> None:
    assert {name for name, _, _ in NUMBERS} == COMMANDS.keys() - {"models"}
    assert len(NUMBERS) > 200


@pytest.mark.parametrize(("name", "option", "value"), NUMBERS)
def test_an_absurd_number_is_refused_before_the_work(name: str, option: str, value: str, run: Run) -> None:
    code, out, err = run(*COMMANDS[name], option, value)
    if (name, option, value) in ALLOWED:
        assert code == 0, err
        return
    assert (code, out) == (2, ""), err
    assert is_sentence(err)
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(("name", "option"), TEXTS)
def test_an_empty_word_is_refused(name: str, option: str, run: Run) -> None:
    for words in ([option, ""], [f"{option}="]) if option.startswith("--") else ([""],):
        code, out, err = run(*COMMANDS[name], *words)
        assert (code, out) == (2, "")
        assert "is empty; give it a value or leave it out" in err
        assert option in err
    assert not list(Path.cwd().iterdir())


def full(*words: str) -> list[object]:
    """Words of commands that take seconds."""
    return [pytest.param(each, marks=pytest.mark.full) for each in words]


@pytest.mark.parametrize(
    "words",
    [
        "models resnet20",
        "reproduce",
        "reproduce seqnet-figure1 --repeats 2 --depth 4",
        "fold plain_resnet20 -o net.safetensors",
        *full("plainify resnet20 --dry-run", "doctor plain_resnet20 --batch-size 2", f"{BENCH} --no-fold"),
    ],
    ids=lambda words: " ".join(words.split()[:2]),
)
def test_a_full_disk_behind_stdout_is_a_sentence_and_files_stay(
    words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = run(*words.split())
    assert code == 1
    assert "No space left on device" in err
    assert is_sentence(err)
    assert "-o" not in words.split() or (Path.cwd() / "net.safetensors").stat().st_size > 1000


@pytest.mark.parametrize(
    "words",
    [
        "export plain_resnet20 -o {}", "fold plain_resnet20 -o {}", "plainify resnet20 -o {}", "doctor resnet20 -o {}",
        f"{BENCH} -o {{}}", "demo -o {}", "reproduce errata -o {}", "reproduce errata --record {}",
        "reproduce pnnh-table1 --dataset digits --epochs 1 -o {}", "doctor {}", "bench resnet20 {}",
        "reproduce noise-figure3 --plain {}", *full("doctor resnet20 --against {}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["device", "pipe", "folder"])
def test_what_is_no_file_is_refused_and_stays(words: str, place: str, run: Run) -> None:
    wants_folder = words.split()[0] in ("bench", "demo", "reproduce") and ("-o" in words or "--record" in words)
    if place == "folder" and wants_folder:
        return
    places = {"device": Path("/dev/full"), "pipe": Path("pipe.onnx"), "folder": Path("folder.onnx")}
    os.mkfifo(places["pipe"])
    places["folder"].mkdir()
    before = places[place].stat()
    forced = [*words.format(places[place]).split(), *(["--force"] if words.split()[0] in ("export", "doctor") else [])]
    code, out, err = run(*forced)
    assert (code, out) == (2, ""), err
    assert is_sentence(err)
    after = places[place].stat()
    assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))


@pytest.mark.parametrize(
    "name", [*sorted(COMMANDS.keys() - {"doctor", "export", "plainify"}), *full("doctor", "export", "plainify")]
)
def test_a_folder_that_was_deleted_is_a_sentence(name: str, run: Run) -> None:
    here = Path.cwd()
    here.rmdir()
    words = [word for word in COMMANDS[name] if word != "--dry-run"]
    if name == "plainify":
        words += ["-o", "net.safetensors"]
    if name == "bench":
        words += ["-o", "bench"]
    if name == "doctor":
        words += ["-o", "page.html"]
    code, out, err = run(*words)
    os.chdir(here.parent)
    if name == "models":  # it needs no folder
        assert code == 0
        return
    assert (code, out) == (2, ""), err
    assert is_sentence(err)


def scripted() -> torch.jit.ScriptModule:
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.jit.script(torch.nn.Sequential(*layers, torch.nn.Linear(4, 10)))


HERE = f"{__name__}:scripted"
NETWORKS = {"colon": ":", "function": "torch:", "module": ":load", "nothing": " ", "scripted": HERE}


@pytest.mark.parametrize("spec", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("command", ["doctor", "plainify", "fold", "export", "bench"])
def test_an_odd_network_is_a_sentence(command: str, spec: str, run: Run) -> None:
    words = {
        "doctor": ["doctor", spec, "--batch-size", "2"],
        "plainify": ["plainify", spec, "--dry-run", "--input-size", "3x8x8"],
        "fold": ["fold", spec, "-o", "net.safetensors", "--input-size", "3x8x8"],
        "export": ["export", spec, "-o", "net.onnx", "--input-size", "3x8x8"],
        "bench": [*BENCH.split()[:1], "resnet20", spec, *BENCH.split()[3:]],
    }[command]
    code, _, err = run(*words)
    assert code in ((0, 1, 2) if spec == HERE else (2,)), err
    assert code == 0 or is_sentence(err)
