"""Test the small models that checks make from recipes of any size."""

from pathlib import Path

import pytest
from tests.data.written import documents, megatron
from tests.verification.families import PROXY

from leaven.recipe.files import read_recipe
from leaven.verification.small_models import SEQ_LEN, TIMES, VOCABULARY, small_recipe

SHAPES = {
    "leaven new 1B": {"d_model": 1792, "n_heads": 14, "n_kv_heads": 14, "d_head": 128, "d_ff": 4736},
    "Llama 3 405B": {"d_model": 16384, "n_heads": 128, "n_kv_heads": 8, "d_head": 128, "d_ff": 53248},
    "Qwen2.5 7B": {"d_model": 3584, "n_heads": 28, "n_kv_heads": 4, "d_head": 128, "d_ff": 18944},
    "Qwen3 32B": {
        "d_model": 5120, "n_heads": 64, "n_kv_heads": 8, "d_head": 128, "d_ff": 25600, "d_attention": 8192,
    },
    "Falcon 7B": {"d_model": 4544, "n_heads": 71, "n_kv_heads": 1, "d_head": 64, "d_ff": 18176},
    "Phi-2": {"d_model": 2560, "n_heads": 32, "n_kv_heads": 32, "d_head": 80, "d_ff": 10240},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_recipe_has_small_widths(shape: dict[str, int]) -> None:
    recipe = read_recipe(PROXY).replace({f"model.{key}": value for key, value in shape.items()})
    recipe = recipe.replace({"model.vocab_size": 49_152, "model.seq_len": 2048, "batch": {"tokens": 1 << 20}})
    small, changed = small_recipe(recipe)
    assert small.model.d_model in range(48, 81)
    shapes = [small.model.scaled(times * small.model.d_model, 2) for times in TIMES]
    assert all(shape.d_head == shapes[0].d_head for shape in shapes)
    assert (shapes[0].vocab_size, shapes[0].seq_len) == (VOCABULARY, SEQ_LEN)
    kept = recipe.model.d_ff / recipe.model.d_model
    assert shapes[0].d_ff / shapes[0].d_model == pytest.approx(kept, rel=0.01)
    assert "vocab_size 49,152 -> 4,096" in changed


def test_token_ids_keep_their_vocabulary(tmp_path: Path) -> None:
    ids = {"data.source": megatron(tmp_path / "ids.bin", documents()), "model.vocab_size": 49_152}
    assert small_recipe(read_recipe(PROXY).replace(ids))[0].model.vocab_size == 49_152


def test_models_with_experts_have_no_dense_layers() -> None:
    experts = [f"model.experts.{value}" for value in ("number=4", "active=2", "d_expert=64", "dense_layers=1")]
    small, changed = small_recipe(read_recipe(PROXY, experts))
    assert small.model.experts
    assert (small.model.experts.dense_layers, "dense layers 1 -> 0" in changed) == (0, True)
