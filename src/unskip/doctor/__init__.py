"""The doctor: what happens to the signal and to the gradient inside a network, and what that means for training."""

from unskip.doctor.report import Report, diagnose
from unskip.doctor.verdict import Verdict, judge

__all__ = ["Report", "Verdict", "diagnose", "judge"]
