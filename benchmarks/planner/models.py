"""Read the model of a row from its fields, a name or a size."""

import re
from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import Any

from benchmarks.planner.stacks import Unused, stack_of
from benchmarks.planner.tables import PublishedRow, number
from pydantic import ValidationError

from leaven.catalogue.groups import PublishedArchitecture
from leaven.catalogue.runs import find_run
from leaven.errors import InputError
from leaven.planning.blueprint import Model
from leaven.planning.published import published_blueprint
from leaven.recipe.shape import ModelShape

# Shapes that a name stands for. Llama 3.1: arXiv 2407.21783, table 3. Heads of MPT: llm-foundry,
# scripts/train/yamls/pretrain/mpt-*.yaml.
_LLAMA = {"vocab": 128_256, "kv_heads": 8}
_MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {**_LLAMA, "L": 32, "h": 4096, "a": 32, "ffn": 14_336},
    "llama-70b": {**_LLAMA, "L": 80, "h": 8192, "a": 64, "ffn": 28_672},
    "llama-405b": {**_LLAMA, "L": 126, "h": 16_384, "a": 128, "ffn": 53_248},
    **{
        f"mpt-{size}": {"vocab": 50_368, "a": heads, "L": layers, "h": width}
        for size, heads, layers, width in (
            ("125m", 12, 12, 768), ("350m", 16, 24, 1024), ("760m", 12, 24, 1536), ("1b", 16, 24, 2048),
            ("3b", 20, 32, 2560), ("7b", 32, 32, 4096), ("13b", 40, 40, 5120), ("30b", 64, 48, 7168),
            ("70b", 64, 80, 8192),
        )
    },
}  # fmt: skip
_LLAMA_3 = re.compile(r"^(?:meta-)?llama-?3(?:\.1)?-?")
# GPT-3 (arXiv 2005.14165), MT-NLG (2201.11990) and the largest of Narayanan 2021, by their size in 1e9.
_GPTS = {
    175: {"L": 96, "h": 12_288, "a": 96},
    530: {"L": 105, "h": 20_480, "a": 128},
    1008: {"L": 128, "h": 25_600, "a": 160},
}
# Models with experts that are not in the catalogue.
_MIXTRAL: dict[str, Any] = {
    "vocab_size": 32_000, "n_kv_heads": 8, "activation": "swiglu", "gated": True, "norm": "rmsnorm",
    "positional": "rotary", "tied_embeddings": False, "qk_norm": False, "bias": False, "n_dense_layers": 0,
    "n_shared_experts": 0, "confidence": "file",
}  # fmt: skip
_MODEL_ZOO = "yanring/Megatron-MoE-ModelZoo: model_configs/benchmarking"
EXPERTS = {
    "mixtral-8x7b": PublishedArchitecture(
        n_layers=32, d_model=4096, n_heads=32, d_ff=14_336, n_experts=8, experts_per_token=2, d_expert=14_336,
        source=f"{_MODEL_ZOO}/Mixtral-8x7B.yaml", **_MIXTRAL,
    ),
    "mixtral-8x22b": PublishedArchitecture(
        n_layers=56, d_model=6144, n_heads=48, d_ff=16_384, n_experts=8, experts_per_token=2, d_expert=16_384,
        source=f"{_MODEL_ZOO}/Mixtral-8x22B.yaml", **_MIXTRAL,
    ),
    "mixtral-8x22b-g8t8": PublishedArchitecture(
        n_layers=56, d_model=6144, n_heads=48, d_ff=16_384, n_experts=64, experts_per_token=8, d_expert=2048,
        source="arXiv 2504.14960, section 4.1: Mixtral 8x22B with 64 experts of an eighth of the width", **_MIXTRAL,
    ),
    "qwen2-57b-a14b": PublishedArchitecture(
        n_layers=28, d_model=3584, n_heads=28, n_kv_heads=4, d_ff=18_944, vocab_size=151_936, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        qkv_bias=True, n_dense_layers=0, n_experts=64, experts_per_token=8, n_shared_experts=8, d_expert=2560,
        source=f"{_MODEL_ZOO}/Qwen2-57B-A14B.yaml", confidence="file",
    ),
    "qwen3-30b-a3b": PublishedArchitecture(
        n_layers=48, d_model=2048, n_heads=32, n_kv_heads=4, d_head=128, d_ff=6144, vocab_size=151_936,
        activation="swiglu", gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=True,
        bias=False, n_dense_layers=0, n_experts=128, experts_per_token=8, n_shared_experts=0, d_expert=768,
        source=f"{_MODEL_ZOO}/Qwen3-30B-A3B.yaml", confidence="file",
    ),
    "deepseek-v2-lite": PublishedArchitecture(
        n_layers=27, d_model=2048, n_heads=16, d_ff=10_944, vocab_size=102_400, activation="swiglu", gated=True,
        norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False, attention="MLA",
        n_dense_layers=1, n_experts=64, experts_per_token=6, n_shared_experts=2, d_expert=1408, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        source="AMD-AGI/Primus: primus/configs/models/megatron/deepseek_v2_lite.yaml", confidence="file",
    ),
    "qwen3-235b-a22b": PublishedArchitecture(
        n_layers=94, d_model=4096, n_heads=64, n_kv_heads=4, d_head=128, d_ff=12_288, vocab_size=151_936,
        activation="swiglu", gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=True,
        bias=False, n_dense_layers=0, n_experts=128, experts_per_token=8, n_shared_experts=0, d_expert=1536,
        source="yanring/Megatron-MoE-ModelZoo: model_configs/benchmarking/Qwen3-235B-A22B.yaml", confidence="file",
    ),
    "grok-1": PublishedArchitecture(
        n_layers=64, d_model=6144, n_heads=48, n_kv_heads=8, d_ff=32_768, vocab_size=131_072, activation="geglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        n_dense_layers=0, n_experts=8, experts_per_token=2, n_shared_experts=0, d_expert=32_768,
        source="NVIDIA/dgxc-benchmarking, tag v25.04.02: grok1/cfg/grok1_314b.yaml, with xAI's vocabulary",
        confidence="file",
    ),
    "qwen1.5-moe-a2.7b": PublishedArchitecture(
        n_layers=24, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=5632, vocab_size=151_936, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        qkv_bias=True, n_dense_layers=0, n_experts=60, experts_per_token=4, n_shared_experts=4, d_expert=1408,
        source="Qwen1.5-MoE-A2.7B, config.json: a shared expert of 5632", confidence="paper-memory",
    ),
    "llama-4-scout": PublishedArchitecture(
        n_layers=48, d_model=5120, n_heads=40, n_kv_heads=8, d_head=128, d_ff=16_384, vocab_size=202_048,
        activation="swiglu", gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False,
        bias=False, n_dense_layers=0, n_experts=16, experts_per_token=1, n_shared_experts=1, d_expert=8192,
        source="pytorch/torchtitan, models/llama4: 17bx16e, every layer with experts (width of experts: remembered)",
        confidence="file",
    ),
    "deepspeed-moe-1.3b-128": PublishedArchitecture(
        n_layers=24, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=8192, vocab_size=50_257, activation="gelu",
        gated=False, norm="layernorm", positional="learned", tied_embeddings=True, qk_norm=False, bias=True,
        n_dense_layers=12, n_experts=128, experts_per_token=1, n_shared_experts=0, d_expert=8192,
        source="microsoft/Megatron-DeepSpeed: examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_MoE128.sh",
        confidence="file",
    ),
    "llama-4-maverick": PublishedArchitecture(
        n_layers=48, d_model=5120, n_heads=40, n_kv_heads=8, d_head=128, d_ff=16_384, vocab_size=202_048,
        activation="swiglu", gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False,
        bias=False, n_dense_layers=24, n_experts=128, experts_per_token=1, n_shared_experts=1, d_expert=8192,
        source="NVIDIA/NeMo, commit 7a8f1cc7bc: llama4_e128: every second layer dense", confidence="file",
    ),
    "minimax-m2.5": PublishedArchitecture(
        n_layers=62, d_model=3072, n_heads=48, n_kv_heads=8, d_head=128, d_ff=1536, vocab_size=200_064,
        activation="swiglu", gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=True,
        bias=False, n_dense_layers=0, n_experts=256, experts_per_token=8, n_shared_experts=0, d_expert=1536,
        source="AMD-AGI/Primus: primus/configs/models/megatron/minimax_m2.5.yaml, with the vocabulary from memory",
        confidence="file",
    ),
    "pai-qwen1.5-8x": PublishedArchitecture(
        n_layers=24, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=5504, vocab_size=151_936, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        qkv_bias=True, n_dense_layers=0, n_experts=8, experts_per_token=2, n_shared_experts=0, d_expert=5504,
        source="FlagOpen/FlagPerf: benchmarks/qwen1.5_MoE/megatron/megatron_pai_main.sh", confidence="file",
    ),
    "glm-4.7-flash": PublishedArchitecture(
        n_layers=47, d_model=2048, n_heads=20, d_ff=10_240, vocab_size=154_880, activation="swiglu", gated=True,
        norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False, attention="MLA",
        n_dense_layers=1, n_experts=64, experts_per_token=4, n_shared_experts=1, d_expert=1536, q_lora_rank=768,
        kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        source="NVIDIA-NeMo/Automodel: examples/llm_benchmark/glm/glm_4.7_flash_mok_4gpu.yaml", confidence="file",
    ),
    **{f"kempner-moe-{n}e": PublishedArchitecture(  # 9.23e9 and 17.69e9 parameters, as the source prints
        n_layers=24, d_model=2048, n_heads=16, n_kv_heads=4, d_ff=7168, vocab_size=128_256, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        n_dense_layers=0, n_experts=n, experts_per_token=2, n_shared_experts=0, d_expert=7168,
        source="KempnerInstitute/KempnerForge: benchmarks/moe_packed, config/model.py", confidence="file",
    ) for n in (8, 16)},
    **{f"gpt-oss-{size}": PublishedArchitecture(  # without the biases of experts and the sinks of attention: 0.03%
        n_layers=layers, d_model=2880, n_heads=64, n_kv_heads=8, d_head=64, vocab_size=201_088, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=True,
        n_dense_layers=0, n_experts=experts, experts_per_token=4, n_shared_experts=0, d_expert=2880,
        source="huggingface/transformers: models/gpt_oss/configuration_gpt_oss.py; openai/gpt-oss: torch/model.py",
        confidence="file",
    ) for size, layers, experts in (("20b", 24, 32), ("120b", 36, 128))},
    "internal-352b": PublishedArchitecture(
        n_layers=60, d_model=4096, n_heads=32, n_kv_heads=8, vocab_size=65_536, activation="swiglu", gated=True,
        norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False, n_dense_layers=0,
        n_experts=32, experts_per_token=3, n_shared_experts=0, d_expert=14_336,
        source="MegaScale-MoE, arXiv 2505.11432, table 2", confidence="file",
    ),
    "grug-250b-4of128": PublishedArchitecture(
        n_layers=48, d_model=5120, n_heads=40, n_kv_heads=10, d_head=128, vocab_size=128_256, activation="swiglu",
        gated=True, norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=False, bias=False,
        n_dense_layers=0, n_experts=128, experts_per_token=4, n_shared_experts=2, d_expert=2560,
        source="marin-community/marin, issue 7201, with Llama 3's vocabulary", confidence="paper-memory",
    ),
    "apertus-350m-32e-tk3-sh1": PublishedArchitecture(
        n_layers=24, d_model=1024, n_heads=16, n_kv_heads=4, vocab_size=131_072, activation="xielu", gated=False,
        norm="rmsnorm", positional="rotary", tied_embeddings=False, qk_norm=True, bias=False, n_dense_layers=0,
        n_experts=32, experts_per_token=3, n_shared_experts=1, d_expert=640,
        source="the run's script, with Apertus' activation and vocabulary from memory", confidence="paper-memory",
    ),
    "fairseq-moe-4b": PublishedArchitecture(
        n_layers=24, d_model=2048, n_heads=32, n_kv_heads=32, d_ff=8192, vocab_size=50_000, activation="gelu",
        gated=False, norm="layernorm", positional="learned", tied_embeddings=True, qk_norm=False, bias=True,
        n_dense_layers=12, n_experts=8, experts_per_token=2, n_shared_experts=0, d_expert=8192,
        source="facebookresearch/fairseq, branch moe: examples/moe_lm/README.md", confidence="file",
    ),
}  # fmt: skip
# Keys that a query attends to in the blocks of a model, in turn from the first block; None: all.
_WINDOWS: dict[str, tuple[int | None, ...]] = {"gpt-oss-20b": (128, None), "gpt-oss-120b": (128, None)}


def with_experts(row: PublishedRow) -> Model | None:
    """The model of a row that names one with experts, or None; its layers and vocabulary may be the row's own."""
    name = str(row.get("model_name") or "").strip().lower()
    try:
        arch = EXPERTS.get(name) or find_run(name).arch
    except InputError:
        return None
    if not arch.n_experts:
        return None
    given = {
        "n_layers": row.whole("L"),
        "n_dense_layers": row.whole("n_dense_layers"),
        "vocab_size": row.whole("vocab"),
    }
    arch = arch.model_copy(update={key: value for key, value in given.items() if value is not None})
    model, windows = published_blueprint(arch, row.whole("seq_len") or 0), cycle(_WINDOWS.get(name, (None,)))
    cores = (replace(block.core, window=window) for block, window in zip(model.blocks, windows, strict=False))
    blocks = tuple(replace(block, core=core) for block, core in zip(model.blocks, cores, strict=True))
    return replace(model, blocks=blocks)


def named(row: PublishedRow) -> dict[str, Any]:
    """The shape of a named model: "mpt-30b", "8B" (Llama 3.1), "the 22B model" (of the same source)."""
    name = _LLAMA_3.sub("llama-", re.sub(r"[\s_]+", "-", str(row.get("model_name") or "").strip().lower()))
    text = f"{row.get('note', '')} {row.get('case', '')}".lower()
    for known, shape in _MODELS.items():
        if known in (name, f"llama-{name}") or (not name and known.replace("llama-", "llama-3.1-") in text):
            return shape
    of_gpt = re.search(r"\b(?:gpt-?3|mt-nlg|megatron)\b", name)
    if (name and not of_gpt) or "h" in row.own:
        return {}
    said = re.search(r"\b([\d.]+b)\b", f"{name} {text}")
    size = row.number("params_b") or (number(said[1].upper()) or 0) / 1e9 if said or row.get("params_b") else 0
    keys = ("L", "h", "a", "ffn", "kv_heads", "vocab", "tied")
    same = (other for other in row.table.siblings if size and other.own.get("params_b") == size and "h" in other.own)
    found = {key: value for other in same for key in keys if (value := other.get(key))}
    return found or next((gpt for known, gpt in _GPTS.items() if size and abs(size / known - 1) < 0.005), {})


def shape_of(row: PublishedRow) -> Model:
    """The shape of the model: that of a named model with experts, or else a dense one.

    With ``ffn`` a gated model without biases (Llama), else a GPT with 4h and learned positions; if both fit, the one
    with the printed number of parameters.
    """
    experts = with_experts(row)
    if experts is not None:
        return experts
    known = named(row)

    def size(name: str) -> int | None:
        own = row.whole(name)
        return own if own is not None else known.get(name)

    needed = {name: size(name) for name in ("L", "h", "vocab", "seq_len")}
    for name, value in needed.items():
        if not value:
            raise Unused(f"no {name}")
    layers, width, vocab, seq_len = (int(value or 0) for value in needed.values())
    heads = size("a") or _usual_heads(row, width)
    if heads is None:
        raise Unused("no heads")
    if width % heads:
        raise Unused(f"{heads} heads do not divide h {width}")
    d_ff, tied = size("ffn"), row.get("tied", known.get("tied"))
    common = {
        "n_layers": layers, "d_model": width, "n_heads": heads, "d_head": width // heads, "vocab_size": vocab,
        "seq_len": seq_len,
    }  # fmt: skip
    common["n_kv_heads"] = size("kv_heads") or heads
    try:
        gpt = ModelShape(
            **common, d_ff=d_ff or 4 * width, norm="layernorm", activation="gelu", positions="learned",
            tied_embeddings=tied is not False, bias=True, dropout=_dropout(row),
        )  # fmt: skip
        if not d_ff:
            return gpt
        llama = ModelShape(**common, d_ff=d_ff, tied_embeddings=tied is True)
    except ValidationError as error:
        raise Unused(f"no such model: {error.errors()[0]['msg']}") from None
    printed = row.number("params_b")
    if d_ff == 4 * width and printed and abs(gpt.params / 1e9 - printed) < abs(llama.params / 1e9 - printed):
        return gpt
    return llama


def _dropout(row: PublishedRow) -> float:
    """Whether the GPT had dropout, by the code that ran it. Dropout has no parameters, so these cannot tell."""
    try:
        return stack_of(row).dropout
    except Unused:
        return 0.0


def _usual_heads(row: PublishedRow, width: int) -> int | None:
    """The number of heads if a row states none: the one of most rows of the table that divides the width."""
    stated = (other.whole("a") for other in row.table.rows if "a" in other.own)
    counts = Counter(heads for heads in stated if heads and width % heads == 0)
    return max(counts, key=lambda heads: counts[heads]) if counts else None
