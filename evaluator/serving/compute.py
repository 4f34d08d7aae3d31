"""The one thread that owns a session, and the views of all requests that wait for it.

The thread takes everything that waits, plans batches of it as `engine.batching` does everywhere, runs the first and
looks again, so that what came meanwhile can share the next. The first batch always holds the view that has waited
longest: nothing starves.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from evaluator.engine.classify import Model, ViewResult, plan_views, run_batch
from evaluator.imaging.views import ViewImage


@dataclass
class _Request:
    """The views of one image, and the future of their results."""

    results: list[ViewResult | None]
    keep_windows: bool
    future: Future[list[ViewResult]] = field(default_factory=Future)

    def finish(self, index: int, result: ViewResult) -> None:
        """Keep the result of one view, and answer when it was the last."""
        self.results[index] = result
        results = [kept for kept in self.results if kept is not None]
        if len(results) == len(self.results) and self.future.set_running_or_notify_cancel():
            self.future.set_result(results)

    def fail(self, error: Exception) -> None:
        """Answer with an error, once."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True)
class _Waiting:
    """One view in the queue, and its place in its request."""

    request: _Request
    index: int
    view: ViewImage


class ComputeThread:
    """Runs views on a session that nobody else may run."""

    def __init__(self, session: Model, name: str) -> None:
        self._session = session
        self._incoming: queue.SimpleQueue[list[_Waiting] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"compute-{name}", daemon=True)
        self._thread.start()

    def submit(self, views: Sequence[ViewImage], *, keep_windows: bool = False) -> Future[list[ViewResult]]:
        """Queue the views of one image; the future gives their results in the same order. Safe in any thread.

        keep_windows: with each view's window scores, which a heat map needs.
        Cancelling the future drops those of its views that still wait. When a batch fails, the requests that had views
        in it get its error, and no others.
        """
        request = _Request([None] * len(views), keep_windows)
        self._incoming.put([_Waiting(request, index, view) for index, view in enumerate(views)])
        return request.future

    def close(self) -> None:
        """Finish what waits and end the thread."""
        self._incoming.put(None)
        self._thread.join()

    def _work(self) -> None:
        waiting: list[_Waiting] = []
        open_ = True
        while open_ or waiting:
            open_ = self._take_incoming(waiting) and open_
            waiting = [view for view in waiting if not view.request.future.done()]  # cancelled, or failed in a batch
            if not waiting:
                continue
            try:
                waiting = self._run_first_batch(waiting)
            except Exception as error:  # a thread that died here would leave every later call waiting for ever
                for view in waiting:
                    view.request.fail(error)
                waiting = []

    def _take_incoming(self, waiting: list[_Waiting]) -> bool:
        """Move all that came into `waiting`; sleep when there is nothing at all. Returns False once closed."""
        while not waiting or not self._incoming.empty():
            views = self._incoming.get()
            if views is None:
                return False
            waiting.extend(views)
        return True

    def _run_first_batch(self, waiting: list[_Waiting]) -> list[_Waiting]:
        """Run the batch of the view that has waited longest; returns the views that are not in it.

        All that waits is planned, and the first batch is run as it was planned: its views alone might be given another
        canvas, for which a GPU would have to prepare itself anew.
        """
        views = [waiter.view for waiter in waiting]
        batch = plan_views(self._session, views).batches[0]
        members = [waiting[index] for index in batch.indices]
        keep_windows = any(member.request.keep_windows for member in members)
        try:
            results = run_batch(self._session, batch, views, keep_windows=keep_windows)
        except Exception as error:
            for member in members:
                member.request.fail(error)
        else:
            for index, result in results.items():
                waiting[index].request.finish(waiting[index].index, result)
        return [waiter for index, waiter in enumerate(waiting) if index not in batch.indices]
