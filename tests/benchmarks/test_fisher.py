"""benchmarks/claims/fisher.py: its matrix against the definition, gradient by gradient."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.claims import fisher as claims_fisher
from benchmarks.claims.fisher import STATISTICS, TwoLayers, compare, fisher_matrix, initial_net, statistics_of
from benchmarks.claims.intervals import interval_of_mean

EXACT = {"rtol": 1e-9, "atol": 1e-12}  # float64 on both sides: only the order of sums differs


def small_net(slope: float) -> tuple[TwoLayers, np.ndarray]:
    """Return a net of 3 inputs, 4 units and 3 classes, and 5 inputs; no two sizes that meet are alike."""
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
def test_the_matrix_is_the_expectation_of_gradients_times_themselves(slope: float) -> None:
    net, inputs = small_net(slope)
    np.testing.assert_allclose(fisher_matrix(net, inputs), plain_fisher(net, inputs), **EXACT)


def test_the_statistics_equal_loops_over_all_pairs() -> None:
    net, inputs = small_net(0.0)
    net.b1[:] = 2.0
    net.w1[2], net.b1[2] = 0.0, -1.0  # a dead unit: its four parameters and its column of W2 have no information
    fisher, first = fisher_matrix(net, inputs), net.w1.size + net.b1.size
    size, squares = len(fisher), (fisher**2).tolist()
    mass = sum(map(sum, squares))
    expected = {
        "off_diagonal": sum(squares[i][j] for i in range(size) for j in range(size) if i != j) / mass,
        "between_layers": sum(squares[i][j] for i in range(size) for j in range(size) if (i < first) != (j < first))
        / mass,
    }
    pairs = {"first_layer": [], "second_layer": [], "between_layers": []}
    for i in range(size):
        for j in range(size):
            if i != j and fisher[i, i] > 0 and fisher[j, j] > 0:
                place = (
                    "between_layers" if (i < first) != (j < first) else "first_layer" if i < first else "second_layer"
                )
                pairs[place].append(squares[i][j] / (fisher[i, i] * fisher[j, j]))
    expected |= {f"correlation_{place}": np.sqrt(np.mean(values)) for place, values in pairs.items()}
    assert (np.diag(fisher) == 0).sum() == 4 + 3
    found = statistics_of(fisher, first)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


def test_correlations_do_not_change_when_the_parameters_of_a_layer_are_scaled() -> None:
    net, inputs = small_net(0.25)
    fisher, first = fisher_matrix(net, inputs), net.w1.size + net.b1.size
    scale = np.where(np.arange(len(fisher)) < first, 10.0, 1.0)
    plain, scaled = statistics_of(fisher, first), statistics_of(fisher * np.outer(scale, scale), first)
    for name in plain:
        assert (scaled[name] == pytest.approx(plain[name])) == name.startswith("correlation"), name


def test_both_nets_of_a_pair_begin_with_the_same_draws() -> None:
    relu, prelu = (initial_net(3, activation) for activation in claims_fisher.ACTIVATIONS)
    np.testing.assert_array_equal(relu.w1, prelu.w1)
    np.testing.assert_allclose(prelu.w2, relu.w2 / np.sqrt(1 + 0.25**2), rtol=1e-12)  # Eq. 15
    assert (relu.slope == 0).all()
    assert (prelu.slope == 0.25).all()


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 9))
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert interval_of_mean(b - a) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("prelu", "verdict"),
    [
        ([0.4, 0.5, 0.62], "smaller with PReLU"),
        ([0.6, 0.72, 0.8], "larger with PReLU"),
        ([0.6, 0.5, 0.7], "no difference shown"),
    ],
)
def test_the_verdict_follows_the_interval_whatever_it_says(prelu: list[float], verdict: str) -> None:
    nets = [
        {"activation": activation, "stage": "after training", "off_diagonal": value}
        for activation, values in (("relu", [0.5, 0.6, 0.7]), ("prelu", prelu))
        for value in values
    ]
    assert compare(nets, "after training", "off_diagonal")["verdict"] == verdict


def test_one_command_writes_result_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = claims_fisher.read_images("val", 40)
    monkeypatch.setattr(claims_fisher, "read_images", lambda split, limit: few)
    monkeypatch.setattr(claims_fisher, "BATCH", 8)
    monkeypatch.setattr(claims_fisher, "HIDDEN", 5)  # a smaller matrix
    output, plot = tmp_path / "fisher.json", tmp_path / "fisher.svg"
    words = ["--seeds", "2", "--steps", "20", "--output", str(output), "--plot", str(plot)]
    monkeypatch.setattr("sys.argv", ["fisher.py", *words])
    claims_fisher.main()
    result = json.loads(output.read_text())
    assert [(row["stage"], row["statistic"]) for row in result["comparisons"]] == [
        (stage, statistic) for stage in claims_fisher.STAGES for statistic in STATISTICS
    ]
    before, after = (
        [net for net in result["nets"] if net["activation"] == "prelu" and net["stage"] == stage]
        for stage in claims_fisher.STAGES
    )
    assert all(net["mean_slope"] == 0.25 for net in before)
    assert all(net["mean_slope"] != 0.25 for net in after)  # learned
    assert plot.read_text().startswith("<svg")
    assert "off_diagonal" in output.with_suffix(".md").read_text()
