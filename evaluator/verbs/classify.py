"""`prelunet classify`: the best classes of images, from a model file or through a server."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluator.contract import ModelContract
from evaluator.engine.classify import Classified, classify_images
from evaluator.engine.overlay import draw_heat_maps, png_bytes
from evaluator.engine.scores import shortest
from evaluator.engine.session import Device, Session, open_session
from evaluator.errors import ImageError, UsageError
from evaluator.files import write_atomically
from evaluator.imaging.decode import decode_rgb
from evaluator.protocols import Protocol, make_protocol

TOP = 5

Answer = dict[str, Any]  # what --json prints of one image, but for its file: the same from a model and from a server
Ask = Callable[[bytes], Answer]  # of an encoded image


def classify(  # noqa: PLR0913 - one argument per option
    *,
    images: Annotated[list[str], typer.Argument(help="Image files; - reads one from stdin.", metavar="IMAGE...")],
    model: Annotated[Path | None, typer.Option(help="Model file, as `prelunet export` wrote it.")] = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT of a running `prelunet serve`.")] = None,
    name: Annotated[str | None, typer.Option(help="Which of the server's models; needed if it has several.")] = None,
    protocol: Annotated[
        str, typer.Option(help="How images are looked at: center, dense-S (as dense-256) or multi-scale.")
    ] = "multi-scale",
    top: Annotated[
        int | None, typer.Option(min=1, help="How many classes to tell (default: 5, or all where there are fewer).")
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(help="Where the model file runs (default: auto: CUDA where it comes up, else the CPU)."),
    ] = None,
    heatmap: Annotated[
        Path | None, typer.Option(help="PNG file to draw: where each of the 5 best classes is seen.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image and line.")] = False,
) -> None:
    """Classify images, with a model file or through a server; both give the same answer."""
    if heatmap is not None and len(images) != 1:
        raise UsageError(f"--heatmap draws one image, not {len(images)}. Call it once for each image")
    with ExitStack() as stack:
        if model is not None and server is None:
            if name is not None:
                raise UsageError("--name picks one of a server's models; leave it out with --model")
            session = open_session(model, device or "auto")
            typer.echo(f"{model.name}: {session.contract.name} on {session.circumstances}", err=True)
            ask = _ask_model(session, model.stem, make_protocol(protocol, session.contract), top, heatmap)
        elif server is not None and model is None:
            if device is not None:
                raise UsageError("--device belongs to --model: a server's device is chosen when it starts")
            ask = _ask_server(stack, server, name, protocol, top, heatmap)
        else:
            raise UsageError("classify needs either --model MODEL.onnx or --server HOST:PORT")
        _answer_all(images, ask, as_json=as_json)
    if heatmap is not None:
        typer.echo(f"heat maps: {heatmap}", err=True)


def _answer_all(images: Sequence[str], ask: Ask, *, as_json: bool) -> None:
    """Print the answer of every image that has one; raise at the end if there was one that has none."""
    failed = 0
    for file in images:
        try:
            answer = ask(_read(file))
        except ImageError as error:
            failure = ImageError(f"{file}: {error}")
        else:
            typer.echo(json.dumps({"file": file, **answer}) if as_json else _lines(file, answer))
            continue
        if len(images) == 1:
            raise failure
        typer.echo(f"prelunet: {failure}", err=True)
        failed += 1
    if failed:
        raise ImageError(f"{failed} of {len(images)} images could not be classified; the reasons are above")


def _read(file: str) -> bytes:
    """Return the bytes of a file or of stdin; ImageError when it cannot be read."""
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror}). Give the path of an image file") from error


def _lines(file: str, answer: Answer) -> str:
    """Return an answer for people."""
    classes = [f"  {p['score']:7.2%}  {p['name']} ({p['wnid']})" for p in answer["predictions"]]
    cut = ["  only the centre was looked at: the image is too elongated"] if answer["capped"] else []
    return "\n".join([file, *classes, *cut])


def _ask_model(session: Session, name: str, protocol: Protocol, top: int | None, heatmap: Path | None) -> Ask:
    """Answer with a session of our own, and draw the heat maps if asked for."""
    contract = session.contract
    classes = len(contract.classes)
    if top is not None and top > classes:
        raise UsageError(f"--top {top}: this model can answer 1 to {classes} classes")

    def ask(data: bytes) -> Answer:
        image = decode_rgb(data)
        (classified,) = classify_images(session, [image], protocol, keep_windows=heatmap is not None)
        if heatmap is not None:
            write_atomically(heatmap, png_bytes(draw_heat_maps(image, classified, contract, protocol)))
        return {
            "predictions": _predictions(classified, contract, top or TOP),
            "model": {"name": name, "sha256": session.model_sha256},
            "protocol": protocol.to_json(),
            "views": [
                {"scale": result.view.scale, "mirrored": result.view.mirrored, "windows": list(result.windows)}
                for result in classified.views
            ],
            "capped": classified.capped,
            "circumstances": session.circumstances.to_json(),
        }

    return ask


def _predictions(classified: Classified, contract: ModelContract, top: int) -> list[dict[str, Any]]:
    return [
        {
            "class_index": index,
            "wnid": contract.classes[index].wnid,
            "name": contract.classes[index].name,
            "score": shortest(score),
        }
        for index, score in classified.top(top)
    ]


def _ask_server(
    stack: ExitStack, address: str, name: str | None, protocol: str, top: int | None, heatmap: Path | None
) -> Ask:
    """Answer through a server."""
    from evaluator.client import Client  # here, so that a model file is classified without loading gRPC

    client = stack.enter_context(Client(address))

    def ask(data: bytes) -> Answer:
        answer = client.classify(data, model=name, protocol=protocol, top_k=top, heatmap=heatmap is not None)
        if heatmap is not None:
            write_atomically(heatmap, answer.heatmap)
        return {
            "predictions": [
                {"class_index": p.class_index, "wnid": p.wnid, "name": p.name, "score": p.score}
                for p in answer.predictions
            ],
            "model": {"name": answer.model, "sha256": answer.model_sha256},
            "protocol": dict(answer.protocol),
            "views": [
                {"scale": view.scale, "mirrored": view.mirrored, "windows": [view.rows, view.columns]}
                for view in answer.views
            ],
            "capped": answer.capped,
            "circumstances": dict(answer.circumstances),
        }

    return ask
