"""Gives every parameter of Megatron-LM's GPTModel its own initial values and its own lr, weight decay, betas and eps.

Put this file and parameters.json beside pretrain_gpt.py, and add two lines before its call of pretrain:

    import leaven_table
    leaven_table.install()

With Megatron-Bridge, instead set the field optimizer_config_override_provider of its ConfigContainer to
bridge_provider().

Start the training with the flags of args.sh. The initial values replace those of --init-method-std, before a
checkpoint is loaded. They depend on the seed of the recipe, the parameter's name and, if tensor-parallel ranks split
the parameter, on the rank. install() replaces a config_overrides of the caller. This file was written for commit
d98e8a6 of Megatron-LM (August 2026) and needs a version whose get_megatron_optimizer has the argument
config_overrides.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TABLE = Path(__file__).with_name("parameters.json")
EMBEDDING = "embedding.word_embeddings.weight"
_INSIDE = re.compile(r"(?:^|\.)((?:embedding|decoder|output_layer)\..*)")  # a name without its wrappers
_BLOCK = re.compile(r"decoder\.layers\.\d+$")
# In Transformer Engine, a norm is part of the module of the matrix that follows.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def install(path: str | Path = TABLE) -> None:
    """Patch Megatron so that its optimizer takes lr, weight decay, betas and eps of each parameter from ``path``."""
    from megatron.training import training

    make = training.get_megatron_optimizer

    @functools.wraps(make)
    def make_with_table(config: Any, model_chunks: Any, config_overrides: Any = None, **options: Any) -> Any:
        return make(config, model_chunks, config_overrides=prepare(config, model_chunks, path), **options)

    training.get_megatron_optimizer = make_with_table


def bridge_provider(path: str | Path = TABLE) -> Any:
    """Return an OptimizerConfigOverrideProvider of Megatron-Bridge that uses the table at ``path``."""
    from megatron.bridge.training.config import OptimizerConfigOverrideProvider

    class TableProvider(OptimizerConfigOverrideProvider):  # type: ignore[misc]
        def build_config_overrides(self, context: Any) -> dict[Any, dict[str, Any]]:
            chunks = context.model if isinstance(context.model, list) else [context.model]
            return prepare(context.optimizer_config, chunks, path)

    return TableProvider()


def prepare(config: Any, model_chunks: Iterable[nn.Module], path: str | Path = TABLE) -> dict[Any, dict[str, Any]]:
    """Draw the initial values of a model, and return the ``config_overrides`` for its optimizer.

    ``config`` is the OptimizerConfig. In the schedule, every parameter's lr falls from its peak to
    ``config.min_lr / config.lr`` times its peak.

    Raises:
        ValueError: if the table belongs to another model, a parameter is not a plain tensor, or
            ``config.lr`` is not set.
    """
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    document = json.loads(Path(path).read_text(encoding="utf-8"))
    table = document["parameters"]
    # Groups are numbered over the whole model, so that every process finds the same groups when it resumes.
    numbers = {each: number for number, each in enumerate(dict.fromkeys(map(_settings, table.values())), start=1)}
    members: dict[Any, set[int]] = {}
    for name, parameter in named_parameters(model_chunks):
        # The last pipeline stage has a copy of a tied embedding.
        known = EMBEDDING if name == "output_layer.weight" and name not in table else name
        if known not in table:
            raise ValueError(
                f"{path} belongs to another model: it has no values for {name}; "
                "use the file that was exported for this model"
            )
        if type(parameter.data) is not Tensor:
            raise ValueError(f"{name} is a {type(parameter.data).__name__}; leaven_table needs whole, plain tensors")
        _draw(parameter, f"{document['seed']} {known}", table[known])
        members.setdefault(_settings(table[known]), set()).add(id(parameter))
    if not config.lr:
        raise ValueError("the optimizer has no lr; set its lr to the value of --lr in args.sh")
    floor = (config.min_lr or 0.0) / config.lr
    logged = next((number for settings, number in numbers.items() if settings[0] == config.lr), 1)
    overrides = {}
    for settings, found in members.items():
        (lr, decay, betas, eps), number = settings, numbers[settings]
        key = ParamKey(predicate=ParamPredicate(f"leaven-{number}", lambda each, found=found: id(each) in found))
        overrides[key] = {
            "max_lr": lr,
            "min_lr": lr * floor,
            "start_wd": decay,
            "end_wd": decay,
            "wd_mult": 1.0,
            "betas": betas,
            "eps": eps,
            "lr_mult": float(number),  # Megatron reads it only to find the groups of a checkpoint
            "default_config": number == logged,
        }
    return overrides


def named_parameters(model_chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters, named as in a model that is not split over pipeline stages."""
    for chunk in model_chunks:
        layers = {
            path: module.layer_number - 1  # counts the layers of all stages, from 1
            for path, module in chunk.named_modules()
            if _BLOCK.search(path) and hasattr(module, "layer_number")
        }
        for local, parameter in chunk.named_parameters():
            path = next((path for path in layers if local.startswith(f"{path}.")), None)
            name = local if path is None else f"decoder.layers.{layers[path]}.{local.removeprefix(f'{path}.')}"
            for fused, norm in _NORMS.items():
                name = name.replace(fused, norm)
            inside = _INSIDE.search(name)
            if parameter.requires_grad:
                yield inside[1] if inside else name, parameter


def _settings(values: dict[str, Any]) -> tuple[float, float, tuple[float, float], float]:
    """Return (lr, weight decay, betas, eps) of a parameter. Parameters with equal settings form a group."""
    return values["lr"], values["weight_decay"], tuple(values["betas"]), values["eps"]


@torch.no_grad()
def _draw(parameter: Tensor, seed: str, values: dict[str, Any]) -> None:
    """Draw this rank's initial values of a parameter. Each of several fused matrices has its own std."""
    if getattr(parameter, "tensor_model_parallel", False):
        from megatron.core import parallel_state

        seed = f"{seed} {parallel_state.get_tensor_model_parallel_rank()}"
    generator = torch.Generator(parameter.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    rows, stds = values.get("rows", [len(parameter)]), values["init_std"]
    # Of query, key and value, a rank has whole groups of heads. Of an MLP, it has rows of the gate and of the input.
    heads = values.get("heads", 1)
    groups, odd = divmod(heads * len(parameter), sum(rows))
    if "linear_fc1" in seed:
        groups, odd = 1, 0
    if odd or not groups:
        raise ValueError(
            f"{seed}: {len(parameter)} rows cannot be split into groups of {sum(rows) // heads} rows; the table "
            f"belongs to another model, or --tensor-model-parallel-size does not divide the number of groups, {heads}"
        )
    sizes = [each * len(parameter) // sum(rows) // groups for each in rows]
    grouped = parameter.data.view(groups, -1, *parameter.shape[1:])
    for part, std in zip(torch.split(grouped, sizes, dim=1), stds if "rows" in values else [stds], strict=True):
        if std:
            part.normal_(values["init_mean"], std, generator=generator)
        else:
            part.fill_(values["init_mean"])
