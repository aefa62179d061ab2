"""Make an API key: `python -m api.keys --id team-a [--scopes inference,admin]`.

The key itself is printed once, to stderr; the entry for the key file, which holds only its hash, to stdout.
"""

import secrets
import sys

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from api.access import KEY_PREFIX, ApiKey, KeyScope, hash_key
from shared.cli.entry import written
from shared.settings import complaints, read_flags

_KEY_BYTES = 32


class KeyRequest(BaseSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api.keys", cli_kebab_case=True, cli_hide_none_type=True)

    id: str = Field(description="Name of the key's owner, for logs, limits and stored objects.")
    scopes: tuple[KeyScope, ...] = Field(default=("inference",), description="What it opens: inference, admin or both.")
    requests_per_minute: int | None = Field(default=None, ge=1, description="Unset: the api's own limit.")
    tokens_per_minute: int | None = Field(default=None, ge=1, description="Likewise.")


def new_key(request: KeyRequest) -> tuple[str, ApiKey]:
    """Return a fresh key and its entry; raises `ValidationError`."""
    secret = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return secret, ApiKey(
        id=request.id,
        sha256=hash_key(secret),
        scopes=request.scopes,
        requests_per_minute=request.requests_per_minute,
        tokens_per_minute=request.tokens_per_minute,
    )


def main(arguments: list[str] | None = None) -> int:
    try:
        request = read_flags(KeyRequest, sys.argv[1:] if arguments is None else arguments)
        secret, entry = new_key(request)
    except (ValidationError, SettingsError) as error:
        for complaint in complaints(error):
            print(complaint, file=sys.stderr)
        return 2
    print(secret, file=sys.stderr)
    print(entry.model_dump_json(exclude_none=True))
    return 0


if __name__ == "__main__":
    with written():
        sys.exit(main())
