"""The front as a process, composed from its settings."""

import asyncio
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_settings import SettingsError

from api.access import InvalidKeys
from api.app import create_app
from api.deps import Services
from api.settings import ApiSettings
from api.webhooks.signing import InvalidSecrets
from shared.client import FleetClient
from shared.heap import keep_for_good
from shared.settings import complaints, read_flags
from shared.telemetry import configure_logging
from shared.tracing import TracingUnavailable, require_tracing

EXIT_USAGE = 2
_LAST_WORDS_S = 5.0
"""Time for error frames to reach callers after the drain."""


class Server(uvicorn.Server):
    """Drain in steps: at the first signal say not ready, then take no more connections, then end what is open.

    A second signal skips the waiting. The process exits with 0 either way.
    """

    def __init__(self, app: FastAPI, settings: ApiSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=round(settings.drain_s + _LAST_WORDS_S),
            )
        )
        self._app = app
        self._settings = settings
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        services: Services | None = getattr(self._app.state, "services", None)
        if services is None or self._signals > 1:
            self._stop(0.0)
            return
        services.draining = True
        asyncio.get_running_loop().call_later(self._settings.drain_delay_s, self._stop, self._settings.drain_s)

    def _stop(self, drain_s: float) -> None:
        self.should_exit = True
        services: Services | None = getattr(self._app.state, "services", None)
        if services is not None:
            asyncio.get_running_loop().call_later(drain_s, services.relay.interrupt)


def main(arguments: list[str] | None = None) -> int:
    try:
        settings = read_flags(ApiSettings, sys.argv[1:] if arguments is None else arguments)
        FleetClient.connect(settings.redis_url)
    except (ValidationError, SettingsError) as error:
        for complaint in complaints(error):
            print(complaint, file=sys.stderr)
        return EXIT_USAGE
    except ValueError as error:
        print(f"redis_url: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        require_tracing(settings.otlp_endpoint)
    except TracingUnavailable as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    configure_logging(settings.log_level, settings.log_format)
    try:
        app = create_app(settings)
    except InvalidKeys as error:
        print(f"api_keys_file: {error}", file=sys.stderr)
        return EXIT_USAGE
    except InvalidSecrets as error:
        print(f"webhook_secrets_file: {error}", file=sys.stderr)
        return EXIT_USAGE
    server = Server(app, settings)
    keep_for_good()
    server.run()
    return 0 if server.started else 1
