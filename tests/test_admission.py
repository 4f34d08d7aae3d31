"""What a server does not take on, and that it lives on after whatever happens in its one compute thread."""

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import evaluator.serving.classifier
import evaluator.serving.compute
from evaluator.client import Client
from evaluator.errors import Overloaded, UsageError
from evaluator.imaging.decode import DecodeLimits
from evaluator.imaging.views import ViewImage
from evaluator.protocols import View, make_protocol
from evaluator.serving.classifier import Classifier
from evaluator.serving.compute import ComputeThread
from fakes import FakeSession, fake_contract
from serving_harness import png, running_server


class Gated(FakeSession):
    """A fake whose runs wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def run(self, images, sizes):
        assert self.gate.wait(30)
        return super().run(images, sizes)


def test_calls_beyond_the_waiting_limit_are_refused_at_once_and_the_others_are_answered() -> None:
    session = Gated()
    with (
        running_server(max_waiting=3, fake=session) as server,
        Client(server.address) as client,
        ThreadPoolExecutor(5) as pool,
    ):
        waiting = {pool.submit(client.classify, png(40, 41 + n), protocol="center") for n in range(5)}
        refused: list[BaseException | None] = []
        while len(refused) < 2:  # nobody is answered before the gate opens, so who is done is refused
            done, waiting = futures.wait(waiting, timeout=30, return_when=futures.FIRST_COMPLETED)
            assert done, "a call beyond the limit waits instead of being refused"
            refused += [call.exception() for call in done]
        session.gate.set()
        assert [type(error) for error in refused] == [Overloaded] * 2
        assert all(call.result(30).predictions for call in waiting)
        assert client.classify(png(40, 50), protocol="center").predictions  # the waiting places are free again


def test_an_overload_is_told_with_its_own_status() -> None:
    session = Gated()
    with (
        running_server(max_waiting=1, fake=session) as server,
        Client(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(client.classify, png(40, 41), protocol="center")
        while server.models.get("fake")._waiting == 0:
            assert not first.done()
        with pytest.raises(Overloaded, match=r"1 images of .* wait for model 'fake' already") as refusal:
            client.classify(png(40, 42), protocol="center")
        session.gate.set()
        assert first.result(30).predictions
    assert isinstance(refusal.value.__cause__, grpc.RpcError)
    assert refusal.value.__cause__.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_images_beyond_the_bytes_that_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator.serving.classifier, "MAX_WAITING_BYTES", 1000)
    with ThreadPoolExecutor(1) as pool:
        classifier = Classifier("fake", "fake.onnx", FakeSession(), pool, DecodeLimits())
        with (
            classifier.admitted(5000),  # alone, any image is let in
            pytest.raises(Overloaded, match="1 images of 5000 bytes"),
            classifier.admitted(1),
        ):
            pass
        with classifier.admitted(600), classifier.admitted(400):
            pass
        classifier.close()


def test_a_view_that_would_take_gigabytes_is_refused_by_its_size_before_it_is_made() -> None:
    contract = fake_contract(max_side=16384)
    with running_server(fake=FakeSession(contract)) as server, Client(server.address) as client:
        with pytest.raises(UsageError, match="seen as 1600x6400 pixels, more than the 2097152"):
            client.classify(png(20, 200), protocol="dense-1600")
        with pytest.raises(UsageError, match="together have 4334420 pixels, more than the 4194304"):  # each fits alone
            client.classify(png(20, 200), protocol="dense-600-601-602")
        assert client.classify(png(20, 200), protocol="dense-40").predictions


def test_an_error_outside_of_the_session_fails_what_waits_and_the_thread_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = ComputeThread(FakeSession(), "fake")
    view = ViewImage(View(32, mirrored=False), np.zeros((32, 40, 3), np.uint8), capped=False)
    with monkeypatch.context() as patch:

        def no_memory(*_arguments, **_options):
            raise MemoryError("planted")

        patch.setattr(evaluator.serving.compute, "plan_views", no_memory)
        with pytest.raises(MemoryError, match="planted"):
            compute.submit([view]).result(30)
    assert len(compute.submit([view]).result(30)) == 1
    compute.close()


def test_a_model_whose_scales_are_large_is_served_at_its_own_scales() -> None:
    contract = fake_contract(default_scales=(800, 900), max_side=4096)
    with ThreadPoolExecutor(1) as pool:
        classifier = Classifier("large", "large.onnx", FakeSession(contract), pool, DecodeLimits())
        classifier._check_size(200, 2000, make_protocol("multi-scale", contract))
        classifier.close()
