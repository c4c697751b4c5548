"""Reproduce: the papers' figures and tables, each by one command. One file each; importing it registers its name."""

from unskip.reproduce import (
    cifar10_headlines,
    errata,
    noise_figure3,
    noise_figure11,
    noise_table1,
    plainnet_table2,
    plainnet_table3,
    pnnh_figure1,
    pnnh_figure3,
    pnnh_table1,
    pnnh_table4,
    seqnet_figure1,
    seqnet_figure5,
    seqnet_figure6,
)
from unskip.reproduce.papers import PAPERS, PaperTable, paper_table, paper_tables
from unskip.reproduce.registry import REPRODUCTIONS, Outcome, Reproduction, Written, reproduce, reproduction

__all__ = [
    "PAPERS",
    "REPRODUCTIONS",
    "Outcome",
    "PaperTable",
    "Reproduction",
    "Written",
    "cifar10_headlines",
    "errata",
    "noise_figure3",
    "noise_figure11",
    "noise_table1",
    "paper_table",
    "paper_tables",
    "plainnet_table2",
    "plainnet_table3",
    "pnnh_figure1",
    "pnnh_figure3",
    "pnnh_table1",
    "pnnh_table4",
    "reproduce",
    "reproduction",
    "seqnet_figure1",
    "seqnet_figure5",
    "seqnet_figure6",
]
