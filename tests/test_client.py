import socket
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from evaluator.client import Client
from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.classify import classify_images
from evaluator.engine.scores import shortest
from evaluator.errors import (
    OUTCOMES,
    DatasetError,
    EnvironmentFault,
    ImageError,
    Interrupted,
    ModelNotFound,
    Overloaded,
    PreluNetError,
    UsageError,
    outcome_of,
)
from evaluator.imaging.decode import decode_rgb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.protocols import make_protocol
from evaluator.serving.status import MAX_MESSAGE, status_of
from fakes import FakeSession
from serving_harness import png, running_server


@contextmanager
def served(servicer: pb_grpc.PreluNetServiceServicer) -> Iterator[str]:
    """Serve with gRPC's plain server; gives its address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_PreluNetServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None)


class InMemory:
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
    """Make a dataset of these files, all of its class 1, and of further samples."""
    listed = [Sample(name, 1, len(data)) for name, data in files.items()]
    return Dataset(Path("/home/somebody/flowers"), classes, [*listed, *samples], InMemory(files))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running_server(fake=FakeSession()) as server, Client(server.address) as client:
        yield client


def test_the_client_gives_the_answer_of_the_model_file_to_the_last_digit(client: Client) -> None:
    session, data = FakeSession(), png(40, 57, seed=1)
    protocol = make_protocol("multi-scale", session.contract)
    (alone,) = classify_images(session, [decode_rgb(data)], protocol)
    answer = client.classify(data)
    assert [(p.class_index, p.score) for p in answer.predictions] == [(i, shortest(s)) for i, s in alone.top(5)]
    assert answer.protocol == protocol.to_json()
    assert answer.circumstances == session.circumstances.to_json()
    assert (answer.model, answer.capped) == ({"name": "fake", "sha256": session.model_sha256}, False)
    assert [(v.scale, v.mirrored, (v.windows["rows"], v.windows["columns"])) for v in answer.views] == [
        (v.view.scale, v.view.mirrored, v.windows) for v in alone.views
    ]


def test_one_client_serves_several_threads(client: Client) -> None:
    classify = partial(client.classify, protocol="center")
    images = [png(40, 41 + n, seed=n) for n in range(8)]
    with futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(classify, images)) == [classify(image) for image in images]


def test_the_models_of_a_server_are_described(client: Client) -> None:
    (model,) = client.models()
    assert (model.name, model.architecture, model.crop, model.default_scales) == ("fake", "demo", 28, (32, 48, 60))
    assert model.classes == FakeSession().contract.classes


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"image": b"text"}, ImageError, "no image that can be read"),
        ({"image": b"x" * MAX_MESSAGE}, ImageError, f"above the server's limit .*{MAX_MESSAGE}"),
        ({"model": "nine"}, ModelNotFound, "no model 'nine' is served. There are: fake"),
        ({"protocol": "nine"}, UsageError, "no protocol 'nine'"),
        ({"top_k": 0}, UsageError, "top_k is 0"),
        ({"top_k": 7}, UsageError, "this model can tell 1 to 6"),
        ({"top_k": 2**40}, UsageError, f"top_k is {2**40}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_server_s_refusal_is_the_error_it_had(client: Client, arguments: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        client.classify(**{"image": png(40, 57), **arguments})
    assert len(client.classify(png(40, 57), model="fake", protocol="center", top_k=6).predictions) == 6


def test_a_dataset_with_its_own_order_of_classes_is_evaluated_by_their_names(client: Client) -> None:
    report = client.evaluate(dataset({"b": png(40, 57, seed=1), "a": png(33, 61, seed=2), "c": b"text"}))
    assert (report["images"], report["refused"], report["dataset"]["name"]) == (3, 1, "flowers")
    assert [entry["images"] for entry in report["classes"]] == [0, 3, 0, 0, 0, 0]
    assert report["refusals"][0]["file"] == "c"


@pytest.mark.parametrize(
    ("sample", "classes", "text"),
    [
        (Sample("gone", 1, 9), ("n00000000", "n00000001"), "gone: it is gone"),
        (Sample("gone", -1, 9), ("n00000000", "n00000001"), "gone: its class is not known"),
        (Sample("\udcff", 1, 9), ("n00000000", "n00000001"), r"'\\udcff': a name that is no Unicode"),
        (Sample("large", 1, MAX_MESSAGE), ("n00000000", "n00000001"), "large: .* Take the file out of the dataset"),
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


def test_where_nothing_listens_the_error_names_the_address_and_the_verb() -> None:
    with socket.socket() as free:  # bound, but nobody accepts
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with Client(address) as client, pytest.raises(EnvironmentFault, match=f"{address}: .*prelunet serve --model"):
            client.classify(png(40, 57))
        with Client(address) as client, pytest.raises(EnvironmentFault, match=f"{address}: no server answers there"):
            client.evaluate(dataset({"a": png(40, 57)}))


def test_a_server_that_does_not_answer_is_an_environment_fault_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(address, timeout=0.2) as client,
            pytest.raises(EnvironmentFault, match=f"{address}: no answer in time"),
        ):
            client.models()


def test_another_kind_of_grpc_server_is_told_from_none() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Client(address) as client, pytest.raises(EnvironmentFault, match="answers there, but not prelunet's"):
        client.models()
    server.stop(None)


@pytest.mark.parametrize("kind", OUTCOMES, ids=lambda kind: kind.__name__)
def test_every_error_of_the_table_comes_back_as_its_own_class(kind: type[PreluNetError]) -> None:
    assert_comes_back(kind("what, where and how"), kind)


def test_a_mistake_of_the_server_comes_back_as_an_internal_error_with_its_id() -> None:
    error = assert_comes_back(ZeroDivisionError("/secret/path"), PreluNetError)
    assert outcome_of(error).exit_code == 1
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
def test_a_bare_status_of_grpc_becomes_an_error_of_ours(code: grpc.StatusCode, kind: type[PreluNetError]) -> None:
    class Bare(pb_grpc.PreluNetServiceServicer):
        def Classify(self, request, context):  # noqa: N802
            context.abort(code, "bare")

    with (
        served(Bare()) as address,
        Client(address) as client,
        pytest.raises(kind, match=f"{address}: .*bare") as caught,
    ):
        client.classify(b"")
    assert type(caught.value) is kind


def assert_comes_back(error: Exception, kind: type[PreluNetError]) -> PreluNetError:
    class Failing(pb_grpc.PreluNetServiceServicer):
        def Classify(self, request, context):  # noqa: N802
            context.abort_with_status(status_of(error, "0123456789ab"))

    with served(Failing()) as address, Client(address) as client, pytest.raises(kind) as caught:
        client.classify(b"")
    assert type(caught.value) is kind
    return caught.value
