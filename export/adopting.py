"""A foreign ONNX classifier → a model file of ours, checked against the net itself before it gets its name."""

import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from evaluator.contract import ClassEntry, GoldenImage, ModelContract, TrunkLayer, golden_image
from evaluator.datasets.class_list import read_class_list
from evaluator.engine.scores import softmax
from evaluator.engine.session import PlainNet, open_session
from evaluator.errors import ContractError, EnvironmentFault, UsageError
from evaluator.files import open_atomically, sha256_of
from export.adopt_cost import multiply_adds
from export.adopt_graph import prepare_net, probability_floor, wrap_net
from export.adopt_net import Interface, find_interface, opset_of, read_net, uses_half
from export.adopt_preprocessing import Layout, Preprocessing
from export.verification import Deviation, deviation

Kind = Literal["auto", "logits", "softmax"]
Pixels = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]

OLDEST_SCAN = 9  # the opset from which on Scan has its present form
_IN_HALF, _IN_SINGLE = 1e-2, 1e-3  # how far from 1 a sum of up to some thousand rounded probabilities may be


@dataclass(frozen=True)
class AdoptOptions:
    """What a user says of a net; None: what its file says.

    crop: pixels; net_output: name of the output with the scores; kind: what these are; name: of the architecture.
    """

    preprocessing: Preprocessing
    crop: int | None = None
    layout: Layout | None = None
    net_output: str | None = None
    kind: Kind = "auto"
    name: str | None = None


@dataclass(frozen=True)
class Adopted:
    """What was made of a net, and what was found out about it.

    one_by_one: why the images of a batch go through the net one after another, or empty where they go together;
    deviations: of every run that was compared with the net itself.
    """

    contract: ModelContract
    interface: Interface
    opset: int
    probabilities: bool
    one_by_one: str
    deviations: tuple[Deviation, ...]


@dataclass(frozen=True)
class _Known:
    """One picture, uint8 (crop, crop, 3), and what the net itself says of it, float64 (K,) each."""

    picture: Pixels
    scores: FloatArray
    logits: FloatArray


def adopt(path: Path, output: Path, classes: Path, options: AdoptOptions) -> Adopted:
    """Write the model file of a foreign ONNX classifier.

    The net is run in onnxruntime on a few pictures, preprocessed by plain numpy; the file is written under a temporary
    name, run on the same pictures, alone and in one batch, and renamed when all scores agree; else no file is left.
    Raises ContractError for a net that cannot be adopted, UsageError for options or a class list that do not fit it.
    """
    for name in (path, Path(os.path.realpath(output))):
        os.fspath(name).encode("utf-8")  # UnicodeEncodeError for what the runtime could not open
    with open_atomically(output) as file:  # first, so that a path that cannot be written is refused before the work
        entries = read_class_list(classes)
        net = read_net(path)
        interface = find_interface(path, net, crop=options.crop, layout=options.layout, output=options.net_output)
        _check_preprocessing(path, interface, options.preprocessing)
        raw = _run_net(path, interface, options.preprocessing)
        _check_classes(path, classes, len(raw[0]), len(entries))
        probabilities = _are_probabilities(path, options.kind, raw, half=interface.half)
        known = [_known(*pair, interface, probabilities) for pair in zip(_pictures(interface.crop), raw, strict=True)]
        contract = _contract(path, net, interface, entries, options, known[0])
        opset = opset_of(net)
        prepare_net(net)
        draft = _Draft(net, interface, options.preprocessing, contract, probabilities, opset)
        one_by_one, deviations = _write_checked(file, path, draft, known)
    return Adopted(contract, interface, opset, probabilities, one_by_one, tuple(deviations))


def _pictures(crop: int) -> list[Pixels]:
    """Return the pictures that net and file are compared on, uint8 (crop, crop, 3): no two alike, none symmetric."""
    golden = golden_image(crop, crop)
    noise = np.random.default_rng(0).integers(0, 256, golden.shape, np.uint8)
    return [golden, np.ascontiguousarray(golden[::-1, :, ::-1]), 255 - golden, noise]


def _check_preprocessing(path: Path, interface: Interface, preprocessing: Preprocessing) -> None:
    """Refuse a mean for a net that takes bytes, and none for one that takes numbers: nothing is guessed."""
    if interface.takes_bytes and preprocessing.mean is not None:
        raise UsageError(
            f"{path}: input '{interface.input}' takes bytes, so the net subtracts its mean itself. "
            "Leave --mean and --std out"
        )
    if not interface.takes_bytes and preprocessing.mean is None:
        raise UsageError(
            f"{path}: input '{interface.input}' takes numbers, and the file does not say which. "
            "Give --mean and --std as in its training (--mean 0 --std 1 --range 255 where the net does that itself)"
        )


def _check_classes(path: Path, classes: Path, outputs: int, listed: int) -> None:
    if outputs == listed:
        return
    hint = ""
    if outputs == listed + 1:
        hint = ". Nets of 1001 classes have one for the background first: give it a line of its own"
    raise UsageError(f"{classes}: {listed} classes are listed, but {path} has {outputs}{hint}")


def _run_net(path: Path, interface: Interface, preprocessing: Preprocessing) -> list[FloatArray]:
    """Return what the net itself says of each picture, float64 (K,), alone and with nothing of ours around it."""
    net = PlainNet(path)

    def row_of(picture: Pixels) -> FloatArray:
        found = net.run({interface.input: interface.feed(preprocessing.plain(picture))}, interface.output)
        batch = interface.batch or 1
        if found.ndim < 2 or found.shape[0] != batch or found.shape[1] < 2 or found.shape[2:] not in {(), (1, 1)}:
            raise ContractError(
                f"{path}: output '{interface.output}' has shape {found.shape}, but a classifier gives "
                f"({batch}, classes). Choose another output, or export the net up to its classes"
            )
        row: FloatArray = found[0].reshape(-1).astype(np.float64)
        if not np.isfinite(row).all():
            raise ContractError(f"{path}: gives NaN or infinity for an image, with this mean and std and range")
        return row

    rows = [row_of(picture) for picture in _pictures(interface.crop)]
    again = row_of(golden_image(interface.crop, interface.crop))
    if np.abs(again - rows[0]).max() > 1e-3 * np.abs(rows[0]).max():
        raise ContractError(
            f"{path}: gives other scores each time it sees the same image. Export it in evaluation mode (dropout off)"
        )
    return rows


def _are_probabilities(path: Path, kind: Kind, rows: list[FloatArray], *, half: bool) -> bool:
    """Find out whether a net's output is behind a softmax, by what it says of several pictures.

    Raises UsageError where that contradicts `kind`, or where it looks like neither.
    """
    slack = _IN_HALF if half else _IN_SINGLE
    within = all(row.min() >= 0 and row.max() <= 1 + slack for row in rows)
    summed = within and all(abs(row.sum() - 1) <= slack for row in rows)
    sums = f"the sums over all classes are {', '.join(f'{row.sum():.3g}' for row in rows)}"
    if kind == "softmax" and not summed:
        raise UsageError(f"{path}: --kind softmax, but its outputs are no probabilities ({sums}). Leave --kind out")
    if kind == "logits" and summed:
        raise UsageError(f"{path}: --kind logits, but its outputs are probabilities ({sums}). Leave --kind out")
    if kind == "auto" and within and not summed:
        raise UsageError(
            f"{path}: its outputs lie between 0 and 1 but are no probabilities of one class among all ({sums}); a "
            "sigmoid gives that. If they should be taken as logits all the same, say --kind logits"
        )
    return summed


def _known(picture: Pixels, row: FloatArray, interface: Interface, probabilities: bool) -> _Known:
    if probabilities:
        return _Known(picture, row, np.log(row + probability_floor(interface)))
    return _Known(picture, softmax(row), row)


def _contract(
    path: Path,
    net: ModelProto,
    interface: Interface,
    classes: tuple[ClassEntry, ...],
    options: AdoptOptions,
    golden: _Known,
) -> ModelContract:
    """State everything the file must say of itself: one window, which is the crop."""
    crop, count = interface.crop, multiply_adds(net, interface)
    said = {"input": interface.input, "layout": interface.layout, "output": interface.output}
    try:
        contract = ModelContract(
            architecture={
                "name": path.stem if options.name is None else options.name,
                "activation": "unknown",
                **({} if count is None else {"multiply_adds": count}),
            },
            classes=classes,
            mean_kind="channel",
            trunk=(TrunkLayer(kernel=crop, stride=crop, pad=0),),
            window=1,
            spp_levels=(1,),
            crop=crop,
            default_scales=(crop,),
            max_side=crop,
            canvas="exact",
            precision="fp16" if uses_half(net) else "fp32",
            checkpoint_sha256=sha256_of(path),
            interpolation=options.preprocessing.interpolation,
            training={"adopted": {**said, **options.preprocessing.to_json()}},
        )
        answer = GoldenImage(crop, crop, tuple(golden.scores.tolist()), tuple(golden.logits.tolist()))
        return replace(contract, golden=(answer,))
    except ValueError as error:
        raise UsageError(f"{path}: no model can be made of it: {error}. Change --name or the class list") from error


@dataclass(frozen=True)
class _Draft:
    """All that a model file is built from."""

    net: ModelProto
    interface: Interface
    preprocessing: Preprocessing
    contract: ModelContract
    probabilities: bool
    opset: int

    def data(self, *, one_by_one: bool) -> bytes:
        """Build the file; the same net and versions give the same bytes."""
        model = wrap_net(
            self.net,
            self.interface,
            self.preprocessing,
            self.contract,
            probabilities=self.probabilities,
            one_by_one=one_by_one,
            version=importlib.metadata.version("prelunet"),
        )
        data: bytes = model.SerializeToString(deterministic=True)
        return data


def _write_checked(file: BinaryIO, path: Path, draft: _Draft, known: list[_Known]) -> tuple[str, list[Deviation]]:
    """Write the file with images going together or, where the net cannot do that, one by one.

    Returns why one by one (empty: together), and the deviations. Raises ContractError with the reasons when neither
    gives the net's own scores.
    """
    reason = ""
    for one_by_one in (False, True):
        if one_by_one and draft.opset < OLDEST_SCAN:
            reason += f"; and opset {draft.opset} has no loop over images, which opset {OLDEST_SCAN} has"
            break
        file.seek(0)
        file.truncate()
        file.write(draft.data(one_by_one=one_by_one))
        file.flush()
        try:
            deviations = list(_deviations(Path(file.name), known))
        except EnvironmentFault:  # too little memory, which the other way would not mend
            raise
        except Exception as error:  # the runtime's own classes, which only the session module may know
            text = _in_short(error).replace(file.name, path.name)
        else:
            failed = [d for d in deviations if not d.passed]
            if not failed:
                return reason, deviations
            worst = max(failed, key=lambda d: d.scores)
            text = f"scores of the same image {worst.case} differ by {worst.scores:.1e}"
        reason += f"; and one by one: {text}" if one_by_one else f"together: {text}"
    raise ContractError(
        f"{path}: its images can be run neither together nor one by one ({reason}). Export it with a dynamic batch"
    )


def _in_short(error: Exception) -> str:
    """Return what the runtime says of a failed run: the node if it names one, else the beginning of its text."""
    text = " ".join(str(error).split())
    if node := re.search(r"running (\w+) node\. Name:'(?:net/)?([^']*)'", text):
        return f"its {node[1]} node{' ' + node[2] if node[2] else ''} fails"
    return text[:200] or type(error).__name__


def _deviations(path: Path, known: list[_Known]) -> Iterator[Deviation]:
    """Compare the file in onnxruntime, on the CPU, with what the net itself says: each picture alone, then together."""
    session = open_session(path, "cpu")
    crop = session.contract.crop
    sizes = np.full((len(known), 2), crop, np.int64)
    together = session.run(np.stack([entry.picture for entry in known]), sizes)
    for row, entry in enumerate(known):
        alone = session.run(entry.picture[None], sizes[:1])
        for case, outputs, place in (("alone", alone, 0), ("together", together, row)):
            yield deviation(
                case, (crop, crop), outputs, place, entry.scores, entry.logits, precision=session.contract.precision
            )
