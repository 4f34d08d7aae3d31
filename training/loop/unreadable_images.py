"""Images of a split that broke since they were looked at: deleted, cut short, overwritten."""

from collections.abc import Callable, Iterable

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import DatasetError
from prelunet.training.distributed.process_group import ProcessGroup

MAX_LISTED = 10  # images that are named at once


class UnreadableImages:
    """What was lost of one split so far, in all processes. files: file → reason."""

    def __init__(self, dataset: Dataset, what: str, files: dict[str, str], report: Callable[[str], None]) -> None:
        """Begin with files that are known. what: `train/` or `val/`; report: receives the names of new ones."""
        self.dataset, self.what, self.files, self._report = dataset, what, files, report
        self._new: dict[str, str] = {}
        self._reported = set(files)

    def reset(self) -> None:
        """Forget what was lost, since it may have been mended; what was named once is not named again."""
        self.files.clear()

    def add(self, unreadable: Iterable[tuple[str, str]]) -> None:
        """Note what this process has met."""
        self._new |= {file: reason for file, reason in unreadable if file not in self.files}

    def gather(self, group: ProcessGroup) -> None:
        """Join what all processes have met, and name it. Collective."""
        new = {file: reason for found in group.all_gather(self._new) for file, reason in found.items()}
        self.files |= new
        self._new = {}
        new = {file: reason for file, reason in new.items() if file not in self._reported}
        self._reported |= set(new)
        if new and group.is_first:
            told = [f"  {file}: {reason}" for file, reason in list(new.items())[:MAX_LISTED]]
            more = [f"  … and {len(new) - MAX_LISTED} more"] if len(new) > MAX_LISTED else []
            said = "another of train/ takes the place of each" if self.what == "train/" else "they are left out"
            self._report("\n".join([f"{self.what}: {len(new)} images cannot be read any more; {said}:", *told, *more]))

    def check(self, limit: float) -> None:
        """Raise DatasetError when more than that part of the split broke; after `gather`.

        What could not be decoded when the training began has been told then, and does not count.
        """
        images = len(self.dataset.samples)
        if len(self.files) > limit * images:
            some = "; ".join(f"{file}: {reason}" for file, reason in list(self.files.items())[:3])
            raise DatasetError(
                f"{self.dataset.location}: {len(self.files)} images of {self.what} broke during the training: more "
                f"than max_refused, {100 * limit:g} % of {images}. The last saved state is kept: put the images back "
                f"as they were, and the same command goes on. The first: {some}"
            )
