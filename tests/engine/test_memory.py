"""Limits on main memory: batches and portions stay within them, and what cannot is refused up front."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.engine.batching import MAX_PIXELS, MAX_WINDOWS, BatchRules, plan_batches
from prelunet.evaluator.engine.memory import (
    WORKSPACE_BYTES,
    MemoryEstimate,
    Workload,
    batch_bytes,
    batch_bytes_bound,
    cpu_rules,
    estimate_memory,
    fit_rules,
    flops_per_pixel,
    format_bytes,
    gpu_rules,
    image_bytes,
    parse_memory,
    portion_size,
    require_fits,
    require_view_fits,
    weights_bytes,
)
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from tests.engine.test_protocol_costs import build_contract
from tests.helpers.fakes import fake_contract

G = 2**30
A = build_contract("A")
CHUNK = 256


# Batches.


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
        needed = batch_bytes(contract, batch.rows, batch.height, batch.width)
        assert batch.rows == 1 or needed <= budget


def test_a_budget_is_used_up() -> None:
    rules = fit_rules(A, G // 2, BatchRules())
    assert 0.99 * G < 2 * batch_bytes_bound(A, rules.max_pixels, rules.max_windows) <= G


def test_batches_have_what_everything_else_leaves() -> None:
    rules = cpu_rules(A, 3 * G, runtime="openvino")
    others = 2**27 + 2.3 * weights_bytes(A) + 2 * (3 * G / 16) + 5 * 2**26  # base, weights, two portions, decoding
    others += 8 * 6 * 1000 * 4 * 64 + 4 * 1000 * 3 * 64 + 512 * 50_000  # results of four portions, and the list
    packed = 4 * 3 * rules.max_pixels
    left = 3 * G - others - packed
    assert 0.99 * left < batch_bytes_bound(A, rules.max_pixels, rules.max_windows, runtime="openvino") <= left


def test_without_a_limit_or_with_a_large_one_batches_are_the_usual_ones() -> None:
    assert cpu_rules(A, None) == cpu_rules(A, 64 * G) == BatchRules()
    most = BatchRules(32, 5000, 7_000_000, 123)
    assert fit_rules(A, 64 * G, most) == most


def test_with_less_memory_both_limits_shrink_alike_and_nothing_else_changes() -> None:
    most = BatchRules(32, 5000, 7_000_000, 123)
    less = fit_rules(A, G, most)
    assert less == replace(most, max_windows=less.max_windows, max_pixels=less.max_pixels)
    assert less.max_pixels < most.max_pixels
    assert less.max_windows / less.max_pixels == pytest.approx(5000 / 7_000_000, rel=1e-3)  # whole numbers


def test_with_next_to_no_memory_every_image_is_a_batch() -> None:
    assert fit_rules(A, 0, BatchRules()) == cpu_rules(A, 1) == BatchRules(max_windows=1, max_pixels=1)


def test_the_larger_the_file_and_what_the_runtime_keeps_of_it_the_smaller_the_batches() -> None:
    usual = cpu_rules(A, 2 * G)
    assert usual == cpu_rules(A, 2 * G, file_bytes=weights_bytes(A)), "a file of unknown size is as its layers say"
    assert cpu_rules(A, 2 * G, file_bytes=weights_bytes(A) + 10**8).max_pixels < usual.max_pixels
    assert cpu_rules(A, 3 * G, runtime="openvino").max_pixels < cpu_rules(A, 3 * G).max_pixels


# A GPU.


def test_gpu_canvases_grow_by_two_cells_of_the_feature_map_and_those_of_exact_files_not_at_all() -> None:
    assert gpu_rules(A, None).canvas_step == 32
    exact = gpu_rules(replace(A, canvas="exact"), None)
    assert exact.canvas_step == 1
    assert exact.switch_pixels > 0, "equal numbers of rows save changes there too"


@pytest.mark.parametrize(("precision", "rate"), [("fp32", 45e12), ("tf32", 200e12), ("fp16", 400e12)])
def test_a_change_of_canvas_costs_what_is_computed_in_20_milliseconds(precision: str, rate: float) -> None:
    rules = gpu_rules(A, None, precision=precision)
    assert rules.switch_pixels * flops_per_pixel(A) == pytest.approx(0.020 * rate, rel=1e-5)  # whole pixels
    assert (
        gpu_rules(replace(A, precision="fp16"), None).switch_pixels
        == gpu_rules(A, None, precision="fp16").switch_pixels
    )


def test_a_net_of_unknown_cost_has_no_blank_canvases() -> None:
    unknown = replace(A, architecture={"name": "x", "activation": "unknown"}, canvas="exact")
    assert gpu_rules(unknown, None).switch_pixels == 0


def test_gpu_batches_are_larger_than_those_of_a_cpu_and_shrink_with_the_limit() -> None:
    usual, small = gpu_rules(A, None, precision="fp16"), gpu_rules(A, 3 * G, precision="fp16")
    assert usual.max_pixels > small.max_pixels > 0
    assert usual.max_pixels > 4 * MAX_PIXELS
    assert usual.max_windows > 4 * MAX_WINDOWS
    assert gpu_rules(A, None, precision="fp32").max_pixels < usual.max_pixels
    assert gpu_rules(A, 80 * G, precision="fp16") == usual, "more would make nothing faster"


# Parts of a chunk.


@pytest.mark.parametrize(
    ("name", "images"), [("center", 256), ("dense-256", 256), ("multi-scale", 64), ("dense-1024", 32)]
)
def test_parts_of_a_chunk_without_a_limit_are_what_they_always_were(name: str, images: int) -> None:
    assert portion_size(build_protocol(name, A), 256, None) == images


def test_the_parts_of_a_chunk_are_as_equal_as_can_be() -> None:
    assert portion_size(build_protocol("multi-scale", A), 250, None) == 63  # 74 would fit: 63 + 63 + 63 + 61


@given(st.integers(1, 2**36), st.sampled_from(["center", "ten-crop", "multi-scale", "spp-net"]), st.integers(1, 999))
def test_a_part_takes_a_sixteenth_of_the_limit_or_is_one_image(memory: int, name: str, chunk: int) -> None:
    protocol = build_protocol(name, A)
    images = portion_size(protocol, chunk, memory)
    assert 1 <= images <= portion_size(protocol, chunk, None)
    assert images == 1 or images * image_bytes(protocol) <= memory / 16


def test_the_views_of_the_longest_image_are_counted_once_for_both_mirrors() -> None:
    assert image_bytes(build_protocol("multi-scale", A)) == 3 * 4 * (256**2 + 384**2 + 480**2)
    assert image_bytes(build_protocol("ten-crop", A)) == 3 * 10 * 224**2


# The whole process.


def need_of(loading: int, batch: int) -> MemoryEstimate:
    return MemoryEstimate(
        base=1, loading=loading, weights=2, batch=batch, packed=8, images=16, decoding=32, results=64, listed=128
    )


def test_a_process_takes_the_larger_of_loading_and_running() -> None:
    assert need_of(loading=1000, batch=4).total == 1 + 1000
    assert need_of(loading=200, batch=4).total == 255


def test_the_longest_view_is_in_the_need() -> None:
    need = estimate_memory(A, build_protocol("dense-1024", A), CHUNK, None)
    assert need.batch == batch_bytes(A, 1, 1024, 4096) > 3.9e9
    assert estimate_memory(A, build_protocol("dense-1000", A), CHUNK, None).batch == batch_bytes(A, 1, 1000, 4000)
    assert need.weights == pytest.approx(1.4 * 712e6, rel=1e-3)  # as the file is, without its metadata
    assert need.loading == pytest.approx(2.2 * 712e6, rel=1e-3)


def test_many_small_views_are_in_the_need() -> None:
    need = estimate_memory(A, build_protocol("center", A), CHUNK, None)
    assert need.batch == batch_bytes(A, MAX_PIXELS // 224**2, 224, 224)


def test_a_run_within_its_limit_says_what_it_takes() -> None:
    need = require_fits(A, build_protocol("multi-scale", A), CHUNK, 4 * G)
    assert need.total <= 4 * G
    told = (
        r"2\.\d\dG \(base 128M, weights 951M, batches \d+M, images \d+M, decoding 320M, results \S+M; 1\.46G while .*"
    )
    assert re.fullmatch(told, str(need))


OPENVINO = Workload("openvino")


def test_what_a_runtime_keeps_of_the_weights_depends_on_what_it_computes_in_too() -> None:
    protocol, size = build_protocol("center", A), weights_bytes(A)
    fp32, bf16 = (
        estimate_memory(A, protocol, 64, None, replace(OPENVINO, precision=name)) for name in ("fp32", "bf16")
    )
    assert fp32.weights == pytest.approx(2.3 * size, abs=1)
    assert bf16.weights == pytest.approx(2.2 * size, abs=1)
    assert bf16.batch < fp32.batch
    assert cpu_rules(A, 3 * G, runtime="openvino", precision="bf16").max_pixels > (
        cpu_rules(A, 3 * G, runtime="openvino").max_pixels
    )


def test_a_cpu_keeps_the_weights_of_a_float16_file_in_float32() -> None:
    protocol, half = build_protocol("center", A), replace(A, precision="fp16")
    whole, halved = (estimate_memory(net, protocol, 64, None) for net in (A, half))
    assert halved.weights == whole.weights
    assert halved.loading == pytest.approx(2.6 / 2.2 * whole.loading, rel=1e-6)
    of_file = estimate_memory(half, protocol, 64, None, Workload(file_bytes=weights_bytes(half)))
    assert of_file == halved, "a file of unknown size is as its layers say"


def test_the_pixels_of_batches_that_wait_are_in_the_need() -> None:
    assert estimate_memory(A, build_protocol("center", A), 64, None).packed == 4 * 3 * MAX_PIXELS
    assert estimate_memory(A, build_protocol("dense-1024", A), 64, None).packed == 4 * 3 * 1024 * 4096


def test_the_scores_of_three_portions_and_a_chunk_are_in_the_need() -> None:
    many = build_contract("A", 22_000)
    protocol = build_protocol("multi-scale", many)
    portion = portion_size(protocol, 64, None)
    views = 6 * 2 * 22_000 * 4  # scores and logits of each
    scores = 3 * 64 * 22_000 * 4  # of images: averaged, as rows, being written
    assert estimate_memory(many, protocol, 64, None).results == views * (3 * portion + 64) + scores


def test_every_image_of_the_dataset_and_every_file_in_a_reader_is_in_the_need() -> None:
    protocol = build_protocol("center", A)
    none = estimate_memory(A, protocol, 64, None)
    some = estimate_memory(A, protocol, 64, None, Workload(images=1000, encoded=10**6))
    assert some.listed - none.listed == 512 * 1000
    assert some.decoding - none.decoding == 10**6


def test_each_pipeline_of_a_worker_has_portions_and_results_of_its_own() -> None:
    protocol = build_protocol("multi-scale", A)
    one, two = (estimate_memory(A, protocol, 64, None, Workload(pipelines=count)) for count in (1, 2))
    assert (two.images, two.packed, two.results) == (2 * one.images, 2 * one.packed, 2 * one.results)
    assert (two.weights, two.batch, two.decoding) == (one.weights, one.batch, one.decoding)


def on_gpus(sessions: int) -> Workload:
    return Workload("cuda", "fp16", gpu_rules=gpu_rules(A, None, precision="fp16"), sessions=sessions)


def test_beside_gpus_there_are_portions_and_packed_batches_for_each_but_no_maps() -> None:
    protocol = build_protocol("multi-scale", A)
    one, three = (estimate_memory(A, protocol, 1024, None, on_gpus(count)) for count in (1, 3))
    assert (three.images, three.packed, three.results) == (3 * one.images, 3 * one.packed, 3 * one.results)
    assert three.weights == 3 * one.weights
    assert three.loading == one.loading + 2 * one.weights, "one after the other"
    assert one.batch == WORKSPACE_BYTES
    assert one.decoding == G, "sixteen threads may decode 12 Mpixel at once"
    half = replace(A, precision="fp16")
    assert estimate_memory(half, protocol, 1024, None, on_gpus(1)).weights == pytest.approx(one.weights / 2)
    assert one.images == 2 * portion_size(protocol, 1024, None, gpu=True) * image_bytes(protocol)


def test_a_limit_on_main_memory_makes_the_portions_for_a_gpu_smaller_or_is_refused() -> None:
    protocol = build_protocol("multi-scale", A)
    need = require_fits(A, protocol, 1024, 8 * G, on_gpus(1))
    assert need.total <= 8 * G < estimate_memory(A, protocol, 1024, None, on_gpus(1)).total
    with pytest.raises(UsageError, match=r"Give \S+G or more$"):
        require_fits(A, protocol, 1024, 2 * G, on_gpus(1))


def refusal_of(contract: ModelContract, protocol: EvaluationProtocol, memory: int) -> str:
    try:
        need = require_fits(contract, protocol, CHUNK, memory)
    except UsageError as error:
        return str(error)
    assert need.total <= memory
    return ""


@pytest.mark.parametrize("model", ["A", "C"])
@pytest.mark.parametrize("name", ["center", "dense-256", "multi-scale", "dense-1024"])
@pytest.mark.parametrize("limit", ["1M", "1G", "2G", "3.5G", "9G"])
def test_what_a_refusal_says_is_enough_and_not_much_less_is(model: str, name: str, limit: str) -> None:
    contract, memory = build_contract(model), parse_memory(limit) or 0
    protocol = build_protocol(name, contract)
    refusal = refusal_of(contract, protocol, memory)
    if refusal:
        found = re.search(r"Give (\S+) or more", refusal)
        enough = parse_memory(found and found[1]) or 0
        assert enough > memory
        assert not refusal_of(contract, protocol, enough)
        assert refusal_of(contract, protocol, int(0.85 * enough)), "an eighth is what parts grow by"


def test_a_view_that_cannot_fit_is_refused_with_its_size_and_what_to_do() -> None:
    with pytest.raises(UsageError) as refused:
        require_fits(A, build_protocol("dense-1024", A), CHUNK, 4 * G)
    text = str(refused.value)
    assert text.startswith("--memory-limit 4.00G: protocol dense-1024 takes up to ")
    assert "image of 1:4 has 1024x4096 pixels" in text
    assert "smaller scales" in text


def test_a_model_that_cannot_even_be_loaded_is_refused_as_such() -> None:
    with pytest.raises(UsageError, match="Loading the model"):
        require_fits(A, build_protocol("center", A), CHUNK, G)


# Amounts.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6G", 6 * 2**30),
        ("500M", 500 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("6GB", 6 * 10**9),
        ("900MB", 900 * 10**6),
        ("2T", 2**41),
        (None, None),
    ],
)
def test_amounts_of_memory_are_read(text: str | None, value: int | None) -> None:
    assert parse_memory(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "6", "G", "6gb", "6Gb", "6 G", "-6G", "+6G", "1e3M", "6.G", "0G", "0.0000001M", "9999999T", "6G\n", "٦G"],
)
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="with its unit"):
        parse_memory(text)


@given(st.integers(2**20, 2**45))
@example(int(9.995 * G))
@example(int(99.95 * G))
def test_an_amount_is_told_to_three_digits_and_never_too_low(value: int) -> None:
    told = parse_memory(format_bytes(value)) or 0
    assert value <= told <= 1.011 * value  # 1.01 after 1.00…1
    assert len(format_bytes(value)) <= 5


def test_a_view_that_no_machine_of_that_size_could_hold_is_refused_with_what_it_takes() -> None:
    large, multi = build_protocol("dense-1024", A), build_protocol("multi-scale", A)
    with pytest.raises(UsageError, match=r"a view of 1024x4096 pixels takes up to 7\.\d\dG .*this machine has 4\.00G"):
        require_view_fits(A, large, (100, 900), 4 * G)
    require_view_fits(A, large, (100, 900), 8 * G)
    require_view_fits(A, large, (300, 400), 4 * G)
    require_view_fits(A, multi, (100, 900), 4 * G)
    require_view_fits(A, build_protocol("center", A), (100, 900), 1)


def test_a_gpu_gets_larger_portions_unless_the_limit_on_main_memory_is_low() -> None:
    multi = build_protocol("multi-scale", A)
    assert portion_size(multi, 1024, None, gpu=True) == portion_size(multi, 1024, 128 * G, gpu=True) == 1024
    assert 0.9 * 8 * G / 16 < portion_size(multi, 1024, 8 * G, gpu=True) * image_bytes(multi) <= 8 * G / 16
    longest = build_protocol("spp-net", A)
    part = portion_size(longest, 1024, None, gpu=True)
    assert part < 1024
    assert 3 * 2**30 < part * image_bytes(longest) <= 6 * 2**30
