"""The doctor: measures the signal and the gradient inside a model and says whether it will train."""

from unskip.doctor.report import Report, diagnose
from unskip.doctor.verdict import Verdict, judge

__all__ = ["Report", "Verdict", "diagnose", "judge"]
