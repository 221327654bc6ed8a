"""The values of a starter: batch, learning rate, schedule, Adam, init and ramp, each out of laws and neighbours."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from leaven.catalogue.batch_change import critical_batch, is_critical, lr_at_batch
from leaven.catalogue.derivation import Draft, Unsure
from leaven.catalogue.laws import LawResult, evaluate, power_lines_tau
from leaven.catalogue.run import Run
from leaven.catalogue.runs import load_runs, size_ratio
from leaven.catalogue.starter_defaults import DEFAULTS
from leaven.catalogue.starter_next import tuning
from leaven.catalogue.votes import FACTOR, Neighbours, Said, batch_ramps, middle, ramp_votes
from leaven.recipe.batch import Ramp
from leaven.recipe.errors import InputError
from leaven.recipe.init_std import INITS
from leaven.recipe.recipe import flatten
from leaven.recipe.shape import BRANCH_ENDS, ModelShape
from leaven.recipe.units import format_quantity

LR_SIZE_EXPONENT = -1 / 3
"""Of a published lr with size within one lineage: GPT-3's table -0.32, LLaMA's -0.33; and of Porian's law, -0.36."""
BATCH_TOKENS_EXPONENT = 0.46
"""Of the batch with tokens: the middle of Step Law 0.57, Zhang 0.47, Power Lines 0.46 and 0.38, DeepSeek 0.33."""
LR_WIDENING = 2.0
"""The lr stays within the neighbours' own, moved to this size, widened by this factor."""
LEAST_STEPS = 200
LONGEST_WARMUP, SHORTEST_WARMUP = 0.05, 0.001
MOST_INCREMENTS = 16
"""A ramp starts at a whole share of the batch, 1/2 to 1/16, and grows by as much."""


@dataclass(frozen=True)
class Setting:
    """What the values are for: the neighbours, the shape, the tokens, and GPUs that the batch has to divide over."""

    near: Neighbours
    model: ModelShape
    tokens: int
    gpus: int

    @property
    def lead(self) -> Run | None:
        return self.near.lead

    @cached_property
    def laws(self) -> list[LawResult]:
        """Each law in one form."""
        model = self.model
        found = evaluate(model.params, self.tokens, params_non_embedding=model.params_non_embedding)
        return [law for law in found if law.form_of is None]

    def law_sources(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [f"{law.law}: {law.source}" for law in self.laws if law.law in wanted]

    def inside(self, laws: Said) -> int:
        """How many of the laws are asked within the range they were fitted on."""
        return sum(law.in_range for law in self.laws if law.law in laws.by)

    def between(self, laws: Said, near: Said) -> float:
        """Between the middles of laws and neighbours, in the logarithm: see :meth:`weight`."""
        weight = self.weight(laws)
        return math.exp(weight * math.log(laws.value) + (1 - weight) * math.log(near.value))

    def weight(self, laws: Said) -> float:
        """Of the laws against the neighbours: a half where all are inside their range, a quarter where none is."""
        return (1 + self.inside(laws) / len(laws.by)) / 4

    def heard(self, laws: Said) -> str:
        return f"{self.inside(laws)} of {len(laws.by)} inside their range, weight {self.weight(laws):.2g}"


def after_duration(draft: Draft, at: Setting) -> None:
    """Steps 5 to 9: batch, lr, schedule, Adam and init, ramp."""
    batch = _batch(draft, at)
    lr = _lr(draft, at, batch)
    _schedule(draft, at, batch)
    _adam(draft, at, batch, lr)
    _ramp(draft, at, batch)


def _batch(draft: Draft, at: Setting) -> int:
    seq_len, lead = at.model.seq_len, at.lead
    optimal = middle({law.law: law.batch_tokens for law in at.laws if law.batch_tokens and not is_critical(law)})
    critical = critical_batch(at.laws)
    if lead and lead.batch_tokens:
        sequences = max(round(lead.batch_tokens / seq_len), 1)
        batch = sequences * seq_len
        if at.tokens < LEAST_STEPS * batch:
            raise InputError(
                f"--from {lead.id}: its batch of {format_quantity(batch)} tokens makes {at.tokens // batch} steps of "
                f"{format_quantity(at.tokens)} tokens; give {format_quantity(LEAST_STEPS * batch)} or more"
            )
        reason = f"as {lead.id}: lr and batch are taken together; laws {_range(optimal, format_quantity)}"
        said = [f"{format_quantity(batch)} tokens, as {lead.id}", f"laws {_range(optimal, format_quantity)}"]
        named, spread = [lead.id], max(optimal.high, batch) / min(optimal.low, batch)
    else:
        moved = middle(
            {
                run.id: run.batch_tokens * (at.tokens / run.tokens) ** BATCH_TOKENS_EXPONENT
                for run in at.near.runs
                if run.batch_tokens and run.tokens
            }
        )
        wanted = at.between(optimal, moved)
        most = min(critical, at.tokens / LEAST_STEPS)
        batch = _sequences(min(wanted, most), most, seq_len, at.gpus) * seq_len
        said = [
            f"{format_quantity(batch)} tokens, {batch // seq_len:,} sequences, {at.tokens // batch:,} steps",
            f"laws {_range(optimal, format_quantity)} ({at.heard(optimal)})",
            f"neighbours, moved to these tokens, {_range(moved, format_quantity)}",
        ]
        reason = (
            f"between the middle of the laws, {format_quantity(optimal.value)} ({optimal.told(format_quantity)}), and"
            f" of the neighbours, {format_quantity(moved.value)} (each x (tokens / its tokens)^"
            f"{BATCH_TOKENS_EXPONENT}: {moved.told(format_quantity)}); rounded to {batch // seq_len:,} "
            "sequences, which ranks divide"
        )
        if wanted > most:
            bound = "the critical batch" if most == critical else f"{LEAST_STEPS} steps"
            reason += f"; {format_quantity(wanted)} bounded by {bound}"
            said.append(f"bounded by {bound}")
        named = list(moved.by)
        spread = max(optimal.high, moved.high) / min(optimal.low, moved.low)
    draft.unsure.append(Unsure("batch", spread, "a smaller one costs time, one above the critical one tokens"))
    said.append(f"critical batch about {format_quantity(critical)}")
    draft.set("batch.tokens", batch, reason)
    draft.step("batch", said, [*at.law_sources(optimal.by), *at.near.sources(named)])
    return batch


def _sequences(wanted: float, most: float, seq_len: int, gpus: int) -> int:
    """The nearest number of sequences 2^k or 3 x 2^k that is not above ``most``; of GPUs the odd factor goes in."""
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    bases = (1, 3) if odd == 1 else (odd,)
    sizes = [base << k for base in bases for k in range(48)]
    fitting = [size for size in sizes if size * seq_len <= most] or [min(sizes)]
    return min(fitting, key=lambda size: abs(math.log(size * seq_len / wanted)))


def _lr(draft: Draft, at: Setting, batch: int) -> float:
    lead, params = at.lead, at.model.params
    critical = critical_batch(at.laws)
    moved = {law.law: lr_at_batch(law, batch, critical) for law in at.laws}
    laws = middle({name: lr.square_root for name, lr in moved.items() if lr})
    said_laws = f"laws at this batch (x sqrt(batch / theirs)) {_range(laws, _short)} ({at.heard(laws)})"
    if lead and lead.peak_lr:
        draft.set(
            "hyperparameters.lr",
            lead.peak_lr,
            f"the peak of {lead.id}, with its batch, at its width and depth; {said_laws}",
        )
        draft.step(
            "lr",
            [f"{_short(lead.peak_lr)} peak, as {lead.id}, at its width and depth", said_laws],
            _lr_sources(at, laws, [lead.id]),
        )
        spread = max(laws.high, lead.peak_lr) / min(laws.low, lead.peak_lr)
        draft.unsure.append(Unsure("lr", spread, "tune it at small scale"))
        return lead.peak_lr
    near = middle(
        {run.id: run.peak_lr * (params / run.params_total) ** LR_SIZE_EXPONENT for run in at.near.runs if run.peak_lr}
    )
    low, high = near.low / LR_WIDENING, near.high * LR_WIDENING
    lr = float(f"{min(max(at.between(laws, near), low), high):.2g}")
    spread = max(laws.high, near.high) / min(laws.low, near.low)
    draft.set(
        "hyperparameters.lr",
        lr,
        f"between the middle of the laws, {_short(laws.value)} ({laws.told(_short)}, each moved to this batch by its "
        f"square root), and of the neighbours, {_short(near.value)} (each x (size / its size)^-1/3: "
        f"{near.told(_short)}); spread {spread:.3g}x, tune it",
    )
    draft.step(
        "lr",
        [
            f"{_short(lr)} peak",
            said_laws,
            f"neighbours, moved to this size, {_range(near, _short)}",
            "muP, Adafactor, AdEMAMix and Muon runs left out",
            f"spread {spread:.3g}x: tune it at small scale",
        ],
        _lr_sources(at, laws, near.by),
    )
    draft.unsure.append(Unsure("lr", spread, "tune it at small scale"))
    return lr


def _lr_sources(at: Setting, laws: Said, ids: Iterable[str]) -> list[str]:
    return [*at.law_sources(laws.by), *at.near.sources(ids)]


def _schedule(draft: Draft, at: Setting, batch: int) -> None:
    near, tokens = at.near, at.tokens
    steps = middle(
        near.of(
            lambda run: (
                run.warmup_fraction * run.tokens / run.batch_tokens
                if run.warmup_fraction and run.tokens and run.batch_tokens
                else None
            )
        )
    )
    wanted = steps.value * batch
    warmup = round(min(max(wanted, SHORTEST_WARMUP * tokens), LONGEST_WARMUP * tokens))
    bound = (
        ""
        if warmup == round(wanted)
        else f"; bounded at {LONGEST_WARMUP:.0%} of the run"
        if wanted > warmup
        else f"; at least {SHORTEST_WARMUP:.1%} of the run"
    )
    rounded = "{:,.0f}".format
    whose = f"as {near.lead.id}" if near.lead and near.lead.id in steps.by else "the middle of the neighbours"
    draft.set(
        "schedule.warmup_tokens",
        warmup,
        f"{steps.value:,.0f} steps, {whose} ({steps.told(rounded)}), x the batch{bound}",
    )
    decay = near.most("schedule.decay")
    assert decay is not None
    draft.set("schedule.decay", decay.value, decay.counted(str))
    # Of those that decay so: a floor belongs to its shape (0 to a linear one, 10% to a cosine).
    floors = near.values("schedule.min_lr_ratio")
    alike = {who: floor for who, floor in floors.items() if decay.by.get(who) == decay.value} or floors
    counts = list(alike.values())
    floor = float(max(dict.fromkeys(counts), key=counts.count))
    floor_said = Said(floor, alike)
    draft.set("schedule.min_lr_ratio", floor, f"of runs that decay so: {floor_said.counted('{:.3g}'.format)}")
    draft.step(
        "schedule",
        [
            f"warm-up {format_quantity(warmup)} tokens, {warmup / tokens:.2%} of the run",
            f"{steps.value:,.0f} steps, {whose} ({steps.low:,.0f} .. {steps.high:,.0f}){bound}",
            f"{decay.value} to {floor:.0%}",
        ],
        near.sources([*steps.by, *decay.by]),
    )


_ADAM = {
    "hyperparameters.beta1": 0.9,
    "hyperparameters.beta2": 0.95,
    "hyperparameters.eps": 1e-8,
    "hyperparameters.weight_decay": 0.1,
}


def _adam(draft: Draft, at: Setting, batch: int, lr: float) -> None:
    near, tokens = at.near, at.tokens
    draft.set(
        "hyperparameters.optimizer", "adamw", "every run here is one of Adam's, with decoupled decay since 2020"
    )
    chosen, counted = {}, []
    for path, usual in _ADAM.items():
        said = near.most(path)
        chosen[path] = float(said.value) if said else usual
        reason = said.counted("{:g}".format) if said else "no neighbour tells; what nearly all published runs have"
        counted += list(said.by) if said else []
        draft.set(path, chosen[path], reason)
    clip = near.most("hyperparameters.grad_clip")
    limit = float(clip.value) if clip else 1.0
    draft.set("hyperparameters.grad_clip", limit, clip.counted("{:g}".format) if clip else "as nearly all runs")
    decay, tau = chosen["hyperparameters.weight_decay"], power_lines_tau(at.model.params, tokens)
    by_tau = batch / (lr * tokens * tau)
    off = max(by_tau / decay, decay / by_tau) if decay else math.inf
    check = f"by Power Lines' timescale tau {tau:.2g} of the run it would be {by_tau:.2g}"
    draft.why["hyperparameters.weight_decay"] += f"; {check}"
    if off > 2:
        draft.unsure.append(Unsure("weight decay", off, f"the tau law would take {by_tau:.2g}"))
    _init(draft, at)
    std = draft.document["hyperparameters"]["init_std"]
    ends = draft.document["hyperparameters"].get("modules", {}).get("attention.out", {}).get("init_std", 1.0)
    width = at.lead.arch.d_model if at.lead and at.lead.arch.d_model else at.model.d_model
    places = ", ".join(f"{name} {value:.2g}" for name, value in _rules(width).items())
    draft.step(
        "adam, init",
        [
            f"betas {chosen['hyperparameters.beta1']:g}, {chosen['hyperparameters.beta2']:g}",
            f"eps {chosen['hyperparameters.eps']:g}",
            f"decay {decay:g} ({check})",
            f"clip {limit:g}",
            f"init std {std:.3g}, what ends a branch x {ends:.3g}",
            f"at width {width:,}: {places}",
        ],
        [*near.sources(counted), "Power Lines 2025 timescale: arXiv 2505.13738", INITS["mt-nlg"].source],
    )


def _rules(width: int) -> dict[str, float]:
    """What published rules give the inner matrices, by their names."""
    return {
        "mt-nlg sqrt(1/(3d))": math.sqrt(1 / (3 * width)),
        "small-init sqrt(2/(5d))": math.sqrt(2 / (5 * width)),
        "fan-in 1/sqrt(d)": math.sqrt(1 / width),
        "gpt2": 0.02,
    }


def _init(draft: Draft, at: Setting) -> None:
    model, lead = at.model, at.lead
    rules = _rules(model.d_model)
    scaled = {
        run.id: run.init_std * math.sqrt(run.arch.d_model)
        for run in at.near.runs
        if run.init_std and run.arch.d_model
    }
    if lead and lead.init_std:
        std, depth = lead.init_std, lead.arch.n_layers or model.n_layers
        residual = (lead.residual_init_std or std) / std
        reason = f"as {lead.id}, at its width"
        branch = f"as {lead.id}: std of what ends a branch over that of the rest"
        if lead.residual_init_std is None:
            residual, branch = (2 * depth) ** -0.5, f"1 / sqrt(2 L); {lead.id} does not tell"
    else:
        width, depth = (lead and lead.arch.d_model) or model.d_model, (lead and lead.arch.n_layers) or model.n_layers
        std, residual = math.sqrt(1 / (3 * width)), (2 * depth) ** -0.5
        others = ", ".join(f"{name} {value / rules['mt-nlg sqrt(1/(3d))']:.2g}x" for name, value in rules.items())
        told = ", ".join(f"{id} {value:.2g}" for id, value in scaled.items()) or "none tells"
        reason = (
            f"sqrt(1 / (3 x {width:,})), MT-NLG 530B and BLOOM-176B: the smallest rule, for too small is safer "
            f"than too large; against it {others}; std x sqrt(d) here 0.58, neighbours: {told}"
        )
        branch = "1 / sqrt(2 L): 2 L branches add up in the residual stream (GPT-2, Megatron-LM)"
        found = [*rules.values(), *(value / math.sqrt(model.d_model) for value in scaled.values())]
        draft.unsure.append(Unsure("init std", max(found) / min(found), "search it with the lr"))
    draft.set(
        "hyperparameters.init", "rule", "a number that the scaling rule can move to a proxy; named ones it may not"
    )
    draft.set("hyperparameters.init_std", float(f"{std:.3g}"), reason)
    for module in BRANCH_ENDS if residual != 1 else ():
        draft.set(f"hyperparameters.modules.{module}.init_std", float(f"{residual:.4g}"), branch)


def _ramp(draft: Draft, at: Setting, batch: int) -> None:
    near, lead, tokens = at.near, at.lead, at.tokens
    starts, lengths = batch_ramps()
    sequences = batch // at.model.seq_len
    ranks = math.gcd(at.gpus, sequences)  # the most that the batch divides over, and so its start has to
    shares = [n for n in range(2, MOST_INCREMENTS + 1) if sequences % (n * ranks) == 0]
    if lead:
        own_starts, own_lengths = batch_ramps([lead])
        ramps = bool(own_starts and own_lengths)
        start, length = own_starts.get(lead.id, 1.0), own_lengths.get(lead.id, 0.0)
        about = f"as {lead.id}" if ramps else f"{lead.id} had none, or does not tell enough of it"
        voters: list[str] = [lead.id]
    else:
        speak = [run for run in load_runs() if run.kind == "dense" and size_ratio(run, near.params) <= FACTOR]
        by_family = {run.family: run for run in (speak if near.within else near.runs)}
        votes = ramp_votes(list(by_family.values()))
        ramps = sum(votes.values()) * 2 > len(votes)
        start, length = middle(starts).value, middle(lengths).value
        yes, no = ([id for id, grew in votes.items() if grew is side] for side in (True, False))
        about = f"{len(yes)} of {len(votes)} families of this size grew it"
        about += (f": {', '.join(yes)}" if yes else "") + (f"; not {', '.join(no)}" if no else "")
        voters = list(votes)
    if not (ramps and shares):
        reason = about if not ramps else f"{about}; this batch has no whole share to start from"
        draft.why["batch.tokens"] += f"; no ramp: {about}"
        draft.step("ramp", [f"none: {reason}"], voters)
        return
    # Small starts bind the ranks of data parallelism, so that of the published ones the larger are nearer.
    part = min(shares, key=lambda n: abs(math.log(n * start)))
    first = sequences // part * at.model.seq_len
    ramp = Ramp(start_tokens=first, increment_tokens=first, over_tokens=max(round(length * tokens), 1))
    percent = "{:.1%}".format
    told = {
        "start_tokens": f"1/{part} of the batch; published starts: {middle(starts).told(percent)}",
        "increment_tokens": "as much as the start, so that each batch divides as the first does",
        "over_tokens": f"{length:.1%} of the run; published lengths: {middle(lengths).told(percent)}",
    }
    for key, value in ramp.model_dump().items():
        draft.set(f"batch.ramp.{key}", value, f"{told[key]}; {about}")
    draft.step(
        "ramp",
        [
            f"{format_quantity(first)} -> {format_quantity(batch)} over the first "
            f"{format_quantity(ramp.over_tokens)} tokens, {length:.1%} of the run",
            about,
            f"published lengths {', '.join(f'{id} {share:.1%}' for id, share in lengths.items())}",
            f"published starts {', '.join(f'{id} {share:.1%}' for id, share in starts.items())}",
        ],
        [*starts, *lengths, *voters],
    )


def rest(draft: Draft, at: Setting) -> None:
    """Steps 10 and 11: precision and scaling, then what guards the run, what comes next, what is least sure."""
    _precision(draft, at)
    _scaling(draft, at)
    draft.step(
        "layout, scale",
        [
            draft.document["precision"]["compute"],
            "one process, micro-batch timed where the run starts",
            f"rule complete-d-p, base {_base_text(draft)}",
        ],
    )
    tokens = at.tokens
    trouble = [run.id for run in at.near.runs if run.instabilities]
    draft.set(
        "stability.on_spike",
        "rollback",
        f"{len(trouble)} of {len(at.near.runs)} neighbours tell of trouble"
        + (f": {', '.join(trouble)}" if trouble else ""),
    )
    checkpoint, evaluation = max(tokens // 50, 1), max(tokens // 50, 1)
    held_out = min(max(tokens // 1_000, 8 * at.model.seq_len), 131_072)
    draft.set("stability.checkpoint_every_tokens", checkpoint, "a fiftieth of the run: what a crash costs at most")
    draft.set("evaluation.every_tokens", evaluation, "a fiftieth of the run")
    draft.set(
        "evaluation.tokens",
        held_out,
        "50 evaluations of a thousandth of the run are 2% of its forward passes; "
        "8 sequences at least, 131,072 tokens at most",
    )
    finished = draft.recipe().model_dump(mode="json", exclude_none=True, exclude={"why"})
    for path in flatten(finished):
        if path not in draft.why and path in DEFAULTS:
            draft.why[path] = DEFAULTS[path]
    said = [
        f"checkpoint and evaluation every {format_quantity(checkpoint)} tokens",
        "rollback from spikes",
        tuning(draft.recipe()),
        "least sure: "
        + "; ".join(
            f"{one.about}, {one.spread:.3g}x between its sources ({one.remedy})"
            for one in sorted(draft.unsure, key=lambda one: -one.spread)
        ),
    ]
    draft.step("guards, next", said)


def _precision(draft: Draft, at: Setting) -> None:
    said = at.near.most("precision.compute")
    counted = f" ({said.counted(str)})" if said else ""
    draft.set("precision.compute", "bf16", f"the range of fp32 without a loss scale{counted}")


def _scaling(draft: Draft, at: Setting) -> None:
    """The values are those of a scale: this one's, or with a lead its own, from where the rule moves them."""
    model, lead, batch = at.model, at.lead, draft.document["batch"]["tokens"]
    base = {"width": model.d_model, "depth": model.n_layers}
    why = (
        "this recipe's own scale: published values and laws are those of a size, so every ratio is 1 until it is "
        "transferred"
    )
    if lead and lead.arch.d_model and lead.arch.n_layers:
        group = model.n_heads // model.n_kv_heads
        unit = model.d_head * group
        width = max(round(lead.arch.d_model / unit), 1) * unit
        base = {
            "width": width,
            "depth": lead.arch.n_layers,
            "d_ff": lead.arch.d_ff or round(model.d_ff / model.d_model * width),
            "d_head": model.d_head,
            "n_kv_heads": width // unit,
        }
        rounded = "" if width == lead.arch.d_model else f" (its width of {lead.arch.d_model:,} in whole heads)"
        why = (
            f"the width and depth of {lead.id}{rounded}, from where the rule moves its values to this shape; "
            "not moved for tokens, for on those laws disagree in sign"
        )
    for key, value in (base | {"batch_tokens": batch, "tokens": at.tokens}).items():
        draft.set(f"scaling.base.{key}", value, why)
    draft.set(
        "scaling.rule",
        "complete-d-p",
        "at the base it multiplies nothing, as the standard parametrisation; from there transfer moves width, depth, "
        "batch and tokens by it (arXiv 2512.22382)",
    )


def _base_text(draft: Draft) -> str:
    base, model = draft.document["scaling"]["base"], draft.document["model"]
    wider, deeper = model["d_model"] / base["width"], model["n_layers"] / base["depth"]
    ratios = "its own, every ratio is 1" if wider == deeper == 1 else f"width x{wider:.3g}, depth x{deeper:.3g}"
    return f"width {base['width']:,} and depth {base['depth']}: {ratios}"


def _range(said: Said, show: Callable[[float], str]) -> str:
    """``0.00045 (0.0001 .. 0.002)``: middle, lowest, highest."""
    return f"{show(said.value)} ({show(said.low)} .. {show(said.high)})"


def _short(value: float) -> str:
    return f"{value:.2g}"
