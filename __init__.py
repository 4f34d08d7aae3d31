"""Find out where an image classifier fails, and serve it.

net = prelunet.load("net.onnx")
net.classify("photo.jpg")

docs/python.md covers the rest, docs/client.md the client of a server. Each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .evaluator.client import AsyncClient, Client, Credentials
    from .evaluator.python.evaluation import compare
    from .export.finding.find import find_input
    from .export.load import load

    __version__: str

__all__ = ["AsyncClient", "Client", "Credentials", "__version__", "compare", "find_input", "load"]

_MODULES = {
    "AsyncClient": "prelunet.evaluator.client",
    "Client": "prelunet.evaluator.client",
    "Credentials": "prelunet.evaluator.client",
    "compare": "prelunet.evaluator.python.evaluation",
    "find_input": "prelunet.export.finding.find",
    "load": "prelunet.export.load",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # here, because it takes longer to load than the rest of this package

        return version("prelunet")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'prelunet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
