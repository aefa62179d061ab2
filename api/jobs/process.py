"""The jobs as a process, composed from their settings."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import SettingsError

from api.jobs.service import serve
from api.jobs.settings import JobSettings
from api.webhooks.ask import WebhookDesk
from api.webhooks.signing import InvalidSecrets
from shared.connection import open_client
from shared.settings import complaints, read_flags
from shared.telemetry import configure_logging

EXIT_USAGE = 2

logger = logging.getLogger("diffleet.jobs")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        settings = read_flags(JobSettings, sys.argv[1:] if arguments is None else arguments)
        _check_urls(settings)
        desk = WebhookDesk.open(settings)
    except InvalidSecrets as error:
        print(f"webhook_secrets_file: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (ValidationError, SettingsError) as error:
        for complaint in complaints(error):
            print(complaint, file=sys.stderr)
        return EXIT_USAGE
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    configure_logging(settings.log_level, settings.log_format)
    # It tells of every look for work.
    logging.getLogger("arq").setLevel(logging.WARNING)
    asyncio.run(_until_signal(settings, desk))
    return 0


def _check_urls(settings: JobSettings) -> None:
    """Raise ValueError, naming the setting, for a URL of which no client can be made."""
    for name, url in (("redis_url", settings.redis_url), ("jobs_redis_url", settings.jobs_redis_url)):
        try:
            if url is not None:
                open_client(url)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


async def _until_signal(settings: JobSettings, desk: WebhookDesk) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    service = asyncio.create_task(serve(settings, desk))
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait({service, waiter}, return_when=asyncio.FIRST_COMPLETED)
    for task in (service, waiter):
        task.cancel()
    await asyncio.gather(service, waiter, return_exceptions=True)
    logger.info("stopped")
