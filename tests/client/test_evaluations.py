"""`evaluate` of both clients against a scripted server: what is sent, returned and retried."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from prelunet.evaluator.client import EvaluationProgress
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import DatasetError, EnvironmentFault, Interrupted, Overloaded, PreluNetError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.rpc.status import status_of
from tests.client.client_harness import ScriptedServicer, free_port, served


class Photos:
    """Reads a dataset that is a dict, and records what was read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.read_ones: list[str] = []

    def read(self, file: str) -> bytes:
        self.read_ones.append(file)
        if file not in self.files:
            raise DatasetError(f"{file}: it is gone")
        return self.files[file]


def photos(*gone: str) -> Dataset:
    """Return a dataset of three images; those in `gone` cannot be read."""
    files = {name: name.encode() for name in ("a", "b", "c") if name not in gone}
    samples = [Sample(name, 1, 1) for name in ("a", "b", "c")]
    return Dataset(Path("/home/somebody/pets"), ("n0", "n1"), samples, Photos(files))


def report(images: int) -> pb.EvaluateResponse:
    return pb.EvaluateResponse(report=pb.Report(version=2, images=images, top1_error=25, worst=pb.WorstClasses()))


def evaluated(requests, _):
    start = next(requests).start
    assert start.dataset == "pets"
    for done, _request in enumerate(requests, 1):
        error = {"top1_error": 100 / done} if done > 1 else {}
        yield pb.EvaluateResponse(
            progress=pb.EvaluateProgress(images=done, refused=done // 2, seconds=done / 2, **error)
        )
    yield report(done)


def test_an_evaluation_reports_its_progress_and_returns_the_report(client_to) -> None:
    steps: list[EvaluationProgress] = []
    server = ScriptedServicer(None, evaluated, None, evaluated)
    with client_to(server) as client:
        result = client.evaluate(photos(), progress=steps.append, request_id="e1", timeout=50)
        assert (result["images"], result["top1_error"]) == (3, 25)
        assert client.evaluate(photos()) == result
    assert steps == [
        EvaluationProgress(1, 0, None, 0.5),
        EvaluationProgress(2, 1, 50, 1),
        EvaluationProgress(3, 1, 100 / 3, 1.5),
    ]
    first, second = (seen for seen in server.seen if seen.method == "Evaluate")
    assert first.metadata["x-request-id"] == "e1"
    assert 40 < first.remaining <= 51
    assert second.remaining > 10**6


def test_an_evaluation_sends_its_options_and_every_image_with_its_class(client_to) -> None:
    sent = []

    def look(requests, _):
        sent.extend(requests)
        yield report(3)

    options = {"model": "six", "protocol": "dense", "scales": [32], "mirror": True, "apply_exif": True}
    with client_to(ScriptedServicer(None, look)) as client:
        client.evaluate(photos(), **options)
    images = [pb.LabelledImage(file=name, data=name.encode(), wnid="n1") for name in "abc"]
    assert sent[0] == pb.EvaluateRequest(start=pb.EvaluateStart(dataset="pets", **options))
    assert sent[1:] == [pb.EvaluateRequest(image=image) for image in images]


@pytest.mark.parametrize("images", [0, 1], ids=["before the first image", "after it"])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, EnvironmentFault),
        (grpc.StatusCode.CANCELLED, Interrupted),
        (Overloaded("full", retry_after=0.001), Overloaded),
    ],
    ids=repr,
)
def test_an_evaluation_that_has_begun_is_never_repeated(client_to, failure, error: type, images: int) -> None:
    def broken(requests, context):
        for _ in range(1 + images):
            next(requests)
        if isinstance(failure, grpc.StatusCode):
            context.abort(failure, "broken")
        context.abort_with_status(status_of(failure, ""))

    server = ScriptedServicer(None, broken)
    with client_to(server) as client, pytest.raises(error, match=r"broken|full"):
        client.evaluate(photos())
    assert [seen.method for seen in server.seen] == ["ListModels", "Evaluate"]


def test_an_evaluation_waits_for_a_server_before_it_reads_images(client_of) -> None:
    dataset, port = photos(), free_port()
    with client_of(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.evaluate, dataset)
        time.sleep(0.5)
        assert not call.done()
        assert dataset.reader.read_ones == []
        with served(ScriptedServicer(None, evaluated), port):
            assert call.result(30)["images"] == 3
    assert dataset.reader.read_ones == ["a", "b", "c"]


def test_an_evaluation_waits_for_a_server_up_to_the_timeout_of_the_client(client_of) -> None:
    with (
        client_of(f"127.0.0.1:{free_port()}", timeout=0.3) as client,
        pytest.raises(EnvironmentFault, match="nothing listens there: connection refused"),
    ):
        client.evaluate(photos())


def test_an_unreadable_image_is_raised_whatever_the_server_answers(client_to) -> None:
    def tolerant(requests, _):
        yield report(len(list(requests)) - 1)

    def strict(requests, context):
        list(requests)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream had no image")

    with client_to(ScriptedServicer(None, tolerant, None, strict)) as client:
        for _ in range(2):
            with pytest.raises(DatasetError, match="b: it is gone"):
                client.evaluate(photos("b"))


def test_an_evaluation_without_a_report_is_an_error_of_the_server(client_of) -> None:
    with (
        served(
            ScriptedServicer(None, lambda requests, _: iter([pb.EvaluateResponse()] * len(list(requests))))
        ) as address,
        client_of(address) as client,
        pytest.raises(PreluNetError, match=f"{address}: the evaluation ended without a report"),
    ):
        client.evaluate(photos())


def test_an_error_of_the_progress_callback_ends_the_call(client_to) -> None:
    ended = threading.Event()

    def watch(requests, context):
        context.add_callback(ended.set)
        yield from evaluated(requests, context)

    def report_progress(_: EvaluationProgress) -> None:
        raise LookupError("the bar is gone")

    with client_to(ScriptedServicer(None, watch)) as client:
        with pytest.raises(LookupError, match="the bar is gone"):
            client.evaluate(photos(), progress=report_progress)
        assert ended.wait(30)


def test_a_response_that_is_not_a_message_is_an_error(client_of) -> None:
    def anything(_, context):
        context.send_initial_metadata(())
        return b"\xff\xff"

    def each(requests, context):
        yield from (anything(request, context) for request in requests)

    def no_models(_request, _context):
        return b""

    names = {
        "Classify": grpc.unary_unary_rpc_method_handler(anything),
        "ListModels": grpc.unary_unary_rpc_method_handler(no_models),
        "Evaluate": grpc.stream_stream_rpc_method_handler(each),
    }
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("prelunet.v1.PreluNetService", names)])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with client_of(address) as client:
            for ask in (lambda: client.classify(b"cat"), lambda: client.evaluate(photos())):
                with pytest.raises(PreluNetError, match=f"^{address}: ") as caught:
                    ask()
                assert type(caught.value) is PreluNetError
            ((_, error),) = client.classify_many([b"cat"])
            assert type(error) is PreluNetError
        server.stop(None).wait()


def test_closing_the_client_interrupts_an_evaluation(client_of) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(requests, _):
        arrived.set()
        gate.wait(30)
        yield report(0)

    with served(ScriptedServicer(None, hold)) as address, ThreadPoolExecutor(1) as pool:
        with client_of(address) as client:
            call = pool.submit(client.evaluate, photos())
            assert arrived.wait(30)
            client.close()
            assert type(call.exception(30)) is Interrupted
        gate.set()
