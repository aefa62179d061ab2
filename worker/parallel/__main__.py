"""A rank other than the first: `python -m worker.parallel FD`, started by rank 0, whose messages come by FD."""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from shared.heap import keep_for_good
from shared.telemetry import configure_logging
from worker.exits import ExitCode
from worker.parallel.messages import Channel, Start

log = logging.getLogger("worker.parallel")

_GRACE_S = 3.0
"""For what is under way when rank 0 leaves: a step that waits for it will never end."""


def main(descriptor: int) -> ExitCode:
    # Rank 0 says when to leave; signals to the whole group of processes are for it alone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(channel.socket,), daemon=True).start()
    start = channel.receive()
    if not isinstance(start, Start):
        return ExitCode.PEER_LOST
    configure_logging(start.log_level, start.log_format)
    return _follow(start, channel)


def _follow(start: Start, channel: Channel) -> ExitCode:
    # Here, because it brings torch: by then rank 0 may be gone already.
    import torch

    from worker.models.checkpoint import ModelError, read_checkpoint
    from worker.models.fp8 import quantize_as_asked
    from worker.parallel.follower import Follower
    from worker.parallel.loading import load_share
    from worker.parallel.peers import TorchPeers

    torch.set_num_threads(start.threads)
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    peers = TorchPeers(start.rank, start.size, Path(start.meeting), device)
    try:
        checkpoint = read_checkpoint(Path(start.folder))
        model = load_share(checkpoint, peers, device=device, dtype=getattr(torch, start.dtype))
        quantize_as_asked(model.module, start.weights, start.head, checkpoint.folder)
    except ModelError as error:
        log.error("rank %d: %s", start.rank, error)
        time.sleep(_GRACE_S)  # rank 0 finds the same, and says so
        return ExitCode.BAD_MODEL
    log.info("rank %d of %d is ready", start.rank, start.size)
    keep_for_good()
    try:
        told = Follower(model, checkpoint.folder, peers).follow(channel)
    except Exception:
        log.exception("rank %d has failed", start.rank)
        return ExitCode.INTERNAL
    if told:
        peers.close()
        return ExitCode.CLEAN
    return ExitCode.PEER_LOST


def _end_with(end: socket.socket) -> None:
    """End this process if rank 0's has ended, whatever it is waiting for."""
    watch = select.poll()
    watch.register(end, select.POLLRDHUP)
    watch.poll()
    time.sleep(_GRACE_S)
    os._exit(ExitCode.PEER_LOST)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    # Without the interpreter's end, which would wait for whom nothing is heard of any more.
    os._exit(code)
