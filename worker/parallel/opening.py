"""A group of ranks, as the settings ask for it."""

from dataclasses import replace

from worker.device import Placement
from worker.parallel.leader import Leader, Lost, check_devices
from worker.parallel.messages import Start
from worker.settings import WorkerSettings


def open_group(settings: WorkerSettings, placement: Placement, lost: Lost) -> tuple[Placement, Leader]:
    """Start the other ranks; return where each one computes, and their leader. Raises `DeviceError`."""
    size = settings.tensor_parallel
    check_devices(size, placement.device)
    if not settings.threads:
        placement = replace(placement, threads=max(1, placement.threads // size))
    start = Start(
        rank=0,
        size=size,
        meeting="",
        folder=str(settings.folder),
        device=placement.device.type,
        dtype=str(placement.dtype).removeprefix("torch."),
        threads=placement.threads,
        weights=settings.weights,
        head=settings.head,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    return placement, Leader(start, lost)
