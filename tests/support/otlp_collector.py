"""An OpenTelemetry collector that keeps what it is sent: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Sent(NamedTuple):
    """One span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    process: int
    failed: bool


class Collector:
    """Listens on a free port while its context is open."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    content = gzip.decompress(content)
                collector.take(content)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, content: bytes) -> None:
        """Keep the spans of one request."""
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            about = {each.key: each.value for each in resource.resource.attributes}
            assert about["service.name"].string_value == "rollgym"
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {
                        each.key: getattr(each.value, each.value.WhichOneof("value"))
                        for each in span.attributes
                    }
                    self.spans.append(
                        Sent(
                            span.name,
                            *(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()),
                            attributes,
                            about["rollgym.process"].int_value,
                            failed=span.status.code == 2,
                        )
                    )

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
