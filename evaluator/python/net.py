"""A model file in a Python program: load it, classify images, evaluate a dataset.

What only an evaluation needs is imported by `Net.evaluate`, so that the first answer comes soon.
"""

import base64
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from PIL import Image

from ..answer import Answer, Prediction, resolve_top_k
from ..cards import card, pictures, side_by_side, table
from ..contract import ClassEntry
from ..engine.classify import build_answer, classify_images
from ..engine.heatmap import draw_heat_maps, png_bytes, why_flat
from ..engine.load import open_session
from ..engine.memory import portion_size, require_view_fits
from ..engine.runtimes import Device
from ..engine.runtimes.base import Precision
from ..engine.session import Session
from ..errors import ImageError, PreluNetError, UsageError
from ..image_input import ImageInput, encoded_image, is_image
from ..imaging.decode import decode_image
from ..imaging.limits import DecodeLimits
from ..imaging.resize import panel_picture
from ..machine import machine_memory
from ..protocols import (
    EvaluationProtocol,
    ProtocolOverrides,
    build_protocol,
    default_protocol_name,
    protocol_from_json,
)
from ..terminal import escape_unprintable

if TYPE_CHECKING:
    from .evaluation import Evaluation

log = logging.getLogger(__name__)

_IMAGES_TOGETHER = 64  # at most, of a list: their views share batches
_IMAGES_SHOWN, _ANSWERS_IN_TEXT = 24, 5  # of a list
_NAMES_SHOWN = 12  # classes on the card of a net
_PNG_LIMITS = DecodeLimits(max_bytes=2**29)  # for pixels: the PNG of a photo is several times as large as its JPEG


def load(
    path: str | os.PathLike[str], device: Device = "auto", *, precision: Precision | None = None, threads: int = 0
) -> "Net":
    """Load a model file that `prelunet export` or `prelunet adopt` wrote.

    device: `cpu`, `openvino`, `ncnn`, `cuda`, or `auto`, by the rule in docs/performance.md; precision: to compute in,
    None for the file's if the device supports it, else fp32; threads: for the model and for decoding, 0 for one per
    core.
    Raises UsageError if the file cannot be read or no such device or precision exists, ContractError if it is not a
    model file, EnvironmentFault if the device or its runtime is unavailable.
    """
    return Net(open_session(Path(path), device, precision=precision, threads=threads), Path(path))


class Net:
    """A loaded model, from `prelunet.load`. Threads may share it. path: of its file."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self.path = path

    def __repr__(self) -> str:
        return escape_unprintable(
            f"<Net {self.path.name}: {self._session.contract.name}, {len(self.classes):,} classes, on {self._runs_on}>"
        )

    @property
    def _runs_on(self) -> str:
        circumstances = self._session.circumstances
        return f"{circumstances.provider.removesuffix('ExecutionProvider')}, {circumstances.precision}"

    def _repr_html_(self) -> str:
        from ..reporting.report import describe_protocol

        names, more = [entry.name for entry in self.classes[:_NAMES_SHOWN]], len(self.classes) - _NAMES_SHOWN
        protocol = self._protocol(None, apply_exif=False)
        rows = {
            f"{len(self.classes):,} classes": ", ".join(names) + (f" and {more:,} more" if more > 0 else ""),
            "default protocol": f"{protocol.name}: {describe_protocol(protocol.to_json())}",
            "runs on": self._runs_on,
        }
        return card(self.path.name, self._session.contract.name, table(map(escape, row) for row in rows.items()))

    @property
    def classes(self) -> tuple[ClassEntry, ...]:
        """Return the classes, each with `wnid` and `name`, in the order of their indices."""
        return self._session.contract.classes

    @overload
    def classify(  # type: ignore[overload-overlap]  # str and bytes are sequences too, but of no images
        self,
        image: ImageInput,
        *,
        protocol: str | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
    ) -> "Classified": ...
    @overload
    def classify(
        self,
        image: Sequence[ImageInput],
        *,
        protocol: str | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
    ) -> "Answers": ...
    def classify(
        self,
        image: Any,
        *,
        protocol: str | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
    ) -> "Classified | Answers":
        """Classify an image, or each image of a list; the views of a list's images share batches.

        image: path of an image file, its bytes, a Pillow image, or an array: uint8 (H, W, 3), RGB, or (H, W), gray;
        protocol: name, None for the model's default; top_k: 1 to the number of classes, None for 5, or all if fewer;
        heatmap: draw the heat maps at once, for which images are computed one by one; apply_exif: apply EXIF
        orientation.
        Raises ImageError for an image that cannot be used, in a list with its index, and UsageError for an object that
        is no image, for another argument that the model does not support, and for a view too large for this machine.
        """
        evaluation_protocol = self._protocol(protocol, apply_exif=apply_exif)
        top = resolve_top_k(top_k, len(self.classes))
        if is_image(image) or not isinstance(image, Sequence):
            return self._classify({"": image}, evaluation_protocol, top, heatmap=heatmap)[0]
        together = portion_size(evaluation_protocol, _IMAGES_TOGETHER, None, gpu=self._session.circumstances.on_gpu)
        results = Answers()
        for start in range(0, len(image), together):
            portion = {f"images[{start + n}]: ": each for n, each in enumerate(image[start : start + together])}
            results += self._classify(portion, evaluation_protocol, top, heatmap=heatmap)
        return results

    def evaluate(  # noqa: PLR0913 - one argument per option
        self,
        data: str | os.PathLike[str],
        *,
        protocol: str | None = None,
        output: str | os.PathLike[str] | None = None,
        labels: str | os.PathLike[str] | None = None,
        limit: int | None = None,
        classes: str | Sequence[str | int] | None = None,
        restrict_classes: str | Sequence[str | int] | None = None,
        apply_exif: bool = False,
        heatmaps: int = 0,
        fresh: bool = False,
    ) -> "Evaluation":
        """Evaluate the model on a dataset and write the report, as `prelunet validate` and `prelunet report` do.

        Each argument is an option of `prelunet validate`, which has some more.
        data: folder, .tar, .tar.gz, .zip or .parquet of images (docs/datasets.md); protocol: name, None for the model's
        default; output: folder of the run, created, or resumed if it holds this run; None for runs/MODEL-DATA-PROTOCOL
        in the current folder, with the limit and a digest of labels and classes at the end if they are given; labels:
        of flat images, a list or the ILSVRC devkit, or `imagenet-real`; limit: evaluate only this many images, evenly
        spaced; classes: evaluate only these wnids or class indices, or those that a file lists; restrict_classes:
        predict among these classes only; heatmaps: show on the report where the model sees this many mistakes; fresh:
        delete the existing run and start over.
        Raises Interrupted on Ctrl-C: what is done is saved, and the same call resumes. Raises DatasetError if the
        dataset does not fit the model, RunFolderError if the folder holds anything else, EnvironmentFault or OSError if
        it cannot be written.
        """
        from ..datasets import DatasetSpec, parse_class_selection
        from ..validation.evaluate_model import default_run_folder, evaluate_model
        from .evaluation import write_evaluation

        if heatmaps < 0:
            raise UsageError(f"heatmaps={heatmaps}: give a number of mistakes, at least 0")
        evaluation_protocol = self._protocol(protocol, apply_exif=apply_exif)
        selected = () if classes is None else parse_class_selection(_joined(classes), self.classes)
        among = None if restrict_classes is None else _joined(restrict_classes)
        listed = None if labels is None else Path(labels)
        spec = DatasetSpec(Path(data), listed, limit=limit, classes=selected, restrict_classes=among)
        overrides = ProtocolOverrides(apply_exif=True) if apply_exif else ProtocolOverrides()
        folder = default_run_folder(self.path, spec, evaluation_protocol, overrides) if output is None else Path(output)
        evaluate_model(
            [self._session],
            self.path,
            spec,
            evaluation_protocol,
            folder,
            heatmaps=heatmaps,
            fresh=fresh,
            report=log.info,
        )
        return write_evaluation(folder)

    def _protocol(self, name: str | None, *, apply_exif: bool) -> EvaluationProtocol:
        contract = self._session.contract
        overrides = ProtocolOverrides(apply_exif=apply_exif)
        return build_protocol(name or default_protocol_name(contract), contract, overrides)

    def _classify(
        self, images: Mapping[str, ImageInput], protocol: EvaluationProtocol, top: int, *, heatmap: bool
    ) -> "list[Classified]":
        """Classify images together. images: by their place in the caller's list, for errors."""
        draw = [partial(self._draw, place, image, protocol, top) for place, image in images.items()]
        if heatmap:
            return [Classified(each(), each, image) for each, image in zip(draw, images.values(), strict=True)]
        decoded = (self._decode(place, image, protocol) for place, image in images.items())  # one at a time in memory
        return [
            Classified(build_answer(self._session, self.path.stem, protocol, classified, top), each, image)
            for classified, each, image in zip(
                classify_images(self._session, decoded, protocol), draw, images.values(), strict=True
            )
        ]

    def _draw(self, place: str, image: ImageInput, protocol: EvaluationProtocol, top: int) -> Answer:
        """Classify one image and draw its heat maps."""
        if (reason := why_flat(self._session.contract, protocol)) is not None:
            log.warning("warning: %s", reason)
        decoded = self._decode(place, image, protocol)
        (classified,) = classify_images(self._session, [decoded], protocol, keep_windows=True)
        picture, size = panel_picture(decoded), (decoded.height, decoded.width)
        heat_maps = png_bytes(draw_heat_maps(picture, size, classified, self._session.contract, protocol))
        return build_answer(self._session, self.path.stem, protocol, classified, top, heat_maps)

    def _decode(self, place: str, image: ImageInput, protocol: EvaluationProtocol) -> Image.Image:
        limits = DecodeLimits() if isinstance(image, bytes | str | os.PathLike) else _PNG_LIMITS
        try:
            data = encoded_image(image)  # its errors name the path
            if isinstance(image, str | os.PathLike):
                place += f"{os.fsdecode(image)}: "
            decoded = decode_image(data, limits, apply_exif=protocol.apply_exif, preparation=protocol.preparation)
        except (ImageError, UsageError) as error:
            error.args = (f"{place}{error}",)
            raise
        if not self._session.circumstances.on_gpu:  # a GPU's runtime reports its own memory
            require_view_fits(self._session, protocol, (decoded.height, decoded.width), machine_memory())
        return decoded


def _joined(words: str | Sequence[str | int]) -> str:
    """Return class words as the command line takes them; names with commas one a line."""
    if isinstance(words, str):
        return words
    texts = list(map(str, words))
    return ("\n" if any("," in text for text in texts) else ",").join(texts)


@dataclass(frozen=True, repr=False)
class Classified:
    """The answer for one image. It holds what was passed as the image (a path, or a reference to the pixels).

    answer: the same as a server's, with protocol, views and circumstances.
    """

    answer: Answer
    _draw: Callable[[], Answer] = field(compare=False)
    _image: ImageInput = field(compare=False)

    def __repr__(self) -> str:
        return repr(self.answer).replace("Answer", "Classified", 1)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Return the best classes, best first, each with `class_index`, `wnid`, `name` and `score`, 0 to 1."""
        return self.answer.predictions

    def heatmap(self) -> Image.Image:
        """Return the image beside maps of where each of its five best classes is seen.

        Unless `classify` has drawn it, the image is read and classified again, and the scores of all windows are in
        memory meanwhile: 0.5 to 2 MB per view at 1000 classes. Raises as `Net.classify` does.
        """
        return Image.open(io.BytesIO(self.answer.heatmap or self._draw().heatmap))

    def _repr_html_(self) -> str:
        scores = self.answer._repr_html_()
        if not self.answer.heatmap:
            return card(self._name, "", side_by_side(pictures([(self._thumbnail(), self._name, "")]), scores))
        url = f"data:image/png;base64,{base64.b64encode(self.answer.heatmap).decode('ascii')}"
        return card(self._name, "", scores, f"<img src='{url}' alt='heat maps' style='max-width:100%'>")

    @property
    def _name(self) -> str:
        """Return the image's path; '' for other images."""
        return os.fsdecode(self._image) if isinstance(self._image, str | os.PathLike) else ""

    def _thumbnail(self) -> str | None:
        """Return the image as a small `data:` URL, None if it can no longer be read."""
        from ..reporting.gallery import TILE, picture_url

        try:
            data = encoded_image(self._image)
            seen = protocol_from_json(self.answer.protocol)
            image = decode_image(data, _PNG_LIMITS, apply_exif=seen.apply_exif, preparation=seen.preparation)
        except PreluNetError:
            return None
        return picture_url(image, TILE)


class Answers(list[Classified]):
    """The answers for a list of images, in its order: a list that notebooks show with its images."""

    def __repr__(self) -> str:
        first = [f"{best.name} {best.score:.1%}" for best in (each.predictions[0] for each in self[:_ANSWERS_IN_TEXT])]
        more = [] if len(first) == len(self) else ["…"]
        return escape_unprintable(f"<Answers for {len(self):,} images: {', '.join(first + more)}>")

    def _repr_html_(self) -> str:
        found = [(each, each.predictions[0]) for each in self[:_IMAGES_SHOWN]]
        more = len(self) - len(found)
        return card(
            f"{len(self):,} images",
            f"the first {len(found)}" if more else "",
            pictures((each._thumbnail(), each._name, f"{best.name} {best.score:.1%}") for each, best in found),
        )
