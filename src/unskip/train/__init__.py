"""Training."""

from unskip.train.params import param_groups

__all__ = ["param_groups"]
