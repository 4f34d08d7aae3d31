import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import jsonschema
import pytest
from google.protobuf.descriptor import Descriptor

from prelunet.evaluator.client import Client
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import DatasetError, UsageError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.html import json_bytes
from prelunet.evaluator.reporting.report import build_report
from prelunet.evaluator.rpc.convert import report_from_message
from prelunet.evaluator.serving import evaluation
from prelunet.evaluator.serving.api.prelunet import MAX_LISTED_REFUSALS, PreluNetServicer, report_message
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.evaluation import MAX_IN_FLIGHT, LabelledImage, evaluate
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.options import ModelFile, QueueOptions
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from prelunet.evaluator.serving.scheduling.request import Answered
from prelunet.evaluator.validation.predictions import Prediction, build_prediction
from prelunet.evaluator.validation.run import Run, build_run_info
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.serving.event_loop import async_test, one_by_one
from tests.serving.serving_harness import GatedSession, Referable, eventually, png, running_server

CENTER, DENSE = RequestOptions("center"), RequestOptions("dense-28")
SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())


def class_folders(root: Path, wnids: list[str], best: dict[bytes, str] | None = None) -> Path:
    """Write a dataset with hits and misses, odd sizes, one panorama and one file that is not an image."""
    for number in range(17):
        data = png(33 + 3 * number, 71 - 2 * number, seed=number)
        wnid = wnids[number % 5] if number % 3 or best is None else best[data]
        (root / wnid).mkdir(parents=True, exist_ok=True)
        (root / wnid / f"{number:02}.png").write_bytes(data)
    (root / wnids[1] / "panorama.png").write_bytes(png(30, 333, seed=50))
    (root / wnids[2] / "cut.png").write_bytes(png(40, 40, seed=51)[:-900])
    return root


def test_the_report_over_the_wire_equals_that_of_validate_on_the_same_folder(exported, tmp_path: Path) -> None:
    net = exported["demo-image"]
    wnids = [entry.wnid for entry in net.session.contract.classes]
    images = [png(33 + 3 * number, 71 - 2 * number, seed=number) for number in range(17)]
    protocol = build_protocol("multi-scale", net.session.contract)
    answers = classify_images(net.session, [decode_rgb(image) for image in images], protocol)
    best = {image: wnids[answer.top(1)[0][0]] for image, answer in zip(images, answers, strict=True)}
    folder = class_folders(tmp_path / "photos", wnids, best)
    dataset = open_dataset(folder, split="val", wnids=wnids)
    run = validated(net.session, dataset, protocol, tmp_path / "run", file=net.path.name)
    expected = build_report(run)
    expected["dataset"]["layout"] = "stream"  # a stream has no folders
    assert 0 < expected["top1_error"] < 100
    assert (expected["images"], expected["refused"], expected["capped"]) == (19, 1, 1)
    with running_server(demo=net.session) as server, Client(server.address) as client:
        report = client.evaluate(dataset)
    assert report == expected
    assert json_bytes(report) == json_bytes(expected), "the keys should be in the same order too"


def test_images_may_arrive_in_any_order_with_either_kind_of_label() -> None:
    session = FakeSession()
    images = [pb.LabelledImage(file=f"{n}.png", data=png(31 + n, 40, seed=n), label=n % 6) for n in range(9)]
    by_wnid = [pb.LabelledImage(file=i.file, data=i.data, wnid=f"n{i.label:08}") for i in reversed(images)]
    with running_server(fake=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        answers = [report_of(stub.Evaluate(stream(*some))) for some in (images, by_wnid)]
    assert answers[0] == answers[1]
    assert (answers[0].images, answers[0].dataset.name) == (9, "flowers")


def report_of(responses: Iterator[pb.EvaluateResponse]) -> pb.Report:
    """Return the report, which comes last."""
    *progress, last = responses
    assert all(response.WhichOneof("message") == "progress" for response in progress)
    assert last.WhichOneof("message") == "report"
    return last.report


def stream(*images: pb.LabelledImage, **start: str) -> Iterator[pb.EvaluateRequest]:
    start_message = pb.EvaluateStart(**{"protocol": "center", "dataset": "/data/flowers", **start})
    return iter([pb.EvaluateRequest(start=start_message), *(pb.EvaluateRequest(image=image) for image in images)])


GOOD = pb.LabelledImage(file="a.png", data=png(40, 57), label=1)


@pytest.fixture(scope="module")
def stub():
    with running_server(fake=FakeSession()) as server, grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.PreluNetServiceStub(channel)


@pytest.mark.parametrize(
    ("requests", "code", "text"),
    [
        ([], "INVALID_ARGUMENT", "the stream is empty; send `start`"),
        ([pb.EvaluateRequest()], "INVALID_ARGUMENT", "first message of an evaluation should be `start`"),
        ([pb.EvaluateRequest(image=GOOD)], "INVALID_ARGUMENT", "first message of an evaluation should be `start`"),
        ([*stream()], "INVALID_ARGUMENT", "the stream had no image"),
        ([*stream(GOOD), *stream()], "INVALID_ARGUMENT", "after the first message, `start`"),
        (
            [*stream(GOOD, pb.LabelledImage(file="b.png", data=png(20, 90), label=1), protocol="dense-100")],
            "INVALID_ARGUMENT",
            r"b\.png: protocol dense-100: a view of this image would have 100x400 pixels",
        ),
        ([*stream(GOOD, GOOD)], "INVALID_ARGUMENT", "two images are named 'a.png'"),
        ([*stream(GOOD, dataset="")], "INVALID_ARGUMENT", "`start` should name the dataset"),
        ([*stream(GOOD, model="nine")], "NOT_FOUND", "no model 'nine'"),
        ([*stream(GOOD, protocol="nine")], "INVALID_ARGUMENT", "unknown protocol 'nine'"),
        ([*stream(pb.LabelledImage(file="b", data=b"", label=6))], "INVALID_ARGUMENT", "b: label 6, but .* 0 to 5"),
        ([*stream(pb.LabelledImage(file="b", data=b"", wnid="n9"))], "INVALID_ARGUMENT", "no class 'n9'"),
        ([*stream(pb.LabelledImage(file="b", data=b""))], "INVALID_ARGUMENT", "b: no true class"),
        ([*stream(pb.LabelledImage(data=b"", label=1))], "INVALID_ARGUMENT", "1 to 1024 characters, not 0"),
        ([*stream(pb.LabelledImage(file="x" * 1025, label=1))], "INVALID_ARGUMENT", "not 1025"),
    ],
)
def test_a_bad_evaluation_gets_an_error_that_explains_it_and_the_next_one_works(
    stub, requests, code: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError, match=text) as caught:
        report_of(stub.Evaluate(iter(requests), timeout=30))
    assert caught.value.code().name == code
    assert report_of(stub.Evaluate(stream(GOOD))).evaluated == 1


def test_refused_images_are_listed_with_reasons_and_alone_have_no_error_rate(stub) -> None:
    bad = [pb.LabelledImage(file=name, data=data, label=2) for name, data in (("b", b""), ("a", b"text"))]
    report = report_from_message(report_of(stub.Evaluate(stream(*bad))))
    assert (report["images"], report["evaluated"], report["refused"]) == (2, 0, 2)
    assert [(each["file"], each["reason"][:20]) for each in report["refusals"]] == [
        ("a", "not a readable image"), ("b", "no image: the file i")
    ]  # fmt: skip
    assert (report["top1_error"], report["top1_interval"], report["top5_interval"]) == (None, None, None)
    assert (report["calibration"], report["macro"]["top1_error"], report["ranks"]["median"]) == (None, None, None)
    jsonschema.validate(report, SCHEMA)


def test_concurrent_evaluations_do_not_mix(stub) -> None:
    streams = [[pb.LabelledImage(file=f"{n}", data=png(40, 50 + n, n), label=m) for n in range(20)] for m in (1, 4)]
    alone = [report_of(stub.Evaluate(stream(*images))) for images in streams]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda images: report_of(stub.Evaluate(stream(*images))), streams)) == alone
    assert alone[0].classes[1].images == alone[1].classes[4].images == 20


@contextmanager
def plane_of(session: FakeSession, max_images: int = 2**20) -> Iterator[DataPlane]:
    """Yield the data plane of a session, without a server. max_images: of one evaluation."""
    models = Models([(ModelFile("fake", Path("fake.onnx")), session)], DecodeLimits())
    yield DataPlane(models, max_images=max_images)
    models.close()


async def classified(plane: DataPlane, image: bytes, on_admitted: Callable[[], None]) -> Answered:
    return await plane.classify(image, "fake", DENSE, Call(), on_admitted=on_admitted)


def labelled(count: int) -> list[LabelledImage]:
    return [LabelledImage(f"{n:04}", png(28, 28 + n, seed=n), 1) for n in range(count)]


def test_the_server_reads_no_faster_than_it_classifies() -> None:
    pulled, answered, most_ahead = 0, 0, 0

    def pulling() -> Iterator[LabelledImage]:
        nonlocal pulled, most_ahead
        for image in labelled(5 * MAX_IN_FLIGHT):
            pulled += 1
            most_ahead = max(most_ahead, pulled - answered)
            yield image

    with plane_of(FakeSession()) as plane:

        async def counted(image: bytes, on_admitted: Callable[[], None]) -> Answered:
            nonlocal answered
            answer = await classified(plane, image, on_admitted)
            answered += 1
            return answer

        served = plane.models.get("fake")
        evaluation_ = evaluate(counted, served, served.plan(DENSE).protocol, "many", one_by_one(pulling()), call=Call())
        report = asyncio.run(evaluation_)
    assert report["evaluated"] == 5 * MAX_IN_FLIGHT
    assert MAX_IN_FLIGHT // 2 < most_ahead <= MAX_IN_FLIGHT


def test_an_error_of_the_iterator_of_images_ends_the_evaluation() -> None:
    def failing() -> Iterator[LabelledImage]:
        yield from labelled(1)
        raise DatasetError("b: the label is missing")

    with plane_of(FakeSession()) as plane:
        evaluation_ = plane.evaluate("few", one_by_one(failing()), "fake", CENTER, Call())
        with pytest.raises(DatasetError, match="b: the label is missing"):
            asyncio.run(evaluation_)


def evaluated(images: list[LabelledImage], reports: list[pb.EvaluateProgress]) -> dict:
    """Evaluate images without a server; `reports` collects the progress reports."""

    async def on_progress(progress: pb.EvaluateProgress) -> None:
        reports.append(progress)

    with plane_of(FakeSession()) as plane:
        return asyncio.run(plane.evaluate("many", one_by_one(images), "fake", CENTER, Call(), on_progress))


def test_progress_counts_what_the_report_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_INTERVAL", 0)
    reports: list[pb.EvaluateProgress] = []
    report = evaluated([LabelledImage("x", b"no image", 1), *labelled(23), LabelledImage("y", b"", 2)], reports)
    assert [progress.images for progress in reports] == list(range(1, 26))
    assert [progress.refused for progress in reports] == sorted(progress.refused for progress in reports)
    assert all(0 <= before.seconds <= after.seconds for before, after in pairwise(reports))
    last = reports[-1]
    assert (last.images, last.refused) == (report["images"], report["refused"]) == (25, 2)
    assert round(last.top1_error, 4) == report["top1_error"]
    assert 0 < last.top1_error < 100


def test_progress_has_no_error_before_an_image_was_evaluated(stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_INTERVAL", 0)
    first, last = stub.Evaluate(stream(pb.LabelledImage(file="x", data=b"no image", label=1)))
    progress = first.progress
    assert (progress.images, progress.refused, progress.HasField("top1_error")) == (1, 1, False)
    assert last.report.refused == 1


def test_progress_is_reported_at_most_once_a_second_and_not_in_a_short_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = count(step=0.3)  # seconds; each reading of the clock is 0.3 s after the last
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    reports: list[pb.EvaluateProgress] = []
    evaluated(labelled(20), reports)
    assert [progress.images for progress in reports] == [4, 8, 12, 16, 20]
    clock = count(step=0.04)
    reports.clear()
    evaluated(labelled(20), reports)
    assert reports == []


def test_a_client_that_reads_no_progress_delays_only_one_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_INTERVAL", 0)
    answered, reports, read = 0, [], asyncio.Event()

    async def on_progress(progress: pb.EvaluateProgress) -> None:
        reports.append(progress)
        await read.wait()

    with plane_of(FakeSession()) as plane:

        async def counted(image: bytes, on_admitted: Callable[[], None]) -> Answered:
            nonlocal answered
            answer = await classified(plane, image, on_admitted)
            answered += 1
            if answered == 3 * MAX_IN_FLIGHT:
                assert len(reports) == 1
                read.set()
            return answer

        served, images = plane.models.get("fake"), one_by_one(labelled(3 * MAX_IN_FLIGHT))
        evaluation_ = evaluate(
            counted, served, served.plan(DENSE).protocol, "many", images, call=Call(), on_progress=on_progress
        )
        report = asyncio.run(evaluation_)
    assert report["evaluated"] == 3 * MAX_IN_FLIGHT


def test_a_client_gets_progress_and_then_the_report(stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_INTERVAL", 0)
    images = [pb.LabelledImage(file=f"{n}", data=png(40, 50 + n, n), label=1) for n in range(20)]
    responses = list(stub.Evaluate(stream(*images)))
    assert [response.WhichOneof("message") for response in responses][-2:] == ["progress", "report"]
    assert responses[-1].report.images == 20
    assert 1 <= len(responses) - 1 <= 20
    assert all(response.progress.seconds > 0 for response in responses[:-1])


def test_an_evaluation_waits_for_admission_when_a_separate_call_is_refused() -> None:
    images = [pb.LabelledImage(file=f"{n}", data=png(40, 50 + n, n), label=1) for n in range(40)]
    session = GatedSession()
    with (
        running_server(queue=QueueOptions(max_views=3), fake=session) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub, admission = pb_grpc.PreluNetServiceStub(channel), server.models.get("").admission
        responses = stub.Evaluate(stream(*images))
        eventually(lambda: len(admission.waiters) == 1)
        assert server.metric("prelunet_waiting_views", model="fake") == 3
        with pytest.raises(grpc.RpcError) as refused:
            stub.Classify(pb.ClassifyRequest(image=images[0].data, protocol="center"))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(admission.waiters) == 1, "no further image should be read meanwhile"
        session.gate.set()
        assert report_of(responses).evaluated == 40
        assert server.metric("prelunet_refusals_total", model="fake", reason="views") == 1, "of the separate call"


@pytest.mark.parametrize("images", [3, 4])
def test_an_evaluation_with_too_many_images_is_refused(images: int) -> None:
    with plane_of(FakeSession(), max_images=3) as plane:
        evaluation_ = plane.evaluate("few", one_by_one(labelled(images)), "fake", CENTER, Call())
        if images == 3:
            assert asyncio.run(evaluation_)["images"] == 3
            return
        with pytest.raises(UsageError, match="at most 3 images in one call, and '0003' is above the limit"):
            asyncio.run(evaluation_)
        assert plane.models.get("fake").admission.used.images == 0


def test_an_abandoned_evaluation_is_not_computed() -> None:
    session = GatedSession()
    images = [pb.LabelledImage(file=f"{n}", data=png(40, 57, n), label=1) for n in range(5)]
    with running_server(fake=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        first = stub.Classify.future(pb.ClassifyRequest(image=images[0].data, protocol="dense-29"))
        assert session.entered.wait(30)
        responses = stub.Evaluate(stream(*images, protocol="dense-41"))
        eventually(lambda: server.metric("prelunet_waiting_images", model="fake") == 6)
        responses.cancel()
        eventually(lambda: server.metric("prelunet_waiting_images", model="fake") == 1)
        session.gate.set()
        assert first.result(30).predictions
        assert stub.Classify(pb.ClassifyRequest(image=images[0].data, protocol="dense-43")).predictions
    assert {shape[1] for shape in session.calls} == {29, 43}, "41, the evaluation's scale, should not be computed"


@async_test
async def test_an_evaluation_holds_no_message_while_it_waits_for_the_next() -> None:
    """Otherwise every idle stream would keep an image in memory, which no limit counts."""

    async def requests() -> AsyncIterator[Any]:
        yield pb.EvaluateRequest(start=pb.EvaluateStart(dataset="photos", protocol="center"))
        request = Referable(pb.EvaluateRequest(image=GOOD))
        message = weakref.ref(request)
        yield request
        del request
        assert message() is None

    sent: list[pb.EvaluateResponse] = []

    async def write(response: pb.EvaluateResponse) -> None:
        sent.append(response)

    context = SimpleNamespace(time_remaining=lambda: None, peer=lambda: "me", write=write)
    models = Models([(ModelFile("fake", Path("fake.onnx")), FakeSession())], DecodeLimits())
    await PreluNetServicer(DataPlane(models)).Evaluate(requests(), context)
    models.close()
    assert [response.report.images for response in sent] == [1]


def test_an_evaluation_with_a_message_above_the_limit_fails(stub) -> None:
    huge = pb.LabelledImage(file="b", data=bytes(65 * 2**20), label=1)
    with pytest.raises(grpc.RpcError, match="larger than max") as caught:
        list(stub.Evaluate(stream(GOOD, huge), timeout=60))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_whose_message_grpc_refuses_are_counted() -> None:
    with running_server(fake=FakeSession()) as server, grpc.insecure_channel(server.address) as channel:
        classify = pb_grpc.PreluNetServiceStub(channel).Classify
        classify(pb.ClassifyRequest(image=png(40, 57)), timeout=60)
        with pytest.raises(grpc.RpcError, match="larger than max"):
            classify(pb.ClassifyRequest(image=bytes(65 * 2**20)), timeout=60)
        eventually(lambda: server.metric("prelunet_refusals_total", model="", reason="message") == 1)
        assert server.metric("prelunet_calls_total", method="prelunet.v1.PreluNetService/Classify", status="OK") == 1


def test_the_report_message_has_the_fields_of_the_schema_in_order() -> None:
    def fields(message: Descriptor) -> list:
        return [(field.name, inner(field.message_type)) for field in message.fields]

    def inner(message: Descriptor | None) -> list | None:
        plain = message is None or message.GetOptions().map_entry or message.name == "WholeNumbers"
        return None if plain else fields(message)

    def properties(schema: dict) -> list:
        names = [name for name in schema["properties"] if name not in {"restriction", "traits"}]  # only of `validate`
        return [(name, inside(schema["properties"][name])) for name in names]

    def inside(part: dict) -> list | None:
        if "$ref" in part:
            return inside(SCHEMA["$defs"][part["$ref"].removeprefix("#/$defs/")])
        if "properties" in part:
            return properties(part)
        return inside(part["items"]) if "items" in part else None

    assert fields(pb.Report.DESCRIPTOR) == properties(SCHEMA)


def test_a_report_survives_conversion_to_a_message_and_back_exactly() -> None:
    contract = fake_contract(classes=4)
    same = tuple(ClassEntry(entry.wnid, "crane") for entry in contract.classes[:2])
    session = FakeSession(replace(contract, classes=(*same, *contract.classes[2:])))
    protocol = build_protocol("center", session.contract)
    (classified,) = classify_images(session, [decode_rgb(png(40, 57))], protocol)
    predictions = [build_prediction("x/a.png", (classified.top(1)[0][0] + 1) % 4, classified)]
    dataset = {"name": "grüße", "fingerprint": "f" * 64, "images": 1, "layout": "x", "selection": None}
    report = build_report(Run(build_run_info(session, "fake.onnx", dataset, protocol), predictions))
    report["top5_error"] = 100 / 3
    report["members"] = [{"model": report["model"], "weight": 1 / 3}]
    assert None in [entry["top1_error"] for entry in report["classes"]]
    assert None in [each["accuracy"] for each in report["calibration"]["bins"]]
    assert report["protocol"]["crop"] == 28
    assert report["suspicion"] is None
    assert report["same_names"] == [[0, 1]]
    assert [len(row) for row in report["worst"]["counts"]] == [1]
    assert there_and_back(report) == report
    assert json_bytes(there_and_back(report)) == json_bytes(report), "keys and numbers should be written the same too"
    report["suspicion"] = "the labels are in another order"
    assert there_and_back(report) == report
    deviation = {"scores": 0.0625, "logits": 0.25}
    report["model"]["calibration"] = {
        "dataset_fingerprint": "c" * 64, "images": 150, "protocol": "multi-scale", "rule": "min-max",
        "tolerance": deviation, "cost": deviation,
    }  # fmt: skip
    assert json_bytes(there_and_back(report)) == json_bytes(report)


@pytest.mark.parametrize(
    ("name", "reason", "listed"),
    [("{:06}", "no image", MAX_LISTED_REFUSALS), ("{:06}" + "ü" * 1018, "x" * 51, 2**20 // (6 + 2 * 1018 + 51))],
    ids=["many", "long"],
)
def test_a_report_message_lists_the_first_refused_images_and_counts_all(name: str, reason: str, listed: int) -> None:
    """A report with a million refusals, or with long names, would exceed every client's message limit."""
    protocol = build_protocol("center", fake_contract())
    predictions = [Prediction(name.format(n), 1, refused=reason) for n in range(3 * MAX_LISTED_REFUSALS)]
    dataset = {
        "name": "x",
        "fingerprint": "f" * 64,
        "images": 3 * MAX_LISTED_REFUSALS,
        "layout": "x",
        "selection": None,
    }
    report = build_report(Run(build_run_info(FakeSession(), "fake.onnx", dataset, protocol), predictions))
    message = report_message(report)
    assert [each.file for each in message.refusals] == [name.format(n) for n in range(listed)]
    assert (message.refused, message.images) == (3 * MAX_LISTED_REFUSALS, 3 * MAX_LISTED_REFUSALS)
    assert message.ByteSize() < 2 * 2**20, "a gRPC client accepts 4 MiB by default"
    assert len(report["refusals"]) == 3 * MAX_LISTED_REFUSALS, "the report itself should be unchanged"


def there_and_back(report: dict) -> dict:
    return report_from_message(pb.Report.FromString(report_message(report).SerializeToString()))


@pytest.mark.parametrize("data", [b"no image", png(28, 28)])
def test_an_evaluation_whose_names_and_refusals_take_too_much_memory_is_refused(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [LabelledImage(f"{number:04}" + 500 * "x", data, 1) for number in range(100)]
    with plane_of(FakeSession()) as plane:
        monkeypatch.setattr(evaluation, "MAX_TEXT_BYTES", 40_000)
        with pytest.raises(UsageError, match="names and refusals of this evaluation take more than 40000 bytes"):
            asyncio.run(plane.evaluate("many", one_by_one(images), "fake", CENTER, Call()))
        report = asyncio.run(plane.evaluate("few", one_by_one(images[:50]), "fake", CENTER, Call()))
    assert report["images"] == 50
