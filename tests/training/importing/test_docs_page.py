"""docs/importing.md: its code runs, its commands work, and its output is as shown."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prelunet.evaluator.cli import run

PAGE = (Path(__file__).parents[3] / "docs" / "importing.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
assert [kind for kind, _ in BLOCKS].count("") == 3, "each of the three examples should have its commands"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """Run the page's code and commands. Return the code's names, the folder and the output that the page shows."""
    folder = tmp_path_factory.mktemp("page")
    names: dict[str, Any] = {}
    shown = ""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, text in BLOCKS:
            if kind == "python":
                exec(compile(text, "docs/importing.md", "exec"), names)
            elif kind == "text":
                shown = text
            elif kind:
                Path({"toml": "names.toml", "json": "caffe.json"}[kind]).write_text(text)
            else:
                for command in text.replace("\\\n", " ").splitlines():
                    assert command.startswith("prelunet "), command
                    assert run(shlex.split(command)[1:]) == 0, command
    return names, folder, shown


def test_the_page_runs_from_top_to_bottom(executed: tuple[dict[str, Any], Path, str]) -> None:
    _, folder, _ = executed
    assert {"net.safetensors", "stages-ours.safetensors", "caffe.safetensors", "caffe.onnx"} <= {
        path.name for path in folder.iterdir()
    }


def test_the_page_shows_what_is_printed(
    executed: tuple[dict[str, Any], Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, shown = executed
    monkeypatch.chdir(folder)
    command = next(text for kind, text in BLOCKS if not kind)
    assert run([*shlex.split(command)[1:], "--force"]) == 0
    printed = capsys.readouterr().out
    before, after = shown.split("  …\n")
    assert printed.startswith(before)
    assert printed.endswith(after)


@pytest.mark.parametrize("channels_last", [False, True])
def test_reordering_fc1_preserves_its_output(executed: tuple[dict[str, Any], Path, str], channels_last: bool) -> None:
    names, _, _ = executed
    torch.manual_seed(1)
    pooled = {level: torch.randn(1, 5, level, level) for level in (1, 2, 3)}
    axes = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    theirs = torch.cat([pooled[level].permute(axes).flatten(1) for level in (1, 2, 3)], 1)
    ours = torch.cat([pooled[level].flatten(1) for level in (3, 2, 1)], 1)
    weight = torch.randn(4, theirs.shape[1])
    reordered = names["fc1_in_our_order"](weight, (1, 2, 3), (3, 2, 1), 5, channels_last)
    # Float32 sums of 70 terms in another order
    np.testing.assert_allclose(ours @ reordered.T, theirs @ weight.T, rtol=0, atol=2e-5)


def test_batch_normalization_folds_as_the_page_says() -> None:
    torch.manual_seed(2)
    conv, norm = torch.nn.Conv2d(3, 4, 3, padding=1).eval(), torch.nn.BatchNorm2d(4).eval()
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    x = torch.randn(1, 3, 5, 6)
    with torch.inference_mode():
        # Float32 sums of 27 terms with other factors
        np.testing.assert_allclose(torch.nn.utils.fuse_conv_bn_eval(conv, norm)(x), norm(conv(x)), rtol=0, atol=1e-5)
