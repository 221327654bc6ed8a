"""Memory compared with closed forms and with published measurements."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.planning.shapes import (
    LLAMA_8B,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_BF16,
    MEGATRON_FP16,
    NANOTRON,
    SMALL,
    TORCHTITAN,
    bloom,
    gpt,
)

from leaven.catalogue.runs import find_run
from leaven.planning.arrangement import Arrangement
from leaven.planning.blueprint import BlockTable, Blueprint, Core, Matmul, blueprint
from leaven.planning.memory import GIB, activation_parts, block_kept, operators_kept, stage_memory, worst_stage
from leaven.planning.published import published_blueprint
from leaven.planning.stages import in_flight, rank_parameters, stage_layers
from leaven.planning.training_codes import LEAVEN_BF16, LEAVEN_FP32, TrainingCode, states
from leaven.recipe.layout import Layout, Recompute
from leaven.recipe.shape import ModelShape

KINDS: tuple[Recompute, ...] = ("none", "selective")
SBH = 2048 * 4 * 6144  # the 22B model, micro-batch 4


def layer_activation_bytes(model: ModelShape, sequences: int, tp: int, code: TrainingCode = LEAVEN_BF16) -> float:
    kept = operators_kept(blueprint(model).blocks[0], model.d_model, model.seq_len, tp, code)
    return sequences * model.seq_len * sum(kept.values())


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikanti_2022_equations_2_and_4_activations_of_a_gpt_block(t: int) -> None:
    shape, a, s, h = gpt(48, 6144, 64), 64, 2048, 6144
    unfused = layer_activation_bytes(shape, 4, t, MEGATRON_FP16)
    assert unfused == pytest.approx(SBH * (10 + 24 / t + 5 * a * s / (h * t)))
    assert layer_activation_bytes(shape, 4, t, MEGATRON) == pytest.approx(SBH / t * (34 + 5 * a * s / h))
    together = TrainingCode(sequence_parallel=True)  # with a flash kernel: 34 s b h / t
    assert layer_activation_bytes(shape, 4, t, together) == pytest.approx(34 * SBH / t)


def test_korthikanti_2022_figure_9_activations_of_530b_on_35_stages() -> None:
    """Full recomputation, tensor degree 8: 13 GB on the first rank, 10.5 if outputs are freed once they are sent,
    1.5 on the last. Read off a plot, in GiB as it seems."""
    shape = gpt(105, 20_480, 128)
    how = Arrangement(Layout(tp=8, pp=35, recompute="full"), 1, 280)
    found = [
        (memory.activations + memory.logits) / GIB
        for memory in (
            stage_memory(shape, how, 0, replace(MEGATRON_2021, keeps_outputs=True)),
            stage_memory(shape, how, 0, MEGATRON_2021),
            stage_memory(shape, how, 34, MEGATRON_2021),
        )
    ]
    assert found[:2] == pytest.approx([13, 10.5], rel=0.02)
    assert found[2] == pytest.approx(1.5, abs=0.2)


def test_a_swiglu_block_is_16_h_plus_8_d_ff_a_token_with_as_many_kv_heads_as_heads() -> None:
    tokens = 2 * SMALL.seq_len
    plain = TrainingCode()
    assert layer_activation_bytes(SMALL, 2, 1, plain) == tokens * (16 * SMALL.d_model + 8 * SMALL.d_ff)
    # leaven's residual stream is fp32, and norms keep their input.
    assert layer_activation_bytes(SMALL, 2, 1) == tokens * (20 * SMALL.d_model + 8 * SMALL.d_ff)


def test_zero_paper_figure_1_states_of_7_5b_on_64_ranks() -> None:
    """arXiv 1910.02054: 120, 31.4, 16.6 and 1.88 GB."""
    one = BlockTable((Matmul("all", 75_000, 100_000, "none"),), Core(1, 1, 1, 1), 0, 0, "gelu")
    model = Blueprint(1, 0, 2, (one,), tied=True)
    found = []
    for zero in range(4):
        memory = stage_memory(model, Arrangement(Layout(dp=64, zero=zero), 1, 1), 0, MEGATRON_FP16)
        found.append((memory.weights + memory.grads + memory.optimizer) / 1e9)
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)


def test_zero_3_divides_everything_but_two_gathered_blocks_or_leavens_last_end() -> None:
    how = Arrangement(Layout(dp=8, zero=3), 1, 1)
    ends = 2 * 32_768 * 768 + 768
    blocks = 2 * 2 * (SMALL.params - ends) / 12
    plain, memory = (stage_memory(SMALL, how, 0, code) for code in (TrainingCode(), LEAVEN_BF16))
    assert plain.gathered == pytest.approx(blocks)
    # At the loss leaven has no block gathered and has freed the embedding.
    assert memory.gathered == pytest.approx(4 * (32_768 * 768 + 768))
    for each in (plain, memory):
        assert each.weights + each.grads + each.optimizer == pytest.approx(16 * SMALL.params / 8)


def test_experts_are_shared_out_over_the_ranks_of_their_own_data_parallel_group() -> None:
    """DeepSeek-V3 on dp 16 x tp 2, ep 8: a rank has 1/8 of the experts, and two ranks have the same ones."""
    run = find_run("deepseek-v3")
    model = published_blueprint(run.arch, 4096)
    experts = 58 * 256 * 3 * 7168 * 2048
    whole = sum(count * block.whole for block, count in model.kinds) + model.final_vectors
    cut = model.params - experts - whole
    layout = Layout(dp=16, tp=2, ep=8)
    assert rank_parameters(model, layout, 0).total == pytest.approx(whole + cut / 2 + experts / 2 / 8)
    memory = stage_memory(model, Arrangement(layout.model_copy(update={"zero": 1}), 1, 8), 0, MEGATRON_FP16)
    assert memory.weights == pytest.approx(2 * (whole + cut / 2 + experts / 16))
    assert memory.optimizer == pytest.approx(12 * ((whole + cut / 2) / 16 + experts / 16 / 2))


def test_the_stages_of_a_model_with_dense_layers_first_hold_every_parameter_once() -> None:
    model = published_blueprint(find_run("deepseek-v3").arch, 4096)
    held = [rank_parameters(model, Layout(pp=8), stage).total for stage in range(8)]
    assert sum(held) == model.params
    interleaved = Layout(pp=4, schedule="interleaved", stages_per_rank=3)
    assert sum(rank_parameters(model, interleaved, rank).total for rank in range(4)) == model.params


def test_context_parallelism_divides_the_tokens_and_shares_the_states() -> None:
    alone, shared = (Arrangement(layout, 2, 1) for layout in (Layout(dp=2, zero=1), Layout(dp=2, cp=4, zero=1)))
    bare = TrainingCode(fixed_gib=0.0, slack=0.0)
    whole, part = (stage_memory(LLAMA_8B, how, 0, bare) for how in (alone, shared))
    assert part.logits == whole.logits / 4
    assert part.activations == pytest.approx(whole.activations / 4)  # the circulating keys need less than the logits
    assert part.optimizer == whole.optimizer / 4
    assert part.weights == whole.weights


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline_and_once_without() -> None:
    shape = gpt(48, 6144, 64)
    assert rank_parameters(shape, Layout(), 0).total == shape.params
    both = sum(rank_parameters(shape, Layout(pp=4), stage).total for stage in range(4))
    assert both == shape.params + 51_200 * 6144


def test_an_embedding_norm_is_on_the_first_stage_and_keeps_its_input() -> None:
    plain = gpt(48, 6144, 64)
    normed = plain.model_copy(update={"embedding_norm": True})
    more = [
        rank_parameters(normed, Layout(pp=4), stage).total - rank_parameters(plain, Layout(pp=4), stage).total
        for stage in range(4)
    ]
    assert more == [2 * 6144, 0, 0, 0]  # gain and bias
    how = Arrangement(Layout(pp=4), 2, 16)
    grown = [
        stage_memory(normed, how, stage).activations - stage_memory(plain, how, stage).activations for stage in (0, 3)
    ]
    assert grown == [4 * 4 * 2 * 2048 * 6144, 0]  # four micro-batches of two sequences in fp32


def test_bloom_70_layers_on_12_stages_as_it_was_trained() -> None:
    for balance in ("number", "weight"):  # an embedding is 1.5 blocks
        assert stage_layers(bloom(70), 12, balance) == (5, *[6] * 10, 5)  # type: ignore[arg-type]


def test_a_large_vocabulary_is_worth_blocks() -> None:
    """No other split has a smaller largest stage; the ends count as their parameters in blocks."""
    shape = gpt(10, 512, 8, vocab=50_304)
    ends = 50_304 * 512 / (12 * 512**2)
    for stages in (2, 3, 4):
        cuts = [cut for cut in product(range(1, 11), repeat=stages) if sum(cut) == 10]
        best = min(max(cut[0] + ends, *cut[1:-1], cut[-1] + ends) for cut in cuts)
        layers = stage_layers(shape, stages)
        assert max(layers[0] + ends, *layers[1:-1], layers[-1] + ends) == best


def test_sent_outputs_are_kept_if_the_code_keeps_them() -> None:
    shape, how = gpt(48, 6144, 64), Arrangement(Layout(pp=4), 2, 16)
    grown = [
        stage_memory(shape, how, stage, TrainingCode(keeps_outputs=True)).activations
        - stage_memory(shape, how, stage, TrainingCode()).activations
        for stage in range(4)
    ]
    output = 2 * 2 * 2048 * 6144
    assert grown == [4 * output, 3 * output, 2 * output, 0]


def test_selective_recomputation_saves_the_scores_and_nothing_with_a_flash_kernel() -> None:
    (block, _) = blueprint(gpt(48, 6144, 64)).kinds[0]
    scores = 5 * 64 * 2048
    for code, saved in ((MEGATRON_FP16, scores), (TrainingCode(), 0)):
        none, selective = (block_kept(block, 6144, 2048, 1, 1, recompute=kind, code=code) for kind in KINDS)
        assert none.stays - selective.stays == selective.once == saved
        assert none.once == 0


def test_torchtitans_selective_recomputation_keeps_every_second_product_and_the_attentions() -> None:
    (block, _) = blueprint(LLAMA_8B).kinds[0]
    kept = block_kept(block, 4096, 8192, 1, 1, recompute="selective", code=TORCHTITAN).stays
    assert kept == 2 * (4096 + 4096 + 1024 + 14_336 + 4096 + 4096)  # input, query, value, gate, mlp.out; attention


def test_activations_of_experts_count_for_the_tokens_that_are_sent_to_them() -> None:
    model = published_blueprint(find_run("deepseek-v3").arch, 4096)
    by_operator = operators_kept(model.blocks[-1], 7168, 4096, 1, MEGATRON)
    # A fused SwiGLU does not keep the gate after its activation.
    assert by_operator["mlp.experts"] == 2 * 3 * 8 * 2048
    assert by_operator["mlp.shared"] == 2 * 3 * 2048
    unfused = operators_kept(model.blocks[-1], 7168, 4096, 1, replace(MEGATRON, fused=False))
    assert unfused["mlp.experts"] == 2 * 4 * 8 * 2048
    assert by_operator["mlp.experts.inputs"] == by_operator["mlp.experts.outputs"] == 2 * 8 * 7168
    assert by_operator["attention.latents"] == 2 * 2 * (1536 + 512 + 64)
    assert "mlp" not in by_operator


def test_narayanan_2021_figure_4_and_korthikanti_2022_section_4_2_3_micro_batches_in_flight() -> None:
    """11, 9, 7 and 5 passes before the first backward one, each through half of a rank. test_schedule.py has other
    schedules."""
    layout = Layout(pp=4, schedule="interleaved", stages_per_rank=2)
    flying = [in_flight(layout, rank, 16) for rank in range(4)]
    assert flying == [11 / 2, 9 / 2, 7 / 2, 5 / 2]
    assert flying[0] == 4 * (1 + (4 - 1) / (4 * 2))


def test_zero_shards_within_a_replica() -> None:
    layouts = (Layout(dp=8, zero=1), Layout(dp=8, zero=1, dp_replicate=4))
    whole, replicated = (stage_memory(SMALL, Arrangement(layout, 1, 1), 0).optimizer for layout in layouts)
    assert replicated == 4 * whole


def test_an_update_needs_the_parameters_before_it() -> None:
    """At the update the activations, copies and logits of a small micro-batch are free and do not count."""
    short = SMALL.model_copy(update={"seq_len": 8})
    bare = replace(LEAVEN_BF16, fixed_gib=0.0, slack=0.0)
    memory = stage_memory(short, Arrangement(Layout(), 1, 1), 0, bare)
    assert memory.total == pytest.approx((4 + 4 + 4 + 8) * short.params)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_operators_of_a_rank_add_up_to_its_activations(recompute: Recompute, stage: int) -> None:
    how = Arrangement(Layout(tp=2, pp=4, recompute=recompute), 2, 16)
    parts = activation_parts(LLAMA_8B, how, stage)
    assert sum(parts.values()) == pytest.approx(stage_memory(LLAMA_8B, how, stage).activations)
    if recompute == "none":
        flying, layers = 4 - stage, stage_layers(LLAMA_8B, 4)[stage]
        assert parts["mlp"] == flying * layers * 2 * 8192 * 2 * 4 * 14_336 / 2


@pytest.mark.parametrize("pp", [1, 4, 32])
@pytest.mark.parametrize("id", ["deepseek-v3", "bloom-176b"])
def test_the_worst_rank_is_the_worst_of_all(id: str, pp: int) -> None:
    """A model with experts begins with dense blocks, which need little: a later rank needs the most."""
    run = find_run(id)
    model = published_blueprint(run.arch, 2048)
    how = Arrangement(Layout(dp=64 // pp, pp=pp), 1, 4 * pp)
    every = [stage_memory(model, how, rank) for rank in range(pp)]
    assert worst_stage(model, how) == max(every, key=lambda memory: memory.total)


FP32 = TrainingCode(compute_copy=0)


def gb(code: TrainingCode) -> dict[str, float]:
    return {state.name: state.bytes / 1e9 for state in states(7e9, code)}


def test_7b_in_fp32_with_adam_are_112_gb_and_140_only_with_a_master_copy_beside() -> None:
    assert gb(FP32) == {"weights": 28, "gradients": 28, "moments": 56}
    assert sum(gb(FP32).values()) == 112
    twice = TrainingCode(optimizer=12, master=4, compute_copy=0)
    assert sum(gb(twice).values()) == 140
    assert gb(twice)["master weights"] == 28


def test_an_average_of_the_weights_is_4_bytes_a_parameter_sharded_like_the_moments() -> None:
    assert gb(FP32.averaging(True)) == gb(FP32) | {"average": 28}
    assert FP32.averaging(False) == FP32
    for zero, ranks in ((0, 1), (1, 4), (3, 4)):
        how = Arrangement(Layout(dp=4, zero=zero), 1, 1)
        plain, averaged = (stage_memory(SMALL, how, 0, code) for code in (FP32, FP32.averaging(True)))
        assert averaged.optimizer - plain.optimizer == pytest.approx(4 * blueprint(SMALL).params / ranks)


@pytest.mark.parametrize("micro_batch", [1, 64])
def test_the_peak_of_a_single_micro_batch_is_its_backward_pass_or_the_update(micro_batch: int) -> None:
    """In fp32: gradients take the memory of freed activations; the update needs another copy of the parameters."""
    one = stage_memory(SMALL, Arrangement(Layout(), micro_batch, 1), 0, LEAVEN_FP32)
    several = stage_memory(SMALL, Arrangement(Layout(), micro_batch, 2), 0, LEAVEN_FP32)
    params, kept = 4 * blueprint(SMALL).params, several.activations + several.logits
    assert one.total - one.fixed - one.reserve == pytest.approx(
        one.states + max(params + max(0, kept - params), 2 * params)
    )


def test_in_fp32_several_ranks_gather_copies_and_the_first_backward_pass_makes_room_for_gradients() -> None:
    """Under tensor parallelism, every weight of a rank has a copy. With as many micro-batches as stages, all forward
    passes of the first stage come first, so its gradients take the activations of one micro-batch."""
    tensor = stage_memory(SMALL, Arrangement(Layout(tp=2), 2, 2), 0, LEAVEN_FP32)
    assert tensor.gathered == tensor.weights == tensor.grads
    two, four = (stage_memory(SMALL, Arrangement(Layout(pp=2), 2, count), 0, LEAVEN_FP32) for count in (2, 4))
    assert two.gathered == two.weights
    assert two.activations == four.activations
    assert four.grads == four.weights
    assert two.grads == pytest.approx(max(0, four.grads - two.activations / 2))


@pytest.mark.parametrize(("code", "each"), [(LEAVEN_BF16, 16), (NANOTRON, 20), (MEGATRON_BF16, 20)])
def test_bytes_a_parameter_of_other_codes(code: TrainingCode, each: int) -> None:
    found = states(1.0, code)
    assert sum(state.bytes_each for state in found) == each == sum(state.bytes for state in found)
    assert all(state.why for state in found)


def test_norms_behind_branches_and_a_shared_norm_change_what_a_block_saves() -> None:
    """In bf16 with an fp32 stream: a norm saves its input, and parallel branches have one input."""
    stream, hidden = 4 * SMALL.d_model, 2 * SMALL.d_model

    def saved(tp: int = 1, **changes: object) -> float:
        shape = ModelShape.model_validate(SMALL.model_dump() | changes)
        return sum(operators_kept(blueprint(shape).blocks[0], shape.d_model, shape.seq_len, tp).values())

    assert saved(norm_placement="sandwich") - saved() == 2 * stream
    assert saved(norm_placement="output") == saved()
    assert saved() - saved(parallel_branches=True) == stream + hidden
    gathered = LEAVEN_BF16.gathered_inputs  # each branch of a tensor-parallel rank has its own copy
    assert saved(2) - saved(2, parallel_branches=True) == stream / 2 + (0 if gathered else hidden / 2)


MASKED = SMALL.model_copy(update={"seq_len": 4096})
WINDOWS = {"window": 64, "global_every": 2}


@pytest.mark.parametrize(
    ("changes", "documents", "masks"),
    [
        ({}, "packed", 0),
        ({}, "isolated", 3),  # one for each sequence of a micro-batch
        ({"positions": "alibi"}, "packed", SMALL.n_heads),
        ({"positions": "alibi"}, "isolated", 3 * SMALL.n_heads),
        (WINDOWS, "packed", 1),
        (WINDOWS, "isolated", 2 * 3),
        (WINDOWS | {"attention_softcap": 50.0}, "packed", 0),
        (WINDOWS | {"attention_softcap": 50.0}, "isolated", 3 / 2),  # booleans
    ],
)
def test_masks_of_attention_are_counted_once_for_all_layers(
    changes: dict[str, Any], documents: str, masks: float
) -> None:
    shape, code = MASKED.model_copy(update=changes), LEAVEN_BF16.isolating(documents)
    how = Arrangement(Layout(), 3, 2)
    without = stage_memory(shape, how, 0, replace(code, masks=False))
    counted = stage_memory(shape, how, 0, code)
    assert counted.activations - without.activations == pytest.approx(masks * 2 * 4096**2)
    assert activation_parts(shape, how, 0, code).get("attention.masks", 0) == masks * 2 * 4096**2
