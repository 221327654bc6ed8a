"""Step times compared with closed forms on a device of round numbers. test_accuracy.py has published rows."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planning.shapes import LLAMA_8B, LLM_FOUNDRY, TORCHTITAN, gpt

from leaven.catalogue.runs import find_run
from leaven.planning.accelerators import SUSTAINED, Accelerator, Sustained
from leaven.planning.arrangement import Arrangement
from leaven.planning.blueprint import BlockTable, Core, Matmul, Model, Split, blueprint
from leaven.planning.collectives import (
    LINK_LATENCY,
    LINK_SHARE,
    NETWORK_LATENCY,
    all_reduce,
    all_to_all,
    reached,
    ring,
    send_once,
)
from leaven.planning.hardware import Cluster, find_accelerator, parse_cluster
from leaven.planning.operators import (
    FLASH,
    LAUNCH,
    STREAMED,
    Operator,
    Work,
    block_operators,
    matmul_seconds,
    stream_seconds,
)
from leaven.planning.published import published_blueprint
from leaven.planning.stages import rank_parameters
from leaven.planning.timing import BlockTime, StepTime, _sends, adding_seconds, block_time, logits_seconds, step_time
from leaven.planning.training_codes import LEAVEN_BF16, TRAINING_CODES, TrainingCode
from leaven.recipe.files import read_recipe
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape

# 1e15 FLOP/s, 1e12 B/s of memory, 100 and 10 GB/s of links, 4 a node, 100 processors
ROUND = Accelerator(
    "round", peaks=(("bf16", 1000),), memory_gib=80, memory_tb_s=1, link_gb_s=100, network_gb_s=10, node_size=4,
    multiprocessors=100, matmuls=(("bf16", 1000),),
)  # fmt: skip
BUSY = replace(ROUND, memory_tb_s=1e6)  # nothing waits for memory


def operators(
    how: Arrangement, cluster: Cluster, code: TrainingCode, shape: ModelShape = LLAMA_8B
) -> dict[str, Operator]:
    work = Work(
        how.micro_batch * shape.seq_len // how.layout.cp, shape.seq_len, shape.d_model, how.layout.tp, how.layout.cp
    )
    found = block_operators(blueprint(shape).blocks[0], work, cluster.accelerator, code)
    return {operator.name: operator for operator in found}


def test_a_product_takes_whole_waves_of_the_best_tiles() -> None:
    # 128 x 256 in 4,096 x 8,192: 1,024 tiles are 11 waves of 100; a tile is 2 x 128 x 256 (k + 128)
    wave = 100 * 2 * 128 * 256 * (4096 + 128) / (1e15 * SUSTAINED)
    assert matmul_seconds((4096, 8192, 4096), BUSY) == pytest.approx(11 * wave)
    # one more row of tiles still is 11 waves; 1,101 tiles are 12
    assert matmul_seconds((4096 + 128, 8192, 4096), BUSY) == pytest.approx(11 * wave)
    assert matmul_seconds((4096 + 384, 8192, 4096), BUSY) == pytest.approx(12 * wave)


def test_a_thin_product_takes_the_time_of_its_bytes_and_a_tiny_one_that_of_a_launch() -> None:
    assert matmul_seconds((64, 65_536, 4096), ROUND) == pytest.approx(
        2 * (64 * 4096 + 4096 * 65_536 + 64 * 65_536) / (1e12 * STREAMED)
    )
    assert matmul_seconds((64, 64, 64), ROUND) == LAUNCH
    assert stream_seconds(2e12, ROUND) == pytest.approx(2 / STREAMED)


def test_widths_that_do_not_suit_the_tensor_cores_are_slow() -> None:
    good, of_64, of_8 = (matmul_seconds((4096, n, 4096), BUSY) for n in (8192, 8184, 8190))
    assert good < of_64 < of_8
    # in the gradient of a weight k counts tokens, of which an expert may have any number
    odd, even = (matmul_seconds((4096, 8192, k), BUSY, over_tokens=True) for k in (1001, 1000))
    assert odd == pytest.approx(even, rel=1e-3)


def test_a_ring_moves_all_but_one_share_and_waits_at_every_step() -> None:
    assert ring(1e9, 4, 1, ROUND) == pytest.approx(3 / 4 * 1e9 / (100e9 * LINK_SHARE) + 3 * LINK_LATENCY)
    # 16 ranks on 4 nodes use the four adapters of each node; 4 of the 15 steps are between nodes
    latency = 4 * NETWORK_LATENCY + 11 * LINK_LATENCY
    assert ring(1e9, 16, 1, ROUND, messages=3) == pytest.approx(15 / 16 * 1e9 / (40e9 * LINK_SHARE) + 3 * latency)
    # with one rank per node, a ring has one adapter
    assert ring(1e9, 4, 4, ROUND) == pytest.approx(3 / 4 * 1e9 / (10e9 * LINK_SHARE) + 3 * NETWORK_LATENCY, rel=0.01)
    assert ring(1e9, 1, 1, ROUND) == all_reduce(1e9, 1, 1, ROUND) == all_to_all(1e9, 1, 1, ROUND) == 0


def test_an_all_reduce_is_two_rings_or_over_many_nodes_a_tree() -> None:
    volume = 2 * 1023 / 1024 * 1e6 / (10e9 * LINK_SHARE)
    assert all_reduce(1e6, 1024, 4, ROUND) - volume == pytest.approx(2 * 10 * NETWORK_LATENCY)
    assert all_reduce(1e9, 4, 1, ROUND) == pytest.approx(2 * ring(1e9, 4, 1, ROUND))


def test_tensor_ranks_reduce_twice_forward_twice_backward_and_twice_more_if_all_is_computed_again() -> None:
    shape, cluster = gpt(2, 1024, 8), Cluster(4, ROUND)
    once = all_reduce(2 * 2048 * 1024, 4, 1, ROUND)
    kinds: tuple[tuple[Recompute, int], ...] = (("none", 4), ("full", 6))
    for recompute, times in kinds:
        how = Arrangement(Layout(tp=4, recompute=recompute), 1, 3)
        assert step_time(shape, how, cluster, TrainingCode()).tensor_parallel == pytest.approx(3 * 2 * times * once)
    pieces = TrainingCode(behind_products=True)
    hidden = step_time(shape, Arrangement(Layout(tp=4), 1, 1), cluster, pieces).tensor_parallel
    assert hidden == pytest.approx(2 * 4 * once / 4)


def test_torchs_checkpoint_stops_before_the_last_product_and_before_outputs_of_experts_return() -> None:
    whole, early = TrainingCode(sends="node"), TrainingCode(sends="node", stops_early=True)
    cluster = parse_cluster("8xH100")

    def block(model: Model, code: TrainingCode, recompute: Recompute) -> BlockTime:
        return block_time(model, Arrangement(Layout(dp=8, ep=8, recompute=recompute), 1, 1), cluster, code)

    dense = gpt(2, 1024, 8)
    work = Work(dense.seq_len, dense.seq_len, 1024)
    operators = block_operators(blueprint(dense).blocks[0], work, cluster.accelerator, early)
    last = next(operator.forward for operator in operators if operator.name == "mlp.out")
    assert block(dense, whole, "full").backward - block(dense, early, "full").backward == pytest.approx(last)
    experts = published_blueprint(find_run("olmoe-1b-7b").arch, 4096)
    sends = block(experts, early, "none").all_reduce / 4  # there and back, forward and backward
    assert block(experts, early, "full").all_reduce == pytest.approx(5 * sends)
    assert block(experts, whole, "full").all_reduce == pytest.approx(6 * sends)


def test_several_stages_on_a_rank_divide_the_bubble_and_zero_bubble_fills_it_with_the_gradients_of_weights() -> None:
    shape, cluster = gpt(32, 4096, 32), parse_cluster("4xH100")

    def timed(**changes: object) -> tuple[float, float]:
        layout = Layout.model_validate({"pp": 4, **changes})
        step = step_time(shape, Arrangement(layout, 1, 16), cluster, TrainingCode(balance="number"))
        return step.bubble, (step.compute + step.pipeline) / 16

    one, slot = timed()
    four, slot_of_four = timed(schedule="interleaved", stages_per_rank=4)
    assert one == pytest.approx(3 * slot)
    assert four == pytest.approx(3 * slot_of_four / 4)
    how, code = Arrangement(Layout(pp=4), 1, 16), TrainingCode(balance="number")
    filled, _ = timed(schedule="zero-bubble")
    # ZB-H1: T_F + T_B - T_W for every rank but one, with T_B the half of the inputs alone
    weights = 8 * block_time(shape, how, cluster, code).weight + logits_seconds(shape, how, cluster, code) / 3
    weights += adding_seconds(rank_parameters(shape, how.layout, 0, code).total, cluster.accelerator, code)
    assert filled == pytest.approx(one - 3 * 2 * weights)
    assert filled < one / 2


def test_selective_recomputation_repeats_the_core_or_all_but_every_second_product() -> None:
    cluster = parse_cluster("8xH100")
    for code in (TrainingCode(), TORCHTITAN):
        none, some = (
            Arrangement(Layout.model_validate({"dp": 8, "recompute": kind}), 1, 1) for kind in ("none", "selective")
        )
        block, again = (block_time(LLAMA_8B, how, cluster, code) for how in (none, some))
        found = operators(none, cluster, code)
        core = found["attention"].forward
        products = sum(operator.forward for operator in found.values() if operator.weight)
        repeated = core if code.selective == "core" else block.forward - core - products / 2
        assert again.backward - block.backward == pytest.approx(repeated)


def test_attention_with_a_flash_kernel_is_the_full_matrix_and_two_and_a_half_times_that_backward() -> None:
    attention = operators(Arrangement(Layout(), 1, 1), Cluster(1, BUSY), TrainingCode())["attention"]
    assert attention.forward == pytest.approx(4 * 8192 * 8192 * 4096 / (1e15 * SUSTAINED * FLASH))
    assert attention.backward == pytest.approx(2.5 * attention.forward)


def test_measured_rates_of_a_device_replace_the_usual_shares() -> None:
    measured = replace(BUSY, sustained=Sustained(matmul=600, attention=900, attention_backward=700))
    product = (4096, 8192, 4096)
    assert matmul_seconds(product, measured) == pytest.approx(matmul_seconds(product, BUSY) * SUSTAINED / 0.6)
    attention = operators(Arrangement(Layout(), 1, 1), Cluster(1, measured), TrainingCode())["attention"]
    assert attention.forward == pytest.approx(4 * 8192 * 8192 * 4096 / 900e12)
    assert attention.backward == pytest.approx(2.5 * 4 * 8192 * 8192 * 4096 / 700e12)


def test_context_ranks_share_a_sequence_and_hide_the_ring_behind_attention() -> None:
    shape = LLAMA_8B.model_copy(update={"seq_len": 131_072})
    one, four = (
        block_time(shape, Arrangement(Layout(cp=cp), 1, 1), parse_cluster(f"{cp}xH100"), TrainingCode())
        for cp in (1, 4)
    )
    assert four.forward == pytest.approx(one.forward / 4, rel=0.02)
    assert four.all_reduce == 0
    slow = replace(find_accelerator("H100"), link_gb_s=1)
    exposed = block_time(shape, Arrangement(Layout(cp=4), 1, 1), Cluster(4, slow), TrainingCode()).all_reduce
    keys = 2 * 131_072 / 4 * 8 * (128 + 128)  # of a rank, in bytes: three of them pass, forward and backward
    slowly = operators(Arrangement(Layout(cp=4), 1, 1), Cluster(4, slow), TrainingCode(), shape)
    attention = slowly["attention"].forward
    assert exposed == pytest.approx(2 * (3 * keys / (1e9 * LINK_SHARE) + 3 * LINK_LATENCY - attention))


def test_experts_are_reached_by_an_all_to_all_there_and_back_and_it_is_slower_between_nodes() -> None:
    model = published_blueprint(find_run("deepseek-v3").arch, 4096)

    def exchanged(ep: int) -> float:
        how = Arrangement(Layout(dp=64, ep=ep), 1, 1)
        return block_time(model, how, parse_cluster("64xH100"), TrainingCode()).all_reduce

    routed = sum(count for block, count in model.kinds if any(row.routed for row in block.matmuls)) / model.n_layers
    message = 2 * 4096 * 7168 * 8  # every token goes to eight experts
    inside = 7 / 8 * message / (450e9 * LINK_SHARE) + LINK_LATENCY
    between = 8 / 16 * message / (50e9 * LINK_SHARE) + NETWORK_LATENCY  # half of the ranks are in the other node
    assert exchanged(1) == 0
    assert exchanged(8) == pytest.approx(routed * 2 * 2 * inside)
    assert exchanged(16) == pytest.approx(routed * 2 * 2 * between)
    # with more ranks, a rank has fewer experts with more tokens each: nearly the same work
    few, many = (
        block_time(model, Arrangement(Layout(dp=64, ep=ep), 4, 1), parse_cluster("64xH100")).forward for ep in (8, 64)
    )
    assert few == pytest.approx(many, rel=0.2)


def test_an_all_to_all_uses_link_and_network_at_once() -> None:
    # 16 ranks on 4 nodes: 3 of the 15 others are in the same node, 12 are not
    assert all_to_all(1e9, 16, 1, ROUND) == pytest.approx(12 / 16 * 1e9 / (10e9 * LINK_SHARE) + NETWORK_LATENCY)
    # a slow link is what the ranks wait for
    slow = replace(ROUND, link_gb_s=1)
    assert all_to_all(1e9, 16, 1, slow) == pytest.approx(3 / 16 * 1e9 / (1e9 * LINK_SHARE) + LINK_LATENCY)


def test_a_token_sent_once_to_a_node_crosses_the_network_once_for_each_node_with_its_experts() -> None:
    # 32 experts on 16 ranks in 4 nodes: count the nodes and ranks of every choice of three experts
    choices = list(combinations(range(32), 3))
    nodes, ranks = (mean(len({expert // each for expert in chosen}) for chosen in choices) for each in (8, 2))
    network, link = (replace(ROUND, **slow) for slow in ({"network_gb_s": 1}, {"link_gb_s": 1}))
    size = 1e9
    found = send_once(size, 16, 1, network, experts=(32, 3), network_share=0.9)
    assert found == pytest.approx(3 / 4 * nodes * size / 0.9e9 + NETWORK_LATENCY)
    found = send_once(size, 16, 1, link, experts=(32, 3))
    assert found == pytest.approx(3 / 4 * ranks * size / (1e9 * LINK_SHARE) + LINK_LATENCY)
    assert send_once(size, 1, 1, ROUND, experts=(32, 3)) == 0


def test_consecutive_experts_of_a_token_are_on_few_ranks() -> None:
    # Qwen3-30B on 8 ranks: 8 of 128 experts, 16 a rank; DeepSeek-V3 on 64 ranks in 8 nodes: 8 of 256, 4 a rank
    assert reached(8, (128, 8), consecutive=True) == 1
    assert (reached(64, (256, 8), consecutive=True), reached(8, (256, 8), consecutive=True)) == (2, 1)
    # Kimi K2 on 32 ranks: 8 of 384, 12 a rank. A token starts at expert 0, 8 or 16 of 24, and the second uses two.
    assert reached(32, (384, 8), consecutive=True) == pytest.approx(4 / 3)
    # after the last expert comes the first
    assert reached(5, (5, 2), consecutive=True) == 2


def test_codes_differ_in_how_they_split_experts_and_send_tokens() -> None:
    model, cluster = published_blueprint(find_run("olmoe-1b-7b").arch, 4096), parse_cluster("64xH100")
    how = Arrangement(Layout(dp=32, tp=2, ep=16), 1, 8)
    split, whole, once, hidden = (
        block_time(model, how, cluster, code)
        for code in (
            replace(TRAINING_CODES["megatron-deepep"], whole_experts=False, sends="expert"),
            TRAINING_CODES["megatron-moe"],
            TRAINING_CODES["megatron-deepep"],
            TRAINING_CODES["megatron-deepep-overlap"],
        )
    )
    # ranks with whole experts exchange nothing after them, behind half of a product
    saved = 2 * all_reduce(2 * 4096 * 2048, 2, 1, cluster.accelerator) / 2
    assert split.all_reduce - whole.all_reduce == pytest.approx(saved, rel=0.1)
    assert once.all_reduce < whole.all_reduce / 2
    assert hidden.all_reduce < once.all_reduce
    assert once.forward == hidden.forward


def test_stages_send_behind_compute_if_a_rank_has_several() -> None:
    model, cluster = published_blueprint(find_run("olmoe-1b-7b").arch, 4096), parse_cluster("64xH100")

    def parts(code: TrainingCode, stages: int) -> tuple[float, float]:
        layout = Layout(dp=16, pp=4, ep=8)
        if stages > 1:
            layout = Layout(dp=16, pp=4, ep=8, schedule="interleaved", stages_per_rank=stages)
        found = step_time(model, Arrangement(layout, 1, 8), cluster, code)
        return found.pipeline, found.bubble

    waits = replace(TRAINING_CODES["megatron-moe"], hidden_transfers=False)
    hidden = TRAINING_CODES["megatron-moe"]
    assert parts(hidden, 1) == parts(waits, 1)
    assert parts(waits, 2)[0] > 0
    # while the pipeline fills and drains, a stage still waits
    assert parts(hidden, 2) == (0, parts(waits, 2)[1])


def test_tokens_are_sent_behind_another_micro_batch_only_if_there_is_one() -> None:
    model, cluster = published_blueprint(find_run("olmoe-1b-7b").arch, 4096), parse_cluster("64xH100")

    def sent(micro_batches: int, code: str) -> float:
        how = Arrangement(Layout(dp=64, ep=16), 1, micro_batches)
        return step_time(model, how, cluster, TRAINING_CODES[code]).tensor_parallel

    once, overlap = "megatron-deepep", "megatron-deepep-overlap"
    assert sent(1, overlap) == sent(1, once) > 0  # nothing is hidden
    assert sent(8, once) == pytest.approx(8 * sent(1, once))
    # seven are sent behind compute, which has 15% of its multiprocessors less while they are
    assert sent(8, overlap) == pytest.approx((1 + 7 * 0.15) * sent(1, once))


def test_tokens_are_copied_for_their_experts_and_sorted_again_on_other_ranks() -> None:
    block = published_blueprint(find_run("deepseek-v3").arch, 4096).blocks[-1]

    def sorting(code: TrainingCode = TrainingCode(), **how: int) -> float:  # noqa: B008 (frozen)
        found = block_operators(block, Work(4096, 4096, 7168, **how), ROUND, code)
        return next(each.forward for each in found if each.name == "sorting")

    token = 2 * 4096 * 7168 / (1e12 * STREAMED)  # seconds to read every token once, in 16 bits
    assert sorting() == pytest.approx((1 + 8 + 8 + 1) * token)
    assert sorting(ep=8) == pytest.approx((1 + 8 + 4 * 8 + 8 + 1) * token)
    # a code whose kernels copy tokens at a fifth of that speed; sorting in whole chunks is as fast as before
    slow = TrainingCode(permuted=STREAMED / 5)
    assert sorting(code=slow) == pytest.approx(5 * (1 + 8 + 8 + 1) * token)
    assert sorting(code=slow, ep=8) == pytest.approx((5 * (1 + 8 + 8 + 1) + 4 * 8) * token)
    # DeepEP: a token arrives once on a rank and is copied there, from consecutive experts on one of 8 ranks
    deepep = replace(slow, sends="node")
    arrived = reached(8, (256, 8))
    assert sorting(code=deepep, ep=8) == pytest.approx(5 * 2 * (arrived + 8) * token)
    assert sorting(code=replace(deepep, consecutive=True), ep=8) == pytest.approx(5 * 2 * (1 + 8) * token)
    assert sorting(code=deepep) == sorting(code=slow)
    dense = block_operators(blueprint(LLAMA_8B).blocks[0], Work(4096, 4096, 4096), ROUND, TrainingCode())
    assert "sorting" not in {each.name for each in dense}


def test_products_of_experts_run_four_at_a_time_in_transformer_engine() -> None:
    # 8 experts of a rank, each of 256 tiles: four of them fill 4 multiprocessors, and half of 2,048
    table = published_blueprint(find_run("olmoe-1b-7b").arch, 4096)

    def products(multiprocessors: int, at_once: int) -> float:
        accelerator = replace(BUSY, multiprocessors=multiprocessors)
        code = TrainingCode(experts_at_once=at_once)
        found = block_operators(table.blocks[0], Work(4096, 4096, 2048, ep=8), accelerator, code)
        return next(each.forward for each in found if each.name.startswith("mlp.experts.out"))

    assert products(4, 4) == pytest.approx(products(4, 0))
    assert products(2048, 4) > 1.05 * products(2048, 0)
    assert products(2048, 100) == pytest.approx(products(2048, 0))  # no more than there are
    assert TRAINING_CODES["megatron-moe"].experts_at_once == 4


def test_what_is_in_no_block_is_exchanged_after_the_backward_pass_and_in_a_pipeline_everything_is() -> None:
    cluster = parse_cluster("64xH100")

    def exposed(shape: ModelShape, **degrees: int) -> float:
        how = Arrangement(Layout.model_validate(degrees), 4, 8)
        return step_time(shape, how, cluster, LEAVEN_BF16).data_parallel

    ends = 4 * (2 * LLAMA_8B.vocab_size + 1) * LLAMA_8B.d_model
    assert exposed(LLAMA_8B, dp=64) == pytest.approx(all_reduce(ends, 64, 1, cluster.accelerator))
    # each of the two stages has half of the blocks, and an end
    blocks, half = 4 * 16 * blueprint(LLAMA_8B).blocks[0].params, 4 * LLAMA_8B.vocab_size * LLAMA_8B.d_model
    messages = 2 * 16 + 1  # two per block, and one for the end
    assert exposed(LLAMA_8B, dp=32, pp=2) == pytest.approx(
        all_reduce(blocks + half, 32, 1, cluster.accelerator, messages), rel=1e-3
    )


@given(
    st.sampled_from(["8xH100", "64xA100-80GB", "512xH100", "4096xH100"]),
    st.sampled_from([256, 2048, 8192]),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([LEAVEN_BF16, LLM_FOUNDRY, TORCHTITAN]),
)
def test_a_higher_zero_stage_exchanges_no_less(gpus: str, seq_len: int, m: int, code: TrainingCode) -> None:
    shape, cluster = LLAMA_8B.model_copy(update={"seq_len": seq_len}), parse_cluster(gpus)
    one, two, three = (
        step_time(shape, Arrangement(Layout(dp=cluster.gpus, zero=zero), 1, m), cluster, code).data_parallel
        for zero in (1, 2, 3)
    )
    assert one <= two <= three + 1e-9
    assert m > 1 or one == pytest.approx(two)


def test_leaven_gathers_16_bits_of_blocks_and_fp32_of_the_ends_once_a_step_below_zero_3() -> None:
    # The network is so slow that compute hides nothing. Bytes as counted in docs/log.md, "What layouts put on the
    # wires".
    slow = Cluster(16, replace(ROUND, network_gb_s=1e-3))
    ends = (2 * LLAMA_8B.vocab_size + 1) * LLAMA_8B.d_model
    blocks, m = LLAMA_8B.params - ends, 3
    share = 15 / 16 / (4e6 * LINK_SHARE)
    for zero, scatters, gathers in ((1, 1, 1), (2, m, 1), (3, m, 2 * m)):
        how = Arrangement(Layout(dp=16, zero=zero), 1, m)
        # under ZeRO 3 blocks are gathered twice per micro-batch, and the ends, which stay gathered, once
        of_ends = scatters + (gathers + 1) // 2
        bytes_moved = 4 * scatters * blocks + 2 * gathers * blocks + 4 * of_ends * ends
        found = step_time(LLAMA_8B, how, slow, LEAVEN_BF16).data_parallel
        assert found == pytest.approx(share * bytes_moved, rel=1e-3)


@pytest.mark.parametrize(("zero", "moved"), [(0, 8), (1, 4 + 4)])
def test_experts_are_exchanged_and_updated_over_the_ranks_that_have_the_same(zero: int, moved: int) -> None:
    model, slow = published_blueprint(find_run("deepseek-v3").arch, 4096), replace(ROUND, network_gb_s=1e-3)
    code, cluster = TrainingCode(), Cluster(64, slow)
    experts = sum(block.experts for block in model.blocks)
    for ep in (1, 4, 16):
        how = Arrangement(Layout(dp=64, ep=ep, zero=zero), 1, 1)
        dense = rank_parameters(model, how.layout, 0).total - experts / ep
        found = step_time(model, how, cluster, code)
        sharers, of_experts = (64, 64 // ep) if zero else (1, 1)
        assert found.optimizer == pytest.approx(2 * 16 * (dense / sharers + experts / ep / of_experts) / 1e12)
        # a group uses as many adapters of a node as it has members there
        of_dense = 63 / 64 * dense / (4e6 * LINK_SHARE)
        apart = (64 // ep - 1) / (64 // ep) * experts / ep / (max(1, 4 // ep) * 1e6 * LINK_SHARE)
        assert found.data_parallel == pytest.approx(moved * (of_dense + apart), rel=1e-3)


def test_replicas_exchange_units_once_a_step_with_the_last_backward_pass() -> None:
    layout, shape = Layout(dp=16, zero=2, dp_replicate=4), gpt(4, 1024, 8, seq_len=64)
    fast = replace(ROUND, link_gb_s=1e6)

    def exchanged(m: int, cluster: Cluster) -> float:
        return step_time(shape, Arrangement(layout, 1, m), cluster, LEAVEN_BF16).data_parallel

    # the four ranks of a node share; each exchanges a quarter of the gradients with three replicas
    quiet, slow = Cluster(16, fast), Cluster(16, replace(fast, network_gb_s=1e-3))
    moved = 2 * 3 / 4 * 4 * shape.params / 4
    for m in (1, 3):
        found = exchanged(m, slow) - exchanged(m, quiet)
        assert found == pytest.approx(moved / (1e6 * LINK_SHARE), rel=0.01)
    # a short exchange is hidden, except that of the ends
    long = Arrangement(layout, 512, 1)
    ends = 4 * (shape.vocab_size + 2) * 1024 / 4
    some = step_time(shape, long, Cluster(16, fast), LEAVEN_BF16).data_parallel
    assert some == pytest.approx(all_reduce(ends, 4, 4, fast), rel=0.25)


def test_norms_of_queries_and_keys_read_and_write_them_once() -> None:
    with_norms = published_blueprint(find_run("olmoe-1b-7b").arch, 4096).blocks[0]
    assert with_norms.qk_norm

    def norms(block: BlockTable) -> Operator:
        found = block_operators(block, Work(4096, 4096, 2048, tp=2), ROUND, TrainingCode())
        return next(operator for operator in found if operator.name == "norms and residuals")

    both, without = norms(with_norms), norms(replace(with_norms, qk_norm=False))
    size = (
        2 * 4096 * (16 + 16) * 128 / 2 / (1e12 * STREAMED)
    )  # seconds to read the queries and keys of half the heads
    assert both.forward - without.forward == pytest.approx(2 * size)
    assert both.backward - without.backward == pytest.approx(3 * size)


@pytest.mark.parametrize(
    ("width", "n_layers", "seq_len", "sequences", "gpu", "measured"),
    [
        # docs/log.md, 24 November: trials of leaven on an H100, batches of 10 sequences of 128 tokens
        (64, 2, 128, 10, "H100-SXM-80GB", 1280 / 0.131e6),
        (128, 4, 128, 10, "H100-SXM-80GB", 1280 / 0.067e6),
        (256, 4, 128, 10, "H100-SXM-80GB", 1280 / 0.063e6),
        # 20 November: `leaven bench examples/350m.toml` on an H200, compiled, 16 sequences; no constant is from it
        (1024, 24, 1024, 16, "H200-SXM-141GB", 16 * 1024 / 159e3),
    ],
)
def test_a_step_takes_as_long_as_the_host_needs_to_issue_it(
    width: int, n_layers: int, seq_len: int, sequences: int, gpu: str, measured: float
) -> None:
    shape, cluster = gpt(n_layers, width, width // 64, 32_768, seq_len, dropout=0.0), parse_cluster(f"1x{gpu}")
    found = step_time(shape, Arrangement(Layout(compile=n_layers == 24), sequences, 1), cluster, LEAVEN_BF16)
    assert found.step == pytest.approx(measured, rel=0.12)
    assert found.host > 0.1 * found.step


@pytest.mark.parametrize(("sequences", "measured"), [(16, 128e3), (32, 134e3), (64, 136e3)])
def test_a_block_that_runs_eagerly_takes_as_long_as_was_measured(sequences: int, measured: float) -> None:
    """docs/log.md, 20 November: tokens/s of examples/350m.toml on an H200, uncompiled. No constant is from it."""
    shape, cluster = (
        read_recipe(Path(__file__).parents[2] / "examples" / "350m.toml").model,
        parse_cluster("1xH200-SXM-141GB"),
    )

    def rate(compile: bool) -> float:
        how = Arrangement(Layout(compile=compile), sequences, 256 // sequences)
        return 256 * 1024 / step_time(shape, how, cluster, LEAVEN_BF16).step

    assert rate(compile=False) == pytest.approx(measured, rel=0.05)
    assert rate(compile=True) == pytest.approx(198e3, rel=0.05)  # `leaven bench`, the same day


def test_only_what_the_device_does_not_hide_is_waiting_for_the_host() -> None:
    shape, cluster = gpt(4, 64, 1, 512, 128), Cluster(1, ROUND)
    code = replace(LEAVEN_BF16, host_pass=2e-3, host_step=1e-3)

    def step(n: int, recompute: Recompute = "none", code: TrainingCode = code) -> StepTime:
        return step_time(shape, Arrangement(Layout(recompute=recompute), 1, n), cluster, code)

    assert step(1).step == pytest.approx(4 * 3e-3)
    assert step(3).step == pytest.approx(4 * (3 * 2e-3 + 1e-3))
    assert step(3, "full").step == pytest.approx(4 * (3 * 4 / 3 * 2e-3 + 1e-3))
    fast = replace(code, host_pass=1e-9, host_step=0.0)
    assert step(1, code=fast) == step(1, code=replace(code, host_pass=0.0, host_step=0.0))
    cpu = Cluster(1, replace(ROUND, name="cpu"))
    assert step_time(shape, Arrangement(Layout(), 1, 1), cpu, code).host == 0


@pytest.mark.parametrize(
    ("width", "d_expert", "experts", "active", "shared", "copies", "planned"),
    [
        (7168, 2048, 32, 8, 2048, 0.16, (9.97, 14.82)),  # DeepSeek-V3's widths; 5.7 and 9.1 ms were measured
        (7168, 2048, 32, 8, 2048, None, (7.54, 12.39)),  # with copies at the full bandwidth
        (4096, 14336, 8, 2, 0, 0.16, (5.38, 9.79)),  # Mixtral's; 4.6 and 7.9 ms
    ],
)
def test_planner_accuracy_states_what_is_planned_for_megatrons_own_test_of_a_layer(
    width: int,
    d_expert: int,
    experts: int,
    active: int,
    shared: int,
    copies: float | None,
    planned: tuple[float, float],
) -> None:
    """docs/evidence/planner-accuracy.md, "Copies for experts on an H100": milliseconds of an MLP, both passes,
    with 4,096 tokens on each of 8 GPUs and DeepEP."""
    sizes = (("in", width, d_expert), ("gate", width, d_expert), ("out", d_expert, width))
    rows = [Matmul("router.gate", width, experts, "none")]
    for name, k, n in sizes:
        split: Split = "row" if name == "out" else "column"
        rows.append(Matmul(f"mlp.{name}", k, n, split, stored=experts, passed=active))
        if shared:
            rows.append(Matmul(f"mlp.shared.{name}", k, n, split))
    block = BlockTable(tuple(rows), Core(8, 8, width // 8, width // 8), 0, 0, "swiglu")
    code = replace(TRAINING_CODES["megatron-deepep"], permuted=copies)
    work, gpu = Work(4096, 4096, width, ep=8, fused=True), find_accelerator("H100-SXM-80GB")
    found = [
        operator
        for operator in block_operators(block, work, gpu, code)
        if operator.name not in {"attention", "norms and residuals", "positions"}
    ]
    sent = _sends(block, work, gpu, code)
    forward, backward = (sent + sum(getattr(each, kind) for each in found) for kind in ("forward", "backward"))
    assert (1e3 * forward, 1e3 * backward) == pytest.approx(planned, abs=0.02)
