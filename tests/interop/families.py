"""Small models of common families, built from configurations without downloads."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from leaven.scaling.table import ParameterRow

VOCABULARY = 97
EAGER = {"experts_implementation": "eager"}  # the others do not compute in float64
LENGTH = 48
Build = Callable[..., nn.Module]


def sizes(width: int, depth: int, heads: int | None = None) -> dict[str, Any]:
    """Return the keys that most configurations have in common."""
    heads = heads or width // 8
    layers = {"num_hidden_layers": depth, "num_attention_heads": heads, "max_position_embeddings": LENGTH}
    return {"vocab_size": VOCABULARY, "hidden_size": width, **layers}


def built(name: str, **config: Any) -> nn.Module:
    """Return a model of a class of transformers."""
    made = getattr(transformers, name)
    model: nn.Module = made(made.config_class(**config))
    return model


def llama(width: int, depth: int, heads: int | None = None, d_ff: int | None = None, tied: bool = False) -> nn.Module:
    common = sizes(width, depth, heads)
    more = {"num_key_value_heads": common["num_attention_heads"] // 2, "tie_word_embeddings": tied}
    return built("LlamaForCausalLM", **common, **more, intermediate_size=d_ff or 3 * width)


def qwen3(width: int, depth: int) -> nn.Module:
    # All heads together are twice the width.
    more = {"num_key_value_heads": width // 16, "intermediate_size": 3 * width, "head_dim": 16}
    return built("Qwen3ForCausalLM", **sizes(width, depth), **more)


def gpt2(width: int, depth: int, heads: int | None = None, d_ff: int | None = None) -> nn.Module:
    shape = {"n_embd": width, "n_layer": depth, "n_head": heads or width // 8, "n_inner": d_ff, "n_positions": LENGTH}
    more = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return built("GPT2LMHeadModel", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape, **more)


def gpt_neox(width: int, depth: int, heads: int | None = None) -> nn.Module:
    more = {"intermediate_size": 4 * width, "use_parallel_residual": True}
    return built("GPTNeoXForCausalLM", **sizes(width, depth, heads), **more)


def bloom(width: int, depth: int) -> nn.Module:
    shape = {"hidden_size": width, "n_layer": depth, "n_head": width // 8, "seq_length": LENGTH}
    return built("BloomForCausalLM", vocab_size=VOCABULARY, **shape)


def mixtral(width: int, depth: int, experts: int = 4, d_ff: int | None = None) -> nn.Module:
    more = {"num_key_value_heads": width // 16, "intermediate_size": d_ff or 2 * width, "num_experts_per_tok": 2}
    return built("MixtralForCausalLM", **sizes(width, depth), **more, num_local_experts=experts, **EAGER)


def qwen3_moe(width: int, depth: int) -> nn.Module:
    more = {"num_key_value_heads": width // 16, "head_dim": 8, "moe_intermediate_size": width, "norm_topk_prob": True}
    more |= {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None}
    return built("Qwen3MoeForCausalLM", **sizes(width, depth), **more, **EAGER)


def olmoe(width: int, depth: int) -> nn.Module:
    more = {"num_key_value_heads": width // 8, "intermediate_size": width, "num_experts": 8, "num_experts_per_tok": 2}
    return built("OlmoeForCausalLM", **sizes(width, depth), **more, eos_token_id=0, **EAGER)


def deepseek_v3(width: int, depth: int, latent: int | None = None) -> nn.Module:
    """Return a model whose first layer has one MLP, and whose latents grow with the width, unless they are given."""
    more = {"num_key_value_heads": width // 8, "intermediate_size": 3 * width, "moe_intermediate_size": width}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    heads = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 8, "n_group": 2, "topk_group": 1}
    latents = {"q_lora_rank": latent or width // 2, "kv_lora_rank": latent or width // 4}
    return built("DeepseekV3ForCausalLM", **sizes(width, depth), **more, **experts, **heads, **latents, **EAGER)


class Block(nn.Module):
    def __init__(self, width: int, d_ff: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.ffn = nn.ModuleDict({"fc1": nn.Linear(width, d_ff), "fc2": nn.Linear(d_ff, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn["fc2"](self.ffn["fc1"](self.norm1(x)).relu())


class Home(nn.Module):
    """A hand-written model: blocks in a Sequential, by default those of the later half with a wider MLP."""

    def __init__(self, width: int, depth: int, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        widths = (width * (1 + (2 * i >= depth)) for i in range(depth))
        self.blocks = nn.Sequential(*(block(width) if block else Block(width, d_ff) for d_ff in widths))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


FAMILIES: dict[str, Build] = {"llama": llama, "qwen3": qwen3, "gpt2": gpt2, "gpt-neox": gpt_neox}
MIXTURES: dict[str, Build] = {"mixtral": mixtral, "qwen3-moe": qwen3_moe, "olmoe": olmoe, "deepseek-v3": deepseek_v3}


def tokens(seed: int = 0, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, 24), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    return found if isinstance(found, torch.Tensor) else found.logits


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def rows_of(model: nn.Module) -> dict[str, ParameterRow]:
    """Return the parameter table of a parametrized model, by name."""
    return {row.name: row for row in model.leaven_rows}


def values(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def stepped(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the parameters after two steps."""
    optimizer = torch.optim.AdamW(groups)
    for seed in range(2):
        loss_of(model, tokens(seed)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
