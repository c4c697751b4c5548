"""Measures: what happens to the signal inside a network, as pure functions of what was recorded there."""

from unskip.measures.cushion import interlayer_cushion, layer_cushion
from unskip.measures.dissipation import cosine_similarity, noise_to_signal, recovery
from unskip.measures.gradient import growth
from unskip.measures.measuring import DEFAULT, FAMILIES, measure, register_family
from unskip.measures.probe import Family, Layer, Probe, record_outputs
from unskip.measures.series import Findings, LayerInfo, Measured, Series

__all__ = [
    "DEFAULT",
    "FAMILIES",
    "Family",
    "Findings",
    "Layer",
    "LayerInfo",
    "Measured",
    "Probe",
    "Series",
    "cosine_similarity",
    "growth",
    "interlayer_cushion",
    "layer_cushion",
    "measure",
    "noise_to_signal",
    "record_outputs",
    "recovery",
    "register_family",
]
