"""The server's Prometheus metrics; docs/operations.md lists all names.

Each server has one registry. Events of a request are recorded in the `ModelMetrics` of its model; this module does not
know what a request is.
"""

import importlib.metadata
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from ...answer import Timings

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STAGES = ("queue", "decode", "compute", "average")
_VIEWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """All metrics of a server. refused: those refusals that are not of a model, by reason."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody needs
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace="prelunet", registry=registry)
        gauge = partial(Gauge, namespace="prelunet", registry=registry)
        seconds = partial(Histogram, namespace="prelunet", registry=registry, buckets=_SECONDS)
        self.calls = counter("calls", "Calls that ended, by method and status.", ("method", "status"))
        self.call_seconds = seconds("call_seconds", "Time from a call's arrival to its end.", ("method",))
        self._of_calls: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self.calls_now = gauge("calls_now", "Calls in flight.")
        self.limits = gauge("limits", "Limits, by option: max-calls, max-connections and so on.", ("option",))
        self.ready = gauge("ready", "1 while health reports SERVING, else 0.")
        self.build_info = gauge("build_info", "1, with the versions.", ("version", "python", "grpcio"))
        versions = importlib.metadata.version("prelunet"), platform.python_version(), grpc.__version__
        self.build_info.labels(*versions).set(1)
        self.grpc_connections = gauge("grpc_connections", "Open TCP connections to the gRPC port; Linux only.")
        self.http_connections = gauge("http_connections", "Open connections to the HTTP port.")
        self.refusals = counter(
            "refusals",
            "Refused requests, by reason: views, bytes, share, calls, arriving, message, stopping, token, scope, rate.",
            ("model", "reason"),
        )
        # A series that starts with its first event hides that event: a single point has no rate.
        reasons = ("calls", "arriving", "message", "stopping", "token", "scope", "rate")
        self.refused = {reason: self.refusals.labels("", reason) for reason in reasons}
        self.reloads = counter(
            "reloads", "Changes of files and models that were loaded or refused.", ("files", "outcome")
        )
        self.certificate_expiry = gauge(
            "certificate_expiry_timestamp_seconds", "Unix time at which the certificate expires; 0: no TLS."
        )
        self._create_those_of_models()

    def _create_those_of_models(self) -> None:
        counter = partial(Counter, namespace="prelunet", registry=self.registry)
        gauge = partial(Gauge, namespace="prelunet", registry=self.registry)
        summary = partial(Summary, namespace="prelunet", registry=self.registry)
        histogram = partial(Histogram, namespace="prelunet", registry=self.registry)
        seconds = partial(histogram, buckets=_SECONDS)
        of, by_reason = ("model",), ("model", "reason")
        self.request_seconds = seconds("request_seconds", "Time from an image's arrival to its answer.", of)
        self.failed_seconds = summary(
            "failed_seconds", "Time from an image's arrival to its error or cancellation.", of
        )
        self.last_answer = gauge(
            "last_answer_timestamp_seconds", "Unix time of the last answered image; 0 before the first.", of
        )
        self.stage_seconds = seconds(
            "stage_seconds", "Time of an image in a stage: queue, decode, compute, average.", ("model", "stage")
        )
        self.waiting_images = gauge("waiting_images", "Unanswered images.", of)
        self.waiting_views = gauge("waiting_views", "Views of unanswered images.", of)
        self.waiting_bytes = gauge("waiting_bytes", "Encoded bytes of unanswered images.", of)
        self.dropped_views = counter(
            "dropped_views", "Views that were never computed, by reason: expired, cancelled, failed.", by_reason
        )
        self.late_views = counter(
            "late_views",
            "Views computed although their caller had left before the batch began; always 0 unless there is a bug.",
            of,
        )
        self.batch_views = histogram("batch_views", "Views in a batch.", of, buckets=_VIEWS)
        self.batch_seconds = seconds("batch_seconds", "Time of a batch on the device.", of)
        self.view_pixels = counter("view_pixels", "Pixels of views in batches.", of)
        self.canvas_pixels = counter("canvas_pixels", "Pixels of the canvases of batches, with padding.", of)
        self.canvas_changes = counter("canvas_changes", "Batches whose shape differs from the one before.", of)
        self.batch_failures = counter(
            "batch_failures", "Failed batches, of a single view or split and retried.", by_reason
        )
        self.model_info = gauge(
            "model_info",
            "1 for each loaded version of a model.",
            ("model", "version", "sha256", "architecture", "provider", "precision"),
        )

    def call_ended(self, method: str, status: str, seconds: float) -> None:
        """Count a call. method: "unknown" unless it is one of ours; status: name of its gRPC status."""
        if (children := self._of_calls.get((method, status))) is None:
            children = self.calls.labels(method, status), self.call_seconds.labels(method)
            self._of_calls[method, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def collect(self) -> list[Metric]:
        """Return the current metrics."""
        return list(self.registry.collect())

    def text(self, accept: str = "", by_process: Mapping[int, Sequence[Metric]] | None = None) -> tuple[bytes, str]:
        """Return all metrics and their media type: OpenMetrics, with exemplars, where `Accept` names it, or text.

        by_process: those of several processes by number, which becomes the label `process`. They are not added up: the
        sum would fall when a process starts anew, and a rate of it would show events that never happened.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self.registry if by_process is None else _OfProcesses(by_process)), media_type


class _OfProcesses:
    """What prometheus_client encodes like a registry."""

    def __init__(self, by_process: Mapping[int, Sequence[Metric]]) -> None:
        self._by_process = by_process

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for number, metrics in sorted(self._by_process.items()):
            for each in metrics:
                family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type, each.unit))
                label = {"process": str(number)}
                family.samples += [sample._replace(labels={**sample.labels, **label}) for sample in each.samples]
        return families.values()


class ModelMetrics:
    """The metrics of one model, of all its versions; their series exist from the first scrape, at 0. Thread-safe.

    refused, dropped, failed: requests refused by admission, views that will never be computed, and batches, by reason.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._request_seconds = metrics.request_seconds.labels(model)
        self.failed_seconds = metrics.failed_seconds.labels(model)
        self._last_answer = metrics.last_answer.labels(model)
        self.waiting_images = metrics.waiting_images.labels(model)
        self.waiting_views = metrics.waiting_views.labels(model)
        self.waiting_bytes = metrics.waiting_bytes.labels(model)
        self.late_views = metrics.late_views.labels(model)
        self.batch_seconds = metrics.batch_seconds.labels(model)
        self._batch_views = metrics.batch_views.labels(model)
        self._view_pixels = metrics.view_pixels.labels(model)
        self._canvas_pixels = metrics.canvas_pixels.labels(model)
        self._canvas_changes = metrics.canvas_changes.labels(model)
        stages = (metrics.stage_seconds.labels(model, stage) for stage in _STAGES)
        self._queue, self._decode, self._compute, self._average = stages
        views, batches, refusals = metrics.dropped_views, metrics.batch_failures, metrics.refusals
        self.refused = {reason: refusals.labels(model, reason) for reason in ("views", "bytes", "share")}
        self.dropped = {reason: views.labels(model, reason) for reason in ("expired", "cancelled", "failed")}
        self.failed = {reason: batches.labels(model, reason) for reason in ("memory", "lost", "error")}

    def answered(self, timings: Timings, average_seconds: float, exemplar: dict[str, str] | None) -> None:
        """Record an answered image: its time in each stage, and in all."""
        self._queue.observe(timings.queue_seconds)
        self._decode.observe(timings.decode_seconds)
        self._compute.observe(timings.compute_seconds)
        self._average.observe(average_seconds)
        self._request_seconds.observe(timings.total_seconds, exemplar)
        self._last_answer.set(time.time())

    def batch(self, views: int, view_pixels: int, canvas_pixels: int, *, changed: bool) -> None:
        """Count a batch sent to the device. changed: its canvas differs from that of the previous batch."""
        self._batch_views.observe(views)
        self._view_pixels.inc(view_pixels)
        self._canvas_pixels.inc(canvas_pixels)
        self._canvas_changes.inc(changed)
