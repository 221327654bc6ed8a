"""What to say when no layout will do: how many GPUs would, and how large a model the ones there are can hold."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from leaven.planning.arrangement import Arrangement, check_layout, tensor_degrees, written
from leaven.planning.blueprint import Blueprint, blueprint
from leaven.planning.hardware import ACCELERATORS, Cluster, parse_cluster
from leaven.planning.layouts import USABLE, Candidate, Exploration, Job, fits, in_a_node, layouts
from leaven.planning.memory import GIB, Memory, worst_stage
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

# Times the GPUs that are tried when nothing fits.
_MORE = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)

# Numbers of GPUs next to one that nothing divides that are tried on either side.
_TRIED = 64


def no_layout(seen: Exploration) -> InputError:
    """Why a search has found nothing that may be chosen, and what would do, in one line."""
    job, beyond = seen.job, seen.untrained
    too_large = [
        (how, memory) for how, memory in seen.too_large if not job.by_leaven or how.layout.cp == how.layout.ep == 1
    ]
    if too_large:
        message = _nothing_fits(job, *too_large[0])
    elif near := _near(job):
        message = (
            f"{job.cluster}: no layout of {job.model.n_layers} layers divides a batch of "
            f"{job.batch_tokens // job.model.seq_len:,} sequences over so many; "
            f"{' or '.join(f'{count:,}' for count in near)} GPUs would do"
        )
    else:
        message = str(seen.refusal or f"no layout of {job.model.n_layers} layers fills {job.cluster}; try fewer GPUs")
    if beyond is not None:
        message += f"; leaven plans and exports, and does not train, --layout {written(beyond.arrangement.layout)}"
    return InputError(message)


def lacking(job: Job, chosen: Candidate) -> str:
    """What a layout that does not fit lacks, and the change of one thing that would do."""
    layout, accelerator = chosen.arrangement.layout, job.cluster.accelerator
    message = (
        f"needs {chosen.memory.total / GIB:.1f} GiB, {USABLE * accelerator.memory_gib:.0f} of "
        f"{accelerator.memory_gib:g} are counted on"
    )
    changes: list[dict[str, Any]] = [{"recompute": "full"}, *({"zero": zero} for zero in range(layout.zero + 1, 4))]
    for key in ("tp", "pp"):
        changes += [{key: getattr(layout, key) * n, "dp": layout.dp // n} for n in (2, 4, 8) if layout.dp % n == 0]
    for change in changes:
        try:
            other = Layout.model_validate(layout.model_dump() | change)
            check_layout(job.model, other, job.cluster)
            how = job.arrangements(other)[0]
        except ValueError:  # of the layout by itself, or with this model or batch
            continue
        memory = worst_stage(job.model, how, job.code)
        if other != layout and fits(memory, job.cluster):
            said = ",".join(f"{key}={value}" for key, value in change.items())
            return f"{message}; {said} would fit in {memory.total / GIB:.1f}"
    return f"{message}; leave out --layout to see what fits"


def possible(job: Job) -> bool:
    """Whether some layout that leaven trains fits."""
    return any(fits(worst_stage(job.model, how, job.code), job.cluster) for how in _smallest(job))


def _smallest(job: Job) -> list[Arrangement]:
    """Of each layout the smallest micro-batch: where it does not fit nothing does."""
    found = []
    fixed = {"stages_per_rank": 1} | ({"cp": 1, "ep": 1} if job.by_leaven else {})
    for layout in layouts(job.model, job.cluster, job.code, fixed):
        try:
            found.append(job.arrangements(layout)[0])
        except InputError:
            continue
    return found[::-1]  # the leanest are at the end


def _nothing_fits(job: Job, least: Arrangement, memory: Memory) -> str:
    accelerator = job.cluster.accelerator
    message = (
        f"nothing fits: the leanest layout ({least}) needs {memory.total / GIB:.1f} GiB of "
        f"{accelerator.memory_gib:g} on each GPU"
    )
    more = next((on for on in _larger(job.cluster) if possible(replace(job, cluster=on))), None)
    would = [f"{more} would do"] if more else []
    layers = _most(job.model.n_layers - 1, lambda n: possible(replace(job, model=_of_layers(job, n))))
    if layers:
        size = format_quantity(blueprint(_of_layers(job, layers)).params)
        would.append(f"{job.cluster} could hold {layers} of the {job.model.n_layers} layers, {size} parameters")
    padded = _padded(job)
    if padded is not None and possible(padded):
        vocab = padded.model.vocab_size
        would.append(f"a vocabulary of {vocab:,} instead of {job.model.vocab_size:,} lets tp divide it, and would do")
    elif not more:
        would.append("more GPUs do not help this batch: take a larger accelerator or a shorter seq_len")
    return f"{message}; {'; '.join(would)}"


def _padded(job: Job) -> Job | None:
    """The job with a vocabulary of whole 128s, if that is what tensor parallelism lacks."""
    if not isinstance(job.model, ModelShape) or job.model.vocab_size % 128 == 0:
        return None
    model = job.model.model_copy(update={"vocab_size": -(-job.model.vocab_size // 128) * 128})
    return replace(job, model=model)


def _of_layers(job: Job, layers: int) -> ModelShape | Blueprint:
    if isinstance(job.model, Blueprint):
        return replace(job.model, blocks=job.model.blocks[:layers])
    return job.model.model_copy(update={"n_layers": layers})


def _larger(cluster: Cluster) -> list[Cluster]:
    return [_of_gpus(cluster, cluster.gpus * times) for times in _MORE]


def _of_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """So many of the same GPUs, in whole nodes if the table has them and no other nodes were asked for."""
    name = cluster.accelerator.name
    if name in ACCELERATORS and str(cluster) == f"{cluster.gpus}x{name}":
        nodes = parse_cluster(f"{gpus}x{name}").accelerator.node_size
        return Cluster(gpus, replace(cluster.accelerator, node_size=nodes))
    return replace(cluster, gpus=gpus)


def _near(job: Job) -> list[int]:
    """The next lower and the next higher number of GPUs that a layout divides and the model fits."""
    counts, found = sorted(_dividing(job)), []
    own = bisect_left(counts, job.cluster.gpus)
    for near in (counts[:own][::-1], counts[own:]):
        some = (count for count in near[:_TRIED] if count != job.cluster.gpus)
        found += [next((n for n in some if possible(replace(job, cluster=_of_gpus(job.cluster, n)))), None)]
    return [count for count in found if count]


def _dividing(job: Job) -> set[int]:
    """All numbers of GPUs that are dp x tp x pp of a layout that divides the batch, the heads and the layers, and
    whose pipeline the batch fills."""
    model, node = job.model, job.cluster.accelerator.node_size
    sequences, rest = divmod(job.batch_tokens // model.seq_len, job.micro_batch or 1)
    return {
        dp * tp * pp
        for dp in range(1, 0 if rest else sequences + 1)
        if sequences % dp == 0
        for pp in range(1, min(model.n_layers, sequences // dp) + 1)
        for tp in tensor_degrees(model)
        if in_a_node(tp, dp * tp * pp, node)
    }


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to a limit for which something holds that holds for all smaller ones; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
