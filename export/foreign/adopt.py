"""Adoption of a foreign ONNX classifier: a model file checked against the original net before it is put in place."""

import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto
from onnx.helper import np_dtype_to_tensor_dtype

from ...evaluator.architectures import OpaqueNet, TrunkLayer
from ...evaluator.arrays import Float64Array, UInt8Array
from ...evaluator.contract import (
    MAX_CROPS_PER_SIDE,
    ClassEntry,
    ModelContract,
    Tolerance,
    golden_image,
    golden_sizes,
)
from ...evaluator.engine.runtimes.base import Precision
from ...evaluator.engine.runtimes.onnx import RawOnnxModel
from ...evaluator.engine.scores import softmax
from ...evaluator.engine.verify import Deviation, golden_answer
from ...evaluator.errors import ContractError, UsageError
from ...evaluator.files import check_not_input, open_atomically
from ...evaluator.protocols import LONG_SIDE_CAP
from ...training.importing.preprocessing import Layout, Preprocessing
from ..dense.build import MAX_CANVAS_SIDE
from ..parity import WindowArrays, golden_answers
from .check import Reference, summarize, write_checked, write_dense
from .dense import MULTI_SCALE, Head, find_head, make_dense, part_of
from .quantized import Form, difference, find_form, in_int8, int8_tolerance, loader
from .read_net import (
    NetInterface,
    count_multiply_adds,
    digest_of,
    find_interface,
    opset_of,
    read_net,
)
from .sidecars import ClassList
from .wrap_net import prepare_net, probability_floor, wrap_net

OutputKind = Literal["auto", "logits", "softmax", "sigmoid"]

_REPEATED_IMAGES = 2  # pictures that the net is run on twice
# Allowed difference between the two runs, as a fraction of the largest output.
_REPEAT_TOLERANCE_HALF, _REPEAT_TOLERANCE_SINGLE = 1e-3, 1e-6
# Allowed difference from 1 of the sum of up to a few thousand rounded probabilities.
_SUM_TOLERANCE_HALF, _SUM_TOLERANCE_SINGLE = 1e-2, 1e-3
HOW_TO_STATE = "--preset, or --mean and --std as in training, or --find-input DATA to find them from labeled images"
_ALIKE = 1e-6  # largest difference of outputs for pictures that a net does not tell apart


@dataclass(frozen=True)
class AdoptOptions:
    """The user's options for a net; None: determined from the file.

    crop, center_scale: pixels; net_output: name of the output with the scores; kind: type of that output; name: of the
    architecture; dense: let the head score every window of a larger image (`export.foreign.dense`); found: how the
    preprocessing was found (`export.finding`), for the file.
    """

    preprocessing: Preprocessing
    crop: int | None = None
    layout: Layout | None = None
    net_output: str | None = None
    kind: OutputKind = "auto"
    name: str | None = None
    dense: bool = False
    center_scale: int | None = None
    found: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AdoptResult:
    """The contract of an adopted net, and what was detected.

    preprocessing: as given, of gray images if the net takes these; sequential_reason: why the images of a batch run one
    at a time, or empty if they run together; deviations: of every run compared with the original net; alike: the net
    gives the same scores to all test images; form: how a net in int8 is quantized; int8_moves: how far its scores in
    int8 are from those on the same numbers in float32.
    """

    contract: ModelContract
    interface: NetInterface
    preprocessing: Preprocessing
    opset: int
    probabilities: bool
    sequential_reason: str
    deviations: tuple[Deviation, ...]
    alike: bool
    form: Form | None
    int8_moves: Tolerance | None


def adopt(path: Path, output: Path, classes: ClassList, options: AdoptOptions) -> AdoptResult:
    """Write the model file of a foreign ONNX classifier.

    The net is run in onnxruntime on a few pictures, preprocessed in numpy. The file is written under a temporary name,
    run on the same pictures, alone and in one batch, and renamed if all scores agree; otherwise no file is left.
    Raises ContractError if the net cannot be adopted, UsageError if options or the class list do not fit the net.
    """
    for name in (path, Path(os.path.realpath(output))):
        os.fspath(name).encode("utf-8")  # UnicodeEncodeError for paths that the runtime could not open
    check_not_input(output, [path])
    with open_atomically(output) as file:  # first, so that an unwritable path is refused before the work
        net = read_net(path)
        interface = find_interface(path, net, crop=options.crop, layout=options.layout, output=options.net_output)
        options = _with_channels(path, interface, options)
        _check_preprocessing(path, interface, options)
        digest = digest_of(net, interface.input, interface.layout, interface.output, options.preprocessing.identity)
        pictures = pictures_of(interface.crop)
        load = loader(path, net)
        form = find_form(load, net)
        if options.dense and form == "operators":
            raise ContractError(
                f"{path}: cannot become dense: it is quantized with operators of integers. Quantize it in the format "
                "QDQ, or adopt it without --dense"
            )
        run = partial(_run_net, path, interface, options.preprocessing, pictures)
        raw = run(load())
        interface = replace(interface, one_score=len(raw[0]) == 1)
        check_classes(path, classes, len(raw[0]))
        probabilities = are_probabilities(path, options.kind, raw, half=interface.half, form=form)
        floor = probability_floor(interface) if probabilities else None
        alike = all(np.allclose(row, raw[0], rtol=_ALIKE, atol=_ALIKE) for row in raw)
        expected = _scores_and_logits(np.stack(raw), floor)
        answers: dict[Precision, tuple[Float64Array, Float64Array]] = {
            "int8" if form == "operators" else "fp32": expected
        }
        tolerance = spread = None
        if form == "qdq":
            answers["int8"] = _scores_and_logits(np.stack(run(load(quantized=True))), floor)
        if form is not None:
            spread = difference(expected, answers["int8"])
            tolerance = int8_tolerance(expected[1], spread)
        references = {
            precision: [Reference(*each) for each in zip(pictures.values(), *both, strict=True)]
            for precision, both in answers.items()
        }
        head = find_head(path, net, interface) if options.dense else None
        windows = _windows(path, net, interface, head, options.preprocessing, floor) if head is not None else ()
        crop = interface.crop
        of_crop = golden_answer(crop, crop, *(rows[0] for rows in expected))
        golden = golden_answers(crop, windows) if windows else (of_crop,)
        contract = replace(
            _contract(path, net, interface, classes.entries, options, head, digest=digest), golden=golden
        )
        if form is not None and tolerance is not None:
            contract = in_int8(contract, form, tolerance)
        opset = opset_of(net)
        if head is not None:
            make_dense(net, head)
        prepare_net(net)
        build = partial(
            wrap_net, net, interface, options.preprocessing, contract, probabilities=probabilities,
            version=importlib.metadata.version("prelunet"), head=head,
        )  # fmt: skip
        if head is not None:
            sequential_reason, deviations = "", write_dense(file, path, build, references, windows, tolerance)
        else:
            sequential_reason, deviations = write_checked(file, path, build, opset, references)
    found = (sequential_reason, tuple(deviations), alike, form, spread)
    return AdoptResult(contract, interface, options.preprocessing, opset, probabilities, *found)


def pictures_of(crop: int) -> dict[str, UInt8Array]:
    """Return name → picture, uint8 (crop, crop, 3), on which net and file are compared; the golden image comes first.

    All pictures differ, also in range, so that a net that depends on its batch (its range, its mean, its size) scores
    a picture differently in the batch than alone. There are more than 8, in case a net treats batches of 1, 4 or 8
    specially.
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
        "a gray picture": 128 + noise // 32,
        "all black": np.zeros_like(golden),
        "all white": np.full_like(golden, 255),
    }


def _with_channels(path: Path, interface: NetInterface, options: AdoptOptions) -> AdoptOptions:
    """Return the options, for a gray net with gray images. Raises UsageError for channels that contradict the net."""
    given = options.preprocessing
    if interface.channels == 1 and given.channels == "bgr":
        raise UsageError(f"{path}: takes gray images, which have one channel. Omit --channels bgr")
    if interface.channels == 3 and given.channels != "gray":
        return options
    for option, numbers in (("--mean", given.mean), ("--std", given.std)):
        if interface.channels == 1 and len(set(numbers or ())) > 1:
            raise UsageError(f"{path}: takes gray images. Give one number as {option}, of its one channel")
    preparation = replace(given.preparation, gray=True)
    return replace(options, preprocessing=replace(given, channels="gray", preparation=preparation))


def _check_preprocessing(path: Path, interface: NetInterface, options: AdoptOptions) -> None:
    """Raise UsageError for a mean if the net takes bytes, or none if it takes floats, and for windows of whole images.

    Nothing is guessed.
    """
    preprocessing, resize = options.preprocessing, options.preprocessing.preparation.resize
    if options.dense and preprocessing.preparation.whole:
        raise UsageError(
            f"{path}: --resize {resize} with --dense: a net that takes whole images has seen no windows of larger "
            "ones. Omit one of them"
        )
    if interface.takes_bytes and preprocessing.mean is not None:
        raise UsageError(
            f"{path}: input '{interface.input}' takes bytes, so the net subtracts the mean itself. "
            "Omit --preset, --mean and --std, or move away the file beside the net that states them"
        )
    if not interface.takes_bytes and preprocessing.mean is None:
        raise UsageError(
            f"{path}: input '{interface.input}' takes floats, and the file does not record the preprocessing. "
            f"Give {HOW_TO_STATE} (--mean 0 --std 1 --range 255 if the net normalizes pixels itself)"
        )


def check_classes(path: Path, classes: ClassList, outputs: int) -> None:
    """Raise UsageError for a list that has not as many classes as the net has outputs."""
    listed = len(classes.entries)
    if outputs == listed > 1 or (outputs, listed) == (1, 2):
        return
    hint = " score, that of the second of two classes. Give a list of both" if outputs == 1 else ""
    if outputs == listed + 1:
        hint = (
            ". Nets with 1001 classes often start with a background class: give a list that starts with a line for it"
        )
    raise UsageError(f"{classes.source}: lists {listed} classes, but {path} has {outputs}{hint}")


def _run_net(
    path: Path,
    interface: NetInterface,
    preprocessing: Preprocessing,
    pictures: Mapping[str, UInt8Array],
    net: RawOnnxModel,
) -> list[Float64Array]:
    """Return the original net's output for each picture, run alone: float64 (K,)."""

    def run(name: str, picture: UInt8Array) -> Float64Array:
        output = net.run({interface.input: interface.feed(preprocessing.apply(picture))}, interface.output)
        batch = interface.batch or 1
        squeezed = output.ndim < 2 and (batch == 1 or output.shape == (batch,))
        whole = output.ndim >= 2 and output.shape[0] == batch and output.shape[2:] in {(), (1, 1)}
        if not (squeezed or whole) or not output.size:
            raise ContractError(
                f"{path}: output '{interface.output}' has shape {output.shape}, but a classifier returns "
                f"({batch}, classes). Choose another output, or export the net with its classification layer"
            )
        row: Float64Array = output.reshape(batch, -1)[0].astype(np.float64)
        if not np.isfinite(row).all():
            raise ContractError(
                f"{path}: returns NaN or infinity for an image ({name}). Check --mean, --std and --range"
            )
        return row

    rows = [run(*entry) for entry in pictures.items()]
    # Repeat the first runs, with a tolerance: a runtime need not return the same bits twice.
    tolerance = _REPEAT_TOLERANCE_HALF if interface.half else _REPEAT_TOLERANCE_SINGLE
    for (name, picture), row in list(zip(pictures.items(), rows, strict=True))[:_REPEATED_IMAGES]:
        difference = float(np.abs(run(name, picture) - row).max())
        if difference > tolerance * np.abs(row).max():
            raise ContractError(
                f"{path}: returns different scores for the same image on each run. Export it in evaluation mode "
                "(dropout off)"
            )
    return rows


def _scores_and_logits(output: Float64Array, floor: float | None) -> tuple[Float64Array, Float64Array]:
    """Return scores and logits for a net's output (..., K), or (..., 1) for two classes.

    floor: of its probabilities, None if they are logits.
    """
    if output.shape[-1] == 1:
        output = np.concatenate([output * 0 if floor is None else 1 - output, output], axis=-1)
    return (softmax(output), output) if floor is None else (output, np.log(output + floor))


def _windows(
    path: Path,
    net: ModelProto,
    interface: NetInterface,
    head: Head,
    preprocessing: Preprocessing,
    floor: float | None,
) -> list[WindowArrays]:
    """Return the windows of each golden image: the feature map of the net's own trunk, cut, each through its own head.

    Raises ContractError if the net does not run on larger images, or gives maps of other sides than its layers.
    """
    trunk = part_of(net, (interface.input, interface.input_type), head.feature_map)
    scorer = part_of(net, (head.feature_map, interface.output_type), interface.output, head.shapes)
    if any(interface.input in node.input for node in scorer.graph.node):
        raise ContractError(
            f"{path}: cannot become dense: its scores depend on its image not only through its feature map "
            f"'{head.feature_map}'. Adopt it without --dense"
        )
    windows: list[WindowArrays] = []
    size = (interface.crop, interface.crop)  # at which something fails
    with tempfile.TemporaryDirectory() as folder:
        file, of_window = Path(folder) / "part.onnx", None
        file.write_bytes(trunk.SerializeToString())
        try:
            of_image = RawOnnxModel(file, threads=1)
            for size in golden_sizes(interface.crop):
                image = interface.feed(preprocessing.apply(golden_image(*size)))
                cells = of_image.run({interface.input: image}, head.feature_map)
                if of_window is None:  # its type may be other than the output's
                    scorer.graph.input[0].type.tensor_type.elem_type = np_dtype_to_tensor_dtype(cells.dtype)
                    file.write_bytes(scorer.SerializeToString())
                    of_window = RawOnnxModel(file, threads=1)
                sides = tuple(map(head.trunk.output_side, size))
                if cells.shape[2:] != sides:
                    reason = "feature map has {}x{} cells, but {}x{} follow from its layers"
                    raise ContractError(reason.format(*cells.shape[2:], *sides))
                rows, columns = (side - head.window + 1 for side in sides)
                outputs = [  # a net that squeezes has no axis for a batch of one
                    of_window.run({head.feature_map: cells[:, :, row:, column:][..., : head.window, : head.window]},
                                  interface.output).reshape(len(cells), -1)[0]
                    for row, column in np.ndindex(rows, columns)
                ]  # fmt: skip
                table = np.reshape(outputs, (rows, columns, -1)).astype(np.float64)
                windows.append(_scores_and_logits(table, floor))
        except ContractError as error:
            text = summarize(error).replace(folder, "").strip()
            raise ContractError(
                f"{path}: cannot become dense: on an image of {size[0]}x{size[1]} pixels {text}. Export the net "
                "with dynamic height and width, or adopt it without --dense"
            ) from error
    return windows


def are_probabilities(path: Path, kind: OutputKind, rows: list[Float64Array], *, half: bool, form: Form | None) -> bool:
    """Detect from the outputs for several pictures whether the net ends in a softmax, or one score in a sigmoid.

    Raises UsageError if that contradicts `kind`, or if the outputs look like neither logits nor probabilities.
    """
    one = len(rows[0]) == 1
    if kind in {"softmax", "sigmoid"} and one != (kind == "sigmoid"):
        returned = "one score, of the second of two classes" if one else f"{len(rows[0])} scores"
        fix = "Omit --kind" if one else "Omit --kind, or pass --kind logits for a net whose classes may all be present"
        raise UsageError(f"{path}: --kind {kind}, but it returns {returned}. {fix}")
    tolerance = _SUM_TOLERANCE_HALF if half else _SUM_TOLERANCE_SINGLE
    within = all(row.min() >= 0 and row.max() <= 1 + tolerance for row in rows)
    if one:
        if kind == "sigmoid" and not within:
            raise UsageError(f"{path}: --kind sigmoid, but its score is not always from 0 to 1. Omit --kind")
        return within and kind != "logits"
    summed = within and all(abs(row.sum() - 1) <= tolerance for row in rows)
    totals = sorted(float(row.sum()) for row in rows)
    sums = f"sums over all classes range from {totals[0]:.3g} to {totals[-1]:.3g}"
    if kind == "softmax" and not summed:
        raise UsageError(f"{path}: --kind softmax, but its outputs are not probabilities ({sums}). Omit --kind")
    if kind == "logits" and summed:
        raise UsageError(f"{path}: --kind logits, but its outputs are probabilities ({sums}). Omit --kind")
    if kind == "auto" and within and not summed:
        rounded = " or a softmax that is rounded to 8 bits: quantize the net without it" if form else ""
        raise UsageError(
            f"{path}: its outputs are between 0 and 1 but do not sum to 1 over the classes ({sums}), as after "
            f"a sigmoid{rounded}. To treat them as logits anyway, pass --kind logits"
        )
    return summed


def _contract(
    path: Path,
    net: ModelProto,
    interface: NetInterface,
    classes: tuple[ClassEntry, ...],
    options: AdoptOptions,
    head: Head | None,
    *,
    digest: str,
) -> ModelContract:
    """Build the contract of the file, without golden images.

    head: of a dense net, otherwise the crop is one window; digest: of the net and how it is fed.
    """
    crop, count = interface.crop, count_multiply_adds(net, interface)
    if options.center_scale is not None and not crop <= options.center_scale <= MAX_CROPS_PER_SIDE * crop:
        raise UsageError(
            f"{path}: images resized to {options.center_scale} pixels, but crops of {crop} need from {crop} to "
            f"{MAX_CROPS_PER_SIDE * crop}. Give the scale of this crop with --scale"
        )
    half = any(tensor.data_type == TensorProto.FLOAT16 for tensor in net.graph.initializer)
    scales = (crop,) if head is None else tuple(int(crop * scale / 224 + 0.5) for scale in MULTI_SCALE)
    found = {} if options.found is None else {"found": options.found}
    tensors = {"input": interface.input, "layout": interface.layout, "output": interface.output}
    try:
        return ModelContract(
            architecture=OpaqueNet(path.stem if options.name is None else options.name, "unknown", count),
            classes=classes,
            mean_kind="channel",
            trunk=(TrunkLayer(kernel=crop, stride=crop, pad=0) if head is None else head.trunk,),
            window=1 if head is None else head.window,
            spp_levels=(1,),
            crop=crop,
            default_scales=scales,
            max_side=crop if head is None else max(MAX_CANVAS_SIDE, LONG_SIDE_CAP * max(scales)),
            canvas="exact",
            precision="fp16" if half else "fp32",
            checkpoint_sha256=digest,
            interpolation=options.preprocessing.interpolation,
            preparation=options.preprocessing.preparation,
            center_scale=options.center_scale or (crop if options.preprocessing.tight else None),
            training={"adopted": {**tensors, **options.preprocessing.to_json(), **found}},
        )
    except ValueError as error:
        raise UsageError(
            f"{path}: cannot be adopted: {error}. Change --name, the class list or the option that it is about"
        ) from error
