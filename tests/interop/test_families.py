"""leaven.parametrize on Hugging Face families: roles, groups and multipliers."""

import copy

import pytest
import torch
from tests.interop.families import FAMILIES, Build, Home, bloom, gpt2, llama, logits, rows_of, tokens

import leaven
from leaven.recipe.shape import Role

KEPT = {"lr": 0.01, "weight_decay": 0.1}  # no init: the model keeps its values
TUNED = KEPT | {"init_std": 0.1}
MITCHELL = KEPT | {"init": "mitchell"}
BRANCHES = {
    "llama": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
    "qwen3": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj"),
    "gpt-neox": ("gpt_neox.layers", "attention.dense", "mlp.dense_4h_to_h"),
}

_LLAMA_BLOCK = """
    self_attn.q_proj.weight          hidden_weight  attention.query
    self_attn.k_proj.weight          hidden_weight  attention.key
    self_attn.v_proj.weight          hidden_weight  attention.value
    self_attn.o_proj.weight          hidden_weight  attention.out
    mlp.gate_proj.weight             hidden_weight  mlp.gate
    mlp.up_proj.weight               hidden_weight  mlp.in
    mlp.down_proj.weight             hidden_weight  mlp.out
    input_layernorm.weight           hidden_norm    norm.attention
    post_attention_layernorm.weight  hidden_norm    norm.mlp
"""
_LLAMA_ENDS = """
    model.embed_tokens.weight  embedding    embedding
    model.norm.weight          final_norm   norm.final
    lm_head.weight             unembedding  unembedding
"""
EXPECTED = {
    "llama": (_LLAMA_BLOCK, _LLAMA_ENDS),
    "qwen3": (
        _LLAMA_BLOCK
        + """
    self_attn.q_norm.weight  qk_norm  norm.query
    self_attn.k_norm.weight  qk_norm  norm.key
""",
        _LLAMA_ENDS,
    ),
    "gpt2": (
        """
    ln_1.weight         hidden_norm    norm.attention
    ln_1.bias           hidden_bias    biases
    attn.c_attn.weight  hidden_weight  attention.query_key_value
    attn.c_attn.bias    hidden_bias    biases
    attn.c_proj.weight  hidden_weight  attention.out
    attn.c_proj.bias    hidden_bias    biases
    ln_2.weight         hidden_norm    norm.mlp
    ln_2.bias           hidden_bias    biases
    mlp.c_fc.weight     hidden_weight  mlp.in
    mlp.c_fc.bias       hidden_bias    biases
    mlp.c_proj.weight   hidden_weight  mlp.out
    mlp.c_proj.bias     hidden_bias    biases
""",
        """
    transformer.wte.weight   tied_embedding  embedding
    transformer.wpe.weight   embedding       positions
    transformer.ln_f.weight  final_norm      norm.final
    transformer.ln_f.bias    final_bias      biases
""",
    ),
    "gpt-neox": (
        """
    input_layernorm.weight            hidden_norm    norm.attention
    input_layernorm.bias              hidden_bias    biases
    post_attention_layernorm.weight   hidden_norm    norm.mlp
    post_attention_layernorm.bias     hidden_bias    biases
    attention.query_key_value.weight  hidden_weight  attention.query_key_value
    attention.query_key_value.bias    hidden_bias    biases
    attention.dense.weight            hidden_weight  attention.out
    attention.dense.bias              hidden_bias    biases
    mlp.dense_h_to_4h.weight          hidden_weight  mlp.in
    mlp.dense_h_to_4h.bias            hidden_bias    biases
    mlp.dense_4h_to_h.weight          hidden_weight  mlp.out
    mlp.dense_4h_to_h.bias            hidden_bias    biases
""",
        """
    gpt_neox.embed_in.weight          embedding    embedding
    gpt_neox.final_layer_norm.weight  final_norm   norm.final
    gpt_neox.final_layer_norm.bias    final_bias   biases
    lm_head.weight                    unembedding  unembedding
""",
    ),
}


def expected(family: str, depth: int) -> dict[str, tuple[str, str]]:
    block, ends = ([line.split() for line in text.split("\n") if line] for text in EXPECTED[family])
    stack = BRANCHES[family][0]
    named = {name: (role, module) for name, role, module in ends}
    return named | {
        f"{stack}.{layer}.{name}": (role, module) for layer in range(depth) for name, role, module in block
    }


@pytest.mark.parametrize("width", [64, 32], ids=["wider", "as wide"])
@pytest.mark.parametrize("family", FAMILIES)
def test_roles_and_modules(family: str, width: int) -> None:
    build = FAMILIES[family]
    model = build(width, 3)
    found = leaven.parametrize(model, base=build(32, 2), hyperparameters=TUNED)
    assert {name: (row.role, row.module) for name, row in rows_of(model).items()} == expected(family, 3)
    names = [name for group in found for name in group["param_names"]]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    held = [id(parameter) for group in found for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_group_values_in_closed_form(family: str) -> None:
    """Width x2, depth x3, batch x2, tokens x8, so q = 1/4."""
    build = FAMILIES[family]
    model = build(64, 6)
    found = leaven.parametrize(
        model, base=build(32, 2), hyperparameters=TUNED, ratios=leaven.Ratios(batch=2, tokens=8)
    )
    lr, eps = 0.01 / 2, 1e-8 * 2
    by_role = {
        Role.EMBEDDING: (lr, 0.05, eps / 2),
        Role.TIED_EMBEDDING: (lr, 0.05, eps / 2),
        Role.UNEMBEDDING: (lr / 2, 0.1, eps),
        Role.HIDDEN_WEIGHT: (lr / 2, 0.1, eps / 6),
        Role.HIDDEN_BIAS: (lr, 0.0, eps / 6),
        Role.HIDDEN_NORM: (lr, 0.0, eps / 6),
        Role.QK_NORM: (lr, 0.0, eps / 3),
        Role.FINAL_NORM: (lr, 0.0, eps / 2),
        Role.FINAL_BIAS: (lr, 0.0, eps / 2),
    }
    rows = rows_of(model)
    for group in found:
        for name in group["param_names"]:
            values = (group["lr"], group["weight_decay"], group["eps"])
            assert values == pytest.approx(by_role[rows[name].role]), name
            assert group["peak_lr"] == group["lr"]
            assert group["betas"] == pytest.approx((0.9**0.25, 0.95**0.25))
    assert rows[next(iter(rows))].init_std == pytest.approx(0.1)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["standard", "completep", "complete-d-p"])
@pytest.mark.parametrize("family", FAMILIES)
def test_multipliers_scale_branches_and_logits(family: str, rule: str) -> None:
    """Compared with a model whose branch ends and logits are scaled by hand."""
    build = FAMILIES[family]
    torch.manual_seed(0)
    model = build(64, 6).double().eval()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    leaven.parametrize(model, base=build(32, 2), hyperparameters=KEPT | {"residual": 0.7}, rule=rule, alpha=0.5)
    with pytest.warns(UserWarning, match=r"lacks the \d+ multipliers"):
        assert list(model.state_dict()) == names
    stack, *ends = BRANCHES[family]
    branch = 0.7 * (3**-0.5 if rule != "standard" else 1.0)
    with torch.no_grad():
        for layer in range(6):
            for end in ends:
                for parameter in plain.get_submodule(f"{stack}.{layer}.{end}").parameters():
                    parameter.mul_(branch)
    readout = 1 / 2 if rule == "completep" or (rule == "complete-d-p" and family == "gpt2") else 1.0
    batch = tokens()
    torch.testing.assert_close(logits(model, batch), readout * logits(plain, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_attention_scale_when_the_head_dimension_grows(build: Build) -> None:
    """Logits are q.k sqrt(d_base) / d instead of q.k / sqrt(d), as for queries smaller by sqrt(d_base / d)."""
    torch.manual_seed(0)
    model = build(64, 2, heads=4).double().eval()
    scaled = copy.deepcopy(model)
    leaven.parametrize(scaled, base=build(32, 2, heads=4), hyperparameters=KEPT, rule="mup")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(0.5**0.5)
            elif "c_attn" in name:
                parameter[..., :64].mul_(0.5**0.5)
    multiplier = 0.5 if build is gpt2 else 1.0
    torch.testing.assert_close(logits(scaled, tokens()), multiplier * logits(model, tokens()))
    kept = build(64, 2, heads=4)
    scales = [module.scaling for module in kept.modules() if hasattr(module, "scaling")]
    leaven.parametrize(kept, base=build(32, 2, heads=4), hyperparameters=KEPT, rule="mup", head_ratio=1.0)
    assert [module.scaling for module in kept.modules() if hasattr(module, "scaling")] == scales


@pytest.mark.parametrize(
    ("build", "into", "out"),
    [
        (llama, "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        (gpt2, "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"),  # stored transposed
    ],
)
def test_each_tensor_has_its_own_ratios(build: Build, into: str, out: str) -> None:
    """d_ff grows by a factor of four, the width by two."""
    model = build(64, 2, d_ff=256)
    leaven.parametrize(model, base=build(32, 2, d_ff=64), hyperparameters=TUNED)
    rows = rows_of(model)
    assert (rows[out].lr, rows[out].eps) == pytest.approx((0.01 / 4, 1e-8 / 2))
    assert (rows[into].lr, rows[into].eps) == pytest.approx((0.01 / 2, 1e-8 / 4))
    assert rows[out].shape == (64, 256)


def test_frozen_parameters_keep_their_values() -> None:
    model = llama(64, 2)
    frozen, trained = model.get_parameter("model.embed_tokens.weight"), model.get_parameter("lm_head.weight")
    frozen.requires_grad_(False)
    before = frozen.clone(), trained.clone()
    leaven.parametrize(model, base=llama(32, 2), hyperparameters=TUNED, initialise=True)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])


def test_a_block_is_compared_with_the_one_at_its_relative_depth() -> None:
    model = Home(64, 6)
    leaven.parametrize(model, base=Home(32, 2), hyperparameters=TUNED)
    for layer in range(6):
        row = rows_of(model)[f"blocks.{layer}.ffn.fc2.weight"]
        assert (row.module, row.layer, row.multiplier) == ("mlp.out", layer, pytest.approx(1 / 3))
        assert row.lr == pytest.approx(0.01 / 2)
    assert rows_of(model)["head.bias"].role is Role.UNEMBEDDING_BIAS


def test_blooms_embedding_norm_scales_like_the_embedding() -> None:
    model = bloom(64, 6)
    leaven.parametrize(model, base=bloom(32, 2), hyperparameters=TUNED, ratios=leaven.Ratios(batch=2, tokens=8))
    rows = {name.removeprefix("transformer."): row for name, row in rows_of(model).items()}
    gain, bias = (rows[f"word_embeddings_layernorm.{name}"] for name in ("weight", "bias"))
    assert (gain.role, gain.module) == ("embedding_norm", "norm.embedding")
    assert (bias.role, bias.module) == ("embedding_bias", "biases")
    assert (rows["ln_f.weight"].role, rows["word_embeddings.weight"].role) == ("final_norm", "tied_embedding")
    for row in (gain, bias):
        assert row.lr == pytest.approx(0.01 / 2)  # sqrt(2 / 8); independent of depth
        assert row.eps == rows["word_embeddings.weight"].eps == pytest.approx(1e-8 * 2 / 2)
        assert row.weight_decay == 0


def test_a_named_init_draws_the_stds_of_its_formula() -> None:
    model = llama(64, 4)
    leaven.parametrize(model, base=llama(32, 2), hyperparameters=MITCHELL, rule="standard", initialise=True)
    values = dict(model.named_parameters())
    d, d_ff = 64, 192
    for layer in range(4):
        block = f"model.layers.{layer}"
        for name, std in {
            "self_attn.q_proj": d**-0.5,
            "mlp.up_proj": d**-0.5,
            "self_attn.o_proj": (2 * d * (layer + 1)) ** -0.5,
            "mlp.down_proj": (2 * d_ff * (layer + 1)) ** -0.5,
        }.items():
            tensor = values[f"{block}.{name}.weight"]
            assert tensor.std().item() == pytest.approx(std, rel=5 / (2 * tensor.numel()) ** 0.5)
    assert torch.equal(values["model.norm.weight"], torch.ones(d))


def test_depth_scaled_init_is_smaller_for_gated_mlps() -> None:
    found = {}
    for build, name in ((llama, "model.layers.1.mlp.up_proj.weight"), (gpt2, "transformer.h.1.mlp.c_fc.weight")):
        model, tuned = build(64, 2), MITCHELL | {"init": "depth-scaled"}
        leaven.parametrize(model, base=build(32, 2), hyperparameters=tuned, rule="standard", initialise=True)
        found[build] = dict(model.named_parameters())[name].std().item()
    assert found[llama] == pytest.approx(0.02 / 2, rel=0.05)
    assert found[gpt2] == pytest.approx(0.02, rel=0.05)
