"""The client of threads."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from prelunet.evaluator.client.calls import RETRIES, Call, Terms, Timeout
from prelunet.evaluator.client.connection import CHANNEL_OPTIONS
from prelunet.evaluator.client.many import AHEAD, Many, Told
from prelunet.evaluator.client.requests import classify_request, evaluate_start
from prelunet.evaluator.client.results import (
    HEALTH,
    Evaluation,
    Progress,
    ServedModel,
    is_serving,
    not_there,
    served_model,
)
from prelunet.evaluator.client.retries import Retries
from prelunet.evaluator.client.sync_streams import Exchange, LabelledImages
from prelunet.evaluator.datasets.sample import Dataset
from prelunet.evaluator.engine.answer import Answer
from prelunet.evaluator.errors import PreluNetError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.wire import answer_from_message


class Client:
    """A connection to a server; use it in a `with` block, from any number of threads.

    address: host:port, or a name as dns:///host:port that stands for several servers, which then take turns;
    timeout: seconds for an answer to one image or question, retries included, None to wait for ever;
    retries: what is tried again, and when.

    Every method raises the errors of `evaluator.errors` that the server had, and EnvironmentFault that names the
    address when there is no way to a server. The model's name may be left out where only one is served. `request_id`
    (1 to 128 letters, digits, '.', '_', ':' and '-') stands in the server's log and in the errors of the call.
    """

    def __init__(self, address: str, *, timeout: float | None = 60.0, retries: Retries = RETRIES) -> None:
        self._terms = Terms(address, timeout, retries)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.PreluNetServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._terms.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight end with Interrupted."""
        self._terms.closed = True
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
        call = Call(self._terms, self._terms.deadline(timeout), request_id)
        return answer_from_message(_answer(self._stub.Classify, request, call))

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
        ahead: int = AHEAD,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Classify many encoded images over one stream; gives the answers as they come, in any order.

        images: (id, image), where an id may be anything; or images alone, whose ids are then 0, 1, 2 …; asked for the
        next one in another thread. Gives (id, answer), or (id, error) for an image that is refused: the others go on.
        ahead: images that are held at most; no more are asked for while so many have no answer, or an answer that
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
        return self._stream(Many(self._terms, request, self._terms.deadline(timeout), request_id, ahead), images)

    def _stream(self, many: Many, images: Iterable[Any]) -> Generator[tuple[Any, Answer | PreluNetError], None, None]:
        """Give the answers; a stream is open while there is something to send or to wait for."""
        exchange = Exchange(many, images)
        try:
            while exchange.wait_for_work():
                if results := exchange.take_results():
                    yield from map(_told, results)
                    continue
                stream = self._stub.ClassifyStream(exchange.open_stream(), **many.call.begin())
                try:
                    for response in stream:
                        yield from map(_told, exchange.answered(response))
                    exchange.ended()
                except grpc.RpcError as failed:
                    exchange.broke(failed)
                finally:
                    stream.cancel()
            many.raise_error()
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
        progress: Callable[[Progress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Send a labelled dataset and return its report, equal to what `prelunet validate` and `report` give.

        But of the refused images it lists the first only, at most 1000 and 1 MiB of names and reasons.
        progress: called about once a second with how far it is; timeout: seconds for all of it, None to wait for ever.
        The other arguments are those of `classify`. Once the first image has been read, nothing is tried again.
        Raises DatasetError for an image that cannot be read.
        """
        call = Call(self._terms, self._terms.deadline(timeout), request_id)
        start = evaluate_start(
            dataset, model=model, protocol=protocol, scales=scales, mirror=mirror, apply_exif=apply_exif
        )
        while True:
            requests, evaluation = LabelledImages(dataset, start), Evaluation(call, progress)
            stream = self._stub.Evaluate(iter(requests), **call.begin())
            try:
                for response in stream:
                    evaluation.read(response)
            except grpc.RpcError as failed:
                requests.raise_own_error()  # if there is one, what the server says of the rest does not matter
                pause = call.pause_after(failed, repeatable=not requests.begun)
            else:
                requests.raise_own_error()
                return evaluation.report()
            finally:
                stream.cancel()
            time.sleep(pause)

    def models(self, *, timeout: Timeout = "client", request_id: str | None = None) -> list[ServedModel]:
        """Return what is served, in the server's order."""
        deadline = self._terms.deadline(timeout)

        def ask(method: Callable[..., Any], request: object) -> Any:
            return _answer(method, request, Call(self._terms, deadline, request_id))

        listed = ask(self._stub.ListModels, pb.ListModelsRequest()).models
        asked = (pb.GetModelRequest(name=model.name) for model in listed)
        return [served_model(ask(self._stub.GetModel, request).model) for request in asked]

    def ready(self, *, timeout: Timeout = "client") -> bool:
        """Whether the server takes calls: False where it says that it does not, or nothing answers in time."""
        call = Call(self._terms, self._terms.deadline(timeout), None)
        try:
            return is_serving(self._health.Check(HEALTH, **call.begin()))
        except grpc.RpcError as failed:
            if not_there(failed):
                return False
            raise call.failure_of(failed).error from failed


def _answer(method: Callable[..., Any], request: object, call: Call) -> Any:
    """Make a call of one request and one answer."""
    while True:
        try:
            response = method(request, **call.begin())
        except grpc.RpcError as failed:
            pause = call.pause_after(failed)
        else:
            call.answered()
            return response
        time.sleep(pause)


def _told(told: Told) -> tuple[Any, Answer | PreluNetError]:
    key, result = told
    return key, answer_from_message(result) if isinstance(result, pb.ClassifyResponse) else result
