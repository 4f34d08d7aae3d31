"""OpenTelemetry: a span for each call, and below it one for each stage of its images, exported over OTLP/gRPC.

A call that is not sampled has no `CallTrace`. The spans of the stages are built when the call has ended, from times
that requests record anyway. A thread of the SDK exports them; it drops spans that it cannot export in time, and logs
that. Only this module imports opentelemetry, which the extra `otel` installs.
"""

import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...errors import UsageError
from .call_context import Call

TRACING_CLOSE_TIMEOUT = 1.0  # seconds to export the last spans when the server stops
MAX_TRACED_IMAGES = 64  # of a call: all of a message, the first ones of a stream
# Variables that the SDK's own start-up reads, and the only values that fit the exporter used here.
_FIXED = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
}
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Creates the spans of a server; configured by the SDK's variables, OTEL_*. Raises UsageError for invalid ones."""

    def __init__(self) -> None:
        for name, value in _FIXED.items():
            if (given := os.environ.get(name) or value) != value:
                raise UsageError(
                    f"--tracing exports over OTLP/gRPC only, but {name} is '{given}': unset it, or set it to {value}"
                )
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # its warnings are about headers of callers
        version = importlib.metadata.version("prelunet")
        resource = Resource.create().merge(Resource({"service.name": "prelunet", "service.version": version}))
        try:
            self._exporter = OTLPSpanExporter()
            self._provider = TracerProvider(
                resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
            )
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except ValueError as error:
            raise UsageError(f"--tracing: a variable OTEL_… has a value that the SDK cannot use: {error}") from error
        self._tracer = self._provider.get_tracer("prelunet", version)

    def begin(self, call: Call) -> "CallTrace | None":
        """Begin the span of a call, as a child of the one that its metadata names; None if it is not sampled."""
        names = ("traceparent", "tracestate")
        parent = _W3C.extract({name: [value for key, value in call.metadata if key == name] for name in names})
        epoch = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(call.method, parent, SpanKind.SERVER, start_time=epoch + round(1e9 * call.begun))
        return CallTrace(self._tracer, span, epoch) if span.is_recording() else None

    def close(self) -> None:
        """Export the last spans, for at most TRACING_CLOSE_TIMEOUT seconds."""
        limit = threading.Timer(TRACING_CLOSE_TIMEOUT, self._exporter.shutdown)  # the SDK's own limit is 30 s
        limit.start()
        self._provider.shutdown()
        limit.cancel()


class CallTrace:
    """The spans of one sampled call.

    span: of the call; epoch: time in nanoseconds since 1970 at which time.monotonic() was 0; exemplar: labels that lead
    from a metric to this trace.
    """

    def __init__(self, tracer: Tracer, span: Span, epoch: int) -> None:
        self._tracer, self._span, self._epoch = tracer, span, epoch
        self._images: list[tuple[Sequence[tuple[str, float, float]], str]] = []
        self.exemplar = {"trace_id": format_trace_id(span.get_span_context().trace_id)}

    def add_image(self, stages: Sequence[tuple[str, float, float]], failure: str) -> None:
        """Add an image that has ended. stages: name, begin and end of each; failure: of the last stage, or empty."""
        if len(self._images) < MAX_TRACED_IMAGES:
            self._images.append((stages, failure))

    def end(self, call: Call, method: str) -> None:
        """End the span of the call, and create those of its images. method: "unknown" unless it is one of ours."""
        parent = set_span_in_context(self._span)
        for number, (stages, failure) in enumerate(self._images):
            for name, begin, end in stages:
                stage = self._tracer.start_span(
                    name, parent, attributes={"prelunet.image": number}, start_time=self._time(begin)
                )
                if failure and (name, begin, end) == stages[-1]:
                    stage.set_status(StatusCode.ERROR, failure)
                stage.end(self._time(end))
        self._span.update_name(method)
        attributes: dict[str, str | int] = {
            "rpc.method": method,
            "rpc.response.status_code": call.status,
            "prelunet.request_id": call.request_id,
            "prelunet.model": ",".join(sorted(call.models)),
            "prelunet.images": call.images,
            "prelunet.failed": call.failed,
            "prelunet.views": call.views,
            "prelunet.bytes": call.bytes,
        }
        self._span.set_attributes({key: value for key, value in attributes.items() if value})
        if call.status != "OK":
            self._span.set_attribute("error.type", call.reason or call.status)
            self._span.set_status(StatusCode.ERROR, call.reason or call.status)
        self._span.end(self._time(time.monotonic()))

    def _time(self, moment: float) -> int:
        """Return a time of time.monotonic() in nanoseconds since 1970."""
        return self._epoch + round(1e9 * moment)
