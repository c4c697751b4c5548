"""A package outside of unskip with a network, a reader, a method, a measure and a data set of its own (tests/test_plugins.py)."""
