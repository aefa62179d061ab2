"""Rank 0's view of the others: it starts their processes, tells them what to do, and ends if one of them does."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from worker.device import DeviceError, Placement
from worker.exits import ExitCode
from worker.models import LoadedModel
from worker.models.checkpoint import read_checkpoint
from worker.parallel.follower import own_number
from worker.parallel.loading import load_share
from worker.parallel.messages import Channel, End, Least, Message, Start
from worker.parallel.peers import TorchPeers

log = logging.getLogger(__name__)

_LEAVE_S = 10.0

Lost = Callable[[str], None]
"""Called, in a thread of its own, with why the group has ended; the main thread may be waiting for a dead rank."""


def end_process(why: str) -> NoReturn:
    """End at once: a part of the model is gone."""
    log.error("%s", why)
    logging.shutdown()
    os._exit(ExitCode.PEER_LOST)


class Leader:
    """Implements `worker.models.Lead`."""

    def __init__(self, start: Start, lost: Lost = end_process) -> None:
        """Start the other ranks of `start`'s group; returns before they have loaded anything."""
        self._lost = lost
        self._closing = False
        self._meeting = tempfile.TemporaryDirectory(prefix="diffleet-")
        self._start = replace(start, meeting=str(Path(self._meeting.name) / "ranks"))
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._peers: TorchPeers | None = None
        for rank in range(1, start.size):
            self._spawn(rank)

    @property
    def size(self) -> int:
        return self._start.size

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def load(self, folder: Path, placement: Placement, need_tokenizer: bool = False) -> LoadedModel:
        """Meet the others and load this rank's share. Raises `ModelError`."""
        self._peers = TorchPeers(0, self.size, Path(self._start.meeting), placement.device)
        checkpoint = read_checkpoint(folder, need_tokenizer=need_tokenizer)
        model = load_share(checkpoint, self._peers, device=placement.device, dtype=placement.dtype)
        return replace(model, lead=self)

    def tell(self, message: Message) -> None:
        for channel in self._channels:
            channel.send(message)

    def free_memory(self, device: torch.device) -> int | None:
        """Return the free bytes of the device that has the fewest; None where it is the host's memory."""
        if device.type != "cuda":
            return None
        assert self._peers is not None
        self.tell(Least("free_memory"))
        return self._peers.least(own_number("free_memory", device))

    def close(self, clean: bool = False) -> None:
        """End the group; not clean: the others may wait for this rank in a step that will not come."""
        if self._closing:
            return
        self._closing = True
        if clean and self._peers is not None:
            self.tell(End())
            self._peers.close()
        for process, channel in zip(self._processes, self._channels, strict=True):
            if not clean:
                process.kill()
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            channel.close()
        self._meeting.cleanup()

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # The queue's address and password are none of its business.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DIFFLEET_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.parallel", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        channel = Channel(ours)
        channel.send(replace(self._start, rank=rank))
        self._processes.append(process)
        self._channels.append(channel)
        threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank-{rank}").start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._lost(f"rank {rank} of {self.size} has ended with code {code}")


def check_devices(size: int, device: torch.device) -> None:
    """Raise `DeviceError` if there is no device for each rank."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise DeviceError(f"tensor_parallel {size}: only {torch.cuda.device_count()} CUDA devices are visible")
    if device.type not in ("cuda", "cpu"):
        raise DeviceError(f"tensor_parallel {size}: a model is shared by CUDA devices or CPU processes, not {device}")
