"""Step times against measured ones.

One number, SUSTAINED, is calibrated, on the first block and the first slope below. The rows called held out were not
used for it.
"""

import pytest
from tests.planning.shapes import LLAMA_8B, MEGATRON_FP16, NANOTRON, bloom, gpt

from leaven.planning.arrangement import Arrangement
from leaven.planning.flops import flops_per_token
from leaven.planning.hardware import Accelerator, Cluster, find_accelerator, parse_cluster
from leaven.planning.memory import Implementation
from leaven.planning.timing import block_time, step_time
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

JEAN_ZAY = parse_cluster("384xA100-80GB")
BLOOM_182B = gpt(78, 13_824, 96, vocab=250_880)
PREQUEL = Layout(dp=8, tp=4, pp=12, zero=1, recompute="full")


def test_the_bubble_has_the_form_measured_at_bloom() -> None:
    # prequel lines 867 to 870: 0.7422 (m + 11) + 3.87 s for m = 32, 64, 96, 128
    seconds = {m: step_time(BLOOM_182B, Arrangement(PREQUEL, 2, m), JEAN_ZAY, MEGATRON_FP16) for m in (32, 96, 128)}
    slope = (seconds[128].step - seconds[96].step) / 32
    assert slope == pytest.approx((seconds[96].step - seconds[32].step) / 64)
    rest = seconds[32].data_parallel + seconds[32].optimizer
    assert seconds[32].step == pytest.approx(slope * (32 + 11) + rest)
    assert slope == pytest.approx(0.7422, rel=0.08)  # 7% high here
    assert rest < 3.87  # the optimiser of 2022 took longer than its memory traffic


@pytest.mark.parametrize(("recompute", "forward_ms", "total_ms"), [("none", 7.7, 19.6), ("full", 7.7, 27.2)])
def test_korthikanti_2022_table_4_block_forward_within_10_percent_and_total_up_to_16_percent_high(
    recompute: str, forward_ms: float, total_ms: float
) -> None:
    layout = Layout.model_validate({"tp": 8, "recompute": recompute})
    block = block_time(gpt(48, 6144, 64), Arrangement(layout, 4, 1), parse_cluster("8xA100-80GB"), MEGATRON_FP16)
    reductions = 6 if recompute == "full" else 4
    forward = block.forward + block.all_reduce * 2 / reductions
    assert 1e3 * forward == pytest.approx(forward_ms, rel=0.10)
    assert total_ms < 1e3 * (block.forward + block.backward + block.all_reduce) < 1.16 * total_ms


@pytest.mark.parametrize(
    ("layout", "micro_batch", "seconds"),
    [
        (PREQUEL, 2, 110.48),
        (Layout(dp=16, tp=4, pp=6, zero=1, recompute="full"), 4, 117.11),
        (Layout(dp=16, tp=2, pp=12, zero=1, recompute="full"), 2, 112.5),
        (Layout(dp=8, tp=2, pp=24, zero=1, recompute="full"), 2, 122.75),
        (Layout(dp=8, tp=8, pp=6, zero=1, recompute="full"), 4, 120.18),
    ],
    ids=["L801", "L803", "L805", "L809", "L726"],
)
def test_bloom_layouts_within_16_percent(layout: Layout, micro_batch: int, seconds: float) -> None:
    how = Arrangement(layout, micro_batch, 2048 // layout.dp // micro_batch)
    assert step_time(bloom(), how, JEAN_ZAY, MEGATRON_FP16).step == pytest.approx(seconds, rel=0.16)


@pytest.mark.parametrize(
    ("layout", "micro_batch", "gas", "nodes", "mfu"),
    [
        (Layout(dp=32, pp=2, zero=1), 1, 8, 8, 39.5),
        (Layout(dp=16, pp=2, zero=1), 1, 16, 4, 43.31),
        (Layout(dp=4, tp=4, zero=1), 4, 16, 2, 43.94),
        (Layout(dp=16, tp=8), 8, 2, 16, 36.33),
    ],
)
def test_held_out_playbook_8b_on_h100_within_8_percent(
    layout: Layout, micro_batch: int, gas: int, nodes: int, mfu: float
) -> None:
    shape = LLAMA_8B.model_copy(update={"n_kv_heads": 32, "vocab_size": 131_072, "seq_len": 4096})
    cluster = parse_cluster(f"{8 * nodes}xH100-80GB")
    step = step_time(shape, Arrangement(layout, micro_batch, gas), cluster, NANOTRON).step
    assert 100 * flops_per_token(shape) * 2**20 / step / cluster.gpus / 989e12 == pytest.approx(mfu, rel=0.08)


@pytest.mark.xfail(strict=True, reason="64 nodes, one micro-batch: latency and congestion are not modelled, 30% said")
def test_held_out_playbook_8b_on_512_gpus() -> None:
    shape = LLAMA_8B.model_copy(update={"n_kv_heads": 32, "vocab_size": 131_072, "seq_len": 4096})
    step = step_time(shape, Arrangement(Layout(dp=128, tp=4), 2, 1), parse_cluster("512xH100"), NANOTRON).step
    assert 100 * flops_per_token(shape) * 2**20 / step / 512 / 989e12 == pytest.approx(18.69, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "micro_batch", "gas", "tokens_per_second"),
    [
        (gpt(40, 5120, 40, vocab=50_368, dropout=0), 2, 3, 2262),
        (gpt(32, 4096, 32, vocab=50_368, dropout=0), 6, 2, 4641),
        (gpt(32, 2560, 20, vocab=50_368, seq_len=8192, dropout=0), 3, 6, 7695),
        (gpt(24, 2048, 16, vocab=50_368, dropout=0), 14, 4, 20_513),
        (gpt(24, 1024, 16, vocab=50_368, dropout=0), 32, 2, 58_782),
    ],
    ids=["13B", "7B", "3B, 8k", "1B", "350M"],
)
def test_held_out_mpt_fsdp_on_8_a100_within_13_percent(
    shape: ModelShape, micro_batch: int, gas: int, tokens_per_second: float
) -> None:
    # llm-foundry, scripts/train/benchmarking: tokens a second and GPU, FULL_SHARD, no recomputation
    step = step_time(shape, Arrangement(Layout(dp=8, zero=3), micro_batch, gas), parse_cluster("8xA100-80GB")).step
    assert micro_batch * gas * shape.seq_len / step == pytest.approx(tokens_per_second, rel=0.13)


def test_a_ring_all_reduce_moves_twice_the_message_less_one_share() -> None:
    fast = Accelerator("test", 1e9, 1e9, 80, memory_tb_s=1e9, link_gb_s=100, network_gb_s=10, node_size=4)
    shape, code = gpt(1, 1024, 8), Implementation()
    message = 2 * 2048 * 1024
    inside = step_time(shape, Arrangement(Layout(tp=4), 1, 1), Cluster(4, fast), code).tensor_parallel
    assert inside == pytest.approx(4 * 2 * 3 / 4 * message / 75e9)
    across = step_time(shape, Arrangement(Layout(tp=8), 1, 1), Cluster(8, fast), code).tensor_parallel
    assert across == pytest.approx(4 * 2 * 7 / 8 * message / 30e9)  # four NICs a node carry the rings


def test_gradients_hide_behind_the_backward_pass_if_it_is_long_enough() -> None:
    shape, cluster = gpt(24, 1024, 16, seq_len=256), Cluster(64, find_accelerator("A100"))
    short, long = (
        step_time(shape, Arrangement(Layout(dp=64), micro_batch, 1), cluster).data_parallel for micro_batch in (1, 64)
    )
    assert short > 0
    assert long == 0
