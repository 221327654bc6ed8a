import pytest
from tests.catalogue.published import model_shape
from tests.planning.shapes import LLAMA_8B, gpt

from leaven.catalogue.runs import PublishedRun, find_run, load_runs
from leaven.errors import InputError
from leaven.planning.blueprint import Blueprint, Core, Matmul, blueprint
from leaven.planning.flops import flops_per_token
from leaven.planning.published import published_blueprint
from leaven.recipe.shape import ModelShape

COUNTED = {run.id: run for run in load_runs() if not (run.params.shape_check or "").startswith("skip")}
# Published numbers of parameters that a token uses.
ACTIVE = {
    "olmoe-1b-7b": 1.28e9,
    "deepseek-moe-16b": 2.8e9,
    "deepseek-v2": 21e9,
    "deepseek-v3": 37e9,
    "kimi-k2": 32.6e9,
    "moonlight-16b-a3b": 2.87e9,
}


def table(run: PublishedRun) -> Blueprint:
    return published_blueprint(run.arch, run.data.seq_len or 2048)


@pytest.mark.parametrize(("id", "published"), ACTIVE.items())
def test_active_parameters_of_experts_are_those_published(id: str, published: float) -> None:
    run = find_run(id)
    assert run.params_active == pytest.approx(published, rel=1e-3)
    assert table(run).active_params == pytest.approx(published, rel=0.03)


def test_layerwise_widths_are_those_of_the_released_model() -> None:
    """OpenELM 270M by hand: 12 to 20 query heads of 64 over 16 layers, FFNs of 768 to 5120."""
    heads = [12] * 5 + [16] * 7 + [20] * 4
    widths = [*range(768, 1793, 256), 2048, *range(2560, 3841, 256), *range(4352, 5121, 256)]
    layers = sum(
        1280 * 64 * (2 * h + 2 * h // 4) + 3 * 1280 * f + 2 * 1280 + 2 * 64
        for h, f in zip(heads, widths, strict=True)
    )
    assert table(find_run("openelm-270m")).params == layers + 32_128 * 1280 + 1280


@pytest.mark.parametrize("run", [run for run in COUNTED.values() if model_shape(run)], ids=lambda run: run.id)
def test_what_leaven_builds_has_one_table_from_either_side(run: PublishedRun) -> None:
    shape = model_shape(run)
    assert blueprint(shape) == table(run)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 4, "qk_norm": True},
        {"qk_norm": True, "qk_norm_per_head": True, "bias": True, "norm": "layernorm"},
        {"d_attention": 32 * 64, "d_head": 64, "tied_embeddings": True},
        {"activation": "gelu", "positions": "learned", "embedding_norm": True, "bias": True},
        {"norm_placement": "output", "qk_norm": True, "qk_norm_whole": True, "window": 4096, "global_every": 4},
        {"norm_placement": "sandwich", "activation": "geglu", "norm": "layernorm", "bias": True},
        {"parallel_branches": True, "attention_bias": "qkv", "rotary_fraction": 0.5},
        {"parallel_branches": True, "attention_bias": "none", "bias": True, "norm": "layernorm"},
    ],
)
def test_parameters_are_those_of_the_shape(changes: dict[str, object]) -> None:
    shape = ModelShape.model_validate(LLAMA_8B.model_dump() | changes)
    found = blueprint(shape)
    assert found.params == found.active_params == shape.params
    assert found.n_layers == 32


def test_tensor_parallel_products_of_a_rank() -> None:
    assert Matmul("in", 4096, 14_336, "column").on_rank(8) == (4096, 1792)
    assert Matmul("out", 14_336, 4096, "row").on_rank(8) == (1792, 4096)
    assert Matmul("mlp.router", 4096, 64, "none").on_rank(8) == (4096, 64)
    assert blueprint(LLAMA_8B).tensor_unit == 8
    assert blueprint(gpt(48, 6144, 64)).tensor_unit == 64


def test_biases_of_row_parallel_products_are_on_every_rank() -> None:
    (block,) = set(blueprint(gpt(4, 512, 8)).blocks)
    # On every rank: two norms with gain and bias, attention.out and mlp.out. Split: query, key, value and mlp.in.
    assert (block.whole, block.split_vectors) == (4 * 512 + 2 * 512, 3 * 512 + 4 * 512)
    assert block.whole + block.cut == block.params


def test_a_shape_that_is_not_published_in_full_is_refused_with_what_is_missing() -> None:
    for run, name in (("llama2-7b", "d_ff"), ("llama2-7b", "qk_norm"), ("deepseek-v3", "d_expert")):
        arch = find_run(run).arch.model_copy(update={name: None})
        with pytest.raises(InputError, match=f"{name} is not known"):
            published_blueprint(arch, 4096)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("dense_layers", [0, 3])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_recipes_experts_have_the_parameters_of_its_shape(activation: str, dense_layers: int, shared: int) -> None:
    experts = {"number": 16, "active": 4, "d_expert": 1408, "dense_layers": dense_layers, "shared": shared}
    shape = ModelShape.model_validate(LLAMA_8B.model_dump() | {"activation": activation, "experts": experts})
    found = blueprint(shape)
    assert (found.params, found.active_params) == (shape.params, shape.params_active)
    assert found.experts == 16
    # The matrices of a block have the names of the model's modules.
    names = {row.name for block in found.blocks for row in block.matmuls}
    assert names == {name for name in shape.modules if name.startswith(("attention.", "mlp."))}
    # 6 per weight that a token uses: all but the embedding and the gains of norms; and attention.
    weights = shape.params_active - shape.vocab_size * 4096 - (2 * 32 + 1) * 4096
    attention = 12 * 32 * 4096 * shape.seq_len
    assert flops_per_token(shape) == pytest.approx(6 * weights + attention, rel=1e-12)


def test_olmoe_from_a_recipe_and_from_the_catalogue_are_the_same_model() -> None:
    run = table(find_run("olmoe-1b-7b"))
    experts = {"number": 64, "active": 8, "d_expert": 1024, "balance": "loss"}
    shape = ModelShape.model_validate(
        {"n_layers": 16, "d_model": 2048, "n_heads": 16, "n_kv_heads": 16, "d_head": 128, "d_ff": 1024}
        | {"vocab_size": run.vocab_size, "seq_len": run.seq_len, "qk_norm": True, "experts": experts}
    )
    for ours, theirs in zip(blueprint(shape).blocks, run.blocks, strict=True):
        assert (ours.matmuls, ours.core) == (theirs.matmuls, theirs.core)


def test_latent_attention_and_experts_of_deepseek_v3() -> None:
    """arXiv 2412.19437: 671B parameters, 37B of them active; 61 layers, the first three dense."""
    found = table(find_run("deepseek-v3"))
    assert found.params == pytest.approx(671e9, rel=1e-3)
    assert found.active_params == pytest.approx(37.5e9, rel=0.01)
    assert [count for _, count in found.kinds] == [3, 58]
    sparse = found.blocks[-1]
    assert sparse.core == Core(128, 128, 192, 128)
    rows = {row.name: row for row in sparse.matmuls}
    assert (rows["mlp.experts.in"].stored, rows["mlp.experts.in"].passed) == (256, 8)
    assert (rows["mlp.shared.out"].stored, rows["mlp.shared.out"].routed) == (1, False)
