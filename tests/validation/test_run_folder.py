"""The run folder: complete chunks survive, incomplete ones are truncated, and other files are never touched."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import open_dataset
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import EnvironmentFault, PreluNetError, RunFolderError
from prelunet.evaluator.json_checks import differences
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import (
    Batching,
    RunInfo,
    build_run_info,
    describe_dataset,
    read_run,
    read_run_info,
)
from prelunet.evaluator.validation.writer import open_run, scores_header
from tests.helpers.fakes import FakeSession, fake_contract
from tests.validation.shared_data import RESULT, contents

SESSION = FakeSession()
CLASSES = 6
IMAGES, CHUNK = 10, 4
SAMPLES = [Sample(f"n{index // 4:08}/{index:02}.png", index // 4, 100 + index) for index in range(IMAGES)]
INFO = replace(
    build_run_info(
        SESSION,
        "m.onnx",
        {"name": "val", "fingerprint": "f" * 64, "images": IMAGES, "layout": "class folders", "selection": None},
        build_protocol("multi-scale", SESSION.contract),
    ),
    chunk=CHUNK,
)

SCORES = np.random.default_rng(0).random((IMAGES, CLASSES)).astype(np.float32)
SCORES[5] = np.nan


def prediction(index: int) -> Prediction:
    sample = SAMPLES[index]
    if index == 5:
        return Prediction(sample.file, sample.label, refused='the "reason"\nin two lines, naïve')
    top = tuple((int(c), float(SCORES[index, c])) for c in np.argsort(-SCORES[index])[:5])
    rank = 1 + int(np.count_nonzero(SCORES[index] > SCORES[index, sample.label]))
    ranks = (3,) * len(INFO.protocol.views)
    return Prediction(sample.file, sample.label, top, rank, ranks, capped=index == 6)


def write(folder: Path, *, images: int = IMAGES, info: RunInfo = INFO, fresh: bool = False) -> int:
    """Write the run up to a number of images. Return how many were already written."""
    with open_run(folder, info, SAMPLES, fresh=fresh) as writer:
        before = writer.done
        while writer.done < images:
            chunk = range(writer.done, min(writer.done + CHUNK, IMAGES))
            writer.append([prediction(index) for index in chunk], SCORES[chunk.start : chunk.stop])
        return before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "first"


def test_a_finished_run_reads_back_as_it_was_written(folder: Path) -> None:
    assert write(folder) == 0
    found = read_run(folder)
    assert found.info == INFO
    assert list(found.predictions) == [prediction(index) for index in range(IMAGES)]
    np.testing.assert_array_equal(np.load(folder / "scores.f32.npy"), SCORES)


def test_the_scores_file_has_the_header_that_numpy_writes(tmp_path: Path) -> None:
    np.save(tmp_path / "saved.npy", SCORES)
    assert (tmp_path / "saved.npy").read_bytes() == scores_header(*SCORES.shape) + SCORES.tobytes()


def test_the_results_contain_no_date_and_no_path(folder: Path) -> None:
    write(folder)
    text = b"".join(contents(folder).values())
    assert str(folder.parent).encode() not in text
    assert b"date" not in text


@pytest.mark.parametrize("done", [0, CHUNK, 2 * CHUNK])
@pytest.mark.parametrize("tail", [b"", b'{"file": "n0000', b"\0" * 50, b"{}\n"])
@pytest.mark.parametrize("rows", [0, 1, 3.5, 4])
def test_whatever_a_crash_leaves_after_the_last_complete_chunk_is_truncated(
    folder: Path, done: int, tail: bytes, rows: float
) -> None:
    write(folder, images=done)
    with (folder / "scores.f32.npy").open("ab") as file:
        file.write(b"\xff" * int(rows * 4 * CLASSES))
    with (folder / "predictions.jsonl").open("ab") as file:
        file.write(tail)
    assert write(folder) == done
    write(folder.parent / "undisturbed")
    assert contents(folder) == contents(folder.parent / "undisturbed")


@pytest.mark.parametrize("missing", ["predictions.jsonl", "scores.f32.npy"])
def test_a_run_that_lost_a_file_starts_again_with_its_first_chunk(folder: Path, missing: str) -> None:
    write(folder, images=CHUNK)
    (folder / missing).unlink()
    assert write(folder) == 0
    write(folder.parent / "undisturbed")
    assert contents(folder) == contents(folder.parent / "undisturbed")


def test_a_pipe_in_the_place_of_the_lines_is_refused_and_not_waited_for(folder: Path) -> None:
    write(folder, images=CHUNK)
    (folder / "predictions.jsonl").unlink()
    os.mkfifo(folder / "predictions.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        write(folder)


def test_the_chunk_of_a_line_that_does_not_match_its_sample_is_repeated(folder: Path) -> None:
    write(folder)
    before = contents(folder)
    lines = folder / "predictions.jsonl"
    lines.write_text(lines.read_text().replace(SAMPLES[6].file, "n00000000/else.png"))
    assert write(folder) == CHUNK
    assert contents(folder) == before


def test_a_finished_run_is_not_touched_when_it_is_opened_again(folder: Path) -> None:
    write(folder)
    before = {name: (folder / name).stat().st_mtime_ns for name in RESULT}
    assert write(folder) == IMAGES
    assert {name: (folder / name).stat().st_mtime_ns for name in RESULT} == before


def test_leftovers_of_a_killed_start_do_not_prevent_a_new_one(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".run.json.0a1b2c3d.tmp").write_text("{")
    assert write(folder) == 0
    assert not list(folder.glob(".*"))


OTHERS: list[tuple[RunInfo, str]] = [
    (replace(INFO, model={**INFO.model, "sha256": "0" * 64}), "model.sha256: "),
    (replace(INFO, protocol=build_protocol("dense-40", SESSION.contract)), r"protocol.scales: \[32, 48, 60\] in the f"),
    (replace(INFO, dataset={**INFO.dataset, "fingerprint": "e" * 64}), "dataset.fingerprint: fff"),
    (replace(INFO, classes=INFO.classes[:5]), "classes.length: 6 in the folder, 5 now"),
    (
        replace(INFO, circumstances={**INFO.circumstances, "provider": "CUDA"}),
        "provider: CPUExec.* in the f.*, CUDA now",
    ),
    (
        replace(INFO, circumstances={**INFO.circumstances, "versions": {"fake": "2"}}),
        "versions.fake: 1 in the folder, 2",
    ),
    (replace(INFO, chunk=8), "chunk: 4 in the folder, 8 now"),
]


@pytest.mark.parametrize(("other", "difference"), OTHERS)
def test_another_run_in_the_folder_is_refused_with_the_difference_shown(
    folder: Path, other: RunInfo, difference: str
) -> None:
    write(folder, images=CHUNK)
    before = contents(folder)
    with pytest.raises(RunFolderError, match=difference) as caught:
        write(folder, info=other)
    assert "--fresh" in str(caught.value)
    assert contents(folder) == before


def test_a_renamed_model_file_or_dataset_is_still_the_same_run(folder: Path) -> None:
    write(folder, images=CHUNK)
    renamed = replace(INFO, model={**INFO.model, "file": "renamed.onnx"}, dataset={**INFO.dataset, "name": "moved.tar"})
    assert write(folder, info=renamed) == CHUNK


def test_a_run_without_provenance_as_of_an_earlier_version_resumes_with_a_model_that_states_it(folder: Path) -> None:
    write(folder, images=CHUNK)
    data = json.loads((folder / "run.json").read_text())
    for key in ("provenance", "checkpoint_sha256"):
        data["model"].pop(key, None)
    (folder / "run.json").write_text(json.dumps(data))
    stated = {"provenance": {"parent_sha256": "ab" * 32, "environments": []}, "checkpoint_sha256": "cd" * 32}
    assert write(folder, info=replace(INFO, model={**INFO.model, **stated})) == CHUNK
    model = read_run(folder).info.model
    assert (model["provenance"], model["checkpoint_sha256"]) == (None, None)


def test_many_differences_are_counted_and_not_all_listed(folder: Path) -> None:
    write(folder, images=CHUNK)
    other = replace(INFO, classes=tuple(ClassEntry(f"m{index}", f"other {index}") for index in range(CLASSES)))
    with pytest.raises(RunFolderError, match=r"(?s)classes\.0\.wnid: .*\n  classes\.3\.name: .*\n  \.\.\. and 4 more"):
        write(folder, info=other)


def test_a_value_that_only_one_of_two_runs_has_is_absent_in_the_other() -> None:
    assert differences({"a": 1, "gone": 2}, {"a": 1, "new": 3}) == [
        "gone: 2 in the folder, (absent) now",
        "new: (absent) in the folder, 3 now",
    ]


def test_fresh_starts_over_and_deletes_only_the_files_of_a_run(folder: Path) -> None:
    write(folder)
    (folder / "report").mkdir()
    (folder / "report" / "report.json").write_text("old")
    (folder / "report" / "notes.txt").write_text("mine")
    (folder / "report" / "compared-with-a").mkdir()
    (folder / "report" / "compared-with-a" / "compare.html").write_text("old")
    (folder / "notes.txt").write_text("mine")
    other = OTHERS[0][0]
    assert write(folder, info=other, fresh=True) == 0
    assert read_run(folder).info == other
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(
        [*RESULT, "notes.txt", "notes.txt"]
    )


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "run.json", "log.jsonl", "scores.f32.npy", ".hidden"])
def test_a_folder_with_other_files_is_left_alone_even_with_fresh(tmp_path: Path, name: str, fresh: bool) -> None:
    (tmp_path / name).write_text("not yours")
    with pytest.raises(RunFolderError, match=r"not empty \(.*\) and not a run.*--run"):
        write(tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "not yours"


@pytest.mark.parametrize("content", ['{"mine": 1}', "[]", '{"version": 2, "model": 1}', '"version model protocol"'])
@pytest.mark.parametrize("fresh", [False, True])
def test_another_programs_run_json_and_its_other_files_are_left_alone(
    tmp_path: Path, content: str, fresh: bool
) -> None:
    files = {"run.json": content, "predictions.jsonl": "mine\n", "log.jsonl": "mine too\n", "scores.f32.npy": "mine"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunFolderError, match=r"not empty .* and not a run"):
        write(tmp_path, fresh=fresh)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_finished_run_on_a_read_only_disk_is_opened_and_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    really = Path.open

    def read_only(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return really(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert write(folder) == IMAGES
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_control_characters_in_names_are_escaped_so_that_the_run_can_be_read(folder: Path) -> None:
    dataset = replace(open_images(folder.parent / "v\x1b]0;al\udcff"), layout="flat, labels from \udce9.txt")
    described = describe_dataset(dataset)
    assert described["name"] == r"v\x1b]0;al\udcff"
    assert described["layout"] == r"flat, labels from \udce9.txt"
    info = build_run_info(SESSION, "m\n.onnx", {**described, "images": IMAGES}, INFO.protocol)
    write(folder, info=replace(info, chunk=CHUNK))
    assert read_run(folder).info.model["file"] == r"m\x0a.onnx"


def open_images(place: Path) -> Dataset:
    (place / "n00000001").mkdir(parents=True)
    Image.new("RGB", (3, 4)).save(place / "n00000001" / "a.png")
    return open_dataset(place, split="val", wnids=[entry.wnid for entry in SESSION.contract.classes])


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(RunFolderError, match="a file, not a folder"):
        write(tmp_path / "file")


def test_a_second_process_on_the_same_folder_is_refused(folder: Path) -> None:
    with (
        open_run(folder, INFO, SAMPLES, fresh=False),
        pytest.raises(RunFolderError, match="another process is writing this run"),
        open_run(folder, INFO, SAMPLES, fresh=True),
    ):
        pass
    assert write(folder) == 0  # the lock is released


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_scores_of_a_chunk_are_on_the_disk_before_its_lines_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []  # file, and the number of lines at that moment
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name in RESULT:
            synced.append((name, (folder / "predictions.jsonl").read_bytes().count(b"\n")))

    monkeypatch.setattr(os, "fsync", watch)
    write(folder, images=2 * CHUNK)
    scores, lines = "scores.f32.npy", "predictions.jsonl"
    assert synced == [(scores, 0), (lines, CHUNK), (scores, CHUNK), (lines, 2 * CHUNK)]


def test_fresh_that_is_killed_at_any_point_leaves_no_lines_under_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(INFO, model={**INFO.model, "sha256": "d" * 64})
    steps, unlink, replaced = iter(range(0)), Path.unlink, Path.replace

    def step() -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", lambda self, **options: (step(), unlink(self, **options))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (step(), replaced(self, target))[1])
    for count in range(20):
        steps = iter(range(1000))
        if not (folder / "run.json").exists() or read_run_info(folder) != INFO:
            write(folder, fresh=True)
        write(folder)
        steps = iter(range(count))
        with suppress(KeyboardInterrupt):
            write(folder, info=other, fresh=True, images=0)
        if read_run_info(folder) == other:
            assert not (folder / "predictions.jsonl").exists() or not (folder / "predictions.jsonl").read_bytes()


def test_on_a_full_disk_the_last_complete_chunk_stays_and_the_run_resumes_there(folder: Path) -> None:
    write(folder, images=CHUNK)
    room = (folder / "predictions.jsonl").stat().st_size + 100  # part of the next chunk's first line
    with (
        largest_file(room),
        pytest.raises(EnvironmentFault, match=r"predictions\.jsonl: .*ulimit -f .*\. 4 of 10 images"),
    ):
        write(folder)
    assert (folder / "predictions.jsonl").stat().st_size == room
    assert write(folder) == CHUNK
    write(folder.parent / "undisturbed")
    assert contents(folder) == contents(folder.parent / "undisturbed")


def test_a_full_disk_at_the_start_leaves_nothing_that_prevents_the_next_start(folder: Path) -> None:
    with largest_file(100), pytest.raises(PreluNetError, match=r"run\.json"):
        write(folder)
    assert write(folder) == 0


# Reading


def test_an_unfinished_run_is_refused_with_the_fix(folder: Path) -> None:
    write(folder, images=CHUNK)
    with pytest.raises(RunFolderError, match=r"4 of 10 images are done.*run the same command to resume"):
        read_run(folder)


def test_a_folder_without_a_run_is_refused_with_the_command_that_creates_one(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run\.json in this folder.*prelunet validate"):
        read_run(tmp_path)


def test_a_run_of_the_version_before_is_refused_as_such_and_not_as_damaged(folder: Path) -> None:
    """Version 2 had another key for the images that were computed together, and at first none."""
    write(folder)
    data = json.loads((folder / "run.json").read_text())
    rules = {key: value for key, value in data["batching"].items() if key != "images_together"}
    before = {**data, "version": 2, "batching": {"part": 4, **rules}}
    first = {key: value for key, value in before.items() if key != "batching"}
    for old in (before, first):
        (folder / "run.json").write_text(json.dumps(old))
        for attempt in (read_run, write):
            with pytest.raises(RunFolderError, match=r"version 2, but .* reads version 3\. Repeat the run") as caught:
                attempt(folder)
            assert "damaged" not in str(caught.value)
    assert write(folder, fresh=True) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: {**data, "version": 4}, "version 4.*Install a newer prelunet"),
        (lambda data: {**data, "version": 2}, "version 2.*Repeat the run with --fresh"),
        (lambda data: {key: data[key] for key in data if key != "dataset"}, "damaged.*dataset"),
        (lambda data: {**data, "protocol": {**data["protocol"], "unknown": 1}}, "damaged.*unknown"),
        (
            lambda data: {**data, "model": {**data["model"], "provenance": {}}},
            r"damaged.*`parent_sha256` - at `\$\.model\.prov",
        ),
    ],
)
def test_a_run_json_that_cannot_be_read_is_refused(folder: Path, change: Any, reason: str) -> None:
    write(folder)
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(change(data)))
    for attempt in (read_run, write):
        with pytest.raises(RunFolderError, match=reason):
            attempt(folder)
    assert write(folder, fresh=True) == 0


# Batching, which differs on a GPU


def test_a_run_on_a_gpu_has_larger_chunks_and_its_rules_survive_the_file(tmp_path: Path) -> None:
    infos = {}
    for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        session = FakeSession(provider=provider)
        infos[provider] = build_run_info(
            session, "m.onnx", INFO.dataset, build_protocol("multi-scale", session.contract)
        )
        write(tmp_path / provider, info=infos[provider])
        assert read_run(tmp_path / provider).info == infos[provider]
        assert infos[provider].batching == Batching(infos[provider].chunk, session.rules)
    cpu, gpu = infos.values()
    assert (cpu.chunk, gpu.chunk) == (64, 1024)


def test_a_memory_limit_makes_the_portions_smaller_on_a_cpu() -> None:
    session = FakeSession(fake_contract(max_side=4096))
    protocol = build_protocol("dense-1000", session.contract)
    free, limited = (
        build_run_info(session, "m.onnx", INFO.dataset, protocol, memory=memory) for memory in (None, 3 * 2**29)
    )
    assert free.batching is not None
    assert limited.batching is not None
    assert 1 < limited.batching.images_together < free.batching.images_together
