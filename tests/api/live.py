"""The app behind a real uvicorn on a free port, in a thread with its own loop."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from api.app import create_app
from api.process import Server
from api.settings import ApiSettings
from tests.api.scripted import ScriptedFleet


@contextmanager
def serving(fleet: ScriptedFleet) -> Iterator[str]:
    """Yield the base URL."""
    settings = ApiSettings(port=0, drain_s=1.0)
    server = Server(create_app(settings, fleet), settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    patience = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < patience
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
