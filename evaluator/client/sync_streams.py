"""What `Client` needs for its streams: images and requests between threads."""

import threading
from collections.abc import Iterable, Iterator

import grpc

from prelunet.evaluator.client.many import Many, Told
from prelunet.evaluator.client.requests import labelled_image
from prelunet.evaluator.datasets.sample import Dataset
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb


class Exchange:
    """`Many` between three threads: the caller's that reads, gRPC's that sends, and one that takes images.

    images: what the caller gives; asked in a thread of its own, because a stream that breaks may be taken up again
    while the caller's iterable still makes the next image.
    """

    def __init__(self, many: Many, images: Iterable[object]) -> None:
        self._many = many
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
                    self._many.take(given)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:  # told by raise_error in the caller's thread
            error = raised
        with self._changed:
            self._many.finish(error)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until there is room for an image; False once the caller wants no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._many.room or self._stopped)
            return not self._stopped

    def wait_for_work(self) -> bool:
        """Wait until there is something to send or to tell; False when everything is told."""
        with self._changed:
            while (pause := self._many.work_in()) != 0.0:
                self._changed.wait(pause)
            return not self._many.done

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
            while self._stream == stream and not self._many.idle:
                if (request := self._many.next_request()) is not None:
                    return request
                self._changed.wait(self._many.due_in())
            return None

    def answered(self, response: pb.ClassifyStreamResponse) -> list[Told]:
        """Take note of an answer; returns what there is to tell."""
        with self._changed:
            self._many.answered(response)
            return self._told()

    def ended(self) -> None:
        """Take note that the server ended the stream, whose requests end too."""
        with self._changed:
            self._close_stream()
            self._many.ended()

    def broke(self, failed: grpc.RpcError) -> None:
        """Take note that the stream broke, whose requests end too; raises the error where that is the end of all."""
        with self._changed:
            self._close_stream()  # first: what is taken from here on belongs to the next stream
            self._many.broke(failed)

    def take_results(self) -> list[Told]:
        """Return what there is to tell."""
        with self._changed:
            return self._told()

    def _told(self) -> list[Told]:
        self._changed.notify_all()  # there may be room now
        return self._many.take_results()

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
        except Exception as error:  # told by raise_own_error in the caller's thread; ending the stream ends the call
            self._error = error

    def raise_own_error(self) -> None:
        """Raise what went wrong on this side, if anything did."""
        if self._error is not None:
            raise self._error
