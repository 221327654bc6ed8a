"""Adam's values in a starter, and the standard deviations that its weights start with."""

import math

from leaven.catalogue.derivation import Draft, Unsure
from leaven.catalogue.laws import power_lines_tau
from leaven.catalogue.starter.setting import Setting
from leaven.recipe.init_std import INITS
from leaven.recipe.shape import BRANCH_ENDS

_ADAM = {
    "hyperparameters.beta1": 0.9,
    "hyperparameters.beta2": 0.95,
    "hyperparameters.eps": 1e-8,
    "hyperparameters.weight_decay": 0.1,
}


def choose_adam(draft: Draft, at: Setting, batch: int, lr: float) -> None:
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
    if not at.lead and not at.model.tied_embeddings:
        without = (
            "small embeddings have large gradients; OLMo 2 left their decay out against spikes (arXiv 2501.00656)"
        )
        draft.set("hyperparameters.modules.embedding.weight_decay", 0.0, without)
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
    # With norms on the branches' outputs a flat and large start is fine (OLMo 2: 0.02); in pre-norm blocks it is not.
    pre_norm = lead is None or lead.arch.norm_placement in (None, "pre")
    if lead and lead.init_std and pre_norm:
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
