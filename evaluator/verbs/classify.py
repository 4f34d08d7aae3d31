"""`prelunet classify`: the top classes of images, from a model file or a server."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..answer import Answer
from ..engine.load import open_session
from ..engine.runtimes import Device
from ..engine.session import Placement
from ..errors import ImageError, UsageError
from ..files import write_atomically
from ..image_input import encoded_image
from ..imaging.limits import DecodeLimits
from ..protocols import ProtocolOverrides, build_protocol, default_protocol_name
from ..python.net import Net
from ..rpc.credentials import Credentials
from ..terminal import echo, report
from .options import Only, OptionalModelOption, ProtocolOption, derive_options

DEFAULT_TIMEOUT = 60.0  # seconds

ClassifyImage = Callable[[bytes], Answer]  # of an encoded image


@derive_options
def classify(
    *,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Image files; - reads one from stdin. With --csv or --jsonl: one folder or archive.",
            metavar="IMAGE",
        ),
    ],
    model: OptionalModelOption = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT or unix:PATH of a running `prelunet serve`.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model on the server; required if it serves several.")
    ] = None,
    protocol: ProtocolOption = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Number of classes to print.", show_default="5, or all if fewer")
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(
            help="Device that runs the model file: cpu, openvino, ncnn, cuda, or auto (docs/performance.md).",
            show_default="auto",
            rich_help_panel=Placement.HELP_GROUP,
        ),
    ] = None,
    placement: Annotated[Placement, Only("precision")],
    heatmap: Annotated[
        Path | None,
        typer.Option("--heatmap", "-o", "--output", help="PNG file to write: heat maps of the 5 top classes."),
    ] = None,
    overrides: Annotated[ProtocolOverrides, Only("apply_exif")],
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Timeout of a server's answer, in seconds.", show_default=f"{DEFAULT_TIMEOUT:g}"),
    ] = None,
    credentials: Credentials,
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV file to write: the top classes of each image of a folder or archive, without labels."),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="The same as a file with one JSON object per line, one for each image.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object per line, one for each image. With --csv or --jsonl: one with the counts.",
        ),
    ] = False,
) -> None:
    """Classify images with a model file or through a server; both give the same answer.

    With --csv or --jsonl, all images of a folder, with progress; after an interruption the same command resumes.
    """
    outputs = {kind: file for kind, file in (("csv", csv), ("jsonl", jsonl)) if file is not None}
    if outputs and (server is not None or heatmap is not None or len(images) != 1):
        raise UsageError(
            "--csv and --jsonl classify one folder or archive with --model: leave out --server and --heatmap"
        )
    if csv is not None and jsonl is not None and csv.resolve() == jsonl.resolve():
        raise UsageError(f"--csv and --jsonl both name {csv}. Name two files")
    if heatmap is not None and len(images) != 1:
        raise UsageError(f"--heatmap draws one image, not {len(images)}. Run the command once for each image")
    options: dict[str, Any] = {
        "top_k": top, "heatmap": heatmap is not None, "apply_exif": bool(overrides.apply_exif)
    }  # fmt: skip
    with ExitStack() as stack:
        if model is not None and server is None:
            if name is not None or timeout is not None:
                raise UsageError("--name and --timeout require --server; leave them out with --model")
            session = open_session(model, device or "auto", precision=placement.precision)
            contract = session.contract
            report(f"{model.name}: {contract.name} on {session.circumstances}")
            if outputs:
                from ..validation.unlabelled import write_classes

                views = build_protocol(protocol or default_protocol_name(contract), contract, overrides)
                count, refused = write_classes(session, model, Path(images[0]), views, outputs, top=top, report=report)
                numbers = {"images": count, "evaluated": count - refused, "refused": refused}
                text = f"{' and '.join(map(str, outputs.values()))}: {count:,} images, {refused:,} of them refused"
                echo(json.dumps(numbers) if as_json else text)
                return

            net = Net(session, model)

            def classify_image(data: bytes) -> Answer:
                return net.classify(data, protocol=protocol, **options).answer

        elif server is not None and model is None:
            if device is not None or placement.precision is not None:
                raise UsageError("--device and --precision require --model: a server chooses them when it starts")
            from ..client import Client

            # Without retries: at a terminal, fail fast if no server is listening.
            connection = Client(server, timeout=timeout or DEFAULT_TIMEOUT, retries=False, credentials=credentials)
            client = stack.enter_context(connection)
            classify_image = partial(client.classify, model=name, protocol=protocol or "", **options)
        else:
            raise UsageError("classify needs either --model MODEL.onnx or --server HOST:PORT")
        _classify_all(images, classify_image, heatmap, as_json=as_json)


def _classify_all(images: Sequence[str], classify_image: ClassifyImage, heatmap: Path | None, *, as_json: bool) -> None:
    """Print the answer for each image. Raise ImageError at the end if any image could not be classified."""
    failed = 0
    for file in images:
        try:
            answer = _classify_file(file, classify_image)
        except ImageError as error:
            failure = error
        else:
            echo(json.dumps({"file": file, **answer.to_json()}) if as_json else _lines(file, answer))
            if heatmap is not None:
                write_atomically(heatmap, answer.heatmap)
                report(f"heat maps: {heatmap}")
            continue
        if len(images) == 1:
            raise failure
        report(f"prelunet: {failure}")
        failed += 1
    if failed:
        raise ImageError(f"{failed} of {len(images)} images could not be classified; the reasons are above")


def _classify_file(file: str, classify_image: ClassifyImage) -> Answer:
    """Return the answer for a file, or for stdin: "-". Raises ImageError with the name."""
    if file != "-":
        if Path(file).is_dir():
            raise ImageError(
                f"{file}: a folder. To classify all its images, add --csv FILE.csv or --jsonl FILE.jsonl to the command"
            )
        data = encoded_image(file)
    elif sys.stdin is None:
        raise ImageError("-: there is no stdin. Give the path of an image file")
    else:
        data = sys.stdin.buffer.read(DecodeLimits.max_bytes + 1)
    try:
        return classify_image(data)
    except ImageError as error:
        raise ImageError(f"{file}: {error}") from error


def _lines(file: str, answer: Answer) -> str:
    """Format an answer for a terminal."""
    names = [p.name if p.name == p.wnid else f"{p.name} ({p.wnid})" for p in answer.predictions]
    classes = [f"  {p.score:7.2%}  {name}" for p, name in zip(answer.predictions, names, strict=True)]
    cut = ["  the image is too elongated: only its center was evaluated"] if answer.capped else []
    return "\n".join([file, *classes, *cut])
