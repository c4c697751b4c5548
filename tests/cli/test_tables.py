"""Tables on narrow terminals."""

import io

from rich.console import Console
from rich.table import Table

from unskip.cli.tables import console_for_tables, fitted


def shown(width: int) -> str:
    table = Table(caption="Millions.")
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    table.add_column("skips")
    table.add_row("pnnh_resnet110_wide", "cifar_resnet", "attention skips kept: 12")
    console = Console(width=width, file=io.StringIO())
    console.print(fitted(table, console, ("family", "nothing", "skips")))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_wide_one_has_every_column_on_one_line() -> None:
    assert "attention skips kept: 12" in shown(100)
    assert "cifar_resnet" in shown(100)
    assert "wider" not in shown(100)


def test_what_may_wrap_wraps_before_anything_goes() -> None:
    assert "cifar_resnet" in shown(60)
    assert "wider" not in shown(60)


def test_names_stay_whole_and_what_is_left_out_is_said() -> None:
    assert "pnnh_resnet110_wide" in shown(40)
    assert "kept:" in shown(40)
    assert "family" in shown(40).split("Millions.")[1]
    assert "cifar_resnet" not in shown(40)
    assert "pnnh_resnet110_wide" in shown(25)
    assert "kept:" not in shown(25)


def test_where_words_may_be_broken_more_columns_stay() -> None:
    table = Table()
    table.add_column("name", overflow="fold")
    table.add_column("family", no_wrap=True)
    table.add_row("pnnh_resnet110_wide:pretext=random", "cifar_resnet")
    console = Console(width=36, file=io.StringIO())
    console.print(fitted(table, console, ("family",)))
    words = console.file.getvalue()  # type: ignore[attr-defined]
    assert "cifar_resnet" in words
    assert "pnnh_resnet110" in words
    assert "…" not in words


def test_off_a_terminal_the_width_is_fixed() -> None:
    assert console_for_tables(77).width == 77
