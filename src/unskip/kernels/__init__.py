"""Triton kernels and their dispatch. Nothing needs them to be correct."""
