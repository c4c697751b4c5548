"""Triton kernels and their dispatch. Nothing needs them to be correct."""

from unskip.kernels.layers import use_fast_layers

__all__ = ["use_fast_layers"]
