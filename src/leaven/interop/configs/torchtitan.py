"""torchtitan: a Python module with one function, for ``--module NAME --config NAME``.

Source: torchtitan 0.3.0 (``config/configs.py``, ``components/optimizer/optimizer.py`` and ``lr_scheduler.py``,
``models/common``, ``models/llama3``, ``models/qwen3``). Its configurations are Python: every parameter may have its
own start, and a pattern its own optimizer settings, so nearly all of a recipe is expressed; multipliers are folded
into the weights. Its language models see no further than a document, and it has no batch ramp and no fp16.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from leaven.interop.configs import formats
from leaven.interop.configs import vocabulary as v
from leaven.interop.configs.losses import common_notes, of_clip, of_ramp, of_schedule, of_start, rounding_notes
from leaven.interop.configs.vocabulary import Export, Given, Loss, Wanted
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape

TARGET = "torchtitan"
HOLDS: Mapping[str, tuple[Any, ...]] = {
    "positions": ("rope",),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "qk_norm_per_head": (False,),
    "embedding_norm": (False,),
    "bias": (False,),
    "dropout": (0.0,),
}
TOGETHER = "keys start as values do, and the gains of keys as those of queries"
REASONS = dict.fromkeys(v.QUANTITIES, TOGETHER)
NAMES = {
    "embedding": "tok_embeddings",
    "norm.attention": "attention_norm",
    "norm.mlp": "ffn_norm",
    "norm.query": "attention.q_norm",
    "norm.key": "attention.k_norm",
    "norm.final": "norm",
    "attention.query": "attention.qkv_linear.wq",
    "attention.key": "attention.qkv_linear.wk",
    "attention.value": "attention.qkv_linear.wv",
    "attention.out": "attention.wo",
    "mlp.gate": "feed_forward.w1",
    "mlp.in": "feed_forward.w3",
    "mlp.out": "feed_forward.w2",
    "unembedding": "lm_head",
}
SHARED = {"attention.key": "attention.value", "norm.key": "norm.query"}
DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "sqrt", "constant": "linear"}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def export(recipe: Recipe) -> Export:
    """A module whose function has the recipe's name."""
    wanted = Wanted.of(recipe)
    shape, losses = v.fitted(recipe.model, HOLDS, TARGET)
    plain = wanted.plain
    modules = {row.name: row.module for row in wanted.table.rows if row.module in NAMES}
    given = {name: _together(name, module, plain) for name, module in modules.items()}
    losses += v.compare(wanted, given, REASONS, plain=True)
    losses += of_start(recipe) + of_ramp(recipe, TARGET) + of_clip(wanted, folded=wanted.rescaled)
    losses += of_schedule(recipe, TARGET, DECAYS, "cosine")
    if recipe.data.documents == "packed":
        losses.append(Loss("data.documents", "packed", "would be isolated: its masks stop at the ends of documents"))
    if recipe.precision.compute not in PRECISIONS:
        losses.append(Loss("precision.compute", recipe.precision.compute, "would be bf16: it has no fp16"))
    notes = [*common_notes(wanted), *rounding_notes(wanted)]
    notes.append("its decay is that of the beginning of a step, leaven's of the end: it is one step later")
    if recipe.layout.pp > 1:
        notes.append("with pp > 1 torchtitan 0.3.0 refuses a group that matches nothing on some stage: use dp and tp")
    if recipe.layout.zero in {1, 2}:
        notes.append(
            f"zero {recipe.layout.zero}: FSDP keeps the gathered weights (fsdp_reshard_after_forward = never)"
        )
    text = _text(wanted, shape, given, modules, formats.commented(losses, notes))
    return Export({"": text}, tuple(losses), tuple(notes))


def _together(name: str, module: str, plain: Mapping[str, Given]) -> Given:
    """What a parameter gets: its own, but for the start that two of them share."""
    mine = plain[name]
    if module not in SHARED:
        return mine
    other = plain[name.replace(module, SHARED[module])]
    return Given(other.init_mean, other.init_std, mine.lr, mine.weight_decay, mine.beta1, mine.beta2, mine.eps)


# The module --------------------------------------------------------------------------------------------------------


def _text(
    wanted: Wanted,
    shape: ModelShape,
    given: Mapping[str, Given],
    modules: Mapping[str, str],
    comments: str,
) -> str:
    recipe, layout, clip = wanted.recipe, wanted.recipe.layout, wanted.recipe.hyperparameters.grad_clip
    family, rope = ("qwen3", "CosSinRoPE") if shape.qk_norm else ("llama3", "ComplexRoPE")
    function = identifier(recipe.name)
    shards = layout.dp // layout.dp_replicate if layout.zero else 1
    recompute = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}[layout.recompute]
    title, optimizer = family.capitalize(), "AdamW" if wanted.decoupled else "Adam"
    return f'''"""{recipe.name}, written by leaven for torchtitan 0.3.0: --module THIS_FILE --config {function}"""

{comments}
import math
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import {rope}, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.{family} import {title}StateDictAdapter, parallelize_{_parallelize(family)}
from torchtitan.models.{family}.model import {title}Model, {title}TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

LAYERS, WIDTH, FFN = {shape.n_layers}, {shape.d_model}, {shape.d_ff}
HEADS, KV_HEADS, HEAD = {shape.n_heads}, {shape.n_kv_heads}, {shape.d_head}
VOCABULARY, LENGTH, NORM_EPS, THETA = {shape.vocab_size}, {shape.seq_len}, {shape.norm_eps}, {shape.rope_theta}

# Standard deviation each matrix starts from, and the value each gain does; a list is one for each layer.
STARTS = {_starts(given, modules)}

# First match wins; all parameters are in one.
GROUPS = {_groups(given, modules, shape)}


def start(name, layer=None):
    value = STARTS[name]
    value = value[layer] if isinstance(value, list) else value
    if "norm" in name:
        return {{"weight": partial(nn.init.constant_, val=value)}}
    return {{"weight": partial(nn.init.normal_, std=value)}}


def norm(size, name, layer=None):
    return RMSNorm.Config(normalized_shape=size, eps=NORM_EPS, param_init=start(name, layer))


def linear(inputs, outputs, name, layer=None):
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=start(name, layer))


def block(layer):
    return {title}TransformerBlock.Config(
        attention_norm=norm(WIDTH, "attention_norm", layer),
        ffn_norm=norm(WIDTH, "ffn_norm", layer),
        attention=GQAttention.Config(
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=HEAD,
            dim=WIDTH,
            qkv_linear=QKVLinear.Config(
                head_dim=HEAD,
                wq=linear(WIDTH, HEADS * HEAD, "attention.qkv_linear.wq", layer),
                wkv=linear(WIDTH, KV_HEADS * HEAD, "attention.qkv_linear.wv", layer),
            ),
            wo=linear(HEADS * HEAD, WIDTH, "attention.wo", layer),
            qk_norm={'norm(HEAD, "attention.q_norm", layer)' if shape.qk_norm else None},
            inner_attention=get_attention_config("flex"),
            rope={rope}.Config(dim=HEAD, max_seq_len=LENGTH, theta=THETA),
        ),
        feed_forward=FeedForward.Config(
            w1=linear(WIDTH, FFN, "feed_forward.w1", layer),
            w2=linear(FFN, WIDTH, "feed_forward.w2", layer),
            w3=linear(WIDTH, FFN, "feed_forward.w3", layer),
        ),
    )


def model():
    embedding = {"{'weight': skip_param_init}" if shape.tied_embeddings else 'start("tok_embeddings")'}
    return {title}Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        enable_weight_tying={shape.tied_embeddings},
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=embedding),
        norm=norm(WIDTH, "norm"),
        lm_head=linear(WIDTH, VOCABULARY, "{"tok_embeddings" if shape.tied_embeddings else "lm_head"}"),
        layers=[block(layer) for layer in range(LAYERS)],
    )


def {function}():
    return Trainer.Config(
        model_spec=ModelSpec(
            name="{family}",
            flavor="{function}",
            model=model(),
            parallelize_fn=parallelize_{_parallelize(family)},
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter={title}StateDictAdapter,
        ),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(pattern=pattern, optimizer_name="{optimizer}", optimizer_kwargs=settings)
                for pattern, settings in GROUPS
            ]
        ),
        lr_scheduler=LRSchedulersContainer.Config({_schedule(wanted)}),
        training=TrainingConfig(
            local_batch_size={wanted.micro_batch},
            global_batch_size={wanted.sequences},
            seq_len=LENGTH,
            steps={wanted.steps},
            max_norm={clip.limit or "math.inf"},
            mixed_precision_param="{PRECISIONS.get(recipe.precision.compute, "bfloat16")}",
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),  # yours here, and hf_assets_path
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree={layout.dp // shards},
            data_parallel_shard_degree={shards},
            fsdp_reshard_after_forward="{"never" if layout.zero in {1, 2} else "default"}",
            tensor_parallel_degree={layout.tp},
            pipeline_parallel_degree={layout.pp},
            context_parallel_degree={layout.cp},
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={layout.compile}),
        debug=DebugConfig(seed={recipe.data.seed}),
    )
'''


def identifier(name: str) -> str:
    """A Python name from a recipe's."""
    word = "".join(each if each.isalnum() and each.isascii() else "_" for each in name)
    return word if word[0].isalpha() else f"recipe_{word}"


def _parallelize(family: str) -> str:
    return "llama" if family == "llama3" else family


def _starts(given: Mapping[str, Given], modules: Mapping[str, str]) -> str:
    starts: dict[str, list[float]] = {}
    for name, values in given.items():
        value = values.init_std if values.init_std or "norm" not in modules[name] else values.init_mean
        starts.setdefault(NAMES[modules[name]], []).append(float(f"{value:.12g}"))
    lines = [
        f"    {place!r}: {values[0] if len(set(values)) == 1 else values},\n" for place, values in starts.items()
    ]
    return "{\n" + "".join(lines) + "}"


def _groups(given: Mapping[str, Given], modules: Mapping[str, str], shape: ModelShape) -> str:
    """Patterns and settings; what most parameters get is the last one, which matches all."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, values in given.items():
        place = NAMES[modules[name]]
        if name.startswith("layers."):
            place = f"layers.{name.split('.')[1]}.{place}"
        settings = (values.lr, values.beta1, values.beta2, values.eps, values.weight_decay)
        groups.setdefault(tuple(float(f"{value:.12g}") for value in settings), []).append(place)
    most = max(groups, key=lambda settings: len(groups[settings]))
    lines = [(_pattern(places, shape.n_layers), settings) for settings, places in groups.items() if settings != most]
    lines.append((".*", most))
    rows = [
        f'    (r"{pattern}", dict(lr={lr}, betas=({beta1}, {beta2}), eps={eps}, weight_decay={decay})),\n'
        for pattern, (lr, beta1, beta2, eps, decay) in lines
    ]
    return "[\n" + "".join(rows) + "]"


def _pattern(places: Iterable[str], n_layers: int) -> str:
    """A regular expression for these modules and no others."""
    layers: dict[str, list[str]] = {}
    ends = []
    for place in places:
        if place.startswith("layers."):
            _, layer, inner = place.split(".", 2)
            layers.setdefault(inner, []).append(layer)
        else:
            ends.append(place.replace(".", r"\."))
    within: dict[str, list[str]] = {}
    for inner, numbers in layers.items():
        within.setdefault(r"\d+" if len(numbers) == n_layers else "|".join(numbers), []).append(inner)
    alternatives = [
        rf"layers\.({numbers})\.({'|'.join(inner).replace('.', chr(92) + '.')})" for numbers, inner in within.items()
    ]
    return rf"^({'|'.join([*ends, *alternatives])})\.weight$"


def _schedule(wanted: Wanted) -> str:
    schedule = wanted.recipe.schedule
    ratio = {"wsd": wanted.cooldown_tokens / wanted.recipe.data.tokens, "constant": 0.0}.get(schedule.decay)
    settings: dict[str, Any] = {
        "warmup_steps": wanted.in_steps(schedule.warmup_tokens),
        "decay_type": DECAYS.get(schedule.decay, "cosine"),
        "decay_ratio": ratio,
        "min_lr_factor": schedule.min_lr_ratio,
    }
    assert ratio is None or math.isfinite(ratio)
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())
