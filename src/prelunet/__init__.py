"""Train, export, evaluate and serve PReLU-nets (He et al. 2015).

The client of a prelunet server is here: `from prelunet import Client`. It is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prelunet.evaluator.client import AsyncClient, Client

    __version__: str

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # here, because it takes longer to load than the rest of this package

        return version("prelunet")
    if name in __all__:
        return getattr(importlib.import_module("prelunet.evaluator.client"), name)
    raise AttributeError(f"module 'prelunet' has no attribute {name!r}")
