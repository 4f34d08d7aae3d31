"""Contracts of exported nets, without a file."""

from typing import Any

from prelunet.evaluator.architectures import Architecture, architecture
from prelunet.evaluator.contract import ClassEntry, ModelContract
from prelunet.export.dense.build import build_contract as contract_of


def build_contract(net: Architecture | str, classes: int = 1000, **options: Any) -> ModelContract:
    """Return the contract of a net with `classes` classes; options: as of export."""
    found = architecture(net) if isinstance(net, str) else net
    return contract_of(
        found, [ClassEntry(f"n{index}", "thing") for index in range(classes)], checkpoint_sha256="", **options
    )
