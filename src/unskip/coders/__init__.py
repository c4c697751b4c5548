"""Coders: the frozen internal path of PNNH, their pretext tasks, closed forms, fitting and cache."""

from unskip.coders.bank import PRETEXTS, CoderBank, act_name, make_coder
from unskip.coders.cache import cache_dir
from unskip.coders.closed_form import ClosedFormCoder
from unskip.coders.coder import Coder, FittedCoder, SharedCoder
from unskip.coders.fit import PRETEXT_TASKS, Fit, fit, floor
from unskip.coders.matrices import FORMS, averaging, odd_part_is_identity
from unskip.coders.spec import CoderSpec
from unskip.coders.transition import ClosedFormTransition, FittedTransition, TransitionCoder

__all__ = [
    "FORMS",
    "PRETEXTS",
    "PRETEXT_TASKS",
    "ClosedFormCoder",
    "ClosedFormTransition",
    "Coder",
    "CoderBank",
    "CoderSpec",
    "Fit",
    "FittedCoder",
    "FittedTransition",
    "SharedCoder",
    "TransitionCoder",
    "act_name",
    "averaging",
    "cache_dir",
    "fit",
    "floor",
    "make_coder",
    "odd_part_is_identity",
]
