"""Measures: what happens to the signal inside a network, as pure functions of what was recorded there."""

from unskip.measures.cushion import interlayer_cushion, layer_cushion
from unskip.measures.dissipation import cosine_similarity, noise_to_signal, recovery
from unskip.measures.gradient import growth
from unskip.measures.measuring import measure, measure_names, register_measure
from unskip.measures.probe import Family, Layer, Probe, record_outputs
from unskip.measures.series import Findings, LayerInfo, Measured, Series

__all__ = [
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
    "measure_names",
    "noise_to_signal",
    "record_outputs",
    "recovery",
    "register_measure",
]
