import gc
import io
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from prelunet.evaluator.client import Client
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.scores import shortest_decimal
from prelunet.evaluator.errors import (
    ERROR_STATUSES,
    DatasetError,
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    Overloaded,
    PreluNetError,
    UsageError,
    error_status,
)
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES
from tests.client.client_harness import ScriptedServicer, health_servicer, served
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import eventually, png, running_server


def packed(detail: ErrorInfo) -> AnyMessage:
    """Return a detail of a status as it travels."""
    wrapped = AnyMessage()
    wrapped.Pack(detail)
    return wrapped


class InMemoryReader:
    """Reads a dataset that is a dict; a missing file is an error as of a folder."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def read(self, file: str) -> bytes:
        if file not in self.files:
            raise DatasetError(f"{file}: it is gone")
        return self.files[file]


def dataset(
    files: dict[str, bytes], *samples: Sample, classes: tuple[str, ...] = ("n00000004", "n00000001")
) -> Dataset:
    """Create a dataset of these files, all of its class 1, and of further samples."""
    listed = [Sample(name, 1, len(data)) for name, data in files.items()]
    return Dataset(Path("/home/somebody/flowers"), classes, [*listed, *samples], InMemoryReader(files))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running_server(fake=FakeSession()) as server, Client(server.address) as client:
        yield client


def test_an_answer_equals_that_of_the_model_file_to_the_last_digit(client: Client) -> None:
    session, data = FakeSession(), png(40, 57, seed=1)
    protocol = build_protocol("multi-scale", session.contract)
    (alone,) = classify_images(session, [decode_rgb(data)], protocol)
    answer = client.classify(data)
    assert [(p.class_index, p.score) for p in answer.predictions] == [(i, shortest_decimal(s)) for i, s in alone.top(5)]
    assert answer.protocol == protocol.to_json()
    assert answer.circumstances == session.circumstances.to_json()
    assert (answer.model, answer.capped) == ({"name": "fake", "sha256": session.model_sha256, "version": 1}, False)
    assert [(v.scale, v.mirrored, (v.windows["rows"], v.windows["columns"])) for v in answer.views] == [
        (v.view.scale, v.view.mirrored, v.windows) for v in alone.views
    ]


def test_many_images_get_the_same_answers_as_single_ones(client: Client) -> None:
    images = {f"{n}.png": png(40, 41 + n, seed=n) for n in range(40)}
    images["bad.png"] = b"text"
    results = dict(client.classify_many(images.items(), protocol="center", top_k=3))
    bad = results.pop("bad.png")
    assert type(bad) is ImageError
    assert results == {
        name: client.classify(images[name], protocol="center", top_k=3) for name in images if name != "bad.png"
    }


def test_every_kind_of_image_gets_the_answer_for_its_pixels(client_of, tmp_path: Path) -> None:
    data = png(40, 57, seed=1)
    (tmp_path / "a.png").write_bytes(data)
    kinds = [data, tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(io.BytesIO(data)), decode_rgb(data)]
    with running_server(fake=FakeSession()) as server, client_of(server.address) as client:
        expected = client.classify(data)
        assert [client.classify(image) for image in kinds] == [expected] * len(kinds)
        assert dict(client.classify_many(kinds)) == dict.fromkeys(range(len(kinds)), expected)
        results = dict(
            client.classify_many([("gone", tmp_path / "gone.png"), ("float", decode_rgb(data) / 255), ("a", data)])
        )
        assert results.pop("a") == expected
        assert {key: type(error) for key, error in results.items()} == {"gone": ImageError, "float": ImageError}
        for image in (tmp_path / "gone.png", decode_rgb(data)[..., None], Image.new("F", (2, 2))):
            with pytest.raises(ImageError, match=r"cannot be read|the array's shape|mode is F"):
                client.classify(image)


def test_a_server_is_ready_and_describes_its_models(client: Client) -> None:
    assert client.ready()
    (model,) = client.models()
    assert (model.name, model.architecture, model.crop, model.default_scales) == ("fake", "demo", 28, (32, 48, 60))
    assert model.classes == FakeSession().contract.classes


def test_a_model_that_is_unloaded_while_models_are_described_is_left_out(client_to) -> None:
    with client_to(ScriptedServicer(None, ModelNotFound("no model 'six' is served"))) as client:
        assert [model.name for model in client.models()] == ["three"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"image": b"text"}, ImageError, "not a readable image"),
        ({"image": b"x" * MAX_MESSAGE_BYTES}, ImageError, f"this client, at most {MAX_MESSAGE_BYTES}"),
        ({"model": "nine"}, ModelNotFound, "no model 'nine' is served. There are: fake"),
        ({"protocol": "nine"}, UsageError, "unknown protocol 'nine'"),
        ({"top_k": 0}, UsageError, "top_k is 0"),
        ({"top_k": 7}, UsageError, "must be 1 to 6"),
        ({"top_k": 2**40}, UsageError, f"top_k is {2**40}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_refusal_of_the_server_is_raised_as_its_own_class(
    client: Client, arguments: dict, error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        client.classify(**{"image": png(40, 57), **arguments})
    assert len(client.classify(png(40, 57), model="fake", protocol="center", top_k=6).predictions) == 6


def test_a_message_beyond_the_limit_of_a_server_or_of_the_client_is_reported_as_such(client_to) -> None:
    heatmap = b"x" * (MAX_MESSAGE_BYTES + 1)
    with client_to(ScriptedServicer(lambda request, _: pb.ClassifyResponse(heatmap=heatmap)), retries=False) as client:
        with pytest.raises(UsageError, match=r"the response exceeds this client's message limit\. Request less"):
            client.classify(b"cat")
        with pytest.raises(ImageError, match="exceeds the server's limit"):  # 4 MiB, gRPC's default
            client.classify(b"x" * (5 * 2**20))


def test_an_answer_may_exceed_the_default_limit_of_grpc(client_to) -> None:
    heatmap = b"x" * (5 * 2**20)
    with client_to(ScriptedServicer(lambda request, _: pb.ClassifyResponse(heatmap=heatmap))) as client:
        assert client.classify(b"cat").heatmap == heatmap


def test_a_dataset_in_another_class_order_is_evaluated_by_wnid(client: Client) -> None:
    report = client.evaluate(dataset({"b": png(40, 57, seed=1), "a": png(33, 61, seed=2), "c": b"text"}))
    assert (report["images"], report["refused"], report["dataset"]["name"]) == (3, 1, "flowers")
    assert [entry["images"] for entry in report["classes"]] == [0, 3, 0, 0, 0, 0]
    assert report["refusals"][0]["file"] == "c"


@pytest.mark.parametrize(
    ("sample", "classes", "text"),
    [
        (Sample("gone", 1, 9), ("n00000000", "n00000001"), "gone: it is gone"),
        (Sample("gone", -1, 9), ("n00000000", "n00000001"), "gone: its class is unknown"),
        (Sample("gone", 1, 9, (0,)), ("n00000000", "n00000001"), "gone: a call cannot have several true classes"),
        (Sample("\udcff", 1, 9), ("n00000000", "n00000001"), r"'\\udcff': the name is not Unicode"),
        (Sample("large", 1, MAX_MESSAGE_BYTES), ("n00000000", "n00000001"), "large: .* Remove the file"),
        (Sample("a2", 0, 9), ("n77", "n00000001"), "a2: the model has no class 'n77'"),
    ],
)
def test_a_sample_that_cannot_be_sent_is_named_and_the_next_call_works(
    client: Client, sample: Sample, classes: tuple[str, ...], text: str
) -> None:
    files = {"a": png(40, 57), "a2": b""}
    with pytest.raises(DatasetError, match=text):
        client.evaluate(dataset(files, sample, classes=classes))
    assert client.evaluate(dataset({"a": png(40, 57)}))["evaluated"] == 1


def test_ready_follows_the_health_of_the_server() -> None:
    status = health_servicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Client(address) as client:
        for status_name, expected in [("SERVING", True), ("NOT_SERVING", False), ("UNKNOWN", False), ("SERVING", True)]:
            status.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status_name))
            eventually(lambda expected=expected: client.ready() is expected)
        server.stop(None).wait()
        assert client.ready() is False


def test_ready_is_false_without_an_answer_and_an_error_for_another_kind_of_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Client(f"127.0.0.1:{silent.getsockname()[1]}") as client:
        assert client.ready(timeout=0.2) is False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with Client(f"127.0.0.1:{free.getsockname()[1]}") as client:
            assert client.ready() is False
    server = grpc.server(futures.ThreadPoolExecutor(1))
    with Client(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}") as client:
        server.start()
        with pytest.raises(EnvironmentFault, match="answered, but it is not a prelunet server"):
            client.ready()
        with pytest.raises(EnvironmentFault, match="answered, but it is not a prelunet server"):
            client.models()
    server.stop(None).wait()


def test_a_silent_server_ends_in_deadline_passed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(address, timeout=0.2) as client,
            pytest.raises(DeadlinePassed, match=f"{address}: no answer in time"),
        ):
            client.models()


@pytest.mark.parametrize("kind", ERROR_STATUSES, ids=lambda kind: kind.__name__)
def test_every_error_of_the_table_is_raised_as_its_own_class(kind: type[PreluNetError]) -> None:
    assert_comes_back(kind("what, where and how"), kind)


def test_a_bug_of_the_server_is_raised_as_an_internal_error_with_its_id() -> None:
    error = assert_comes_back(ZeroDivisionError("/secret/path"), PreluNetError)
    assert error_status(error).exit_code == 1
    assert "id 0123456789ab" in str(error)
    assert "/secret" not in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.CANCELLED, Interrupted),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNKNOWN, EnvironmentFault),
    ],
)
def test_a_bare_grpc_status_is_raised_as_one_of_our_errors(code: grpc.StatusCode, kind: type[PreluNetError]) -> None:
    with (
        served(ScriptedServicer(code)) as address,
        Client(address, retries=False) as client,
        pytest.raises(kind, match=f"{address}: .*bare") as caught,
    ):
        client.classify(b"")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda client: client.classify(None), "an image cannot be of type NoneType; give a path"),
        (lambda client: client.classify(b"cat", model=5), "an option cannot be sent"),
        (lambda client: client.classify(b"cat", model="\udc80"), "an option cannot be sent: .*surrogates not allowed"),
        (lambda client: client.classify(b"cat", scales=48), "an option cannot be sent: .*not iterable"),
        (lambda client: client.classify(b"cat", top_k="3"), "an option cannot be sent"),
        (lambda client: client.classify(b"cat", request_id=7), "request_id is 7"),
        (lambda client: client.classify(b"cat", timeout=[3]), r"timeout is \[3\]"),
        (lambda client: list(client.classify_many(b"cat")), r"images is a bytes, but it must be several .* \[image\]"),
        (lambda client: list(client.classify_many("cat.jpg")), "images is a str"),
        (lambda client: list(client.classify_many(np.zeros((3, 4, 3), np.uint8))), "images is a ndarray"),
        (lambda client: client.evaluate("val"), "dataset is a str; open it first: .*open_dataset"),
        (lambda client: type(client)("127.0.0.1:1", retries=3), "retries is 3, but it must be True or False"),
        (lambda client: type(client)(None), "address is None, but it must be host:port"),
        (lambda client: type(client)("\udc80:1"), r"address is '\\udc80:1', but it must be host:port"),
    ],
)
def test_an_argument_of_a_wrong_type_is_a_usage_error(client_of, call: Callable[[Any], Any], text: str) -> None:
    with client_of("127.0.0.1:1", retries=False) as client, pytest.raises(UsageError, match=text):
        call(client)


CALLS = {
    "classify": lambda client: client.classify(b"cat"),
    "classify_many": lambda client: list(client.classify_many([b"cat"])),
    "evaluate": lambda client: client.evaluate(dataset({"a": b"cat"})),
    "models": lambda client: client.models(),
    "ready": lambda client: client.ready(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_client_is_refused(client_of, name: str) -> None:
    with client_of("127.0.0.1:1") as client:
        client.close()
        with pytest.raises(UsageError, match="the client is closed; make the call inside its `with` block"):
            CALLS[name](client)


@pytest.mark.parametrize("name", ["classify", "models", "ready"])
def test_a_client_that_is_closed_before_any_server_answers_is_interrupted(client_of, name: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        futures.ThreadPoolExecutor(1) as pool,
        client_of(f"127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        call = pool.submit(CALLS[name], client)
        time.sleep(0.5)
        client.close()
        with pytest.raises(Interrupted, match="the client was closed before the answer arrived"):
            call.result(30)


def test_a_client_that_is_closed_between_two_attempts_is_interrupted(client_to) -> None:
    with client_to(ScriptedServicer(Overloaded("full", retry_after=0.5))) as client:
        threading.Timer(0.2, client.close).start()
        with pytest.raises(Interrupted, match="the client was closed before the answer arrived"):
            client.classify(b"cat")


def assert_comes_back(error: Exception, kind: type[PreluNetError]) -> PreluNetError:
    with (
        served(ScriptedServicer(error)) as address,
        Client(address, retries=False) as client,
        pytest.raises(kind) as caught,
    ):
        client.classify(b"")
    assert type(caught.value) is kind
    return caught.value


def test_a_request_id_is_sent_and_ends_the_text_of_errors() -> None:
    server = ScriptedServicer(ImageError("no image"), Overloaded("full", 7), ZeroDivisionError(), None)
    with served(server) as address, Client(address, retries=False) as client:
        for kind, text in [(ImageError, "no image"), (Overloaded, "full"), (PreluNetError, "id 0123456789ab")]:
            with pytest.raises(kind, match=rf"{text} \(request id photo:7_.-\)$") as caught:
                client.classify(b"cat", request_id="photo:7_.-")
            assert type(caught.value) is kind
            assert getattr(caught.value, "retry_after", 7) == 7
        client.models(request_id="x" * 128)
        client.classify(b"cat")
    assert [seen.metadata.get("x-request-id") for seen in server.seen] == ["photo:7_.-"] * 3 + ["x" * 128] * 3 + [None]


@pytest.mark.parametrize("wrong", ["", "x" * 129, "a b", "a\nb", "é", "a/b"])
def test_an_invalid_request_id_is_refused(wrong: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UsageError, match="request_id is"):
        client.classify(b"cat", request_id=wrong)


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff no message",
        Status(code=3, message="another code").SerializeToString(),
        Status(
            code=14, message="bare", details=[AnyMessage(type_url="x/google.rpc.ErrorInfo", value=b"\xff")]
        ).SerializeToString(),
        Status(
            code=14, message="bare", details=[packed(ErrorInfo(reason="IMAGE_ERROR", domain="another"))]
        ).SerializeToString(),
    ],
)
def test_foreign_status_details_are_ignored(details: bytes) -> None:
    def fail(request, context):
        context.set_trailing_metadata([("grpc-status-details-bin", details)])
        context.abort(grpc.StatusCode.UNAVAILABLE, "bare")

    with (
        served(ScriptedServicer(fail)) as address,
        Client(address, retries=False) as client,
        pytest.raises(EnvironmentFault, match=f"{address}: .*bare") as caught,
    ):
        client.classify(b"cat")
    assert type(caught.value) is EnvironmentFault


def test_importing_the_client_loads_only_what_it_needs_and_changes_nothing_process_wide() -> None:
    program = """if True:
        import sys, warnings
        before = warnings.filters[:]
        from prelunet import AsyncClient, Client
        assert {"grpc", "asyncio"} <= sys.modules.keys()
        assert not sys.modules.keys() & {"numpy", "PIL", "torch", "onnx", "onnxruntime", "msgspec", "cryptography"}
        # grpc may add filters for its own modules
        assert [each for each in warnings.filters if each not in before and "grpc" not in str(each)] == []
        print(*{name.split(".")[2] for name in sys.modules if name.startswith("prelunet.evaluator.")})
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed = {"answer", "cards", "cli_option", "client", "errors", "files", "image_input", "pb", "rpc", "terminal"}
    assert set(result.stdout.split()) == allowed


def test_ctrl_c_leaves_a_call_and_cancels_it_on_the_server() -> None:
    ended = threading.Event()

    def interrupt(_, context):
        context.add_callback(ended.set)
        time.sleep(0.3)  # until the client waits: gRPC may deadlock if a signal comes while it sets up a call
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.wait(30)

    def interrupt_stream(requests, context):
        next(requests)
        interrupt(requests, context)
        yield from ()

    server = ScriptedServicer(interrupt, interrupt, None, interrupt_stream)
    with served(server) as address, Client(address, timeout=None) as client:
        for ask in (
            lambda: client.classify(b"cat"),
            lambda: list(client.classify_many([b"cat"])),
            lambda: client.evaluate(dataset({"a": b"cat"})),
        ):
            with pytest.raises(KeyboardInterrupt):
                ask()
            assert ended.wait(20)
            ended.clear()


FORKING = """if True:
    import os, sys
    from prelunet import Client
    client = Client(sys.argv[1])
    print(client.classify(b"parent").predictions[0].name, flush=True)
    if os.fork() == 0:
        print(client.classify(b"child, same client").predictions[0].name, flush=True)
        with Client(sys.argv[1]) as another:
            print(another.classify(b"child, own client").predictions[0].name, flush=True)
        os._exit(0)
    os.wait()
    print(client.classify(b"parent again").predictions[0].name, flush=True)
"""


def test_a_client_works_in_a_forked_process_and_in_its_parent() -> None:
    with served(ScriptedServicer()) as address:
        result = subprocess.run([sys.executable, "-c", FORKING, address], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["parent", "child, same client", "child, own client", "parent again"]


LEFT_OPEN = """if True:
    import sys, threading
    from prelunet import Client
    def images():
        yield b"cat"
        threading.Event().wait()
    answers = Client(sys.argv[1]).classify_many(images())
    print(next(answers)[1].predictions[0].name)
"""


def test_a_program_exits_although_it_closes_nothing_and_its_iterable_never_ends() -> None:
    with served(ScriptedServicer()) as address:
        result = subprocess.run([sys.executable, "-c", LEFT_OPEN, address], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("cat\n", "")


def test_an_error_that_was_handled_keeps_nothing_alive(client_to) -> None:
    def refused(client) -> weakref.ref:
        with pytest.raises(ImageError) as caught:
            client.classify(b"cat")
        seen, caught = weakref.ref(caught.value), None
        return seen

    with client_to(ScriptedServicer(*[ImageError("no image")] * 2)) as client:
        gc.collect()
        gc.disable()
        try:
            seen = refused(client)
            (seen_of_many,) = (weakref.ref(error) for _, error in client.classify_many([b"cat"]))
            client.classify(b"dog")  # after which no thread holds what it did before
            assert seen() is None, "error, traceback and the request's image would live until the next collection"
            assert seen_of_many() is None
        finally:
            gc.enable()
