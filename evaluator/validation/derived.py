"""What merged runs and ensembles share: they are made from the folders of other runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.validation.run_log import RESUMED, STARTED, last_beginning
from prelunet.evaluator.validation.writer import RunWriter

_OF_THE_SOURCE = {"event", "date", "done"}  # of a beginning in its log, not what a derived run takes over


def refuse_source_as_target(sources: Sequence[Path], folder: Path) -> None:
    """Refuse to write into a folder that is read: with --fresh it would be deleted first."""
    for source in sources:
        if source.exists() and folder.exists() and source.samefile(folder):
            raise UsageError(f"{folder}: is one of the runs that are read. Choose a new folder with --run")


def begin(writer: RunWriter, images: int, sources: Sequence[Path], announce: Callable[[str], None]) -> None:
    """Say and log where the writing of a derived run starts.

    The log tells where the dataset lay, as the log of the first source does that knows it: a report looks there.
    """
    if writer.done == images:
        announce(f"{writer.folder}: finished already; comparing it with the runs it is made of")
        return
    new, place = writer.done == 0, f"{writer.done} of {images} images"
    announce(f"{writer.folder}: {'new' if new else f'going on after {place}'}")
    known = next((entry for source in sources if (entry := last_beginning(source)) is not None), {})
    fields = {key: value for key, value in known.items() if key not in _OF_THE_SOURCE}
    writer.log(
        STARTED if new else RESUMED,
        **{**fields, "done": writer.done, "sources": [str(source.resolve()) for source in sources]},
    )
