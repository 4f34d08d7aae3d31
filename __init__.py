"""See where your image classifier fails, then serve it.

net = prelunet.load("net.onnx")
net.classify("photo.jpg")

docs/python.md covers the rest, docs/client.md the client of a server. Each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .evaluator.answer import Prediction
    from .evaluator.client import AsyncClient, Client, Credentials
    from .evaluator.errors import (
        CannotTell,
        CheckFailed,
        CheckpointError,
        ContractError,
        DatasetError,
        DeadlinePassed,
        DeviceLost,
        DivergenceError,
        EnvironmentFault,
        ImageError,
        ImageTooLarge,
        Interrupted,
        MissingExtra,
        ModelNotFound,
        ModelRefused,
        NotReady,
        OutOfMemory,
        Overloaded,
        PermissionDenied,
        PreluNetError,
        RunFolderError,
        Unauthenticated,
        UsageError,
    )
    from .evaluator.python.evaluation import Comparison, Evaluation, compare
    from .evaluator.python.net import Answers, Classified, Net
    from .export.finding.find import find_input
    from .export.load import load

    __version__: str

__all__ = [
    "Answers",
    "AsyncClient",
    "CannotTell",
    "CheckFailed",
    "CheckpointError",
    "Classified",
    "Client",
    "Comparison",
    "ContractError",
    "Credentials",
    "DatasetError",
    "DeadlinePassed",
    "DeviceLost",
    "DivergenceError",
    "EnvironmentFault",
    "Evaluation",
    "ImageError",
    "ImageTooLarge",
    "Interrupted",
    "MissingExtra",
    "ModelNotFound",
    "ModelRefused",
    "Net",
    "NotReady",
    "OutOfMemory",
    "Overloaded",
    "PermissionDenied",
    "Prediction",
    "PreluNetError",
    "RunFolderError",
    "Unauthenticated",
    "UsageError",
    "__version__",
    "compare",
    "find_input",
    "load",
]

_MODULES = {
    "Answers": "prelunet.evaluator.python.net",
    "AsyncClient": "prelunet.evaluator.client",
    "Classified": "prelunet.evaluator.python.net",
    "Client": "prelunet.evaluator.client",
    "Comparison": "prelunet.evaluator.python.evaluation",
    "Credentials": "prelunet.evaluator.client",
    "Evaluation": "prelunet.evaluator.python.evaluation",
    "Net": "prelunet.evaluator.python.net",
    "Prediction": "prelunet.evaluator.answer",
    "compare": "prelunet.evaluator.python.evaluation",
    "find_input": "prelunet.export.finding.find",
    "load": "prelunet.export.load",
}  # of all but the errors


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # here, because it takes longer to load than the rest of this package

        return version("prelunet")
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "prelunet.evaluator.errors")), name)
    raise AttributeError(f"module 'prelunet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
