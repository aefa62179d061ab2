"""Make a secret that signs webhooks: `python -m api.webhooks`. It goes into the file of `webhook_secrets_file`."""

import sys

from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from api.webhooks.signing import new_secret
from shared.cli.entry import written


class SecretRequest(BaseSettings):
    """A fresh secret is printed to standard output."""

    model_config = SettingsConfigDict(cli_prog_name="python -m api.webhooks")


def main(arguments: list[str] | None = None) -> int:
    CliApp.run(SecretRequest, cli_args=sys.argv[1:] if arguments is None else arguments)
    print(new_secret())
    return 0


if __name__ == "__main__":
    with written():
        sys.exit(main())
