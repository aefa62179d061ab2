"""A fake worker as a process, composed from its settings."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict, SettingsError

from shared.card import CARD_FILES, ModelCard
from shared.connection import FleetUnavailable
from shared.fake.answer import EMBEDDING_SIZE
from shared.fake.worker import FakeWorker
from shared.heart import Heart
from shared.queue import WorkerQueue
from shared.settings import ServiceSettings, check_model_name, complaints, read_flags
from shared.telemetry import configure_logging
from shared.text import InvalidTokenizer, Tokenizer

_MAX_MODEL_LEN = 4096
_BLOCK_LENGTH = 16


class FakeSettings(ServiceSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m shared.fake", extra="ignore")

    model: Path = Field(description="Folder with config.json and the tokenizer's files.")
    model_name: str = Field(description="Name that requests ask for.")
    step_ms: float = Field(default=20.0, ge=0.0, le=60_000.0, description="Milliseconds of a denoising step.")
    max_rows: int = Field(default=32, ge=1, le=4096, description="Requests decoded at the same time.")
    lease_ms: int = Field(default=15_000, ge=400, le=600_000, description="Silent for so long, it loses its requests.")
    drain_s: float = Field(default=10.0, ge=0.0, description="Seconds to finish running requests at the end.")
    ready_file: Path | None = Field(default=None, description="Written once it takes requests, removed at its end.")


def card_of(name: str, folder: Path) -> ModelCard:
    """Return the card of a fake model with the tokenizer of a folder; raises OSError, ValueError, InvalidTokenizer."""
    files = {file: (folder / file).read_bytes() for file in CARD_FILES if (folder / file).is_file()}
    config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
    eos: int | list[int] | None = config.get("eos_token_id")
    return ModelCard(
        name=check_model_name(name),
        family="fake",
        max_model_len=_MAX_MODEL_LEN,
        block_length=_BLOCK_LENGTH,
        fixed_block_length=False,
        decoding={"strategy": "threshold", "threshold": 0.9},
        temperature=0.0,
        capabilities=("generate", "chat", "infill") if Tokenizer.from_files(files).has_template else ("generate",),
        stop_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        mask_token_id=config.get("mask_token_id") or 0,
        vocab_size=config["vocab_size"],
        files=files,
        embedding_size=EMBEDDING_SIZE,
    )


async def _run(settings: FakeSettings, card: ModelCard) -> None:
    worker_id = f"fake-{socket.gethostname()}-{secrets.token_hex(4)}"
    queue = WorkerQueue.connect(settings.redis_url, card.name, worker_id, settings.lease_ms, slots=settings.max_rows)
    heart = Heart.connect(settings.redis_url, worker_id, card.name, settings.lease_ms)
    worker = FakeWorker(queue, heart, card, worker_id, settings.max_rows, settings.step_ms / 1000)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.leave)
    file = settings.ready_file

    def ready() -> None:
        if file is not None:
            draft = file.with_name(f".{file.name}.{os.getpid()}")
            draft.write_text(f"{worker_id}\n")
            draft.replace(file)

    try:
        await worker.run(settings.drain_s, ready)
    finally:
        heart.close()
        if file is not None:
            file.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a fake worker to its end; returns 0, or 2 for wrong settings and 1 if Redis does not answer."""
    try:
        settings = read_flags(FakeSettings, sys.argv[1:] if argv is None else argv)
        card = card_of(settings.model_name, settings.model)
    except (ValidationError, SettingsError) as error:
        for complaint in complaints(error):
            print(f"fake: {complaint}", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError, InvalidTokenizer) as error:
        print(f"fake: model: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("fake").info("answers are made up: there is no model")
    try:
        asyncio.run(_run(settings, card))
    except FleetUnavailable as error:
        print(f"fake: redis_url: {error}", file=sys.stderr)
        return 1
    return 0
