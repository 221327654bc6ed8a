import pytest
from pydantic import ValidationError

from leaven.recipe.shape import ModelShape

LLAMA_1B = {
    "n_layers": 16,
    "d_model": 2048,
    "n_heads": 32,
    "n_kv_heads": 8,
    "d_head": 64,
    "d_ff": 8192,
    "vocab_size": 128_256,
    "seq_len": 8192,
    "tied_embeddings": True,
}
GPT2 = {
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "n_kv_heads": 12,
    "d_head": 64,
    "d_ff": 3072,
    "vocab_size": 50_257,
    "seq_len": 1024,
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied_embeddings": True,
    "bias": True,
}


@pytest.mark.parametrize(
    ("shape", "params"),
    [(LLAMA_1B, 1_235_814_400), (GPT2, 124_439_808)],  # as reported for Llama 3.2 1B and GPT-2 small
)
def test_exact_counts_of_published_models(shape: dict[str, object], params: int) -> None:
    assert ModelShape.model_validate(shape).params == params


def test_narayanan_formula() -> None:
    """P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) for GPT (arXiv 2104.04473, eq. 2), final norm left out."""
    shape = ModelShape.model_validate(GPT2)
    n, h, v, s = shape.n_layers, shape.d_model, shape.vocab_size, shape.seq_len
    formula = 12 * n * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * n * h))
    assert shape.params - 2 * h == pytest.approx(formula, abs=0.5)


def test_names_are_unique_and_every_module_is_tunable() -> None:
    shape = ModelShape.model_validate(GPT2 | {"qk_norm": True})
    names = [parameter.name for parameter in shape.parameters()]
    assert len(names) == len(set(names))
    assert {"positions", "biases", "norm.query", "attention.out", "mlp.in"} <= set(shape.modules)


def test_scaled_keeps_head_dimension_and_ratios() -> None:
    shape = ModelShape.model_validate(LLAMA_1B).scaled(4096, 32)
    assert (shape.d_head, shape.n_heads, shape.n_kv_heads, shape.d_ff, shape.n_layers) == (64, 64, 16, 16_384, 32)


def test_scaled_says_which_widths_work() -> None:
    with pytest.raises(ValueError, match="2048 or 2304 is"):
        ModelShape.model_validate(LLAMA_1B).scaled(2100, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 2000}, "set d_model = 2048"),
        ({"n_kv_heads": 3}, "1, 2, 4, 8, 16, 32 would"),
        ({"n_heads": 64, "d_head": 32, "d_model": 2048, "n_kv_heads": 5}, "would"),
        ({"d_head": 1, "n_heads": 2048, "n_kv_heads": 1}, "even d_head"),
        ({"n_layers": "sixteen"}, "n_layers"),
        ({"n_layers": 16.0}, "n_layers"),
        ({"n_layers": True}, "n_layers"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelShape.model_validate(LLAMA_1B | change)
