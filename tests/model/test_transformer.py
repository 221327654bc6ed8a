"""The model has the parameters of its table, and the logits of a loop over positions and heads in numpy."""

import math

import numpy as np
import pytest
import torch

from leaven.model.experts import MixtureOfExperts
from leaven.model.initialisation import build_model, fill
from leaven.model.transformer import Block, Transformer, alibi_slopes
from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

BASE = {
    "n_layers": 2,
    "d_model": 24,
    "n_heads": 6,
    "n_kv_heads": 2,
    "d_head": 4,
    "d_ff": 40,
    "vocab_size": 50,
    "seq_len": 16,
}
FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gains per head": {"qk_norm": True, "qk_norm_per_head": True},
    "gains per head, centred": {"qk_norm": True, "qk_norm_per_head": True, "norm": "layernorm"},
    "tied": {"tied_embeddings": True},
    "embedding norm, tied": {"embedding_norm": True, "norm": "layernorm", "bias": True, "tied_embeddings": True},
    "embedding norm, learned positions": {"embedding_norm": True, "positions": "learned"},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "tied_embeddings": True,
        "n_kv_heads": 6,
    },
    "bloom": {"norm": "layernorm", "activation": "gelu", "positions": "alibi", "bias": True, "n_kv_heads": 6},
    "opt": {"norm": "layernorm", "activation": "relu", "positions": "learned", "bias": True, "n_kv_heads": 6},
    "squared_relu": {"activation": "squared_relu", "qk_norm": True, "norm": "layernorm"},
    "wide heads, relu": {"d_head": 8, "d_attention": 48, "activation": "relu"},
    "another eps": {"norm_eps": 0.03, "qk_norm": True},
    "olmo 2": {"norm_placement": "output", "qk_norm": True, "qk_norm_whole": True},
    "olmo 3": {"norm_placement": "output", "qk_norm": True, "qk_norm_whole": True, "window": 3, "global_every": 2},
    "gemma 2": {
        "norm_placement": "sandwich",
        "activation": "geglu",
        "tied_embeddings": True,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "window": 4,
        "global_every": 2,
    },
    "mistral": {"window": 3},
    "a window, alibi": {"window": 3, "positions": "alibi", "norm": "layernorm", "n_kv_heads": 6},
    "gpt-j": {
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "attention_bias": "none",
        "parallel_branches": True,
        "rotary_fraction": 0.5,
        "n_kv_heads": 6,
    },
    "qwen2": {"attention_bias": "qkv"},
    "biases of attention, sandwich, parallel": {
        "attention_bias": "all",
        "norm_placement": "sandwich",
        "parallel_branches": True,
        "norm": "layernorm",
        "bias": True,
    },
    "mixtral": {"experts": {"number": 4, "active": 2, "d_expert": 40}},
    "olmoe": {
        "experts": {"number": 8, "active": 3, "d_expert": 12, "normalise": False},
        "qk_norm": True,
        "qk_norm_whole": True,
    },
    "deepseek-v3's experts": {
        "experts": {
            "number": 6,
            "active": 2,
            "d_expert": 16,
            "shared": 2,
            "dense_layers": 1,
            "router": "sigmoid",
            "weight_scale": 2.5,
            "balance": "bias",
        }
    },
    "one active expert, relu, parallel": {
        "experts": {"number": 3, "active": 1, "d_expert": 20, "shared": 1, "normalise": False},
        "activation": "relu",
        "parallel_branches": True,
        "tied_embeddings": True,
    },
}
MULTIPLIERS = {
    "layers.0.attention.out.weight": 0.7,
    "layers.1.mlp.out.weight": 1.3,
    "layers.1.mlp.experts.out.weight": 1.3,
    "layers.1.mlp.shared.out.weight": 0.6,
    "unembedding.weight": 0.4,
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def shape(family: dict[str, object]) -> ModelShape:
    return ModelShape.model_validate(BASE | family)


def random_model(family: dict[str, object]) -> Transformer:
    """Return a float64 model in which gains and biases are random too, so that a test notices if one is not
    applied."""
    multipliers = MULTIPLIERS | {"embedding.weight": 0.4 if family.get("tied_embeddings") else 1.0}
    model = Transformer(shape(family), multipliers, attention_scale=0.3).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    for block in model.layers:
        if isinstance(block.mlp, MixtureOfExperts) and block.mlp.settings.balance == "bias":
            block.mlp.bias_E = torch.randn(block.mlp.settings.number, generator=generator, dtype=torch.float64)
    return model


@families
def test_names_and_shapes_are_those_of_the_table(family: dict[str, object]) -> None:
    expected = {parameter.name: parameter.shape for parameter in shape(family).parameters()}
    actual = {name: tuple(parameter.shape) for name, parameter in Transformer(shape(family)).named_parameters()}
    assert actual == expected


def reference(model: Transformer, tokens: np.ndarray) -> np.ndarray:  # noqa: PLR0915
    """Return the logits (T, V) of one sequence (T,), computed for one position, head and key at a time."""
    w = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    s = model.shape

    def norm(name: str, x: np.ndarray, head: int | None = None) -> np.ndarray:
        if f"{name}.weight" not in w:
            return x
        gain = w[f"{name}.weight"] if head is None else w[f"{name}.weight"][head]
        if s.norm == "layernorm":
            y = (x - x.mean()) / math.sqrt(x.var() + s.norm_eps)
            return y * gain + w.get(f"{name}.bias", 0.0)
        return x / math.sqrt((x * x).mean() + s.norm_eps) * gain

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)

    def rope(x: np.ndarray, place: int) -> np.ndarray:
        if s.positions != "rope":
            return x
        turned, out = round(s.d_head * s.rotary_fraction), x.copy()
        half = turned // 2
        for i in range(half):
            turn = complex(x[i], x[i + half]) * np.exp(1j * place * s.rope_theta ** (-2 * i / turned))
            out[i], out[i + half] = turn.real, turn.imag
        return out

    def gelu(h: np.ndarray) -> np.ndarray:
        return 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
        return x if cap is None else cap * np.tanh(x / cap)

    def mlp(layer: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        def product(side: str, x: np.ndarray) -> np.ndarray:
            return linear(f"{layer}.{side}", x) if expert is None else w[f"{layer}.{side}.weight"][expert] @ x

        h = product("in", x)
        if s.activation == "swiglu":
            gate = product("gate", x)
            h = gate / (1 + np.exp(-gate)) * h
        elif s.activation == "geglu":
            h = gelu(product("gate", x)) * h
        elif s.activation == "gelu":
            h = gelu(h)
        else:
            h = np.maximum(h, 0) ** (2 if s.activation == "squared_relu" else 1)
        return product("out", h)

    def mixture(layer: str, block: Block, x: np.ndarray) -> np.ndarray:
        """Return the sum of the outputs of the chosen experts, times the multiplier of the branch, plus the output of
        the shared experts."""
        e, logits = s.experts, w[f"{layer}.router.weight"] @ x
        scores = 1 / (1 + np.exp(-logits)) if e.router == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        bias = np.zeros(e.number) if block.mlp.bias_E is None else block.mlp.bias_E.numpy()
        chosen = sorted(range(e.number), key=lambda expert: -(scores + bias)[expert])[: e.active]
        total = sum(scores[expert] for expert in chosen) if e.normalise else 1.0
        y = sum(scores[expert] / total * mlp(f"{layer}.experts", x, expert) for expert in chosen)
        y = y * e.weight_scale * MULTIPLIERS.get(f"{layer}.experts.out.weight", 1.0)
        if e.shared:
            y = y + mlp(f"{layer}.shared", x) * MULTIPLIERS.get(f"{layer}.shared.out.weight", 1.0)
        return y

    xs = [w["embedding.weight"][token].copy() for token in tokens]
    if s.embedding_norm:
        xs = [norm("norm.embedding", x) for x in xs]
    if s.positions == "learned":
        xs = [x + w["positions.weight"][place] for place, x in enumerate(xs)]
    for layer, block in enumerate(model.layers):
        at = f"layers.{layer}"
        queries, keys, values, before = [], [], [], [x.copy() for x in xs]
        everything = s.window is None or (s.global_every and layer % s.global_every == s.global_every - 1)
        for place, x in enumerate(xs):
            y = norm(f"{at}.norm.attention", x)
            q, k = linear(f"{at}.attention.query", y), linear(f"{at}.attention.key", y)
            if s.qk_norm_whole:
                q, k = norm(f"{at}.norm.query", q), norm(f"{at}.norm.key", k)
            q, k = q.reshape(s.n_heads, s.d_head), k.reshape(s.n_kv_heads, s.d_head)
            if s.qk_norm and not s.qk_norm_whole:
                own = s.qk_norm_per_head
                q = np.stack([norm(f"{at}.norm.query", x, h if own else None) for h, x in enumerate(q)])
                k = np.stack([norm(f"{at}.norm.key", x, h if own else None) for h, x in enumerate(k)])
            queries.append([rope(head, place) for head in q])
            keys.append([rope(head, place) for head in k])
            values.append(linear(f"{at}.attention.value", y).reshape(s.n_kv_heads, s.d_head))
        for place in range(len(xs)):
            heads = []
            for head in range(s.n_heads):
                group = head // (s.n_heads // s.n_kv_heads)
                first = 0 if everything else max(place + 1 - s.window, 0)
                scores = np.array([queries[place][head] @ keys[j][group] * 0.3 for j in range(place + 1)])
                scores = capped(scores, s.attention_softcap)
                if s.positions == "alibi":
                    scores = scores - alibi_slopes(s.n_heads)[head] * np.arange(place, -1, -1)
                weights = np.exp(scores - scores.max())
                weights[:first] = 0
                weights /= weights.sum()
                heads.append(sum(weight * values[j][group] for j, weight in enumerate(weights)))
            branch = norm(f"{at}.norm.attention_out", linear(f"{at}.attention.out", np.concatenate(heads)))
            xs[place] = xs[place] + MULTIPLIERS.get(f"{at}.attention.out.weight", 1.0) * branch
        for place, x in enumerate(xs):
            y = norm(f"{at}.norm.attention", before[place]) if s.parallel_branches else norm(f"{at}.norm.mlp", x)
            if s.has_experts(layer):
                xs[place] = x + mixture(f"{at}.mlp", block, y)
            else:
                branch = norm(f"{at}.norm.mlp_out", mlp(f"{at}.mlp", y))
                xs[place] = x + MULTIPLIERS.get(f"{at}.mlp.out.weight", 1.0) * branch
    readout = w["embedding.weight" if s.tied_embeddings else "unembedding.weight"]
    logits = np.stack([readout @ norm("norm.final", x) for x in xs]) * model.logit_multiplier
    return capped(logits, s.logit_softcap)


@families
def test_logits_equal_the_reference_in_float64(family: dict[str, object]) -> None:
    model = random_model(family)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
    logits = model(torch.from_numpy(tokens)).detach().numpy()
    assert logits.dtype == np.float64
    for row in range(2):
        np.testing.assert_allclose(logits[row], reference(model, tokens[row]), rtol=1e-10, atol=1e-10)


def test_alibi_slopes_of_eight_and_twelve_heads() -> None:
    """8 heads have the slopes 1/2 to 1/256 (Press et al. 2021, section 3). 12 heads have these and every other slope
    of 16 heads."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12) == [2.0**-i for i in range(1, 9)] + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)]


def test_initial_values_are_those_of_the_table(tiny: Recipe) -> None:
    big = transfer(tiny, width=128, depth=2)
    model = build_model(big.model, parameter_table(big), seed=0)
    values = dict(model.named_parameters())
    for row in parameter_table(big).rows:
        tensor = values[row.name]
        if row.init_std == 0:
            assert torch.all(tensor == row.init_mean)
        else:
            # The standard error of a standard deviation over n normals is std / sqrt(2 n); five of them.
            tolerance = 5 / math.sqrt(2 * tensor.numel())
            assert tensor.std().item() == pytest.approx(row.init_std, rel=tolerance)
            assert abs(tensor.mean().item()) < 5 * row.init_std / math.sqrt(tensor.numel())


@pytest.mark.parametrize("init", INITS)
def test_initial_values_are_those_of_a_published_init(tiny: Recipe, init: str) -> None:
    shape = {"d_model": 64, "n_heads": 8, "n_kv_heads": 8, "d_ff": 160, "n_layers": 3}
    recipe = tiny.replace(
        {f"model.{key}": value for key, value in shape.items()}
        | {"hyperparameters.init": init, "hyperparameters.init_std": None}
        | {"hyperparameters.modules": {"mlp.out": {"init_std": 2.0}}}
    )
    values = dict(build_model(recipe.model, parameter_table(recipe), seed=3).named_parameters())
    for parameter in recipe.model.parameters():
        if len(parameter.shape) == 2:
            tuned = 2.0 if parameter.module == "mlp.out" else 1.0
            expected = tuned * INITS[init].std(parameter, 3, gated=True)
            tensor = values[parameter.name]
            tolerance = 5 / math.sqrt(2 * tensor.numel())
            assert tensor.std().item() == pytest.approx(expected, rel=tolerance), parameter.name


def test_initial_values_depend_only_on_seed_and_name(tiny: Recipe) -> None:
    def values(recipe: Recipe, seed: int) -> dict[str, torch.Tensor]:
        return dict(build_model(recipe.model, parameter_table(recipe), seed).named_parameters())

    first, again, other = values(tiny, 0), values(tiny, 0), values(tiny, 1)
    deeper = values(tiny.replace({"model.n_layers": 3, "scaling.rule": "standard"}), 0)
    name = "layers.1.mlp.in.weight"
    assert torch.equal(first[name], again[name])
    assert torch.equal(first[name], deeper[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.0.mlp.in.weight"])


def test_initial_rows_do_not_depend_on_the_number_of_rows() -> None:
    """A process of a sharded layout draws only some of the rows."""
    whole, longer = torch.empty(512, 8), torch.empty(1000, 8)
    fill(whole, "w", 0.0, 1.0, 3)
    fill(longer, "w", 0.0, 1.0, 3)
    assert torch.equal(whole, longer[:512])
    assert not torch.equal(whole[:256], whole[256:])
