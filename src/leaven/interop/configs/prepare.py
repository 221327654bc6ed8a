"""Initialises a model and builds its optimizer with the values of a leaven recipe. Needs torch, but not leaven.

from prepare import prepare, schedule
optimizer = prepare(model, "parameters.json")
scheduler = schedule(optimizer, "parameters.json")
Trainer(model, arguments, train_dataset=..., optimizers=(optimizer, scheduler))

For a trainer that reads its initial weights from a folder, `python prepare.py FOLDER` writes that folder. The command
also needs transformers.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

# Names of the unembedding of GPT-NeoX: in transformers 5, and in its checkpoints and older versions.
HEADS = {"lm_head.weight": "embed_out.weight"}


def prepare(model: nn.Module, path: str | Path) -> torch.optim.Optimizer:
    """Draw new weights for ``model``, and return its optimizer, Adam or AdamW.

    ``path`` is the file parameters.json. Parameters with the same lr, betas, eps and weight decay form a group.

    Raises:
        ValueError: if the file belongs to another model.
    """
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    wanted, named = document["parameters"], dict(model.named_parameters())
    for now, before in HEADS.items():
        if now in named and before in wanted:
            wanted[now] = wanted.pop(before)
    if unlike := named.keys() ^ wanted.keys():
        raise ValueError(
            f"{path} belongs to another model: the file or this model lacks {', '.join(sorted(unlike)[:3])}; "
            "use the file that was exported for this model"
        )
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        values = wanted[name]
        _start(parameter, values)
        settings = {key: values[key] for key in ("lr", "betas", "eps", "weight_decay")}
        group = groups.setdefault(json.dumps(settings), settings | {"params": []})
        group["params"].append(parameter)
    most = max(groups.values(), key=lambda group: sum(parameter.numel() for parameter in group["params"]))
    kind = torch.optim.AdamW if document["optimizer"] == "adamw" else torch.optim.Adam
    # The optimizer's own lr is the peak for schedulers with an absolute final lr.
    return kind(list(groups.values()), lr=most["lr"])


def schedule(optimizer: torch.optim.Optimizer, path: str | Path) -> LambdaLR:
    """Return the recipe's schedule, which multiplies the lr of each group.

    A step has the schedule's lr at the last token of the step.
    """
    values = json.loads(Path(path).read_text(encoding="utf-8"))["schedule"]
    return LambdaLR(optimizer, lambda step: _factor((step + 1) * values["batch_tokens"], **values))


def _factor(
    done: int,
    *,
    decay: str,
    tokens: int,
    warmup_tokens: int,
    min_lr_ratio: float,
    decay_ratio: float,
    batch_tokens: int,
) -> float:
    """Return the factor on the peak lr after ``done`` tokens. The other arguments are a recipe's schedule."""
    if done < warmup_tokens:
        return done / warmup_tokens
    left = tokens - warmup_tokens
    progress = min((done - warmup_tokens) / left, 1.0) if left > 0 else 1.0
    if decay == "constant":
        return 1.0
    if decay == "inverse_sqrt":
        return max(math.sqrt(warmup_tokens / done), min_lr_ratio)
    if decay == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    elif decay == "linear":
        share = 1 - progress
    else:  # wsd: constant, then a cooldown at the end
        cooldown = min(decay_ratio * tokens, left)
        into = (done - (tokens - cooldown)) / cooldown if cooldown > 0 else 1.0
        share = 1 - math.sqrt(min(max(into, 0.0), 1.0))
    return min_lr_ratio + (1 - min_lr_ratio) * share


@torch.no_grad()
def _start(parameter: Tensor, values: dict[str, Any]) -> None:
    """Draw the initial values of a parameter. Each part of a fused tensor has its own std."""
    if "rows" not in values:
        _draw(parameter, values["init_mean"], values["init_std"])
        return
    rows = [count // values["heads"] for count in values["rows"]]
    joined = torch.empty_like(
        parameter.T if values["transposed"] else parameter, memory_format=torch.contiguous_format
    )
    flat = joined.flatten(0, 1) if joined.ndim == 3 else joined  # the matrices of all experts, below each other
    by_head = flat.view(values["heads"], -1, *flat.shape[1:])
    for part, std in zip(torch.split(by_head, rows, dim=1), values["init_std"], strict=True):
        _draw(part, 0.0, std)
    parameter.copy_(joined.T if values["transposed"] else joined)


def _draw(tensor: Tensor, mean: float, std: float) -> None:
    if std:
        tensor.normal_(mean, std)
    else:
        tensor.fill_(mean)


if __name__ == "__main__":
    from transformers import AutoConfig, AutoModelForCausalLM

    here = Path(__file__).parent
    torch.manual_seed(json.loads((here / "parameters.json").read_text(encoding="utf-8"))["seed"])
    models: Any = AutoModelForCausalLM
    started = models.from_config(AutoConfig.from_pretrained(here))
    prepare(started, here / "parameters.json")
    started.save_pretrained(sys.argv[1])
