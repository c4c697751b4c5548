"""A package outside of unskip: a method, a reader and a measure, found by their entry points."""
