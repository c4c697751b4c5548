"""Throughput and memory of two or more networks, side by side in one process."""

from unskip.bench.compare import Comparison
from unskip.bench.setting import Case, Setting, parse_bytes
from unskip.bench.show import SPARE, draw, make_results_folder, table, write

__all__ = ["SPARE", "Case", "Comparison", "Setting", "draw", "make_results_folder", "parse_bytes", "table", "write"]
