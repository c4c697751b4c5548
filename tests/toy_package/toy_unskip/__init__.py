"""A package outside of unskip with a network, a reader, a method and a measure of its own (tests/test_plugins.py)."""
