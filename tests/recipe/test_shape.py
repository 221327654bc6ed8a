import pytest
from pydantic import ValidationError

from leaven.recipe.shape import ModelShape

LLAMA_1B = {"n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_head": 64, "d_ff": 8192}
LLAMA_1B |= {"vocab_size": 128_256, "seq_len": 8192, "tied_embeddings": True}


def test_names_are_unique_and_every_module_is_tunable() -> None:
    shape = ModelShape.model_validate(
        LLAMA_1B
        | {"norm": "layernorm", "bias": True, "positions": "learned", "qk_norm": True, "embedding_norm": True}
    )
    names = [parameter.name for parameter in shape.parameters()]
    assert len(names) == len(set(names))
    assert {"positions", "biases", "norm.embedding", "norm.query", "attention.out", "mlp.in"} <= set(shape.modules)


def test_scaled_keeps_head_dimension_and_ratios() -> None:
    shape = ModelShape.model_validate(LLAMA_1B).scaled(4096, 32)
    assert (shape.d_head, shape.n_heads, shape.n_kv_heads, shape.d_ff, shape.n_layers) == (64, 64, 16, 16_384, 32)


QWEN3_0_6B = LLAMA_1B | {"n_layers": 28, "d_model": 1024, "n_heads": 16, "d_head": 128, "d_attention": 2048}
QWEN3_0_6B |= {"d_ff": 3072, "vocab_size": 151_936, "qk_norm": True}


def test_an_attention_width_that_is_not_the_model_width() -> None:
    """0.6 B parameters, 0.44 B without embeddings (the model's card); their width over d_model is kept."""
    small = ModelShape.model_validate(QWEN3_0_6B)
    assert round(small.params / 1e9, 2) == 0.60
    assert round(small.params_non_embedding / 1e9, 2) == 0.44
    big = small.scaled(2048, 28)
    assert (big.n_heads, big.n_kv_heads, big.d_head, big.d_attention) == (32, 16, 128, 4096)
    assert small.scaled(1024, 28, d_head=64).n_heads == 32
    with pytest.raises(ValueError, match="groups of 2 heads of size 128; give 1024 or 1152"):
        small.scaled(1100, 28)
    assert small.scaled(1152, 28).n_heads == 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 2000}, "set d_model = 2048"),
        ({"d_attention": 4096}, "d_attention 4096 is not n_heads x d_head = 32 x 64 = 2048; set d_attention = 2048"),
        ({"n_kv_heads": 3}, "set n_kv_heads to 1 or 2 or 4 or 8 or 16 or 32"),
        ({"d_head": 1, "n_heads": 2048, "n_kv_heads": 1}, "even d_head"),
        ({"n_layers": True}, "n_layers"),
        ({"qk_norm_whole": True}, "needs qk_norm = true"),
        ({"rotary_fraction": 0.3}, "= 0.3 x 64 must be a positive even number"),
        ({"rotary_fraction": 0.5, "positions": "alibi"}, 'positions must be "rope"'),
        ({"attention_softcap": 50.0, "dropout": 0.1}, "neither dropout nor ALiBi"),
        ({"global_every": 4}, "needs a sliding window"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelShape.model_validate(LLAMA_1B | change)


def test_newer_keys_are_written_only_with_another_value_than_their_default() -> None:
    """Runs and studies are identified by hashes of their recipes, which must stay as they are."""
    shape = ModelShape.model_validate(LLAMA_1B)
    newer = shape.added_defaults()
    assert len(newer) == 10
    assert not newer.keys() & shape.model_dump().keys()
    assert ModelShape.model_validate(LLAMA_1B | newer).model_dump_json() == shape.model_dump_json()
    other = ModelShape.model_validate(LLAMA_1B | {"norm_placement": "output", "window": 8})
    assert other.model_dump().items() - shape.model_dump().items() == {("norm_placement", "output"), ("window", 8)}
    assert ModelShape.model_validate(other.model_dump()) == other


def test_which_layers_have_a_window_and_which_matrices_a_bias() -> None:
    shape = ModelShape.model_validate(LLAMA_1B | {"window": 8, "global_every": 3, "attention_bias": "qkv"})
    assert [shape.window_of(layer) for layer in range(6)] == [8, 8, None, 8, 8, None]
    biased = {parameter.name for parameter in shape.parameters() if parameter.name.endswith(".bias")}
    assert {name.split(".", 2)[2] for name in biased} == {
        f"attention.{side}.bias" for side in ("query", "key", "value")
    }
