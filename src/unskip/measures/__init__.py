"""Measures of the signal and the gradient inside a model, layer by layer."""

from unskip.measures.cushion import interlayer_cushion, layer_cushion
from unskip.measures.dissipation import cosine_similarity, noise_to_signal, recovery
from unskip.measures.first_updates import COLLAPSED, UPDATES, MakeOptimizer, first_updates, last_tokens, slower
from unskip.measures.gradient import growth
from unskip.measures.measuring import measure, measure_names, register_measure
from unskip.measures.probe import Family, Layer, Probe, record_outputs
from unskip.measures.series import Findings, LayerInfo, Measure, Measured, Series
from unskip.measures.tokens import attention_entropy, token_similarity, token_spread

__all__ = [
    "COLLAPSED",
    "UPDATES",
    "Family",
    "Findings",
    "Layer",
    "LayerInfo",
    "MakeOptimizer",
    "Measure",
    "Measured",
    "Probe",
    "Series",
    "attention_entropy",
    "cosine_similarity",
    "first_updates",
    "growth",
    "interlayer_cushion",
    "last_tokens",
    "layer_cushion",
    "measure",
    "measure_names",
    "noise_to_signal",
    "record_outputs",
    "recovery",
    "register_measure",
    "slower",
    "token_similarity",
    "token_spread",
]
