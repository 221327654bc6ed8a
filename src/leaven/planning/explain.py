"""Explain why another layout was not chosen, and what to change if no layout fits."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from leaven.documents.planning import Comparison, Explanation
from leaven.planning.accelerators import accelerators
from leaven.planning.arrangement import (
    Arrangement,
    check_layout,
    layout_of,
    parse_keys,
    shape_refusal,
    tensor_degrees,
    written,
)
from leaven.planning.blueprint import Blueprint, Model, blueprint
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.layouts import (
    EQUAL,
    USABLE,
    Exploration,
    Job,
    LayoutCandidate,
    explore,
    fits,
    in_a_node,
    layouts,
)
from leaven.planning.memory import GIB, Memory, worst_stage
from leaven.recipe.errors import InputError
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity

# Names of the parts of a step in a sentence.
PARTS = {
    "compute": "compute",
    "tensor_parallel": "all-reduce",
    "pipeline": "transfers between stages",
    "bubble": "bubble",
    "data_parallel": "gradient exchange",
    "optimizer": "optimizer",
}
# Most neighbours that are listed, and how much slower a step must be for a neighbour to be listed.
_N_NOT = 4
_SLOWER = 0.03
# If nothing fits, these multiples of the GPUs are tried.
_MORE = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
# If no layout divides the GPUs, this many other counts are tried on either side.
_TRIED = 64


def _comparison(
    asked: str,
    chosen: LayoutCandidate,
    line: str,
    found: LayoutCandidate | None = None,
    needs: tuple[Arrangement, Memory] | None = None,
) -> Explanation:
    """Return the comparison of a requested layout with the chosen one.

    ``found`` is the best candidate that fits. If none fits, ``needs`` is the arrangement that needs the least memory.
    """
    how, memory = (found.arrangement, found.memory) if found else needs or (None, None)

    def side_by_side(own: dict[str, float], other: dict[str, float]) -> dict[str, Comparison]:
        return {part: Comparison(asked=own.get(part, 0.0), chosen=other.get(part, 0.0)) for part in {**own, **other}}

    return Explanation(
        asked=asked,
        line=line,
        possible=how is not None,
        fits=found is not None,
        layout=how and how.to_json(),
        step_seconds=found and found.time.step,
        seconds=side_by_side(vars(found.time), vars(chosen.time)) if found else {},
        gib=side_by_side(memory.parts_gib, chosen.memory.parts_gib) if memory else {},
    )


def explain(exploration: Exploration, chosen: LayoutCandidate, asked: str) -> Explanation:
    """Compare the chosen layout with the best layout that has the requested values, such as ``pp=8,zero=1``.

    Raises:
        InputError: if ``asked`` is not part of a layout.
    """
    fixed = parse_keys(asked)
    if not fixed:
        raise InputError(f"--explain {asked!r} is empty; write for example tp=4 or pp=8,recompute=full")
    micro_batch = fixed.pop("mbs", None)
    _require_values(asked, fixed)
    job = exploration.job if micro_batch is None else replace(exploration.job, micro_batch=micro_batch)
    notes = _unsearched(job, fixed)
    if job.by_leaven:  # layouts that leaven cannot train are searched on request only
        fixed = {"cp": 1, "ep": 1} | fixed
    if fixed.get("zero", 0) > 1 and not {"pp", "schedule", "stages_per_rank"} & {*fixed}:
        fixed["pp"] = 1
    refusal = _refusal(job, fixed)
    if refusal is not None:
        return _comparison(asked, chosen, refusal.removeprefix(f"{asked}: "))
    seen = explore(job, fixed)
    if seen.fitting:
        found = seen.fitting[0]
        return _comparison(asked, chosen, _slower(found, chosen) + notes, found)
    if seen.too_large:
        least = seen.too_large[0]
        return _comparison(asked, chosen, too_large(job.cluster, least[1]), needs=least)
    reason = str(seen.refusal) if seen.refusal else f"no layout of {job.cluster.gpus:,} GPUs has that"
    # If only degrees of the choice itself are requested, give the reason why its layout has no such micro-batch.
    if fixed.keys() <= {"cp", "ep", "compile"}:
        try:
            job.arrangements(chosen.arrangement.layout)
        except InputError as error:
            reason = str(error)
    return _comparison(asked, chosen, reason)


def not_lines(exploration: Exploration, chosen: LayoutCandidate) -> tuple[str, ...]:
    """Return at most four lines that say why neighbours of the chosen layout were not chosen.

    A neighbour has another value of one key, dp adjusted to it, and its best micro-batch. Neighbours are listed if
    they do not fit or are more than 3% slower. If a value requires other values to change too, the line names them:
    ``pp 2 (with zero 1)``.
    """
    cluster = exploration.job.cluster
    found: list[tuple[float, str]] = []
    for key in ("tp", "pp", "zero", "recompute"):
        own = chosen.arrangement.layout
        fitting: dict[Any, list[LayoutCandidate]] = {}
        for candidate in exploration.layouts:
            fitting.setdefault(getattr(candidate.arrangement.layout, key), []).append(candidate)
        misfits: dict[Any, list[tuple[Arrangement, Memory]]] = {}
        for how, memory in exploration.misfits:
            misfits.setdefault(getattr(how.layout, key), []).append((how, memory))
        for value in _neighbours(getattr(own, key), {*fitting, *misfits}):
            alike = [each for each in fitting.get(value, []) if not _others(each.arrangement.layout, own, key)]
            lean = [memory for how, memory in misfits.get(value, []) if not _others(how.layout, own, key)]
            if lean and not alike:
                found.append((float("inf"), f"{key} {value}: {too_large(cluster, lean[0])}"))
            elif value in fitting:
                near = (alike or fitting[value])[0]
                others = _others(near.arrangement.layout, own, key)
                slower = near.time.step / chosen.time.step - 1
                if slower > _SLOWER:
                    what = f"{key} {value}" + (f" (with {', '.join(others)})" if others else "")
                    found.append((slower, f"{what}: {_reason(near, chosen)}"))
            else:
                found.append((float("inf"), f"{key} {value}: {too_large(cluster, misfits[value][0][1])}"))
    return tuple(line for _, line in sorted(found)[:_N_NOT])


def _others(layout: Layout, own: Layout, key: str) -> list[str]:
    """Return the values in which a layout differs from the chosen one, except ``key`` and values that depend on
    it."""
    follow = {"dp", "compile", key} | ({"schedule", "stages_per_rank"} if layout.pp == 1 else set())
    follow |= {"dp_replicate"} if layout.zero < 3 else set()
    mine, theirs = layout.model_dump(), own.model_dump()
    return [f"{name} {value}" for name, value in mine.items() if name not in follow and value != theirs[name]]


def _neighbours(own: Any, values: Iterable[Any]) -> list[Any]:
    """Return the values to compare with ``own``: the next lower and higher number, or for a word all other words."""
    others = [value for value in values if value != own]
    if isinstance(own, str):
        return others
    lower, higher = [n for n in others if n < own], [n for n in others if n > own]
    return [*([max(lower)] if lower else []), *([min(higher)] if higher else [])]


def _slower(found: LayoutCandidate, chosen: LayoutCandidate) -> str:
    if found.arrangement == chosen.arrangement:
        return "this is the chosen layout"
    more = (found.memory.total - chosen.memory.total) / GIB
    memory = f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
    slower = found.time.step / chosen.time.step - 1
    if abs(slower) <= EQUAL:
        return f"as fast with {memory} ({found.arrangement})"
    if slower < 0:
        return f"{slower:+.1%} time, {memory}: faster ({found.arrangement})"
    return f"{slower:+.1%} time, {memory}: {_reason(found, chosen)} ({found.arrangement})"


def _reason(found: LayoutCandidate, chosen: LayoutCandidate) -> str:
    """Return the part of a step that grows most compared with the chosen layout, and its share of the step."""
    more = {part: seconds - vars(chosen.time)[part] for part, seconds in vars(found.time).items()}
    part = max(more, key=more.__getitem__)
    share = vars(found.time)[part] / found.time.step
    if part == "bubble":
        m = found.arrangement.grad_accumulation
        return f"bubble {share:.0%} at {m} micro-batch{'' if m == 1 else 'es'}"
    if part == "compute":
        again = found.arrangement.layout.recompute, chosen.arrangement.layout.recompute
        what = "more compute" if again[0] in {"none", again[1]} else "more compute with recomputation"
        return f"{found.time.compute / chosen.time.compute - 1:.0%} {what}"
    return f"{PARTS.get(part, part.replace('_', ' '))} {share:.0%} of the step"


def too_large(cluster: Cluster, memory: Memory) -> str:
    """Return text such as ``needs 75.8 GiB, limit 68 of 80 GiB (85%)``."""
    gib = cluster.accelerator.memory_gib
    return f"needs {memory.total / GIB:.1f} GiB, limit {USABLE * gib:.0f} of {gib:g} GiB ({USABLE:.0%})"


def _require_values(asked: str, fixed: dict[str, Any]) -> None:
    """Raise InputError if no layout can have one of the values."""
    for key, value in fixed.items():
        rest = {"dp": value} if key in {"ep", "dp_replicate"} else {}
        rest |= {"zero": 1} if key == "dp_replicate" else {"pp": 2} if key in {"schedule", "stages_per_rank"} else {}
        if (key == "stages_per_rank" and value > 1) or (key, value) == ("schedule", "interleaved"):
            rest |= {"schedule": "interleaved", "stages_per_rank": value if key == "stages_per_rank" else 2}
        layout_of(asked, rest | {key: value})


def _unsearched(job: Job, fixed: dict[str, Any]) -> str:
    """Return a note about requested values that the search never tries, to append to a line."""
    left_out = []
    if fixed.get("tp", 1) > job.cluster.accelerator.node_size:
        left_out.append("tensor parallelism across nodes")
    if fixed.get("zero", 0) > 1 and fixed.get("pp", 1) > 1:
        left_out.append(f"ZeRO {fixed['zero']} with a pipeline")
    if fixed.get("schedule") == "zero-bubble":
        left_out.append("a zero-bubble schedule")
    notes = f"; the search leaves out {' and '.join(left_out)}" if left_out else ""
    if job.by_leaven and max(fixed.get("cp", 1), fixed.get("ep", 1)) > 1:
        notes += "; leaven can plan and export this but cannot train with it"
    return notes


def _refusal(job: Job, fixed: dict[str, Any]) -> str | None:
    """Return why no layout of the model and the cluster can have these values, or None if one may exist."""
    tp, pp, cp, ep = (fixed.get(key, 1) for key in ("tp", "pp", "cp", "ep"))
    product = tp * pp * cp * fixed.get("dp", 1)
    divides = job.cluster.gpus % product == 0
    return shape_refusal(job.model, Layout(dp=ep, tp=tp, pp=pp, cp=cp, ep=ep)) or (
        None if divides else f"{job.cluster.gpus:,} GPUs are not divisible by {product}"
    )


def no_layout(seen: Exploration) -> InputError:
    """Return the error for a search that found no layout: one line with the reason and what would work."""
    job, beyond = seen.job, seen.untrained
    if seen.misfits:
        message = _nothing_fits(job, *seen.misfits[0])
    elif near := _near(job):
        message = (
            f"{job.cluster}: no layout of {job.model.n_layers} layers divides a batch of "
            f"{job.batch_tokens // job.model.seq_len:,} sequences over that many GPUs; "
            f"{' or '.join(f'{count:,}' for count in near)} GPUs would work"
        )
    else:
        message = str(seen.refusal or f"no layout of {job.model.n_layers} layers fills {job.cluster}; try fewer GPUs")
    if beyond is not None:
        message += f"; leaven can plan and export, but not train, --layout {written(beyond.arrangement.layout)}"
    return InputError(message)


def lacking(job: Job, chosen: LayoutCandidate) -> str:
    """Return how much memory a layout that does not fit needs, and one change with which it would fit."""
    layout, message = chosen.arrangement.layout, too_large(job.cluster, chosen.memory)
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
            asked = ",".join(f"{key}={value}" for key, value in change.items())
            return f"{message}; {asked} would fit in {memory.total / GIB:.1f} GiB"
    return f"{message}; without --layout leaven plans one that fits"


def possible(job: Job) -> bool:
    """Return whether any layout that leaven may choose fits into memory."""
    fixed = {"stages_per_rank": 1} | ({"cp": 1, "ep": 1} if job.by_leaven else {})
    for layout in reversed([*layouts(job.model, job.cluster, job.code, fixed)]):  # the leanest are at the end
        try:
            smallest = job.arrangements(layout)[0]  # where the smallest micro-batch does not fit, nothing does
        except InputError:
            continue
        if fits(worst_stage(job.model, smallest, job.code), job.cluster):
            return True
    return False


def _nothing_fits(job: Job, least: Arrangement, memory: Memory) -> str:
    accelerator = job.cluster.accelerator
    message = (
        f"nothing fits: even the layout with the least memory ({least}) needs {memory.total / GIB:.1f} GiB of "
        f"{accelerator.memory_gib:g} on each GPU"
    )
    larger = (_of_gpus(job.cluster, job.cluster.gpus * times) for times in _MORE)
    more = next((cluster for cluster in larger if possible(replace(job, cluster=cluster))), None)
    would = [f"{more} would work"] if more else []
    # What fits with some layers fits with fewer.
    layers = bisect_left(
        range(1, job.model.n_layers), True, key=lambda n: not possible(replace(job, model=_of_layers(job, n)))
    )
    if layers:
        size = format_quantity(blueprint(_of_layers(job, layers)).params)
        would.append(f"{job.cluster} could hold {layers} of the {job.model.n_layers} layers, {size} parameters")
    padded = _padded(job)
    if padded is not None and possible(padded):
        vocab = padded.model.vocab_size
        would.append(f"a vocabulary of {vocab:,} instead of {job.model.vocab_size:,} would fit, since tp divides it")
    elif not more:
        would.append(
            "more GPUs do not help with this batch: use an accelerator with more memory or a shorter seq_len"
        )
    return f"{message}; {'; '.join(would)}"


def _padded(job: Job) -> Job | None:
    """Return the job with its vocabulary padded to a multiple of 128, or None if there is nothing to pad."""
    if not isinstance(job.model, ModelShape) or job.model.vocab_size % 128 == 0:
        return None
    model = job.model.model_copy(update={"vocab_size": -(-job.model.vocab_size // 128) * 128})
    return replace(job, model=model)


def _of_layers(job: Job, layers: int) -> Model:
    if isinstance(job.model, Blueprint):
        return replace(job.model, blocks=job.model.blocks[:layers])
    return job.model.model_copy(update={"n_layers": layers})


def _of_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return a cluster of ``gpus`` GPUs of the same kind, in nodes of the usual or the requested size."""
    name = cluster.accelerator.name
    if name in accelerators() and str(cluster) == f"{cluster.gpus}x{name}":
        nodes = parse_cluster(f"{gpus}x{name}").accelerator.node_size
        return Cluster(gpus, replace(cluster.accelerator, node_size=nodes))
    return replace(cluster, gpus=gpus)


def _near(job: Job) -> list[int]:
    """Return the nearest lower and the nearest higher number of GPUs with which some layout fits."""
    counts, found = sorted(_dividing(job)), []
    own = bisect_left(counts, job.cluster.gpus)
    for near in (counts[:own][::-1], counts[own:]):
        some = (count for count in near[:_TRIED] if count != job.cluster.gpus)
        found += [next((n for n in some if possible(replace(job, cluster=_of_gpus(job.cluster, n)))), None)]
    return [count for count in found if count]


def _dividing(job: Job) -> set[int]:
    """Return every number of GPUs that some layout can use.

    Each number is dp x tp x pp, where dp divides the batch, tp is a tensor-parallel degree that the model allows, and
    every pipeline stage has a layer and a micro-batch.
    """
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
