"""`python -m unskip` is the command line."""

from unskip.cli import main

main()
