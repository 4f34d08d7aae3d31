"""Images of a split that became unreadable during a run: deleted, truncated or overwritten files."""

from collections.abc import Callable, Iterable

from ...evaluator.datasets.dataset import Dataset
from ...evaluator.errors import DatasetError
from ..distributed.process_group import ProcessGroup

MAX_LISTED = 10  # images listed in one message


class UnreadableImages:
    """The unreadable images of one split so far, in all processes. files: file → reason."""

    def __init__(self, dataset: Dataset, split: str, files: dict[str, str], report: Callable[[str], None]) -> None:
        """Start with known files. split: `train/` or `val/`; report: receives the names of new files."""
        self.dataset, self.split, self.files, self._report = dataset, split, files, report
        self._new: dict[str, str] = {}
        self._reported = set(files)

    def reset(self) -> None:
        """Forget all files, since they may have been repaired; those already reported are not reported again."""
        self.files.clear()

    def add(self, unreadable: Iterable[tuple[str, str]]) -> None:
        self._new |= {file: reason for file, reason in unreadable if file not in self.files}

    def gather(self, group: ProcessGroup) -> None:
        """Combine the files of all processes, and report the new ones. Collective."""
        new = {file: reason for found in group.all_gather(self._new) for file, reason in found.items()}
        self.files |= new
        self._new = {}
        new = {file: reason for file, reason in new.items() if file not in self._reported}
        self._reported |= set(new)
        if new:
            listed = [f"  {file}: {reason}" for file, reason in list(new.items())[:MAX_LISTED]]
            rest = [f"  … and {len(new) - MAX_LISTED} more"] if len(new) > MAX_LISTED else []
            action = "each is substituted by another image of train/" if self.split == "train/" else "they are skipped"
            self._report(
                "\n".join([f"{self.split}: {len(new)} images have become unreadable; {action}:", *listed, *rest])
            )

    def check(self, limit: float) -> None:
        """Raise DatasetError if more than this fraction of the split became unreadable. Call after `gather`.

        Images that could not be decoded at the start of the run were reported then and do not count.
        """
        images = len(self.dataset.samples)
        if len(self.files) > limit * images:
            some = "; ".join(f"{file}: {reason}" for file, reason in list(self.files.items())[:3])
            raise DatasetError(
                f"{self.dataset.location}: {len(self.files)} images of {self.split} became unreadable during training, "
                f"more than max_refused ({100 * limit:g} % of {images}). The last saved state is kept. Restore the "
                f"images and run the same command to resume. The first: {some}"
            )
