"""The file for the ILSVRC server, compared with a plain implementation of the format."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.cli import run as prelunet
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.validation.ensemble import ensemble
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.submission import write_submission
from tests.reporting.scored_runs import best_first, changed_info, random_scores, write_scored_run

IMAGES = 40
CLASSES = [{"wnid": f"n0{index}440764", "name": f"class {index}"} for index in range(7)]
IDS = {CLASSES[index]["wnid"]: number for index, number in enumerate((7, 1000, 3, 12, 1, 999, 450))}
FILES = [f"{'ba'[index % 2]}{index % 3}/ILSVRC2012_test_{index * 37 % IMAGES + 1:08}.JPEG" for index in range(IMAGES)]


def scored_run(folder: Path, *, refused: Sequence[int] = (), labeled: bool = False, seed: int = 0) -> Path:
    """Write a run of images whose base names sort differently from their paths."""
    order = sorted(range(IMAGES), key=lambda index: FILES[index])
    labels = [index % 7 if labeled else None for index in range(IMAGES)]
    return write_scored_run(
        folder,
        random_scores(seed, IMAGES),
        labels,
        files=[FILES[index] for index in order],
        refusals=dict.fromkeys(refused, "truncated"),
        classes=CLASSES,
        model={"file": f"m{seed}.onnx", "sha256": f"{seed}" * 64},
    )


def expected_lines(scores: np.ndarray, refused: Sequence[int] = ()) -> list[str]:
    """Return the expected lines, computed in the plainest way. scores: in the order of the paths."""
    lines = {}
    for place, file in enumerate(sorted(FILES)):
        best = [IDS[CLASSES[index]["wnid"]] for index in best_first(scores[place])[:5]]
        lines[file.split("/")[1]] = "1 2 3 4 5" if place in refused else " ".join(str(number) for number in best)
    return [lines[name] for name in sorted(lines)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "submission.txt"


@pytest.mark.parametrize("labeled", [False, True])
def test_each_image_has_its_five_ids_in_the_order_of_the_file_names(tmp_path: Path, out: Path, labeled: bool) -> None:
    assert sorted(FILES) != sorted(FILES, key=lambda file: file.split("/")[1])
    run = read_run(scored_run(tmp_path / "run", labeled=labeled))
    assert write_submission(run, IDS, out) == 0
    assert out.read_bytes() == "".join(line + "\n" for line in expected_lines(random_scores(0, IMAGES))).encode()


def test_an_ensemble_is_submitted_like_a_run(tmp_path: Path, out: Path) -> None:
    folders = [scored_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    found = ensemble(folders, tmp_path / "e")
    write_submission(found.run, IDS, out)
    assert out.read_text().splitlines() == expected_lines(np.load(tmp_path / "e" / "scores.f32.npy"))


def test_a_refused_image_stops_the_submission_unless_placeholders_are_allowed(tmp_path: Path, out: Path) -> None:
    run = read_run(scored_run(tmp_path / "run", refused=[5, 30]))
    with pytest.raises(RunFolderError, match=r"2 images were refused \(.*: truncated\).*--allow-refused"):
        write_submission(run, IDS, out)
    assert not out.exists()
    assert write_submission(run, IDS, out, allow_refused=True) == 2
    assert out.read_text().splitlines() == expected_lines(random_scores(0, IMAGES), refused=[5, 30])


def test_images_of_the_same_name_in_two_folders_are_refused(tmp_path: Path, out: Path) -> None:
    files = ["a/1.png", "a/2.png", "b/2.png"]
    run = read_run(write_scored_run(tmp_path / "run", random_scores(0, 3), [None] * 3, files=files, classes=CLASSES))
    with pytest.raises(RunFolderError, match=r"a/2\.png and b/2\.png have the same name"):
        write_submission(run, IDS, out)
    assert not out.exists()


def test_names_without_leading_zeros_have_no_clear_order_and_are_refused(tmp_path: Path, out: Path) -> None:
    files = ["a/test1.png", "a/test10.png", "a/test2.png"]
    run = read_run(write_scored_run(tmp_path / "run", random_scores(0, 3), [None] * 3, files=files, classes=CLASSES))
    with pytest.raises(
        RunFolderError, match=r"as text test1\.png, test10\.png, test2\.png, but by number test1\.png, t"
    ):
        write_submission(run, IDS, out)


def test_a_class_without_a_devkit_id_is_refused_with_its_wnid(tmp_path: Path, out: Path) -> None:
    run = read_run(scored_run(tmp_path / "run"))
    for unknown in (CLASSES[:1], CLASSES[2:]):
        known = {
            wnid: number for wnid, number in IDS.items() if {"wnid": wnid} not in [{"wnid": c["wnid"]} for c in unknown]
        }
        with pytest.raises(UsageError, match=rf"{len(unknown)} of the model's 7 classes .* \({unknown[0]['wnid']}"):
            write_submission(run, known, out)
    assert not out.exists()


def test_answers_among_four_classes_are_refused(tmp_path: Path, out: Path) -> None:
    folder = write_scored_run(tmp_path / "run", np.full((3, 4), 0.25, np.float32), [None] * 3, classes=CLASSES[:4])
    whole = read_run(scored_run(tmp_path / "whole"))
    restriction = {"name": "four", "classes": [0, 2, 3, 5]}
    restricted = replace(whole, info=replace(whole.info, dataset={**whole.info.dataset, "restriction": restriction}))
    for run in (read_run(folder), restricted):
        with pytest.raises(UsageError, match="among 4 classes, but a line needs 5"):
            write_submission(run, IDS, out)


def test_a_part_of_the_dataset_is_no_submission(tmp_path: Path, out: Path) -> None:
    folder = scored_run(tmp_path / "run")
    changed_info(folder, "dataset", "selection", value="the first 40")
    with pytest.raises(RunFolderError, match=r"part of the dataset \(the first 40\)"):
        write_submission(read_run(folder), IDS, out)
    changed_info(folder, "dataset", "selection", value=None)
    changed_info(folder, "shard", value={"number": 1, "of": 1})
    with pytest.raises(RunFolderError, match=r"run: shard 1 of 1, not a complete run.*prelunet merge"):
        write_submission(read_run(folder), IDS, out)


@pytest.mark.parametrize(("strange", "fault"), [(1001, "id 1001, but"), (0, "id 0, but"), (3, "same id, 3")])
def test_ids_out_of_range_or_duplicate_are_refused_with_their_file_and_an_old_file_stays(
    tmp_path: Path, out: Path, strange: int, fault: str
) -> None:
    run = read_run(scored_run(tmp_path / "run"))
    out.write_bytes(b"old")
    ids = {**IDS, CLASSES[6]["wnid"]: strange}
    with pytest.raises(UsageError, match=rf"ids\.txt: gives .*n06440764 the {fault}"):
        write_submission(run, ids, out, ids_from=tmp_path / "ids.txt")
    assert out.read_bytes() == b"old"


def test_the_devkits_table_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table = scored_run(tmp_path / "run"), mapping(tmp_path / "kit")
    before = table.read_bytes()
    assert prelunet(["submission", str(folder), "-o", str(table), "--devkit", str(table)]) == 2
    assert f"{table}: is the input itself" in capsys.readouterr().err
    assert table.read_bytes() == before


def mapping(folder: Path) -> Path:
    """Write a text mapping with lines `id wnid`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "synsets.txt"
    path.write_text("".join(f"{number} {wnid}\n" for wnid, number in IDS.items()))
    return path


def test_the_verb_reports_what_a_submission_lacks(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scored_run(tmp_path / "run", refused=[2])
    command = ["submission", str(folder), "-o", str(out), "--devkit", str(mapping(tmp_path))]
    assert prelunet(command) == 2
    assert "--allow-refused" in capsys.readouterr().err
    assert prelunet([*command, "--allow-refused"]) == 0
    told = capsys.readouterr()
    assert ": 40 lines of 5 devkit ids" in told.out
    assert "1 images were refused and have the line '1 2 3 4 5'" in told.err
    assert "100,000 images, this run has 40" in told.err
    assert out.read_text().splitlines() == expected_lines(random_scores(0, IMAGES), refused=[2])


def test_the_ids_of_the_classes_are_read_from_the_devkits_own_table(tmp_path: Path, out: Path) -> None:
    from scipy.io import savemat

    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    ancestor = [(1001, "n00001740", "entity", 5)]
    rows = [(number, wnid, "words", 0) for wnid, number in IDS.items()] + ancestor
    (tmp_path / "data").mkdir()
    savemat(tmp_path / "data" / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
    folder = scored_run(tmp_path / "run")
    for devkit in (tmp_path, tmp_path / "data", tmp_path / "data" / "meta.mat"):
        out.unlink(missing_ok=True)
        assert prelunet(["submission", str(folder), "-o", str(out), "--devkit", str(devkit)]) == 0
        assert out.read_text().splitlines() == expected_lines(random_scores(0, IMAGES))


def test_an_invalid_devkit_is_refused(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = scored_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "meta.mat").write_bytes(b"no matlab")
    (tmp_path / "sorted.txt").write_text("".join(f"{entry['wnid']}\n" for entry in CLASSES))
    for name in ("none", "empty", "meta.mat", "sorted.txt"):
        assert prelunet(["submission", str(folder), "-o", str(out), "--devkit", str(tmp_path / name)]) == 2
        assert str(tmp_path / name) in capsys.readouterr().err
    assert not out.exists()
