"""The models of a server: names, sessions, and that each has run once before anybody is told that it is ready."""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from evaluator.engine.session import Placement, Session, open_placed
from evaluator.errors import ModelNotFound, UsageError
from evaluator.imaging.decode import DecodeLimits
from evaluator.machine import cores
from evaluator.serving.classifier import MAX_WAITING, Classifier

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ModelFile:
    """One model to serve: the name by which callers ask for it, and its file."""

    name: str
    path: Path


def parse_models(options: Sequence[str]) -> tuple[ModelFile, ...]:
    """Read `NAME=MODEL.onnx` options; raises UsageError for one that is none, and for a name given twice."""
    files = []
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path or not _NAME.fullmatch(name):
            raise UsageError(
                f"--model {option}: give a name and a file, as in --model flowers=flowers.onnx. "
                "A name has up to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit"
            )
        files.append(ModelFile(name, Path(path)))
    names = [file.name for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--model {twice}=…: the name is given twice; each model needs its own")
    if not files:
        raise UsageError("no model to serve; name at least one: --model NAME=MODEL.onnx")
    return tuple(files)


def load_models(files: Iterable[ModelFile], placement: Placement) -> list[tuple[ModelFile, Session]]:
    """Load each model and run it once; all or none. Raises what `open_placed` raises."""
    return [(file, open_placed(file.path, placement, for_many=True)) for file in files]


class Models:
    """What is served, by name, in the order given. Owns the threads that decode for all of it."""

    def __init__(
        self, loaded: Iterable[tuple[ModelFile, Session]], limits: DecodeLimits, max_waiting: int = MAX_WAITING
    ) -> None:
        self._decoders = ThreadPoolExecutor(cores(), thread_name_prefix="decode")
        self._by_name = {
            file.name: Classifier(file.name, file.path.name, session, self._decoders, limits, max_waiting)
            for file, session in loaded
        }

    def get(self, name: str) -> Classifier:
        """Return the model of that name; of no name the only one. Raises ModelNotFound that lists what there is."""
        if not name and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            what = f"no model '{name}' is served" if name else "several models are served, so a name is needed"
            raise ModelNotFound(f"{what}. There are: {', '.join(self._by_name)}")
        return self._by_name[name]

    def all(self) -> list[Classifier]:
        """Return every model, in the order given."""
        return list(self._by_name.values())

    def close(self) -> None:
        """Finish what waits and end all threads."""
        self._decoders.shutdown()
        for classifier in self._by_name.values():
            classifier.close()
