"""Prints what became of the random networks behind the results of a test run, all parts of a test added up."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {}
    for report in (r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])):
        for name, value in getattr(report, "user_properties", ()):
            if name == "outcomes":
                outcome, times = value
                counts.setdefault(report.nodeid.split("::")[-1].split("[")[0], Counter())[outcome] += times
    for test, outcomes in counts.items():
        terminalreporter.section(test)
        for outcome, times in sorted(outcomes.items(), key=lambda item: (":" in item[0], item[0])):
            terminalreporter.line(f"{times:>7} {outcome}")
