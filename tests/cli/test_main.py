"""What holds for every command: help, terminals that know little, Ctrl-C."""

import io
import re
import signal
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from unskip.cli import main
from unskip.cli.commands import app
from unskip.reproduce import REPRODUCTIONS

COMMANDS = [[name] for name in ("bench", "demo", "doctor", "export", "fold", "models", "plainify", "train")]
COMMANDS += [["reproduce", name] for name in REPRODUCTIONS]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_explained_and_out_is_short_o_everywhere(words: list[str]) -> None:
    command = get_command(app)
    for word in words:
        command = command.resolve_command(command.make_context("", [], resilient_parsing=True), [word])[1]  # type: ignore[attr-defined]
    options = {option.name: option for option in command.params if option.param_type_name == "option"}
    assert all(option.help for option in options.values())
    assert all(option.help[0].isupper() or option.help.split()[0].strip(":,") in CHOICES for option in options.values())
    assert words == ["models"] or "-o" in options["out"].opts
    # A word that is to be typed as it stands must not be written with a capital.
    assert not any(re.match("(Auto|Cifar10|Digits|Npz|Pnnh|Usps|Torch)", option.help) for option in options.values())


CHOICES = {"auto", "cpu", "fp32", "dense", "never", "rm", "same"}


def test_help_is_wrapped_for_the_width_at_hand() -> None:
    shown = CliRunner().invoke(app, ["plainify", "--help"], env={"COLUMNS": "200"}).stdout
    assert "or the proof failed, and nothing was written." in shown


def test_a_terminal_without_the_signs_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["unskip", "reproduce"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    sys.stdout.flush()
    assert b"how close ?r(?)" in written.getvalue()


def test_ctrl_c_is_one_sentence_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT)  # an exception by now, since the command may have something to tidy up

    monkeypatch.setattr("unskip.io.shipping.fold_to_file", interrupt)
    monkeypatch.setattr(sys, "argv", ["unskip", "fold", "plain_resnet20", "-o", "plain.safetensors"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.strip() == "Interrupted. Nothing is left half written; the same command begins anew."


MINE = """
from torch import nn

def build(num_classes=10, in_chans=1):
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)]
    return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.ReLU(), *last)

other = build
"""


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "mynet:build"],
        ["train", "digits-pnnh-56", "--model", "mynet:build", "--epochs", "1", "--warmup-epochs", "0", "--device",
         "cpu"],
        ["export", "mynet:build", "-o", "net.pt2", "--input-size", "1x8x8"],
        pytest.param(
            ["bench", "mynet:build", "mynet:other", "--device", "cpu", "--no-compile", "--infer", "--size", "8",
             "--rounds", "1"],
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_module_in_the_current_folder_is_found(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mynet.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as in an installed program
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "mynet:build" in result.stdout
    assert sys.path[-1] == str(tmp_path)
