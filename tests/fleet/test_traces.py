"""One request's spans from two processes, as a receiver of OTLP gets them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from api.app import create_app
from api.settings import ApiSettings
from shared.embedded import EmbeddedServer
from tests.api.scripted import Caller, ScriptedFleet
from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import until

pytestmark = pytest.mark.slow


class Receiver:
    """Takes spans over HTTP, by the name of the service that sent them."""

    def __init__(self) -> None:
        spans = self.spans = dict[str, list[Span]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                    (name,) = (one.value.string_value for one in part.resource.attributes if one.key == "service.name")
                    for scope in part.scope_spans:
                        spans.setdefault(name, []).extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


async def test_a_request_s_spans_of_front_and_worker_are_one_trace(
    fleet_server: EmbeddedServer, spawn_worker: SpawnWorker, receiver: Receiver, tmp_path: Path
) -> None:
    worker = spawn_worker("traced", "--otlp-endpoint", receiver.url).wait_ready()
    app = create_app(ApiSettings(redis_url=fleet_server.url, otlp_endpoint=receiver.url))
    async with app.router.lifespan_context(app):
        answer = await Caller(app, ScriptedFleet()).post(
            "/generate", {"model": "traced", "prompt": "a secret", "max_tokens": 16}
        )
        assert answer.status == 200
    worker.send(15)  # type: ignore[arg-type]
    worker.wait_exit()
    until(lambda: len(receiver.spans) == 2, "both have sent")
    (front,), (back,) = receiver.spans["diffleet-api"], receiver.spans["diffleet-worker"]
    assert back.trace_id == front.trace_id
    assert back.parent_span_id == front.span_id
    assert front.parent_span_id == b""
    assert front.start_time_unix_nano <= back.start_time_unix_nano < back.end_time_unix_nano
    assert len(back.events) >= 1
    assert b"secret" not in front.SerializeToString() + back.SerializeToString()
