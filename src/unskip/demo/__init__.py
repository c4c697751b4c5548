"""What `unskip demo` runs and shows."""
