"""Which model files are served under which names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prelunet.evaluator.errors import UsageError

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


def require_files(files: Iterable[ModelFile]) -> None:
    """Refuse files that cannot be read, all before the first is loaded; raises UsageError."""
    for file in files:
        try:
            with file.path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"--model {file.name}={file.path}: cannot be read ({error.strerror}). Give the path of a model file"
            ) from error
