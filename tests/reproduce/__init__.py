"""Tests of the reproductions, at a size that runs in seconds."""
