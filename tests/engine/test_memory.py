"""The bound of main memory: above the values alive in the graph and above all measurements, and kept by batches."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.architectures import OpaqueNet, architecture
from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.engine.batching import MAX_PIXELS, MAX_WINDOWS, BatchRules, plan_batches
from prelunet.evaluator.engine.memory import (
    WORKSPACE_BYTES,
    batch_bytes,
    cpu_rules,
    estimate_memory,
    fit_rules,
    flops_per_pixel,
    gpu_rules,
    image_bytes,
    portion_size,
    require_fits,
    require_loadable,
    require_view_fits,
)
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.session import Circumstances, Placement, Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.machine import parse_memory
from prelunet.evaluator.protocols import build_protocol
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import write_checkpoint
from tests.engine.contracts import build_contract
from tests.helpers.fakes import fake_contract
from tests.helpers.graph_memory import most_alive
from tests.helpers.tiny_nets import CLASSES, TINY, tiny_checkpoint

ROOT = Path(__file__).parents[2]
G = 2**30
CHUNK = 256
A_FILE = 712_000_000  # bytes


A = build_contract("A")


def session_of(
    contract: ModelContract = A, device: Device = "cpu", precision: str = "fp32", file_bytes: int = A_FILE
) -> Session:
    """Return a session of which nothing runs."""
    rules = gpu_rules(contract, None, precision=precision) if device == "cuda" else BatchRules()
    circumstances, loaded = Circumstances("provider", precision, {}), SimpleNamespace(prepared_shapes=1)
    return Session(loaded, contract, "", circumstances, Placement(device), rules=rules, model_bytes=file_bytes)  # type: ignore[arg-type]


# A batch, against what is alive at once in the exported graph.


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_checkpoint(folder / "tiny.safetensors", tiny_checkpoint())
    export_checkpoint(folder / "tiny.safetensors", folder / "tiny.onnx")
    return folder / "tiny.onnx"


# Small images, where the first layers take most; long ones, where the windows do.
@pytest.mark.parametrize("size", [(24, 24), (31, 47), (64, 200), (240, 33)])
def test_the_bound_is_above_what_is_alive_in_the_graph_and_below_three_times_that(
    tiny_model: Path, size: tuple[int, int]
) -> None:
    contract = build_contract(TINY, CLASSES)
    bound = batch_bytes_of(contract, 1, *size) - WORKSPACE_BYTES
    assert most_alive(tiny_model, *size) <= bound <= 3 * most_alive(tiny_model, *size)


def batch_bytes_of(contract: ModelContract, rows: int, height: int, width: int) -> int:
    grid = contract.window_grid(height, width)
    return batch_bytes(contract, rows * height * width, rows * grid[0] * grid[1])


@pytest.mark.parametrize("name", ["A", "C", "E", "demo", "demo30"])
def test_no_map_of_any_image_is_larger_than_the_bound_allows(name: str) -> None:
    net = architecture(name)
    rng = np.random.default_rng(0)
    for height, width in rng.integers(net.crop, 6 * net.crop, (60, 2)).tolist():
        bound = batch_bytes_of(build_contract(net), 1, height, width) - WORKSPACE_BYTES
        maps, channels, rows, columns = [], 3, height, width
        for layer, size in zip(net.trunk, net.layers, strict=True):
            rows, columns = size.output_side(rows), size.output_side(columns)
            channels = getattr(layer, "channels", channels)
            maps.append(4 * channels * rows * columns)
        features = 4 * net.bins * net.channels * (rows - net.window + 1) * (columns - net.window + 1)
        assert 3 * max(maps) <= bound
        assert 2 * features + 4 * maps[-1] <= bound


def adopted_contract(multiply_adds: int | None = None) -> ModelContract:
    net = OpaqueNet("resnet", "unknown", multiply_adds)
    return replace(A, architecture=net, canvas="exact", max_side=224, crop=224, default_scales=(224,))


def test_a_batch_of_an_adopted_net_takes_maps_as_wide_as_those_of_vgg() -> None:
    vgg = 5 * 224 * 224 * 64 * 4
    assert 2 * vgg <= batch_bytes(adopted_contract(), 5 * 224 * 224, 5) - WORKSPACE_BYTES <= 4 * vgg


# Batches within a limit.


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(28, 300), st.integers(28, 300)), min_size=1, max_size=40),
    st.sampled_from([1, 8]),
    st.sampled_from([2**25, 2**25 + 10**6, 2**26, 2**27]),
)
def test_no_batch_of_several_images_takes_more_than_the_budget(
    shapes: list[tuple[int, int]], step: int, budget: int
) -> None:
    contract = fake_contract()
    rules = fit_rules(contract, budget, BatchRules(step, switch_pixels=step - 1))
    for batch in plan_batches(shapes, contract.window_grid, rules, max_side=contract.max_side).batches:
        assert batch.rows == 1 or batch_bytes_of(contract, batch.rows, batch.height, batch.width) <= budget


def test_without_a_limit_or_with_a_large_one_batches_are_the_usual_ones() -> None:
    assert cpu_rules(A, None, A_FILE) == cpu_rules(A, 64 * G, A_FILE) == BatchRules()
    most = BatchRules(32, 5000, 7_000_000, 123)
    assert fit_rules(A, 64 * G, most) == most


def test_small_nets_share_canvases_in_openvino_alone_and_large_nets_and_exact_files_never_on_a_cpu() -> None:
    demo = build_contract("demo")
    for precision in ("fp32", "bf16"):
        small = cpu_rules(demo, None, A_FILE, device="openvino", precision=precision)
        assert small.canvas_step == demo.trunk_stride
        assert small.switch_pixels > demo.crop**2, "preparing a shape takes longer than computing a crop"
        assert cpu_rules(A, None, A_FILE, device="openvino", precision=precision) == BatchRules()
    for device in ("cpu", "ncnn"):
        assert cpu_rules(demo, None, A_FILE, device=device) == BatchRules()
    assert cpu_rules(replace(demo, canvas="exact"), None, A_FILE, device="openvino") == BatchRules()
    limited = cpu_rules(demo, G // 2, 10_000_000, device="openvino")
    assert (limited.canvas_step, limited.max_pixels) < (small.canvas_step, small.max_pixels)
    assert limited.switch_pixels > 0


def test_with_next_to_no_memory_every_image_is_a_batch() -> None:
    assert fit_rules(A, 0, BatchRules()) == cpu_rules(A, 1, A_FILE) == BatchRules(max_windows=1, max_pixels=1)


def test_the_more_the_runtime_keeps_of_the_file_the_smaller_the_batches() -> None:
    usual = cpu_rules(A, 2 * G, A_FILE)
    assert cpu_rules(A, 2 * G, A_FILE + 10**8).max_pixels < usual.max_pixels
    assert cpu_rules(replace(A, precision="fp16"), 2 * G, A_FILE // 2) == usual, "a CPU computes in float32"
    fp32, bf16 = (cpu_rules(A, 3 * G, A_FILE, device="openvino", precision=name) for name in ("fp32", "bf16"))
    assert fp32.max_pixels < bf16.max_pixels < cpu_rules(A, 3 * G, A_FILE).max_pixels


# A GPU.


def test_gpu_canvases_grow_by_two_cells_of_the_feature_map_and_those_of_exact_files_not_at_all() -> None:
    assert gpu_rules(A, None).canvas_step == 32
    assert gpu_rules(replace(A, canvas="exact"), None).canvas_step == 1


def test_a_change_of_canvas_costs_more_pixels_the_faster_they_are_computed_and_none_if_that_is_unknown() -> None:
    fp32, tf32, fp16 = (gpu_rules(A, None, precision=name).switch_pixels for name in ("fp32", "tf32", "fp16"))
    assert 0 == gpu_rules(adopted_contract(), None).switch_pixels < fp32 < tf32 < fp16
    assert gpu_rules(replace(A, precision="fp16"), None).switch_pixels == fp16, "the file's own precision"
    assert gpu_rules(replace(A, canvas="exact"), None).switch_pixels > 0, "equal numbers of rows save changes there too"


def test_gpu_batches_are_larger_than_those_of_a_cpu_and_shrink_with_the_limit() -> None:
    usual, small = gpu_rules(A, None, precision="fp16"), gpu_rules(A, 3 * G, A_FILE // 2, precision="fp16")
    assert usual.max_pixels > small.max_pixels > 0
    assert usual.max_pixels > 4 * MAX_PIXELS
    assert usual.max_windows > 4 * MAX_WINDOWS
    assert gpu_rules(A, 80 * G, precision="fp16") == usual, "more would make nothing faster"


def test_operations_are_those_of_the_convolutions_and_some_for_windows_or_what_an_adopted_file_states() -> None:
    crop = 2 * 18.9e9 / 224**2  # of A, without the fully connected layers, which Table 3 counts too
    assert crop < flops_per_pixel(A) < 1.5 * crop
    assert flops_per_pixel(adopted_contract(4_000_000_000)) == pytest.approx(8e9 / 224**2)


# Portions of a chunk.


@pytest.mark.parametrize(
    ("name", "images"), [("center", 256), ("dense-256", 256), ("multi-scale", 64), ("dense-1024", 32)]
)
def test_portions_without_a_limit_have_the_recorded_sizes(name: str, images: int) -> None:
    assert portion_size(build_protocol(name, A), 256, None) == images


@given(st.integers(1, 2**36), st.sampled_from(["center", "ten-crop", "multi-scale", "spp-net"]), st.integers(1, 999))
def test_a_portion_takes_at_most_a_sixteenth_of_the_limit_or_is_one_image(memory: int, name: str, chunk: int) -> None:
    protocol = build_protocol(name, A)
    images = portion_size(protocol, chunk, memory)
    assert 1 <= images <= portion_size(protocol, chunk, None)
    assert images == 1 or images * image_bytes(protocol) <= memory / 16


def test_an_image_takes_the_views_of_the_longest_image_once_for_both_mirrors() -> None:
    for name, image in (("multi-scale", (100, 900)), ("ten-crop", (300, 400))):
        protocol = build_protocol(name, A)
        views = make_views(np.zeros((*image, 3), np.uint8), protocol)
        kept = {np.lib.array_utils.byte_bounds(view.image): view.image.nbytes for view in views}  # shared: once
        assert image_bytes(protocol) >= sum(kept.values())


def test_a_gpu_gets_larger_portions_unless_the_limit_on_main_memory_is_low() -> None:
    multi = build_protocol("multi-scale", A)
    assert portion_size(multi, 1024, None, gpu=True) == portion_size(multi, 1024, 128 * G, gpu=True) == 1024
    assert 0.9 * 8 * G / 16 < portion_size(multi, 1024, 8 * G, gpu=True) * image_bytes(multi) <= 8 * G / 16
    assert portion_size(build_protocol("spp-net", A), 1024, None, gpu=True) < 1024


# The whole process, against measurements.

GROWTH = json.loads((ROOT / "benchmarks" / "results" / "growth.json").read_text(encoding="utf-8"))
FILE_MB = {  # of model A by classes
    case["settings"]["classes"]: case["result"]["file_mb"]
    for case in GROWTH["cases"]
    if case["settings"]["part"] == "classes"
}
ENGINES: dict[str, tuple[Device, str]] = {
    "onnxruntime fp32": ("cpu", "fp32"),
    "OpenVINO fp32": ("openvino", "fp32"),
    "OpenVINO bf16": ("openvino", "bf16"),
}
# Part of the result file → largest bound of the peak as a multiple of the measured one. `memory` fills its batches with
# elongated photos, as the bound assumes. `classes` computes one photo. `dataset` has small images, for which nearly all
# of the memory for decoding stays unused.
MEASURED = {"memory": 1.8, "classes": 2.5, "dataset": 6.5}


@pytest.mark.parametrize(
    "case",
    [case for case in GROWTH["cases"] if case["settings"]["part"] in MEASURED],
    ids=lambda case: " ".join(map(str, case["settings"].values())),
)
def test_the_bound_is_above_every_measurement_and_not_far(case: dict[str, Any]) -> None:
    part, measured = case["settings"]["part"], case["result"]
    classes, images = case["settings"].get("classes", 1000), case["settings"].get("images", 0)
    contract, file_mb, name = build_contract("A", classes), FILE_MB[classes], "dense-384"
    if part == "memory":
        name = f"dense-{case['settings']['scale']}"
    elif part == "dataset":
        contract, file_mb, name = build_contract("demo", 10), 2, "multi-scale"
    session = session_of(contract, *ENGINES[case["settings"]["engine"]], int(file_mb * 2**20))
    bound = estimate_memory(
        session, build_protocol(name, contract), 1 if part == "classes" else 64, None, images=images
    )
    assert measured["loading_mb"] * 2**20 <= bound.loading <= 2 * measured["loading_mb"] * 2**20
    settled = bound.parts["base"] + bound.parts["weights"]
    assert measured["settled_mb"] * 2**20 <= settled <= 2 * measured["settled_mb"] * 2**20
    running = sum(bound.parts.values())
    assert measured["peak_mb"] * 2**20 <= running <= MEASURED[part] * measured["peak_mb"] * 2**20


# The views of demo at 28 and 32 pixels are so small that the limit on windows bounds their batches.
@pytest.mark.parametrize(
    ("net", "name"),
    [
        *(("A", name) for name in ("center", "dense-256", "multi-scale", "dense-1024", "spp-18")),
        *(("demo", name) for name in ("center", "dense-28", "dense-32")),
    ],
)
@pytest.mark.parametrize("limit", [None, 3 * G])
def test_no_planned_batch_of_a_protocols_views_takes_more_than_the_bound(
    net: str, name: str, limit: int | None
) -> None:
    contract, rng = build_contract(net), np.random.default_rng(1)
    protocol = build_protocol(name, contract)
    bound = estimate_memory(session_of(contract), protocol, CHUNK, limit)
    images = [(300, 300), (300, 1200), *((300, int(300 * ratio)) for ratio in rng.uniform(1, 4, 60))]
    images += [(320, 350)] * 3000  # 28x31 and 32x35 pixels: as many windows as in a square of that scale
    shapes = [(protocol.crop, protocol.crop)] * 3000 if protocol.crop else [
        resized_size(*image, scale, protocol.long_side_cap) for image in images for scale in protocol.scales
    ]  # fmt: skip
    rules = cpu_rules(contract, limit, A_FILE)
    for batch in plan_batches(shapes, contract.window_grid, rules, max_side=contract.max_side).batches:
        assert batch_bytes_of(contract, batch.rows, batch.height, batch.width) <= bound.parts["batches"]


def test_a_cpu_keeps_the_weights_of_a_float16_file_in_float32() -> None:
    protocol, half = build_protocol("center", A), session_of(replace(A, precision="fp16"), file_bytes=A_FILE // 2)
    assert estimate_memory(half, protocol, 64, None) == estimate_memory(session_of(), protocol, 64, None)


def test_sessions_on_gpus_share_nothing_and_load_one_after_the_other() -> None:
    protocol, session = build_protocol("multi-scale", A), session_of(device="cuda", precision="fp16")
    one, three = (estimate_memory(session, protocol, 1024, None, sessions=count) for count in (1, 3))
    assert all(three.parts[part] == 3 * one.parts[part] for part in ("images", "results", "weights"))
    assert three.loading == one.loading + 2 * one.parts["weights"]
    packed = [each.parts["batches"] - WORKSPACE_BYTES for each in (one, three)]  # the maps are on the GPU
    assert packed[1] == 3 * packed[0] > 0


# Refusals.


def refusal_of(contract: ModelContract, name: str, memory: int) -> str:
    try:
        need = require_fits(session_of(contract), build_protocol(name, contract), CHUNK, memory)
    except UsageError as error:
        return str(error)
    assert need.total <= memory
    return ""


@pytest.mark.parametrize("model", ["A", "C"])
@pytest.mark.parametrize("name", ["center", "dense-256", "multi-scale", "dense-1024"])
@pytest.mark.parametrize("limit", ["1M", "1G", "2G", "3.5G", "9G"])
def test_the_limit_that_a_refusal_names_is_enough_and_not_much_less_is(model: str, name: str, limit: str) -> None:
    contract, memory = build_contract(model), parse_memory(limit) or 0
    refusal = refusal_of(contract, name, memory)
    if refusal:
        found = re.search(r"Give (\S+) or more", refusal)
        enough = parse_memory(found and found[1]) or 0
        assert enough > memory
        assert not refusal_of(contract, name, enough)
        assert refusal_of(contract, name, int(0.6 * enough)), "batches and portions grow by up to five eighths"


def test_a_view_that_cannot_fit_is_refused_with_its_size_and_what_to_do() -> None:
    text = refusal_of(A, "dense-1024", 4 * G)
    assert text.startswith("--memory-limit 4.00G: protocol dense-1024 takes up to ")
    assert "image of 1:4 has 1024x4096 pixels" in text
    assert "smaller scales" in text


def test_a_model_that_cannot_even_be_loaded_is_refused_as_such() -> None:
    assert "Loading the model" in refusal_of(A, "center", G)
    with pytest.raises(UsageError, match=r"loading the model alone takes up to 1\.\d\dG, .* may take 1\.00G"):
        require_loadable(A_FILE, "fp32", G, "cpu")
    require_loadable(A_FILE, "fp32", 2 * G, "cpu")


def test_a_limit_on_main_memory_makes_the_portions_for_a_gpu_smaller_or_is_refused() -> None:
    protocol, session = build_protocol("multi-scale", A), session_of(device="cuda", precision="fp16")
    assert (
        require_fits(session, protocol, 1024, 8 * G).total
        <= 8 * G
        < estimate_memory(session, protocol, 1024, None).total
    )
    with pytest.raises(UsageError, match=r"Give \S+G or more$"):
        require_fits(session, protocol, 1024, 2 * G)


def test_a_view_that_no_machine_of_that_size_could_hold_is_refused_with_what_it_takes() -> None:
    large, multi, session = build_protocol("dense-1024", A), build_protocol("multi-scale", A), session_of()
    with pytest.raises(UsageError, match=r"a view of 1024x4096 pixels takes up to \d\.\d\dG .*this machine has 2\.00G"):
        require_view_fits(session, large, (100, 900), 2 * G)
    require_view_fits(session, large, (100, 900), 8 * G)
    require_view_fits(session, large, (300, 400), 2 * G)
    require_view_fits(session, multi, (100, 900), 2 * G)
    require_view_fits(session, build_protocol("center", A), (100, 900), 1)
    with pytest.raises(UsageError, match="this machine has 6"):
        require_view_fits(session_of(device="openvino"), large, (100, 900), 6 * G)
