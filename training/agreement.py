"""What the processes of a training do together before it begins: agree on what is asked for, and hold its folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prelunet.evaluator.differences import differences, shown
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from prelunet.training.group import Group
from prelunet.training.run_folder import open_run_folder


def check_place(folder: Path, dataset: Path) -> None:
    """Raise UsageError for a run's folder among the class folders, where it would be taken for a class."""
    if folder.resolve().parent in {(dataset / split).resolve() for split in ("train", "val")}:
        raise UsageError(
            f"--out {folder}: among the class folders of {dataset} it would be taken for a class. Choose a folder "
            "outside the images"
        )


def check_alike(group: Group, wanted: dict[str, Any]) -> None:
    """Raise UsageError in every process when not all of them were asked for the same. Collective.

    wanted: plain data, all that decides the results. Else each would train on its own images or at its own rate, and
    the mean of their gradients would be that of no training.
    """
    first, *others = group.everybody(wanted)
    for rank, other in enumerate(others, start=1):
        if found := differences(first, other, places=("in process 0", f"in process {rank}")):
            raise UsageError(
                f"the processes of this training were asked for different things:\n{shown(found)}\n"
                "Start all of them with the same command, on machines that have the same images"
            )


@contextmanager
def held_folder(
    group: Group, folder: Path, description: dict[str, Any], *, fresh: bool
) -> Iterator[Callable[[], None] | None]:
    """Hold the run's folder, as `open_run_folder`: the first process does, and the others come when it has."""
    if not group.is_first:
        if group.any(False):
            raise EnvironmentFault("the first process of this training ended before the training began; it says why")
        yield None
        return
    with ExitStack() as stack:
        try:
            make_room = stack.enter_context(open_run_folder(folder, description, fresh=fresh))
        except Exception:  # not KeyboardInterrupt: whoever stops the program does not wait for other processes
            group.any(True)
            raise
        group.any(False)
        yield make_room
