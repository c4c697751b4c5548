"""A package outside of unskip: a network, a reader, a method, a measure and a data set (tests/test_plugins.py)."""
