"""Parse, write and check layouts: the numbers of data-parallel, tensor-parallel and pipeline ranks, and so on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from leaven.errors import InputError, suggestion
from leaven.planning.blueprint import Model, blueprint
from leaven.planning.hardware import Cluster
from leaven.recipe.files import validated
from leaven.recipe.layout import Layout, Pipeline, Recompute
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import listed

MOST_CHARACTERS = 300  # of a layout as text
# The keys of ``--layout`` with their possible values; None stands for any whole number from 1 on.
_KEYS: dict[str, tuple[str, ...] | None] = {
    "dp": None,
    "tp": None,
    "pp": None,
    "cp": None,
    "ep": None,
    "zero": ("0", "1", "2", "3"),
    "mbs": None,
    "dp_replicate": None,
    "stages_per_rank": None,
    "recompute": get_args(Recompute),
    "schedule": get_args(Pipeline),
    "compile": ("true", "false"),
}


@dataclass(frozen=True)
class Arrangement:
    """The way in which a training step runs: layout, micro-batch size, and number of gradient accumulation steps."""

    layout: Layout
    micro_batch: int  # sequences per forward pass of a rank
    grad_accumulation: int  # micro-batches of a rank per step

    def to_json(self) -> dict[str, Any]:
        counts = {"micro_batch": self.micro_batch, "grad_accumulation": self.grad_accumulation}
        return self.layout.model_dump() | counts

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Arrangement":
        """Return the arrangement from the dict that :meth:`to_json` returned."""
        layout = {name: document[name] for name in Layout.model_fields}
        return cls(Layout.model_validate(layout), document["micro_batch"], document["grad_accumulation"])

    def __str__(self) -> str:
        layout = self.layout
        dp = f"{layout.dp}" + (f" in {layout.dp_replicate} replicas" if layout.dp_replicate > 1 else "")
        pp = f"{layout.pp}" + (f" {layout.schedule}" if layout.schedule != "1f1b" else "")
        pp += f" of {layout.stages_per_rank} stages each" if layout.stages_per_rank > 1 else ""
        cp = f" · cp {layout.cp}" if layout.cp > 1 else ""
        cp += f" · ep {layout.ep}" if layout.ep > 1 else ""
        return (
            f"dp {dp} · tp {layout.tp} · pp {pp}{cp} · zero {layout.zero} · micro-batch {self.micro_batch}"
            f" · accumulate {self.grad_accumulation} · recompute {layout.recompute}"
            + (" · compiled" if layout.compile else "")
        )


def scheduled(layout: Layout, micro_batches: int) -> int:
    """Round the micro-batches of a step up to a multiple of pp for interleaved and zero-bubble schedules."""
    if layout.schedule in {"gpipe", "1f1b"}:
        return micro_batches
    return -(-micro_batches // layout.pp) * layout.pp


def parse_keys(text: str) -> dict[str, Any]:
    """Parse text such as ``tp=8,recompute=full``; ``mbs`` is the micro-batch size. Raise InputError if wrong."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"layout {text[:20]!r}... is too long; write for example tp=8,pp=12,dp=4,zero=1,mbs=2")
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _KEYS:
            hint = suggestion(key, _KEYS, f"known are {', '.join(_KEYS)}")
            raise InputError(f"layout {text!r}: no such key {key!r}; {hint}")
        if key in values:
            raise InputError(f"layout {text!r}: {key} appears twice; remove one")
        known = _KEYS[key]
        if value not in known if known else not value.isdecimal() or not int(value):
            would = listed(known) if known else "a whole number from 1 on"
            raise InputError(f"layout {text!r}: {item!r} is wrong; {key} must be {would}")
        values[key] = int(value) if value.isdecimal() else value == "true" if key == "compile" else value
    return values


def parse_layout(text: str, gpus: int | None = None, *, compile: bool = False) -> tuple[Layout, int | None]:
    """Return (layout, micro-batch size or None) for text such as ``tp=8,pp=12,zero=1,mbs=2``.

    By default, dp is ``gpus`` / (tp x pp x cp) if this is a whole number, otherwise 1. ``compile`` is the default of
    the key ``compile``. Raise InputError if a key, a value or their combination is wrong.
    """
    values = {"compile": compile} | parse_keys(text)
    micro_batch = values.pop("mbs", None)
    if gpus is not None:
        dp, rest = divmod(gpus, math.prod(values.get(key, 1) for key in ("tp", "pp", "cp")))
        values = values if rest else {"dp": dp} | values
    return validated(Layout, values, f"layout {text!r}"), micro_batch


def written(layout: Layout) -> str:
    """Return a layout as text that ``--layout`` accepts, such as ``dp=4,tp=8``. Default values are left out."""
    values = layout.model_dump(exclude_defaults=True)
    return ",".join(f"{key}={str(values[key]).lower()}" for key in _KEYS if key in values)


def tensor_degrees(model: Model) -> list[int]:
    """Return the tensor-parallel degrees (values of tp) that a model allows, the smallest first.

    A degree divides seq_len and all sizes that tensor parallelism splits. A QK-norm over all heads allows only 1.
    """
    if isinstance(model, ModelShape) and model.qk_norm_whole:
        return [1]
    unit = math.gcd(blueprint(model).tensor_unit, model.seq_len)
    return [tp for tp in range(1, unit + 1) if unit % tp == 0]


def check_layout(model: Model, layout: Layout, cluster: Cluster) -> None:
    """Raise InputError if the model or the cluster does not allow a layout."""
    if layout.ranks != cluster.gpus:
        ranks = f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp}" + (f" x cp {layout.cp}" if layout.cp > 1 else "")
        dp, rest = divmod(cluster.gpus, layout.tp * layout.pp * layout.cp)
        would = f"tp x pp x cp must divide {cluster.gpus:,}" if rest else f"dp={dp} would work"
        raise InputError(f"layout {ranks} is {layout.ranks:,} ranks, but there are {cluster.gpus:,} GPUs; {would}")
    if refusal := shape_refusal(model, layout):
        raise InputError(f"layout {refusal}")


def shape_refusal(model: Model, layout: Layout) -> str | None:
    """Return why a layout is impossible for a model and what would work, or None if the layout is possible."""
    tp, stages, experts = layout.tp, layout.pp * layout.stages_per_rank, blueprint(model).experts
    possible = tensor_degrees(model)
    if tp not in possible:
        return f"tp={tp}: {_cut_by_tensor_ranks(model, tp)}; tp of {listed(possible)} works"
    if stages > model.n_layers:
        what = f"pp={layout.pp}" + (f" x stages_per_rank={stages // layout.pp}" if stages > layout.pp else "")
        return f"{what}: there are only {model.n_layers} layers; at most {model.n_layers} stages work"
    if layout.cp > 1 and model.seq_len % (2 * layout.cp):
        # Each rank gets one chunk of each half of the sequence, so that causal attention is equal work for all ranks.
        return f"cp={layout.cp}: seq_len {model.seq_len} is not divisible by 2 x {layout.cp}; cp=1 works"
    if layout.ep > 1 and not experts:
        return f"ep={layout.ep}: this model has no experts to distribute; ep=1 works"
    if experts % layout.ep:
        return f"ep={layout.ep}: {experts} experts are not divisible by {layout.ep}; use a divisor of {experts}"
    return None


def _cut_by_tensor_ranks(model: Model, tp: int) -> str:
    sizes = "the heads and widths of the blocks"
    if isinstance(model, ModelShape):
        if model.qk_norm_whole:
            return "qk_norm_whole normalises all heads together, and a rank would have only some of them"
        sizes = f"{model.n_heads} heads, {model.n_kv_heads} kv heads, d_ff {model.d_ff}"
        sizes += f", d_expert {model.experts.d_expert}" if model.experts else ""
    sizes += f", a vocabulary of {model.vocab_size} and seq_len {model.seq_len}"
    return f"{sizes} are not all divisible by {tp}"


def bubble(micro_batches: int, stages: int, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which a pipeline rank is idle.

    ``stages`` is the number of pipeline ranks, each with ``stages_per_rank`` virtual stages (interleaved schedule).
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    return (stages - 1) / (stages_per_rank * micro_batches + stages - 1)


def grad_accumulation(layout: Layout, seq_len: int, batch_tokens: int, micro_batch: int) -> int:
    """Return how many micro-batches a rank runs in a step, rounded up."""
    return -(-batch_tokens // seq_len // layout.dp // micro_batch)


def pipeline_refusal(layout: Layout, seq_len: int, smallest_tokens: int, micro_batch: int) -> str | None:
    """If the smallest batch gives a rank fewer than pp micro-batches, return what to change, else None."""
    count = grad_accumulation(layout, seq_len, smallest_tokens, micro_batch)
    if count >= layout.pp:
        return None
    lower = grad_accumulation(layout, seq_len, smallest_tokens, 1) >= layout.pp
    return (
        f"pp={layout.pp}: the smallest batch of {smallest_tokens // seq_len:,} sequences gives a rank only {count} "
        f"micro-batch{'' if count == 1 else 'es'}, and {bubble(count, layout.pp):.0%} of a step would be bubble; "
        + (f"lower [batch] micro_batch from {micro_batch}, or " if lower else "")
        + f"begin with a batch of {layout.pp * layout.dp * seq_len:,} tokens or more"
    )
