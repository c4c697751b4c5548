"""What every room may use: text, files, random state, helpers for modules."""
