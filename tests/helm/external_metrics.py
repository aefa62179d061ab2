"""What KEDA's metrics server answers to an HPA, for a real control plane: one number, behind the aggregation layer.

The API is external.metrics.k8s.io/v1beta1 (kubernetes/metrics). An ExternalName service leads the apiserver here.
"""

import json
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from tests.certificates import self_signed
from tests.helm.chart import Object
from tests.helm.control_plane import ControlPlane

GROUP = "external.metrics.k8s.io"
METRIC = "outstanding"
_ROOT = f"/apis/{GROUP}/v1beta1"


def hpa_for(scaled: Object) -> Object:
    """Return the HPA that KEDA makes of a ScaledObject with one composite metric (keda.sh/docs, scaling modifiers)."""
    spec = scaled["spec"]
    modifiers = spec["advanced"]["scalingModifiers"]
    target = {"type": modifiers["metricType"], "averageValue": modifiers["target"]}
    return {
        "apiVersion": "autoscaling/v2beta2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": f"keda-hpa-{scaled['metadata']['name']}"},
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": max(1, spec["minReplicaCount"]),
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            "metrics": [{"type": "External", "external": {"metric": {"name": METRIC}, "target": target}}],
        },
    }


class ExternalMetrics:
    """Serve `measure()` to the HPAs of a control plane, and remember what was told when."""

    def __init__(self, plane: ControlPlane, folder: Path, measure: Callable[[], float]) -> None:
        self.told: list[tuple[float, float]] = []
        """Monotonic seconds and the number, of each look of an HPA."""
        self._measure = measure
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self_signed(folder, "metrics", "localhost"))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._plane = plane

    def __enter__(self) -> "ExternalMetrics":
        self._thread.start()
        service = {"kind": "Service", "apiVersion": "v1", "metadata": {"name": "metrics"}}
        self._plane.call(
            "POST",
            "/api/v1/namespaces/default/services",
            {**service, "spec": {"type": "ExternalName", "externalName": "localhost"}},
        )
        spec = {
            "group": GROUP,
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "metrics", "namespace": "default", "port": self._server.server_port},
        }
        api = {
            "kind": "APIService",
            "apiVersion": "apiregistration.k8s.io/v1",
            "metadata": {"name": f"v1beta1.{GROUP}"},
        }
        self._plane.call("POST", "/apis/apiregistration.k8s.io/v1/apiservices", {**api, "spec": spec})
        self._plane.until(lambda: self._plane.get(_ROOT) is not None, "the apiserver leads to the metrics")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, path: str) -> Object | None:
        """Return the object at a path; None if there is none."""
        path = path.partition("?")[0]
        if path == _ROOT:
            resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/v1beta1",
                "resources": [{**resource, "singularName": ""}],
            }
        if path.endswith(f"/namespaces/default/{METRIC}"):
            value = self._measure()
            self.told.append((time.monotonic(), value))
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            item = {"metricName": METRIC, "metricLabels": {}, "timestamp": now, "value": f"{value:g}"}
            kind = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/v1beta1"}
            return {**kind, "metadata": {}, "items": [item]}
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = metrics.answer(self.path)
                body = json.dumps(found or {"kind": "Status", "apiVersion": "v1", "code": 404}).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
