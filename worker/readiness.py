"""Whether the worker takes requests, as a file and over HTTP."""

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Readiness:
    """True between the first claim and the drain; the file then holds the worker's id. It is never half written."""

    def __init__(self, file: Path | None, worker_id: str) -> None:
        self._file = file
        self._worker_id = worker_id
        self._ready = False

    @property
    def ready(self) -> bool:
        return self._ready

    def announce(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            draft.write_text(f"{self._worker_id}\n")
            draft.replace(self._file)
        self._ready = True

    def withdraw(self) -> None:
        self._ready = False
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Probe:
    """`/health/live`, `/health/ready` and `/metrics` on a port, in threads of their own."""

    def __init__(self, host: str, port: int, ready: Callable[[], bool], metrics: Callable[[], bytes]) -> None:
        """Bind; raises OSError if the address is taken."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/health/live":
                        self._answer(200, b"live\n")
                    case "/health/ready":
                        self._answer(200, b"ready\n") if ready() else self._answer(503, b"not ready\n")
                    case "/metrics":
                        self._answer(200, metrics(), _METRICS)
                    case _:
                        self._answer(404, b"not found\n")

            def _answer(self, status: int, body: bytes, content_type: str = _TEXT) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="probe", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
