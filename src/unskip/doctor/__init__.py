"""The doctor: what the measures of a network mean."""

from unskip.doctor.verdict import Verdict, judge

__all__ = ["Verdict", "judge"]
