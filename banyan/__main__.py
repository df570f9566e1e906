"""`python -m banyan`: the command line."""

from banyan.cli import main

main()
