"""The planner's table of operators against the two other counts of parameters, and against shapes by hand."""

import pytest
from tests.catalogue.published import model_shape
from tests.planning.shapes import LLAMA_8B, gpt

from leaven.catalogue.counting import count_parameters
from leaven.catalogue.run import PublishedRun
from leaven.catalogue.runs import find_run, load_runs
from leaven.planning.blueprint import Blueprint, Core, Matmul, blueprint
from leaven.planning.published import published_blueprint
from leaven.recipe.errors import InputError
from leaven.recipe.shape import ModelShape

COUNTED = {run.id: run for run in load_runs() if count_parameters(run.arch, run.data.seq_len if run.data else None)}


def table(run: PublishedRun) -> Blueprint:
    assert run.data is not None
    return published_blueprint(run.arch, run.data.seq_len or 2048)


@pytest.mark.parametrize("run", COUNTED.values(), ids=COUNTED)
def test_parameters_are_those_that_the_catalogue_counts(run: PublishedRun) -> None:
    found = table(run)
    assert (found.params, found.active_params) == count_parameters(run.arch, found.seq_len)


def test_nearly_all_published_runs_are_counted() -> None:
    assert len(COUNTED) >= 100


@pytest.mark.parametrize("run", [run for run in COUNTED.values() if model_shape(run)], ids=lambda run: run.id)
def test_what_leaven_builds_has_one_table_from_either_side(run: PublishedRun) -> None:
    shape = model_shape(run)
    assert shape is not None
    assert blueprint(shape) == table(run)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 4, "qk_norm": True},
        {"qk_norm": True, "qk_norm_per_head": True, "bias": True, "norm": "layernorm"},
        {"d_attention": 32 * 64, "d_head": 64, "tied_embeddings": True},
        {"activation": "gelu", "positions": "learned", "embedding_norm": True, "bias": True},
    ],
)
def test_parameters_are_those_of_the_shape(changes: dict[str, object]) -> None:
    shape = ModelShape.model_validate(LLAMA_8B.model_dump() | changes)
    found = blueprint(shape)
    assert found.params == found.active_params == shape.params
    assert found.n_layers == 32


def test_a_table_is_made_once_and_is_its_own_table() -> None:
    made = blueprint(LLAMA_8B)
    assert blueprint(made) is made is blueprint(LLAMA_8B.model_copy())
    assert hash(made) == hash(blueprint(LLAMA_8B.model_copy(update={"rope_theta": 1e6})))


def test_tensor_parallel_products_of_a_rank() -> None:
    assert Matmul("in", 4096, 14_336, "column").on_rank(8) == (4096, 1792)
    assert Matmul("out", 14_336, 4096, "row").on_rank(8) == (1792, 4096)
    assert Matmul("router", 4096, 64, "none").on_rank(8) == (4096, 64)
    assert blueprint(LLAMA_8B).tensor_unit == 8
    assert blueprint(gpt(48, 6144, 64)).tensor_unit == 64


def test_biases_of_row_parallel_products_are_on_every_rank() -> None:
    (block,) = set(blueprint(gpt(4, 512, 8)))
    # two norms of gain and bias, attention.out and mlp.out; shared out: query, key, value, mlp.in
    assert (block.whole, block.split_vectors) == (4 * 512 + 2 * 512, 3 * 512 + 4 * 512)
    assert block.whole + block.cut == block.params


def test_latent_attention_and_experts_of_deepseek_v3() -> None:
    """arXiv 2412.19437: 671B parameters, 37B of them active; 61 layers, the first three dense."""
    found = table(find_run("deepseek-v3"))
    assert found.params == pytest.approx(671e9, rel=1e-3)
    assert found.active_params == pytest.approx(37.5e9, rel=0.01)
    assert [count for _, count in found.kinds] == [3, 58]
    sparse = found.blocks[-1]
    assert sparse.core == Core(128, 128, 192, 128)
    assert (sparse.row("experts.in").stored, sparse.row("experts.in").passed) == (256, 8)
    assert sparse.row("shared.out").stored == 1
    assert not sparse.row("shared.out").routed


def test_keys_that_a_query_meets() -> None:
    core = Core(8, 8, 64, 64)
    assert (core.keys(4096), core.keys(4096, "causal")) == (4096, 2048)
    window = Core(8, 8, 64, 64, window=1024)
    exact = sum(min(position + 1, 1024) for position in range(4096)) / 4096
    assert window.keys(4096) == 1024
    assert window.keys(4096, "causal") == pytest.approx(exact, rel=1e-3)
    assert window.keys(512, "causal") == 256  # shorter than the window


def test_windows_go_round_over_the_layers() -> None:
    run = find_run("llama2-7b")
    found = published_blueprint(run.arch, 4096, windows=(1024, 1024, 1024, None))
    assert [block.core.window for block in found][:5] == [1024, 1024, 1024, None, 1024]


def test_a_shape_that_is_not_published_in_full_is_refused_with_what_is_missing() -> None:
    arch = find_run("llama2-7b").arch.model_copy(update={"d_ff": None, "qk_norm": None})
    with pytest.raises(InputError, match="qk_norm is not known"):
        published_blueprint(arch, 4096)
    with pytest.raises(InputError, match="d_ff is not known"):
        published_blueprint(arch.model_copy(update={"qk_norm": False}), 4096)
    sparse = find_run("deepseek-v3").arch.model_copy(update={"d_expert": None})
    with pytest.raises(InputError, match="d_expert is not known"):
        published_blueprint(sparse, 4096)
