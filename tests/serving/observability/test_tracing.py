"""Traces, received by an OTLP collector of this process."""

import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from prelunet.evaluator.errors import MissingExtra, UsageError, import_from_extra
from prelunet.evaluator.pb.inference import inference_pb2_grpc as inference_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.access import AccessControl
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.observability.tracing import MAX_TRACED_IMAGES, TRACING_CLOSE_TIMEOUT, Tracing
from prelunet.evaluator.serving.options import QueueOptions
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import write_tokens
from tests.serving.api.inference_calls import infer_request
from tests.serving.http.http_calls import ON
from tests.serving.serving_harness import GatedSession, RunningServer, eventually, png, running_server
from tests.serving.test_serving_process import model, serving  # noqa: F401 - `model` is a fixture

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
CLASSIFY = "prelunet.v1.PreluNetService/Classify"
STAGES = ["queue", "decode", "queue", "compute", "answer"]


@dataclass
class Collector(collector_grpc.TraceServiceServicer):
    """A real OTLP server. received: the requests, as text; spans: those in all of them."""

    spans: list[Span] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    address: str = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - its name in the protocol
        self.received.append(str(request))
        self.spans += [s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]
        return collector_pb.ExportTraceServiceResponse()

    def of_servers(self) -> list[Span]:
        """Return the spans of calls, in the order of their ends."""
        return sorted((s for s in self.spans if s.kind == Span.SPAN_KIND_SERVER), key=lambda s: s.end_time_unix_nano)

    def stages(self, parent: Span) -> list[Span]:
        """Return the spans below one, in the order of their starts."""
        below = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(below, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Run a collector to which the SDK's variables lead."""
    servicer, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    collector_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{servicer.address}")
    server.start()
    yield servicer
    server.stop(None).wait()


@contextmanager
def traced_server(**options: Any) -> Iterator[RunningServer]:
    """Run a server; all its spans have been exported afterwards."""
    tracing = Tracing()
    with running_server(tracing=tracing, http=ON, **{"a": FakeSession(), **options}) as server:
        yield server
    tracing.close()


def over_grpc(server: RunningServer, image: bytes, headers: dict[str, str], **changes: Any) -> list[float]:
    """Classify an image and return the three times of the answer, in seconds."""
    with grpc.insecure_channel(server.address) as channel:
        request = pb.ClassifyRequest(image=image, model="a", **changes)
        answer = pb_grpc.PreluNetServiceStub(channel).Classify(request, metadata=tuple(headers.items()), timeout=30)
    return [getattr(answer.timings, f"{stage}_seconds") for stage in ("queue", "decode", "compute")]


def over_http(server: RunningServer, image: bytes, headers: dict[str, str], **changes: Any) -> list[float]:
    url = f"http://{server.http}/v1/classify"
    answer = httpx.post(url, content=image, headers=headers, params=changes, timeout=30, trust_env=False)
    return [answer.json()["timings"][f"{stage}_seconds"] for stage in ("queue", "decode", "compute")]


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


Call = Callable[..., list[float]]


@pytest.mark.parametrize("call", [over_grpc, over_http])
def test_a_call_is_traced_through_its_stages_below_the_span_of_its_caller(collector: Collector, call: Call) -> None:
    before = time.time_ns()
    with traced_server() as server:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=x", "x-request-id": "mine"}
        times = call(server, png(40, 57), headers, protocol="multi-scale")
    (span,) = collector.of_servers()
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=x")
    assert span.name == CLASSIFY
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert (
        attributes(span).items()
        >= {
            "rpc.method": CLASSIFY,
            "rpc.response.status_code": "OK",
            "prelunet.request_id": "mine",
            "prelunet.model": "a",
            "prelunet.views": 6,
        }.items()
    )
    assert span.status.code == Status.STATUS_CODE_UNSET
    stages = collector.stages(span)
    assert [stage.name for stage in stages] == STAGES
    assert len(collector.spans) == 1 + len(STAGES)
    assert {stage.trace_id.hex() for stage in stages} == {TRACE}
    ends = [stage.end_time_unix_nano for stage in stages]
    assert [stage.start_time_unix_nano for stage in stages[1:]] == ends[:-1], "one follows the other"
    assert span.start_time_unix_nano <= stages[0].start_time_unix_nano
    assert ends[-1] <= span.end_time_unix_nano
    seconds = defaultdict(float)
    for stage in stages:
        seconds[stage.name] += (stage.end_time_unix_nano - stage.start_time_unix_nano) / 1e9
    queue, decode, compute = times
    tolerance = 1e-6  # times are floats, and spans have whole nanoseconds
    assert seconds["decode"] == pytest.approx(decode, abs=tolerance)
    # Together: between two batches of its views, an image waits; that is in the span of `compute`.
    assert seconds["queue"] + seconds["compute"] == pytest.approx(queue + compute, abs=tolerance)
    assert seconds["compute"] >= compute - tolerance


@pytest.mark.parametrize("call", [over_grpc, over_http])
def test_the_callers_flag_and_the_sdks_variables_decide_what_is_sampled(
    collector: Collector, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced_server() as server:
        call(server, png(40, 57), {"traceparent": UNSAMPLED})
        call(server, png(40, 57), {})
        call(server, png(40, 57), {"traceparent": f"00-{TRACE}"})  # malformed
    first, second = collector.of_servers()
    assert TRACE not in {first.trace_id.hex(), second.trace_id.hex()}
    assert not first.parent_span_id
    assert not second.parent_span_id
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with traced_server() as server:
        call(server, png(40, 57), {})
        call(server, png(40, 57), {"traceparent": SAMPLED})
    (third,) = collector.of_servers()[2:]
    assert third.trace_id.hex() == TRACE


def failed_call(server: RunningServer, request: pb.ClassifyRequest, timeout: float = 30.0, **metadata: str) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
        pb_grpc.PreluNetServiceStub(channel).Classify(request, metadata=tuple(metadata.items()), timeout=timeout)


def failure_of(span: Span) -> tuple[str, str, int]:
    return span.status.message, str(attributes(span).get("error.type", "")), span.status.code


def test_failed_and_refused_calls_have_the_reason_as_status_and_so_has_the_stage_that_failed(
    collector: Collector,
) -> None:
    image, gated = png(40, 57), GatedSession()
    with traced_server(b=gated, queue=QueueOptions(max_views=1)) as server:
        failed_call(server, pb.ClassifyRequest(image=b"no image", model="a"))
        failed_call(server, pb.ClassifyRequest(image=image, model="c"))
        with ThreadPoolExecutor() as pool:
            first = pool.submit(failed_call, server, pb.ClassifyRequest(image=image, model="b"), 1.0)
            assert gated.entered.wait(30)
            failed_call(server, pb.ClassifyRequest(image=image, model="b"))
            first.result(30)
            eventually(lambda: server.metric("prelunet_waiting_images", model="b") == 0)
            gated.gate.set()
    spans = collector.of_servers()
    late = failure_of(spans[3])[0]
    assert late in {"DEADLINE_PASSED", "DEADLINE_EXCEEDED"}  # the server's error, or the client's, which is sooner
    reasons = ["IMAGE_ERROR", "MODEL_NOT_FOUND", "OVERLOADED", late]
    assert [failure_of(span) for span in spans] == [(reason, reason, Status.STATUS_CODE_ERROR) for reason in reasons]
    stages = [[(stage.name, stage.status.message) for stage in collector.stages(span)] for span in spans]
    queued, decoded = ("queue", ""), ("decode", "")
    assert stages[:3] == [[queued, ("decode", "IMAGE_ERROR")], [], []]
    assert stages[3][:3] == [queued, decoded, queued]
    assert stages[3][3:] in [[("compute", why)] for why in ("DEADLINE_PASSED", "EXPIRED", "CANCELLED")]


def test_no_token_image_name_or_error_text_is_exported(collector: Collector, tmp_path: Path) -> None:
    access, metrics = tmp_path / "tokens.toml", Metrics()
    (secret,) = write_tokens(access, ("alice", ("classify", "evaluate")))
    start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="my photos", protocol="center"))
    images = [(png(40, 57), "holiday.jpg"), (b"no image", "private.jpg"), (png(40, 57), "holiday.jpg")]
    requests = [start, *(pb.EvaluateRequest(image=pb.LabelledImage(data=i, file=f, label=1)) for i, f in images)]
    with traced_server(access=AccessControl(access, metrics), metrics=metrics) as server:
        failed_call(server, pb.ClassifyRequest(image=png(40, 57)), authorization="Bearer wrong-secret")
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError, match="holiday"):
            list(pb_grpc.PreluNetServiceStub(channel).Evaluate(
                iter(requests), metadata=(("authorization", f"Bearer {secret}"),), timeout=30
            ))  # fmt: skip
    assert [span.status.message for span in collector.of_servers()] == ["UNAUTHENTICATED", "DATASET_ERROR"]
    text = "".join(collector.received)
    for private in (secret, "wrong-secret", "Bearer", "holiday", "private", "my photos", "alice", "127.0.0.1"):
        assert private not in text


@pytest.mark.parametrize("images", [[b"no image", png(40, 57)], [png(40, 57)] * (MAX_TRACED_IMAGES + 6)])
def test_a_stream_is_one_span_with_the_stages_of_its_first_images(collector: Collector, images: list[bytes]) -> None:
    requests = [
        pb.ClassifyStreamRequest(id=f"{number}", request=pb.ClassifyRequest(image=image, protocol="center"))
        for number, image in enumerate(images)
    ]
    with traced_server() as server, grpc.insecure_channel(server.address) as channel:
        answers = list(pb_grpc.PreluNetServiceStub(channel).ClassifyStream(iter(requests), timeout=60))
    assert len(answers) == len(images)
    (span,) = collector.of_servers()
    failed = images.count(b"no image")
    assert attributes(span)["prelunet.images"] == len(images)
    assert attributes(span).get("prelunet.failed", 0) == failed
    assert span.status.code == Status.STATUS_CODE_UNSET
    by_image = defaultdict(list)
    for stage in collector.stages(span):
        by_image[attributes(stage)["prelunet.image"]].append((stage.name, stage.status.message))
    traced = min(len(images), MAX_TRACED_IMAGES)
    assert set(by_image) == set(range(traced))
    of_answered, of_failed = [(name, "") for name in STAGES], [("queue", ""), ("decode", "IMAGE_ERROR")]
    assert sorted(by_image.values(), key=len) == [of_failed] * failed + [of_answered] * (traced - failed)


def test_all_images_of_a_message_are_traced_and_probes_are_not(collector: Collector) -> None:
    with traced_server() as server, grpc.insecure_channel(server.address) as channel:
        stub = inference_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(infer_request([png(40, 57, seed) for seed in range(3)], model_name="a"), timeout=30)
        httpx.get(f"http://{server.http}/v2/health/live", trust_env=False)
        httpx.get(f"http://{server.http}/nowhere", trust_env=False)
    infer, unknown = collector.of_servers()
    assert infer.name == "inference.GRPCInferenceService/ModelInfer"
    assert len(collector.stages(infer)) == 3 * len(STAGES)
    assert (unknown.name, unknown.status.message) == ("unknown", "NOT_FOUND")


def test_the_latency_histogram_has_the_trace_of_a_sampled_call_as_exemplar(collector: Collector) -> None:
    metrics = Metrics()
    with traced_server(metrics=metrics) as server:
        over_grpc(server, png(40, 57), {"traceparent": UNSAMPLED})
        assert not exemplars(metrics)
        over_grpc(server, png(40, 57), {"traceparent": SAMPLED})
        assert exemplars(metrics) == [("prelunet_request_seconds_bucket", {"trace_id": TRACE})]


def exemplars(metrics: Metrics) -> list[tuple[str, dict[str, str]]]:
    families = text_string_to_metric_families(metrics.text("application/openmetrics-text;version=1.0.0")[0].decode())
    samples = [sample for family in families for sample in family.samples]
    return [(sample.name, sample.exemplar.labels) for sample in samples if sample.exemplar is not None]


@contextmanager
def refusing_collector() -> Iterator[str]:
    with socket.socket() as closed:  # bound, so that no other program gets the port
        closed.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{closed.getsockname()[1]}"


@contextmanager
def silent_collector() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("dead", [refusing_collector, silent_collector])
def test_a_dead_collector_fails_and_delays_neither_calls_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, dead: Callable[[], Any]
) -> None:
    for name, value in (("SCHEDULE_DELAY", "10"), ("MAX_QUEUE_SIZE", "8"), ("MAX_EXPORT_BATCH_SIZE", "8")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)  # an export is soon in progress, and the queue full
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with dead() as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        tracing = Tracing()
        with running_server(tracing=tracing, a=FakeSession()) as server:
            start = time.monotonic()
            for _ in range(20):
                over_grpc(server, png(40, 57), {"traceparent": SAMPLED}, protocol="center")
            calls = time.monotonic() - start
        start = time.monotonic()
        tracing.close()
        closing = time.monotonic() - start
    assert calls < 40, "one export takes 60 s"
    assert closing < TRACING_CLOSE_TIMEOUT + 9, "the SDK waits for 30 s"  # 9: for a busy machine


@pytest.mark.parametrize("on", [True, False])
def test_the_option_turns_it_on_and_the_last_spans_are_exported_at_the_end(
    collector: Collector,
    model: Path,  # noqa: F811
    on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    options = ["--lame-duck", "0", "--log-format", "json", *(["--tracing"] if on else [])]
    with serving(model, *options) as (process, _, address):
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.PreluNetServiceStub(channel)
            stub.Classify(pb.ClassifyRequest(image=png(40, 57)), metadata=(("traceparent", SAMPLED),), timeout=30)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
    assert [span.trace_id.hex() for span in collector.of_servers()] == [TRACE] * on
    assert (f'"trace_id": "{TRACE}"' in log) is on
    if on:
        assert 'string_value: "prelunet"' in collector.received[0], "service.name"
        assert 'string_value: "test"' in collector.received[0], "from OTEL_RESOURCE_ATTRIBUTES"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
    ],
)
def test_a_variable_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"OTEL_.*{value}"):
        Tracing()


def test_without_the_extra_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "prelunet.evaluator.serving.observability.tracing"
    monkeypatch.delitem(sys.modules, module)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"opentelemetry, which is not installed.*\[otel\]"):
        import_from_extra(module)
