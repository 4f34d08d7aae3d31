"""The section of docs/performance.md on growth, written from the file of growth.py. Pure functions."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growth_plots import medians, points_of

Json = dict[str, Any]
Row = dict[str, Any]
NOT_MEASURED = "Not measured."


def section(data: Json, pictures: Mapping[str, str]) -> str:
    """Return the Markdown of all parts. pictures: by name of a plot the path under which the page finds it."""
    shown = {name: f"![{ALTERNATIVES[name]}]({path})" for name, path in pictures.items()}
    blocks = ["## How cost grows", _circumstances(data)]
    for title, picture, write in PARTS:
        blocks += [f"### {title}", *([shown[picture]] if picture in shown else []), write(data)]
    return "\n\n".join(blocks)


ALTERNATIVES = {
    "growth-area": "Seconds and operations against the pixels of a view",
    "growth-memory": "Peak of memory against the pixels of a view, measured and expected",
    "growth-protocols": "Seconds against elongation, and against the number of scales",
    "growth-classes": "Seconds and sizes against the number of classes",
    "growth-dataset": "Milliseconds per image and peak of memory against the size of the dataset",
}


def _circumstances(data: Json) -> str:
    """Return what the numbers were measured with: a line for each call that gave some of them."""
    used = sorted({case["run"] for case in data["cases"]})
    lines = []
    for run in (data["runs"][index] for index in used):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        rehearsal = " **A rehearsal with a tiny net: no number means anything.**" if run["tiny"] else ""
        missing = "".join(f" {name}: {said}." for name, said in run["engines"].items() if isinstance(said, str))
        lines.append(
            f"Measured {run['date']} on {run['machine']['cores']} cores of {run['machine']['cpu']} with {versions}: "
            f"`{run['command']}`.{missing}{rehearsal}"
        )
    return "\n".join(lines)


def _area(data: Json) -> str:
    points = points_of(data, "area")
    if not points:
        return NOT_MEASURED
    first, last = points[0], points[-1]
    told = (
        "A photo of 375x500 pixels at growing scales; a point is one view and its mirror image. "
        f"From {first['pixels'] / 2e6:.2f} to {last['pixels'] / 2e6:.2f} million pixels, "
        f"{_times(first, last, 'pixels')} times the area, operations grow {_times(first, last, 'gflop')} times: those "
        "of the trunk with the area, those of the head with the windows, of which a square of one crop has one only. "
        f"The head is {_share(first)} of the operations at {first['scale']}, {_crossing(points)}and {_share(last)} at "
        f"{last['scale']}."
    )
    columns: list[Column] = [
        ("scale", lambda point: str(point["scale"])),
        ("view", lambda point: "x".join(map(str, point["views"][0]))),
        ("windows", lambda point: f"{point['windows'] // 2:,}"),
        ("GFLOP", lambda point: _number(point["gflop"])),
        ("of it head", _share),
    ]
    return f"{told}\n\n{_table(points, columns + _seconds(points, rates=True))}"


def _elongation(data: Json) -> str:
    points = points_of(data, "elongation")
    if not points:
        return NOT_MEASURED
    columns: list[Column] = [
        ("shape", lambda point: f"1:{point['times']:g}"),
        ("view", lambda point: "x".join(map(str, point["views"][0]))),
        ("windows", lambda point: f"{point['windows'] // 2:,}"),
        ("GFLOP", lambda point: _number(point["gflop"])),
    ]
    told = "Shorter side 256; beyond 1:4 only the centre is looked at, so that nothing grows further."
    return f"{told}\n\n{_table(points, columns + _seconds(points, rates=True))}"


def _scales(data: Json) -> str:
    points = points_of(data, "scales")
    if not points:
        return NOT_MEASURED
    columns: list[Column] = [
        ("scales", lambda point: ", ".join(map(str, point["scales"]))),
        ("views", lambda point: str(len(point["views"]))),
        ("GFLOP", lambda point: _number(point["gflop"])),
    ]
    return (
        "The same photo; every scale is resized from it and has its mirror image. What a scale costs is its area: "
        f"nothing is shared between scales.\n\n{_table(points, columns + _seconds(points, rates=True))}"
    )


def _memory(data: Json) -> str:
    points = points_of(data, "memory")
    if not points:
        return NOT_MEASURED
    above = [point for point in points for key in ("loading", "settled", "peak")
             if point[f"{key}_mb"] > point[f"predicted_{key}_mb"]]  # fmt: skip
    nearest = max(point["peak_mb"] / point["predicted_peak_mb"] for point in points)
    kept = "No measured number is above what is expected" if not above else (
        f"**{len(above)} numbers are above what is expected**"
    )  # fmt: skip
    told = (
        "The pairs of the first section, each in a process of its own, in MB: measured / expected at most "
        f"(`evaluator/engine/memory.py`). {kept}; the nearest peak is {100 * nearest:.0f} % of it. *rows*: how many "
        "views share a batch: a pair of large ones is computed one after the other, which keeps memory flat."
    )
    columns: list[Column] = [
        ("engine", lambda point: point["engine"]),
        ("scale", lambda point: str(point["scale"])),
        ("rows", lambda point: str(point["rows"])),
        *(
            (title, lambda point, key=key: f"{point[f'{key}_mb']:,} / {point[f'predicted_{key}_mb']:,}")
            for title, key in (("while loading", "loading"), ("loaded", "settled"), ("peak of the pair", "peak"))
        ),
    ]
    return f"{told}\n\n{_table(sorted(points, key=lambda point: point['engine']), columns)}"


def _classes(data: Json) -> str:
    points = points_of(data, "classes")
    if not points:
        return NOT_MEASURED
    engines = list(dict.fromkeys(point["engine"] for point in points))
    rows = []
    for count in dict.fromkeys(point["classes"] for point in points):
        of_count = {point["engine"]: point for point in points if point["classes"] == count}
        rows.append({**next(iter(of_count.values())), "engines": of_count})
    columns: list[Column] = [
        ("classes", lambda row: f"{row['classes']:,}"),
        ("GFLOP", lambda row: _number(row["gflop"])),
        ("file MB", lambda row: f"{row['file_mb']:,.0f}"),
        ("windows' scores MB", lambda row: _number(row["window_scores_mb"])),
    ]
    for engine in engines:
        columns.append((f"{engine}: s", _of_engine(engine, lambda p: f"{statistics.median(p['seconds']):.2f}")))
        columns.append((f"{engine}: loading / peak MB", _of_engine(engine, _loading_and_peak)))
    return (
        "A pair at scale 384 (375x500 photo). Only the last layer grows, 16 kB of weights and as many multiply-adds "
        "per class and window as fc2 has outputs. *windows' scores*: of both views, which the runtime makes and a "
        f"heat map keeps.\n\n{_table(rows, columns)}"
    )


def _dataset(data: Json) -> str:
    points = points_of(data, "dataset")
    if not points:
        return NOT_MEASURED
    engine = points[0]["engine"]
    of_one = sorted((p for p in points if p["engine"] == engine), key=lambda p: p["images"])
    told = "`prelunet validate` with the demo's net on the embedded images, repeated under other names."
    if len(of_one) > 1:
        before, last = of_one[-2:]  # smaller ones end before every shape has been met
        growth = last["peak_mb"] - before["peak_mb"]
        told += (
            f" From {before['images']:,} to {last['images']:,} images the peak of {engine} grows by {growth:,} MB, "
            f"{growth * 2**20 / (last['images'] - before['images']):.0f} bytes an image. What must grow is the list of "
            f"samples with their names, {last['list_bytes_an_image']} bytes an image here, and the columns into which "
            "the finished run is read; pixels, views and scores are those of a few parts, whatever the number. A small "
            "dataset also pays for starting, and for its last part, beside which nothing is left to do."
        )
    columns: list[Column] = [
        ("engine", lambda point: point["engine"]),
        ("images", lambda point: f"{point['images']:,}"),
        ("seconds", lambda point: f"{point['seconds']:.1f}"),
        ("ms per image", lambda point: f"{1000 * point['seconds'] / point['images']:.2f}"),
        ("peak MB", lambda point: f"{point['peak_mb']:,}"),
        ("list of samples, bytes per image", lambda point: str(point["list_bytes_an_image"])),
        ("written, bytes per image", lambda point: f"{point['written_bytes_an_image']:,}"),
    ]
    return f"{told}\n\n{_table(sorted(points, key=lambda point: point['engine']), columns)}"


PARTS: Sequence[tuple[str, str, Callable[[Json], str]]] = (
    ("With the image's area", "growth-area", _area),
    ("With elongation", "growth-protocols", _elongation),
    ("With scales", "", _scales),
    ("Memory with the image's area", "growth-memory", _memory),
    ("With classes", "growth-classes", _classes),
    ("With the dataset", "growth-dataset", _dataset),
)
Column = tuple[str, Callable[[Row], str]]


def _seconds(points: Sequence[Row], *, rates: bool) -> list[Column]:
    """Return a column for each engine: seconds, and GFLOP/s beside them."""
    names = list(dict.fromkeys(name for point in points for name in point["seconds"]))
    return [(f"{name}: s{' (GFLOP/s)' if rates else ''}", _seconds_of(name)) for name in names]


def _seconds_of(name: str) -> Callable[[Row], str]:
    def cell(point: Row) -> str:
        seconds = medians(point).get(name)
        return "" if seconds is None else f"{_number(seconds)} ({point['gflop'] / seconds:.0f})"

    return cell


def _of_engine(engine: str, cell: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: cell(row["engines"][engine]) if engine in row["engines"] else ""


def _loading_and_peak(point: Row) -> str:
    return f"{point['loading_mb']:,} / {point['peak_mb']:,}"


def _share(point: Row) -> str:
    return f"{100 * point['head_gflop'] / point['gflop']:.0f} %"


def _times(first: Row, last: Row, key: str) -> str:
    return f"{last[key] / first[key]:.0f}"


def _crossing(points: Sequence[Row]) -> str:
    """Say where the head first takes a tenth of the operations."""
    beyond = [point for point in points[1:-1] if point["head_gflop"] > 0.1 * point["gflop"]]
    return f"{_share(beyond[0])} at {beyond[0]['scale']} already " if beyond else ""


def _number(value: float) -> str:
    """Return a number with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    lines = [" | ".join(title for title, _ in columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row) for _, cell in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
