"""A worker as a process, composed from its settings."""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsError
from redis.exceptions import RedisError

from shared.connection import open_sync_client
from shared.heap import keep_for_good
from shared.heart import Heart
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo, WorkerState
from shared.settings import complaints
from shared.telemetry import configure_logging
from shared.tracing import Tracing, TracingUnavailable, open_tracing
from worker.bridge import Bridge, BridgeError, Pace
from worker.exits import ExitCode
from worker.heartbeat import Heartbeat
from worker.mailbox import Mailbox
from worker.metrics import Metrics
from worker.pulse import Pulse
from worker.readiness import Probe, Readiness
from worker.service import Service
from worker.settings import WorkerSettings, read_settings

log = logging.getLogger("worker")

_ANNOUNCE_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker to its end; returns an `ExitCode`. To be called from the main thread."""
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv)
    except (ValidationError, SettingsError) as error:
        for complaint in complaints(error):
            _complain(complaint)
        return ExitCode.BAD_SETTINGS
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until there is something to drain
    try:
        tracing = open_tracing("diffleet-worker", settings.otlp_endpoint, settings.trace_share)
    except TracingUnavailable as error:
        _complain(str(error))
        return ExitCode.BAD_SETTINGS
    configure_logging(settings.log_level, settings.log_format)
    try:
        _await_redis(settings)
    except ValueError as error:
        _complain(f"redis_url: {error}")
        return ExitCode.BAD_SETTINGS
    except (RedisError, OSError) as error:
        _complain(f"redis_url: no answer from {_without_password(settings.redis_url)}: {error}")
        return ExitCode.REDIS_UNREACHABLE
    try:
        return _serve(settings, tracing)
    finally:
        tracing.close()


def _about_model(complaint: str) -> str:
    """Return what is wrong with a model, beginning with the setting that is at fault: `model` where it names none."""
    first = complaint.partition(":")[0].partition(",")[0]
    return complaint if first in WorkerSettings.model_fields else f"model: {complaint}"


def _serve(settings: WorkerSettings, tracing: Tracing) -> ExitCode:
    # Here, because it brings torch: help and complaints about settings need not wait for it.
    from worker.assembly import assemble
    from worker.device import DeviceError
    from worker.models import ModelError

    name = settings.served_name
    worker_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    metrics = Metrics(name)
    readiness = Readiness(settings.ready_file, worker_id)
    readiness.withdraw()  # a killed predecessor may have left its file
    pulse = Pulse(settings.stuck_s)
    heart = Heart.connect(settings.redis_url, worker_id, name, settings.lease_ms, settings.partitions)

    def give_up(code: ExitCode = ExitCode.STUCK) -> NoReturn:
        readiness.withdraw()
        logging.shutdown()
        os._exit(code)

    def info(state: WorkerState) -> WorkerInfo:
        return WorkerInfo(worker_id, name, state, slots=settings.max_rows, pid=os.getpid())

    probe = None
    if settings.metrics_port:
        try:
            probe = Probe(settings.metrics_host, settings.metrics_port, lambda: readiness.ready, metrics.render)
        except OSError as error:
            _complain(f"metrics_port: {settings.metrics_host}:{settings.metrics_port}: {error}")
            return ExitCode.BAD_SETTINGS
        probe.start()

    began = time.perf_counter()
    loading = Heartbeat(
        heart, pulse, settings.beat_s, dict, lambda held, verdicts: None, lambda: info("loading"), give_up
    )
    loading.start()

    def lost(why: str) -> NoReturn:
        log.error("%s", why)
        give_up(ExitCode.PEER_LOST)

    try:
        with pulse.declare(settings.load_s):
            redis = open_sync_client(settings.redis_url)
            try:
                assembly = assemble(settings, lost, redis)
            finally:
                redis.close()
    except ModelError as error:
        _complain(_about_model(str(error)))
        return ExitCode.BAD_MODEL
    except DeviceError as error:
        _complain(str(error))
        return ExitCode.BAD_SETTINGS
    finally:
        loading.stop()
    placement, load, group = assembly.placement, assembly.engine.load(), assembly.group
    log.info(
        "model loaded: %s (%s) on %s, %s, %d threads, %d KV pages, in %.1f s",
        name, assembly.spec.family, placement.device, placement.dtype, placement.threads, load.total_pages,
        time.perf_counter() - began,
    )  # fmt: skip
    keep_for_good()

    mailbox = Mailbox()
    bridge = Bridge(
        lambda: WorkerQueue.connect(
            settings.redis_url,
            name,
            worker_id,
            settings.lease_ms,
            settings.max_attempts,
            partitions=settings.partitions,
            slots=settings.max_rows,
        ),
        assembly.card,
        mailbox,
        Pace(
            slots=settings.max_rows,
            claim_poll_s=settings.claim_poll_ms / 1000,
            abort_poll_s=settings.abort_poll_ms / 1000,
            preview_s=settings.preview_interval_ms / 1000,
        ),
        worker_id,
        metrics,
        assembly.adapters,
        on_drain=lambda: service.stop(),
        tracing=tracing,
    )
    service = Service(assembly.engine, bridge, mailbox, pulse, readiness, metrics, settings.drain_s)

    def announce() -> WorkerInfo:
        load = assembly.engine.load()
        return WorkerInfo(
            worker_id,
            name,
            service.state,
            slots=settings.max_rows,
            free=max(0, settings.max_rows - len(bridge.held())),
            steps=load.steps,
            tokens=metrics.tokens,
            pages=load.total_pages,
            pages_free=load.free_pages,
            reclaims=metrics.reclaims,
            pid=os.getpid(),
            device=str(placement.device) if group is None else f"{placement.device} x{group.size}",
            version=_version(),
            card=assembly.card.digest,
            adapters=tuple(assembly.adapters.names()) if assembly.adapters is not None else (),
            adapter_digests=tuple(assembly.adapters.digests()) if assembly.adapters is not None else (),
        )

    heartbeat = Heartbeat(heart, pulse, settings.beat_s, bridge.held, bridge.judge, announce, give_up)
    metrics.show_ranks(1 if group is None else group.size)
    if assembly.adapters is not None:
        assembly.adapters.tell(metrics)
    metrics.watch(lambda: announce().free, lambda: heartbeat.age_s, lambda: assembly.forward.seconds)
    try:
        bridge.start(_ANNOUNCE_S)
    except BridgeError as error:
        _complain(f"redis_url: {error}: {error.__cause__}")
        if group is not None:
            group.close()
        return ExitCode.REDIS_UNREACHABLE
    heartbeat.start()
    service.listen_to_signals()
    log.info("worker ready: %s", worker_id)
    code = service.run()
    heartbeat.stop()
    heart.close()
    if probe is not None:
        probe.stop()
    log.info("worker ended: %s", code.name)
    if group is not None:
        group.close(clean=code is ExitCode.CLEAN)
        if code is not ExitCode.CLEAN:
            # Without the interpreter's end, which would wait for the ranks that are gone.
            give_up(code)
    return code


def _version() -> str:
    try:
        return version("diffleet")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed


def _await_redis(settings: WorkerSettings) -> None:
    """Return once Redis answers; raises what its client raises when patience has run out."""
    client = open_sync_client(settings.redis_url, timeout_s=3.0)
    deadline = time.monotonic() + settings.redis_wait_s
    try:
        while True:
            try:
                client.ping()
                return
            except (RedisError, OSError) as error:
                if time.monotonic() >= deadline:
                    raise
                log.warning("waiting for Redis: %s", error)
                time.sleep(0.5)
    finally:
        client.close()


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(ExitCode.CLEAN)


def _complain(message: str) -> None:
    print(f"worker: {message}", file=sys.stderr)
