"""A foreign ONNX classifier → a model file of ours, checked against the net itself before it gets its name."""

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from onnx import ModelProto

from prelunet.evaluator.architectures import TrunkLayer
from prelunet.evaluator.arrays import Float64Array, UInt8Array
from prelunet.evaluator.contract import ClassEntry, ModelContract, golden_image
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes.base import error_summary
from prelunet.evaluator.engine.runtimes.onnx import RawOnnxModel
from prelunet.evaluator.engine.scores import softmax
from prelunet.evaluator.engine.verify import Deviation, deviation, golden_answer
from prelunet.evaluator.errors import ContractError, EnvironmentFault, UsageError
from prelunet.evaluator.files import check_not_input, open_atomically, sha256_of
from prelunet.export.foreign.read_net import (
    NetInterface,
    count_multiply_adds,
    find_interface,
    opset_of,
    random_operators,
    read_net,
    uses_half,
)
from prelunet.export.foreign.wrap_net import prepare_net, probability_floor, wrap_net
from prelunet.training.importing.preprocessing import Layout, Preprocessing

OutputKind = Literal["auto", "logits", "softmax"]

OLDEST_SCAN = 9  # the opset from which on Scan has its present form
_REPEATED_IMAGES = 2  # pictures that the net is run on twice
# Allowed difference between the two runs, as a fraction of the largest output.
_REPEAT_TOLERANCE_HALF, _REPEAT_TOLERANCE_SINGLE = 1e-3, 1e-6
# Allowed difference from 1 of the sum of up to a few thousand rounded probabilities.
_SUM_TOLERANCE_HALF, _SUM_TOLERANCE_SINGLE = 1e-2, 1e-3


@dataclass(frozen=True)
class AdoptOptions:
    """What a user says of a net; None: what its file says.

    crop: pixels; net_output: name of the output with the scores; kind: what these are; name: of the architecture.
    """

    preprocessing: Preprocessing
    crop: int | None = None
    layout: Layout | None = None
    net_output: str | None = None
    kind: OutputKind = "auto"
    name: str | None = None


@dataclass(frozen=True)
class AdoptResult:
    """What was made of a net, and what was found out about it.

    sequential_reason: why the images of a batch go through the net one after another, or empty where they go together;
    deviations: of every run that was compared with the net itself.
    """

    contract: ModelContract
    interface: NetInterface
    opset: int
    probabilities: bool
    sequential_reason: str
    deviations: tuple[Deviation, ...]


@dataclass(frozen=True)
class _Reference:
    """One picture, uint8 (crop, crop, 3), and what the net itself says of it, float64 (K,) each."""

    picture: UInt8Array
    scores: Float64Array
    logits: Float64Array


def adopt(path: Path, output: Path, classes: Path, options: AdoptOptions) -> AdoptResult:
    """Write the model file of a foreign ONNX classifier.

    The net is run in onnxruntime on a few pictures, preprocessed by plain numpy; the file is written under a temporary
    name, run on the same pictures, alone and in one batch, and renamed when all scores agree; else no file is left.
    Raises ContractError for a net that cannot be adopted, UsageError for options or a class list that do not fit it.
    """
    for name in (path, Path(os.path.realpath(output))):
        os.fspath(name).encode("utf-8")  # UnicodeEncodeError for what the runtime could not open
    check_not_input(output, (path, classes))
    with open_atomically(output) as file:  # first, so that a path that cannot be written is refused before the work
        entries = read_class_list(classes)
        net = read_net(path, output)
        interface = find_interface(path, net, crop=options.crop, layout=options.layout, output=options.net_output)
        _check_preprocessing(path, interface, options.preprocessing)
        pictures = _pictures(interface.crop)
        raw = _run_net(path, interface, options.preprocessing, pictures, random_operators(net))
        _check_classes(path, classes, len(raw[0]), len(entries))
        probabilities = _are_probabilities(path, options.kind, raw, half=interface.half)
        references = [
            _build_reference(*pair, interface, probabilities) for pair in zip(pictures.values(), raw, strict=True)
        ]
        contract = _contract(path, net, interface, entries, options, references[0])
        opset = opset_of(net)
        prepare_net(net)
        draft = _Draft(net, interface, options.preprocessing, contract, probabilities, opset)
        sequential_reason, deviations = _write_checked(file, path, draft, references)
    return AdoptResult(contract, interface, opset, probabilities, sequential_reason, tuple(deviations))


def _pictures(crop: int) -> dict[str, UInt8Array]:
    """Return the pictures that net and file are compared on by name, uint8 (crop, crop, 3), the golden image first.

    No two alike, and of several ranges, so that a net that measures its batch (its range, its mean, its size) says of
    a picture something else among the others than alone; more than the batch of 1, 4 or 8 that a net may single out.
    """
    golden = golden_image(crop, crop)
    noise = np.random.default_rng(0).integers(0, 256, golden.shape, np.uint8)
    return {
        "the golden image": golden,
        "the golden image, mirrored": np.ascontiguousarray(golden[::-1, :, ::-1]),
        "the golden image, turned": np.ascontiguousarray(golden.transpose(1, 0, 2)),
        "the golden image, inverted": 255 - golden,
        "noise": noise,
        "a dark picture": golden // 8,
        "a grey picture": 128 + noise // 32,
        "all black": np.zeros_like(golden),
        "all white": np.full_like(golden, 255),
    }


def _check_preprocessing(path: Path, interface: NetInterface, preprocessing: Preprocessing) -> None:
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


def _run_net(
    path: Path,
    interface: NetInterface,
    preprocessing: Preprocessing,
    pictures: Mapping[str, UInt8Array],
    drawing: list[str],
) -> list[Float64Array]:
    """Return what the net itself says of each picture, float64 (K,), alone and with nothing of ours around it.

    drawing: the operators of the net that draw random numbers, for the message where its answers differ.
    """
    net = RawOnnxModel(path, threads=1)  # the last bits of the golden scores depend on the number of threads

    def row_of(what: str, picture: UInt8Array) -> Float64Array:
        found = net.run({interface.input: interface.feed(preprocessing.apply(picture))}, interface.output)
        batch = interface.batch or 1
        if found.ndim < 2 or found.shape[0] != batch or found.shape[1] < 2 or found.shape[2:] not in {(), (1, 1)}:
            raise ContractError(
                f"{path}: output '{interface.output}' has shape {found.shape}, but a classifier gives "
                f"({batch}, classes). Choose another output, or export the net up to its classes"
            )
        row: Float64Array = found[0].reshape(-1).astype(np.float64)
        if not np.isfinite(row).all():
            raise ContractError(
                f"{path}: gives NaN or infinity for an image ({what}), with this mean and std and range"
            )
        return row

    rows = [row_of(*entry) for entry in pictures.items()]
    # Repeat the first runs, with a tolerance: a runtime need not return the same bits twice.
    tolerance = 0 if drawing else _REPEAT_TOLERANCE_HALF if interface.half else _REPEAT_TOLERANCE_SINGLE
    for (what, picture), row in list(zip(pictures.items(), rows, strict=True))[:_REPEATED_IMAGES]:
        off = float(np.abs(row_of(what, picture) - row).max())
        if off > tolerance * np.abs(row).max():
            why = f"; it draws random numbers ({', '.join(drawing)})" if drawing else ""
            raise ContractError(
                f"{path}: gives other scores each time it sees the same image{why}. Export it in evaluation mode "
                "(dropout off)"
            )
    return rows


def _are_probabilities(path: Path, kind: OutputKind, rows: list[Float64Array], *, half: bool) -> bool:
    """Find out whether a net's output is behind a softmax, by what it says of several pictures.

    Raises UsageError where that contradicts `kind`, or where it looks like neither.
    """
    slack = _SUM_TOLERANCE_HALF if half else _SUM_TOLERANCE_SINGLE
    within = all(row.min() >= 0 and row.max() <= 1 + slack for row in rows)
    summed = within and all(abs(row.sum() - 1) <= slack for row in rows)
    totals = sorted(float(row.sum()) for row in rows)
    sums = f"the sums over all classes run from {totals[0]:.3g} to {totals[-1]:.3g}"
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


def _build_reference(
    picture: UInt8Array, row: Float64Array, interface: NetInterface, probabilities: bool
) -> _Reference:
    if probabilities:
        return _Reference(picture, row, np.log(row + probability_floor(interface)))
    return _Reference(picture, softmax(row), row)


def _contract(
    path: Path,
    net: ModelProto,
    interface: NetInterface,
    classes: tuple[ClassEntry, ...],
    options: AdoptOptions,
    golden: _Reference,
) -> ModelContract:
    """State everything the file must say of itself: one window, which is the crop."""
    crop, count = interface.crop, count_multiply_adds(net, interface)
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
        return replace(contract, golden=(golden_answer(crop, crop, golden.scores, golden.logits),))
    except ValueError as error:
        raise UsageError(f"{path}: no model can be made of it: {error}. Change --name or the class list") from error


@dataclass(frozen=True)
class _Draft:
    """All that a model file is built from."""

    net: ModelProto
    interface: NetInterface
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


def _write_checked(
    file: BinaryIO, path: Path, draft: _Draft, references: list[_Reference]
) -> tuple[str, list[Deviation]]:
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
            with np.errstate(all="ignore"):  # NaN and infinity are deviations like others
                deviations = list(_deviations(Path(file.name), references))
        except EnvironmentFault:  # too little memory, which the other way would not mend
            raise
        except Exception as error:  # the runtime's own classes, which only the session module may know
            text = _in_short(error).replace(file.name, path.name)
        else:
            failed = [d for d in deviations if not d.passed]
            if not failed:
                return reason, deviations
            worst = max(failed, key=lambda d: (d.scores, d.logits))
            text = f"scores of the same image {worst.case} differ by {worst.scores:.1e}"
        reason += f"; and one by one: {text}" if one_by_one else f"together: {text}"
    raise ContractError(
        f"{path}: its images can be run neither together nor one by one ({reason}). Export it with a dynamic batch"
    )


def _in_short(error: Exception) -> str:
    """Return what the runtime says of a failed run: the node if it names one, else the beginning of its text."""
    text = error_summary(error)
    if node := re.search(r"running (\w+) node\. Name:'(?:net/)?([^']*)'", text):
        return f"its {node[1]} node{' ' + node[2] if node[2] else ''} fails"
    return text


def _deviations(path: Path, references: list[_Reference]) -> Iterator[Deviation]:
    """Compare the file in onnxruntime, on the CPU, with what the net itself says: each picture alone, then together."""
    session = open_session(path, "cpu")
    crop = session.contract.crop
    sizes = np.full((len(references), 2), crop, np.int64)
    together = session.run(np.stack([entry.picture for entry in references]), sizes)
    for row, entry in enumerate(references):
        alone = session.run(entry.picture[None], sizes[:1])
        for case, outputs, place in (("alone", alone, 0), ("together", together, row)):
            yield deviation(
                case, (crop, crop), outputs, place, entry.scores, entry.logits, precision=session.contract.precision
            )
