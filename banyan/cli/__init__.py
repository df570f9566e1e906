"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations


def main() -> None:
    """Entry point of `banyan`."""
    from banyan.cli.app import run

    run()
