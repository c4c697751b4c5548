"""Prints what became of the random networks behind the results of a test run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [
        f"{report.nodeid.split('::')[-1]}: {value}"
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "outcomes"
    ]
    if lines:
        terminalreporter.section("random networks")
        for line in lines:
            terminalreporter.line(line)
