"""Coders: the frozen internal path of PNNH, their pretext tasks, closed forms, fitting and cache."""

from unskip.coders.bank import PRETEXTS, CoderBank, act_name, make_coder
from unskip.coders.cache import cache_dir
from unskip.coders.closed import FORMS, averaging, odd_part_is_identity
from unskip.coders.closed_form import Closed, ClosedFormCoder, ClosedFormTransition, closed_of
from unskip.coders.coder import Coder, CoderRef, TransitionCoder, is_replica
from unskip.coders.fit import PRETEXT_TASKS, Fit, fit, floor
from unskip.coders.spec import CoderSpec

__all__ = [
    "FORMS",
    "PRETEXTS",
    "PRETEXT_TASKS",
    "Closed",
    "ClosedFormCoder",
    "ClosedFormTransition",
    "Coder",
    "CoderBank",
    "CoderRef",
    "CoderSpec",
    "Fit",
    "TransitionCoder",
    "act_name",
    "averaging",
    "cache_dir",
    "closed_of",
    "fit",
    "floor",
    "is_replica",
    "make_coder",
    "odd_part_is_identity",
]
