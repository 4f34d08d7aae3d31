"""The client of threads."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from prelunet.evaluator.answer import Answer
from prelunet.evaluator.client.calls import DEFAULT_RETRY_POLICY, Call, ClientSettings, RetryPolicy, Timeout
from prelunet.evaluator.client.channel import CHANNEL_OPTIONS
from prelunet.evaluator.client.messages import (
    HEALTH,
    EvaluationProgress,
    EvaluationResponses,
    ServedModel,
    classify_request,
    evaluate_start,
    is_serving,
    is_unreachable,
    labelled_image,
    served_model_from_message,
)
from prelunet.evaluator.client.streams import MAX_PENDING, PendingImages, Result
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import PreluNetError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.convert import answer_from_message


class Client:
    """A connection to a server; use it in a `with` block, from any number of threads.

    address: host:port, or a name as dns:///host:port that stands for several servers, which then take turns;
    timeout: seconds for an answer to one image or question, retries included, None to wait for ever;
    retries: what is tried again, and when.

    Every method raises the errors of `evaluator.errors` that the server had, and EnvironmentFault that names the
    address when there is no way to a server. The model's name may be left out where only one is served. `request_id`
    (1 to 128 letters, digits, '.', '_', ':' and '-') stands in the server's log and in the errors of the call.
    """

    def __init__(
        self, address: str, *, timeout: float | None = 60.0, retries: RetryPolicy = DEFAULT_RETRY_POLICY
    ) -> None:
        self._settings = ClientSettings(address, timeout, retries)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.PreluNetServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._settings.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end with Interrupted."""
        self._settings.closed = True
        self._channel.close()

    def classify(  # noqa: PLR0913 - one argument per option
        self,
        image: bytes,
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        timeout: Timeout = "client",
        request_id: str | None = None,
    ) -> Answer:
        """Classify one encoded image.

        protocol: its name, "" for the model's own; scales, mirror: other shorter sides in pixels than the protocol's,
        and whether each is seen mirrored too; None as the protocol has it;
        top_k: 1 to the number of classes; None is 5, or all where there are fewer;
        heatmap: draw where each of the five best classes is seen; apply_exif: obey the camera's note on rotation;
        timeout: other seconds than the client's.
        """
        request = classify_request(
            image,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        return answer_from_message(_unary_call(self._stub.Classify, request, call))

    def classify_many(  # noqa: PLR0913 - one argument per option
        self,
        images: Iterable[Any],
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Classify many encoded images over one stream; gives the answers as they come, in any order.

        images: (id, image), where an id may be anything; or images alone, whose ids are then 0, 1, 2 …; asked for the
        next one in another thread. Gives (id, answer), or (id, error) for an image that is refused: the others go on.
        max_pending: images that are held at most; no more are asked for while so many have no answer, or an answer that
        nobody has taken. timeout: seconds for all of them. The other arguments are those of `classify`.

        A stream that breaks is taken up again with what is unanswered, if the client's retries allow it; an image that
        comes at a bad moment is sent again. What `images` raises is raised after the answers to those before.
        """
        request = partial(
            classify_request,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        return self._stream(
            PendingImages(self._settings, request, self._settings.deadline(timeout), request_id, max_pending), images
        )

    def _stream(
        self, pending: PendingImages, images: Iterable[Any]
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Give the answers; a stream is open while there is something to send or to wait for."""
        exchange = Exchange(pending, images)
        try:
            while exchange.wait_for_work():
                if results := exchange.take_results():
                    yield from map(_to_answer, results)
                    continue
                stream = self._stub.ClassifyStream(exchange.open_stream(), **pending.call.begin())
                try:
                    for response in stream:
                        yield from map(_to_answer, exchange.answer_received(response))
                    exchange.stream_ended()
                except grpc.RpcError as failed:
                    exchange.stream_failed(failed)
                finally:
                    stream.cancel()
            pending.raise_error()
        finally:
            exchange.stop()

    def evaluate(  # noqa: PLR0913 - one argument per option
        self,
        dataset: Dataset,
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        apply_exif: bool = False,
        progress: Callable[[EvaluationProgress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Send a labelled dataset and return its report, equal to what `prelunet validate` and `report` give.

        But of the refused images it lists the first only, at most 1000 and 1 MiB of names and reasons.
        progress: called about once a second with how far it is; timeout: seconds for all of it, None to wait for ever.
        The other arguments are those of `classify`. Once the first image has been read, nothing is tried again.
        Raises DatasetError for an image that cannot be read.
        """
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        start = evaluate_start(
            dataset, model=model, protocol=protocol, scales=scales, mirror=mirror, apply_exif=apply_exif
        )
        while True:
            requests, evaluation = LabelledImages(dataset, start), EvaluationResponses(call, progress)
            stream = self._stub.Evaluate(iter(requests), **call.begin())
            try:
                for response in stream:
                    evaluation.read(response)
            except grpc.RpcError as failed:
                requests.raise_local_error()  # if there is one, what the server says of the rest does not matter
                pause = call.pause_after(failed, repeatable=not requests.begun)
            else:
                requests.raise_local_error()
                return evaluation.report()
            finally:
                stream.cancel()
            time.sleep(pause)

    def models(self, *, timeout: Timeout = "client", request_id: str | None = None) -> list[ServedModel]:
        """Return what is served, in the server's order."""
        deadline = self._settings.deadline(timeout)

        def ask(method: Callable[..., Any], request: object) -> Any:
            return _unary_call(method, request, Call(self._settings, deadline, request_id))

        listed = ask(self._stub.ListModels, pb.ListModelsRequest()).models
        asked = (pb.GetModelRequest(name=model.name) for model in listed)
        return [served_model_from_message(ask(self._stub.GetModel, request).model) for request in asked]

    def ready(self, *, timeout: Timeout = "client") -> bool:
        """Whether the server takes calls: False where it says that it does not, or nothing answers in time."""
        call = Call(self._settings, self._settings.deadline(timeout), None)
        try:
            return is_serving(self._health.Check(HEALTH, **call.begin()))
        except grpc.RpcError as failed:
            if is_unreachable(failed):
                return False
            raise call.failure_of(failed).error from failed


def _unary_call(method: Callable[..., Any], request: object, call: Call) -> Any:
    """Make a call of one request and one answer."""
    while True:
        try:
            response = method(request, **call.begin())
        except grpc.RpcError as failed:
            pause = call.pause_after(failed)
        else:
            call.answer_received()
            return response
        time.sleep(pause)


def _to_answer(result: Result) -> tuple[Any, Answer | PreluNetError]:
    key, outcome = result
    return key, answer_from_message(outcome) if isinstance(outcome, pb.ClassifyResponse) else outcome


# What `Client` needs for its streams: images and requests between threads.


class Exchange:
    """`PendingImages` between three threads: the caller's that reads, gRPC's that sends, and one that takes images.

    images: what the caller gives; asked in a thread of its own, because a stream that breaks may be taken up again
    while the caller's iterable still makes the next image.
    """

    def __init__(self, pending: PendingImages, images: Iterable[object]) -> None:
        self._pending = pending
        self._changed = threading.Condition()
        self._stopped = False
        self._stream = 0
        threading.Thread(target=self._take, args=(images,), name="prelunet-images", daemon=True).start()

    def _take(self, images: Iterable[object]) -> None:
        """Take images while there is room, until there are no more of them."""
        error: BaseException | None = None
        try:
            each = iter(images)
            while self._has_room():
                given = next(each)
                with self._changed:
                    self._pending.add(given)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:  # told by raise_error in the caller's thread
            error = raised
        with self._changed:
            self._pending.finish(error)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until there is room for an image; False once the caller wants no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.has_room or self._stopped)
            return not self._stopped

    def wait_for_work(self) -> bool:
        """Wait until there is something to send or to tell; False when everything is told."""
        with self._changed:
            while (pause := self._pending.seconds_until_work()) != 0.0:
                self._changed.wait(pause)
            return not self._pending.done

    def open_stream(self) -> Iterator[pb.ClassifyStreamRequest]:
        """Return the requests of a new stream, for gRPC's thread; those of the stream before end."""
        with self._changed:
            self._stream += 1
            return self._requests(self._stream)

    def _requests(self, stream: int) -> Iterator[pb.ClassifyStreamRequest]:
        while (request := self._next_request(stream)) is not None:
            yield request

    def _next_request(self, stream: int) -> pb.ClassifyStreamRequest | None:
        """Wait for a request of this stream; None when it should send no more."""
        with self._changed:
            while self._stream == stream and not self._pending.idle:
                if (request := self._pending.next_request()) is not None:
                    return request
                self._changed.wait(self._pending.seconds_until_due())
            return None

    def answer_received(self, response: pb.ClassifyStreamResponse) -> list[Result]:
        """Take note of an answer; returns what there is to tell."""
        with self._changed:
            self._pending.answer_received(response)
            return self._take_results()

    def stream_ended(self) -> None:
        """Take note that the server ended the stream, whose requests end too."""
        with self._changed:
            self._close_stream()
            self._pending.stream_ended()

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Take note that the stream broke, whose requests end too; raises the error where that is the end of all."""
        with self._changed:
            self._close_stream()  # first: what is taken from here on belongs to the next stream
            self._pending.stream_failed(failed)

    def take_results(self) -> list[Result]:
        """Return what there is to tell."""
        with self._changed:
            return self._take_results()

    def _take_results(self) -> list[Result]:
        self._changed.notify_all()  # there may be room now
        return self._pending.take_results()

    def stop(self) -> None:
        """Take no more images; the thread that takes them ends, at the latest when the next one is there."""
        with self._changed:
            self._stopped = True
            self._close_stream()

    def _close_stream(self) -> None:
        self._stream += 1
        self._changed.notify_all()


class LabelledImages:
    """The messages of one evaluation, and what went wrong while they were made.

    gRPC asks for them in a thread of its own and would tell only that something failed there. begun: whether an image
    has been asked for.
    """

    def __init__(self, dataset: Dataset, start: pb.EvaluateRequest) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[pb.EvaluateRequest]:
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield labelled_image(self._dataset, sample)
        except Exception as error:  # told by raise_local_error in the caller's thread; ending the stream ends the call
            self._error = error

    def raise_local_error(self) -> None:
        """Raise what went wrong on this side, if anything did."""
        if self._error is not None:
            raise self._error
