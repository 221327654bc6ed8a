"""The scale that hyperparameters are written at: of the proxy, of a tuned base of leaven's, or of the target."""

from dataclasses import dataclass

from leaven.catalogue.derivation import Draft
from leaven.catalogue.starter.asked import Asked
from leaven.catalogue.starter.proxy import TuningAdvice, choose_proxy
from leaven.catalogue.starter.setting import Setting
from leaven.catalogue.starter.tuned import tuned_base
from leaven.catalogue.votes import neighbours
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.recipe.units import format_quantity


@dataclass(frozen=True)
class StarterBase:
    """Where the hyperparameters of a starter belong."""

    setting: Setting
    batch_tokens: int
    tuning: TuningAdvice
    tuned: Recipe | None = None  # the base of leaven's own whose values are taken

    @property
    def shape(self) -> ModelShape:
        return self.setting.model


def choose_base(draft: Draft, asked: Asked, at: Setting, batch: int) -> StarterBase:
    """The proxy's scale where one is worth tuning, else the target's own."""
    if at.lead:
        if asked.proxy:
            raise InputError(
                f"--proxy with --from {at.lead.id}: its values are taken as they are; leave one of them out"
            )
        tuning = TuningAdvice(
            None, f"the values of {at.lead.id} are taken as they are; to tune a proxy leave out --from"
        )
        return StarterBase(at, batch, tuning)
    if asked.proxy == 0:
        tuning = TuningAdvice(None, "no proxy was asked for")
    else:
        tuning = choose_proxy(at.model, batch, at.tokens, at.near.lineages_within, asked.proxy)
    proxy = tuning.proxy
    tuned = None if at.near.within else tuned_base(at.model, at.tokens)
    if tuned:
        shape = at.model.scaled(tuned.model.d_model, tuned.model.n_layers, d_ff=tuned.model.d_ff)
        own = Setting(at.near, shape, tuned.data.tokens, 1)
        search = f"a search on your text, with {format_quantity(proxy.shape.params)}, " if proxy else "no search: "
        draft.step(
            "proxy",
            [
                f"nothing near this size is published; the values are those of {tuned.name}, which leaven has tuned",
                f"{search}{tuning.reason}",
            ],
        )
        return StarterBase(own, tuned.batch.tokens, tuning, tuned)
    if proxy is None:
        draft.step("proxy", [f"none: {tuning.reason}", "lr, moments, decay and init are chosen at this size"])
        return StarterBase(at, batch, tuning)
    shape = proxy.shape
    setting = Setting(neighbours(shape.params, proxy.tokens), shape, proxy.tokens, 1)
    draft.step(
        "proxy",
        [
            f"tune {format_quantity(shape.params)} parameters on {format_quantity(proxy.tokens)} tokens, batch "
            f"{format_quantity(proxy.batch_tokens)}: {tuning.reason}",
            f"L {shape.n_layers}  d {shape.d_model:,}  d_ff {shape.d_ff:,}",
            f"as many tokens a parameter as the target, {setting.tokens_per_parameter:,.4g}, and nearly as many "
            f"steps: {proxy.tokens // proxy.batch_tokens:,} for {at.tokens // batch:,} at the full batch",
            proxy.evidence,
            "lr, moments, decay and init are chosen there, and the rule carries them up",
        ],
        ["arXiv 2512.22382"],
    )
    return StarterBase(setting, proxy.batch_tokens, tuning)
