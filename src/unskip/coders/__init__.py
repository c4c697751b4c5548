"""Coders: the frozen internal path of PNNH, their pretext tasks, closed forms, fitting and cache."""

from unskip.coders.bank import PRETEXTS, CoderBank, act_name, make_coder
from unskip.coders.closed_form import ClosedFormCoder
from unskip.coders.coder import Coder, FittedCoder, SharedCoder
from unskip.coders.fit import fit, floor
from unskip.coders.matrices import FORMS, averaging, odd_part_is_identity
from unskip.coders.spec import CoderSpec
from unskip.coders.transition import ClosedFormTransition, TransitionCoder

__all__ = [
    "FORMS",
    "PRETEXTS",
    "ClosedFormCoder",
    "ClosedFormTransition",
    "Coder",
    "CoderBank",
    "CoderSpec",
    "FittedCoder",
    "SharedCoder",
    "TransitionCoder",
    "act_name",
    "averaging",
    "fit",
    "floor",
    "make_coder",
    "odd_part_is_identity",
]
