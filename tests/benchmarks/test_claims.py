"""benchmarks/claims: the rule against scipy, rows on a tiny dataset, and the Fisher matrix against its definition."""

import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from benchmarks.claims import rows, run
from benchmarks.claims.fisher import TwoLayers, fisher_matrix, statistics_of
from benchmarks.claims.rows import Arm, Claim, Row, verdict
from benchmarks.claims.run import Experiment
from benchmarks.common.intervals import interval_of_mean, median_ratio
from benchmarks.common.results import ROOT, environment
from prelunet.evaluator.errors import Interrupted

EXACT = {"rtol": 1e-9, "atol": 1e-12}  # float64 on both sides: only the order of sums differs


def small_net(slope: float) -> tuple[TwoLayers, np.ndarray]:
    """Return a net of 3 inputs, 4 units and 3 classes, and 5 inputs; no two sizes that meet are equal."""
    random = np.random.default_rng(2)
    w1, w2 = random.standard_normal((4, 3)), random.standard_normal((3, 4))
    net = TwoLayers(w1, random.standard_normal(4), np.full(4, slope), w2, random.standard_normal(3))
    return net, random.standard_normal((5, 3))


def plain_fisher(net: TwoLayers, inputs: np.ndarray) -> np.ndarray:
    """Return the mean over images of the sum over classes of p·g·gᵀ, with autograd's gradient g of log p."""
    parameters = [torch.tensor(value, requires_grad=True) for value in (net.w1, net.b1, net.w2, net.b2)]
    w1, b1, w2, b2 = parameters
    total = np.zeros((sum(p.numel() for p in parameters),) * 2)
    for image in torch.from_numpy(inputs):
        for label in range(len(net.b2)):
            response = w1 @ image + b1
            hidden = torch.clamp(response, min=0) + torch.from_numpy(net.slope) * torch.clamp(response, max=0)
            log_probability = torch.log_softmax(w2 @ hidden + b2, dim=0)[label]
            gradients = torch.autograd.grad(log_probability, parameters)
            g = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
            total += float(log_probability.detach().exp()) * np.outer(g, g)
    return total / len(inputs)


@pytest.mark.parametrize("slope", [0.0, 0.25, -0.4])
def test_the_matrix_is_the_expected_outer_product_of_the_gradients(slope: float) -> None:
    net, inputs = small_net(slope)
    np.testing.assert_allclose(fisher_matrix(net, inputs), plain_fisher(net, inputs), **EXACT)


def test_the_statistics_equal_loops_over_all_pairs() -> None:
    net, inputs = small_net(0.0)
    net.b1[:] = 2.0
    net.w1[2], net.b1[2] = 0.0, -1.0  # a dead unit: its four parameters and its column of W2 have no information
    matrix, first = fisher_matrix(net, inputs), net.w1.size + net.b1.size
    size, squares = len(matrix), (matrix**2).tolist()
    assert (np.diag(matrix) == 0).sum() == 4 + 3
    pairs: dict[str, list[float]] = {"in the first layer": [], "in the second layer": [], "between the layers": []}
    off_diagonal = between = 0.0
    for i in range(size):
        for j in range(size):
            crosses = (i < first) != (j < first)
            off_diagonal += squares[i][j] * (i != j)
            between += squares[i][j] * crosses
            if i != j and matrix[i, i] > 0 and matrix[j, j] > 0:
                place = "between the layers" if crosses else f"in the {'first' if i < first else 'second'} layer"
                pairs[place].append(squares[i][j] / (matrix[i, i] * matrix[j, j]))
    total = sum(map(sum, squares))
    expected = {"off-diagonal mass": off_diagonal / total, "mass between the layers": between / total}
    expected |= {f"correlation {place}": float(np.sqrt(np.mean(values))) for place, values in pairs.items()}
    assert statistics_of(matrix, first) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_mean_is_that_of_a_paired_t_test() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 9))
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert interval_of_mean(b - a) == pytest.approx((expected.low, expected.high))


def test_the_error_of_a_median_ratio_is_the_spread_of_medians_of_many_samples() -> None:
    random = np.random.default_rng(3)
    ratios = random.normal(1.0, 0.1, (4000, 25))
    found = [median_ratio(row, np.ones(25)) for row in ratios]
    spread = float(np.std([median for median, _ in found]))
    # rel: the formula is asymptotic, and 25 values are few
    assert np.mean([error for _, error in found if error is not None]) == pytest.approx(spread, rel=0.05)
    assert median_ratio([10, 40, 9], [20, 20, 10])[0] == pytest.approx(0.9)  # of each pair, not of the medians
    assert median_ratio([3], [4]) == (0.75, None)


@pytest.mark.parametrize("mean", [-1.0, -0.3, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_claim_holds_if_the_t_test_of_its_differences_rejects_zero_on_its_side(mean: float, sign: Any) -> None:
    differences = np.array([-0.4, 0.1, 0.5, -0.3, 0.1]) + mean  # sums to 5·mean; |mean| 0.3 is within the interval
    found = stats.ttest_1samp(differences, 0.0)
    expected = "not shown" if found.pvalue > 0.05 else "holds" if found.statistic * sign > 0 else "the opposite"
    assert verdict(list(differences), sign) == expected
    assert expected == {1.0: "holds", -1.0: "the opposite"}.get(mean * sign, "not shown")


NET = """
crop = 16
trunk = [{ conv = 4, kernel = 3, stride = 2, pad = 1 }, { conv = 6, kernel = 3, stride = 2, pad = 1 }]
spp_levels = [2, 1]
hidden = 8
"""


def write_photos(path: Path, *, good_val: bool = True) -> Path:
    """Write a tar of three classes, 10 photos of each in train/ and 4 in val/; bad ones cannot be decoded."""
    random = np.random.default_rng(5)
    with tarfile.open(path, "w") as archive:
        for split, count in (("train", 10), ("val", 4)):
            for label in range(3):
                for number in range(count):
                    pixels = random.integers(0, 120, (24, 26, 3), np.uint8)
                    pixels[..., label] += 60  # so that something can be learned
                    coded = io.BytesIO()
                    Image.fromarray(pixels).save(coded, "PNG")
                    data = coded.getvalue() if good_val or split == "train" else b"no image"
                    entry = tarfile.TarInfo(f"photos/{split}/n{label}/{number}.png")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    return path


def make_tiny(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Replace the nets, grids and rows by tiny ones, and the check of the rules, which needs a clean checkout."""
    (folder / "tiny.toml").write_text(NET)
    claims = [
        Claim("one", ("b", "dense-16-20"), ("a", "best center"), -1),
        Claim("two", (rows.ENSEMBLE, "center"), (rows.BEST_MEMBER, "center"), -1),
        Claim("three", ("b", "slope of conv1"), None, 1),
    ]
    for name, value in {
        "NETS": folder, "CROP": 16, "JITTER": (18, 22), "STEPS": {"tiny": 4}, "RATES": (0.001, 0.002, 0.004),
        "RATE_LIMITS": (0.0005, 0.008), "SEARCH_SEEDS": (100,), "SCALES": (16, 20),
        "ARMS": {"a": Arm("tiny", {"activation": "relu"}), "b": Arm("tiny", {"activation": "prelu"})},
        "ROWS": {"tiny": Row("Tiny", ("a", "b"), claims, seeds=(0, 1))},
    }.items():  # fmt: skip
        patch.setattr(rows, name, value)
    patch.setattr(run, "MEMBERS", ("a", "b"))
    rules = {"rules": "0" * 40, "rules_date": "2026-01-02T00:00:00+00:00", "content": "", "commit": "", "cpu": ""}
    patch.setattr(run, "read_rules", lambda: rules)


def words(data: Path, runs: Path) -> list[str]:
    return ["run", "tiny", "--data", str(data), "--runs", str(runs), "--output", str(runs / "results")]


def run_row(data: Path, runs: Path, patch: pytest.MonkeyPatch) -> Any:
    """Run the tiny row in this process; return its result."""
    patch.setattr("sys.argv", words(data, runs))
    run.main()
    return json.loads((runs / "results" / "tiny.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Run the tiny row undisturbed; return its photos, folder and result."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_photos(folder / "photos.tar")
    with pytest.MonkeyPatch.context() as patch:
        make_tiny(folder, patch)
        return data, folder / "runs", run_row(data, folder / "runs", patch)


CHILD = """
import sys
from pathlib import Path
import pytest
from benchmarks.claims import run
from tests.benchmarks.test_claims import make_tiny
make_tiny(Path(sys.argv.pop(1)), pytest.MonkeyPatch())
run.main()
"""


def test_a_row_that_was_killed_resumes_and_gives_the_same_verdicts(
    whole: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data, undisturbed, expected), killed = whole, tmp_path / "killed"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), *words(data, killed)[1:]], env=environment())
    deadline = time.monotonic() + 120
    while len(done := list(killed.glob("*/*/result.json"))) < 3:
        assert child.poll() is None, "it ended too early to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (killed / "results" / "tiny.json").exists()
    times = {path: path.stat().st_mtime_ns for path in done}

    make_tiny(tmp_path, monkeypatch)
    result = run_row(data, killed, monkeypatch)
    for runs in (killed, undisturbed):
        assert (runs / "results" / "tiny.svg").read_text().startswith("<svg")
        assert str(runs.parent) not in (runs / "results" / "tiny.json").read_text()
    assert {path: path.stat().st_mtime_ns for path in done} == times, "finished nets are not trained again"
    assert result == expected
    figures = {(found["arm"], found["figure"]): found["by_seed"] for found in result["figures"]}
    first = result["claims"][0]
    differences = np.subtract(figures["b", "dense-16-20"], figures["a", "best center"])
    np.testing.assert_allclose(first["by_seed"], differences, atol=1e-4)  # rounded
    assert first["verdict"] == verdict(list(differences), -1)


def test_another_machine_resumes_from_the_kept_results_and_trains_only_nets_whose_weights_it_needs(
    whole: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, monkeypatch)
    (data, here, expected), there = whole, tmp_path / "there"
    kept = (here / "results" / "nets.jsonl").read_text().splitlines(keepends=True)
    (there / "results").mkdir(parents=True)
    # without the row's last step, which reads the scores of two nets of each seed
    (there / "results" / "nets.jsonl").write_text("".join(line for line in kept if rows.ENSEMBLE not in line))
    assert run_row(data, there, monkeypatch) == expected
    trained = {path.relative_to(there) for path in there.glob("*/*/net")}
    assert trained == {path.relative_to(here) for path in here.glob("*/final-*/net")}
    assert (there / "results" / "nets.jsonl").read_text() == "".join(kept)


def test_a_net_that_gets_another_result_on_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, monkeypatch)
    data, kept = write_photos(tmp_path / "photos.tar"), tmp_path / "nets.jsonl"
    net = run.Net("b", 0.002, 7, final=True)
    first = Experiment(data, tmp_path / "here", {}, kept)
    (result,) = first.nets([net])
    result["figures"]["early loss"] += 1e-9
    kept.write_text(json.dumps({"net": net.name, "results": {"result": result}}))
    with pytest.raises(SystemExit, match=r"b/final-0\.002-7: trained again on this machine, it has another result"):
        Experiment(data, tmp_path / "there", {}, kept).errors([net], "center")


def test_a_net_records_its_own_start_and_not_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, monkeypatch)
    experiment = Experiment(write_photos(tmp_path / "photos.tar"), tmp_path, {}, tmp_path / "nets.jsonl")
    time.sleep(1.1)  # starts are kept in whole seconds
    before = datetime.now(UTC).replace(microsecond=0)
    experiment.nets([net := run.Net("a", 0.002, 7, final=True)])
    started = json.loads((tmp_path / net.name / "started.json").read_text())["started"]
    assert before <= datetime.fromisoformat(started) <= datetime.now(UTC)


def test_a_net_that_has_only_begun_is_not_kept_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, monkeypatch)
    first, second = run.Net("a", 0.002, 7, final=True), run.Net("b", 0.002, 7, final=True)
    experiment = Experiment(write_photos(tmp_path / "photos.tar"), tmp_path / "here", {}, tmp_path / "nets.jsonl")

    def interrupt(*_words: Any, **_options: Any) -> None:
        raise Interrupted("stopped")

    experiment.nets([first])
    with monkeypatch.context() as patch:
        patch.setattr(run, "train", interrupt)
        with pytest.raises(Interrupted):
            experiment.nets([second])
    experiment.errors([first], "center")  # writes the results of all nets again
    kept = [json.loads(line)["net"] for line in (tmp_path / "nets.jsonl").read_text().splitlines()]
    assert kept == [first.name]


def test_the_search_never_opens_val(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, monkeypatch)
    found = []
    for good in (True, False):
        data = write_photos(tmp_path / f"{good}.tar", good_val=good)
        experiment = Experiment(data, tmp_path / str(good), {}, tmp_path / f"{good}.json")
        searched = experiment.search(["a", "b"])
        found.append((searched, experiment.best_scale("b", searched["b"]["rate"], "center")))
    assert found[0] == found[1]
    with tarfile.open(experiment.search_data) as archive:
        names = archive.getnames()
    # 30 images of train/, the fifth and the tenth of each class in the order of names held out
    assert len(names) == 30
    assert [name for name in names if name.startswith("val/n1/")] == ["val/n1/4.png", "val/n1/9.png"]


@pytest.mark.parametrize(
    ("errors", "chosen", "tried", "at_limit"),
    [
        ({0.005: 30, 0.01: 20, 0.02: 25}, 0.01, 3, False),
        ({0.005: 30, 0.01: 25, 0.02: 20, 0.04: 22}, 0.02, 4, False),
        ({0.0025: 21, 0.005: 20, 0.01: 20, 0.02: 25}, 0.005, 4, False),  # of equals the lower rate
        ({rate: 90 - rate for rate in (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)}, 0.16, 6, True),
    ],
)
def test_the_grid_grows_until_the_best_rate_is_inside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: dict[float, float],
    chosen: float,
    tried: int,
    at_limit: bool,
) -> None:
    monkeypatch.setattr(
        Experiment, "nets", lambda _, nets: [{"top1_error": errors[net.rate], "loss": 1.0} for net in nets]
    )
    found = Experiment(Path(), Path(), {}, tmp_path / "nets.jsonl").search(["relu"])["relu"]
    assert (found["rate"], len(found["tried"]), found["at_limit"]) == (chosen, tried, at_limit)


def test_no_verdict_is_given_under_rules_that_are_younger_than_a_net_or_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks" / "claims"
    folder.mkdir(parents=True)
    (folder / "RULES.md").write_text("old")

    def git(*command: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "rules")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    rules = run.read_rules()
    started = {**rules, "started": datetime.now(UTC).isoformat()}
    run.require_older_rules([started], rules)
    (folder / "RULES.md").write_text("new")
    with pytest.raises(SystemExit, match="differs from its commit"):
        run.read_rules()
    git("commit", "-q", "-a", "-m", "other rules")
    with pytest.raises(SystemExit, match="no verdict: a net began on"):
        run.require_older_rules([started], run.read_rules())
    with pytest.raises(SystemExit, match="no verdict: a net began on"):
        run.require_older_rules([{**started, "started": "2020-01-01T00:00:00+00:00"}], rules)


def test_the_rules_state_every_claim_and_what_would_refute_it() -> None:
    text = (ROOT / "benchmarks" / "claims" / "RULES.md").read_text(encoding="utf-8")
    headings = " ".join(line for line in text.splitlines() if line.startswith("###"))
    for name, row in rows.ROWS.items():
        assert f"`{name}`" in headings
        assert [claim.text for claim in row.claims if f"| {claim.text} |" not in text] == []
