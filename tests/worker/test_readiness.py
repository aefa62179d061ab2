"""Probes over HTTP, and where the arithmetic runs."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from worker.device import DeviceError, place, usable_cores
from worker.readiness import Probe, Readiness


@pytest.fixture
def readiness() -> Readiness:
    return Readiness(None, "w1")


@pytest.fixture
def probe(readiness: Readiness) -> Iterator[Probe]:
    probe = Probe("127.0.0.1", 0, lambda: readiness.ready, lambda: b"diffleet_up 1\n")
    probe.start()
    yield probe
    probe.stop()


def get(probe: Probe, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{probe.port}{path}", timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_ready_follows_the_worker_and_live_does_not(probe: Probe, readiness: Readiness) -> None:
    assert get(probe, "/health/ready")[0] == 503
    readiness.announce()
    assert get(probe, "/health/ready")[0] == 200
    readiness.withdraw()
    assert get(probe, "/health/ready")[0] == 503
    assert get(probe, "/health/live")[0] == 200


def test_metrics_are_served_and_nothing_else(probe: Probe) -> None:
    assert get(probe, "/metrics") == (200, b"diffleet_up 1\n")
    assert get(probe, "/etc/passwd")[0] == 404


def test_on_a_cpu_the_default_is_float32_and_one_core_is_left_over() -> None:
    placement = place("cpu")
    assert (placement.device.type, placement.dtype) == ("cpu", torch.float32)
    assert placement.threads == max(1, usable_cores() - 1)
    assert place("cpu", "bfloat16", threads=3).dtype is torch.bfloat16
    assert place("cpu", threads=3).threads == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cuda"):
        place("cuda")


@pytest.mark.parametrize(("content", "cores"), [("50000 100000\n", 1), ("max 100000\n", None), ("broken", None)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(content)
    assert usable_cores(limit) == (cores or usable_cores(tmp_path / "missing"))
