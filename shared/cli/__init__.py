"""The `diffleet` command."""


def main() -> None:
    from shared.cli.commands import app

    app()
