"""benchmarks/claims: the Fisher matrix against its definition, the interval against scipy, and a rehearsal."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.claims import fisher
from benchmarks.claims.fisher import STATISTICS, TwoLayers, fisher_matrix, statistics_of
from benchmarks.common.intervals import interval_of_mean, median_ratio

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
    pairs: dict[str, list[float]] = {"first_layer": [], "second_layer": [], "between_layers": []}
    off_diagonal = between = 0.0
    for i in range(size):
        for j in range(size):
            crosses = (i < first) != (j < first)
            off_diagonal += squares[i][j] * (i != j)
            between += squares[i][j] * crosses
            if i != j and matrix[i, i] > 0 and matrix[j, j] > 0:
                place = "between_layers" if crosses else "first_layer" if i < first else "second_layer"
                pairs[place].append(squares[i][j] / (matrix[i, i] * matrix[j, j]))
    total = sum(map(sum, squares))
    expected = {"off_diagonal": off_diagonal / total, "between_layers": between / total}
    expected |= {f"correlation_{place}": float(np.sqrt(np.mean(values))) for place, values in pairs.items()}
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


def test_one_command_writes_result_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = fisher.read_images("val", 40)
    monkeypatch.setattr(fisher, "read_images", lambda split, limit: few)
    monkeypatch.setattr(fisher, "BATCH", 8)
    monkeypatch.setattr(fisher, "HIDDEN", 5)  # a smaller matrix
    output, plot = tmp_path / "fisher.json", tmp_path / "fisher.svg"
    monkeypatch.setattr(
        "sys.argv", ["fisher", "--seeds", "2", "--steps", "20", "--output", str(output), "--plot", str(plot)]
    )
    fisher.main()
    result = json.loads(output.read_text())
    assert [(row["stage"], row["statistic"]) for row in result["comparisons"]] == [
        (stage, statistic) for stage in fisher.STAGES for statistic in STATISTICS
    ]
    assert plot.read_text().startswith("<svg")
    assert "off_diagonal" in output.with_suffix(".md").read_text()
