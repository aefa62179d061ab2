"""The `diffleet` command."""

from shared.cli.entry import early_interrupts, written


def main() -> None:
    with early_interrupts():
        from shared.cli.commands import app

    with written():
        app()
