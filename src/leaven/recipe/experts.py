"""The experts of a mixture-of-experts model: their number and sizes, the router, and how its load is balanced."""

from typing import Literal

from pydantic import Field, model_validator

from leaven.recipe.base import Part


class Experts(Part):
    """The mixture of experts that replaces the MLP of a block.

    The output is the sum of the chosen experts' outputs, weighted by the router. No token is dropped. Shared
    experts read every token; their outputs are added without a weight.
    """

    number: int = Field(gt=1, le=2**16)  # number of routed experts in a block
    active: int = Field(gt=0)  # number of routed experts that each token uses
    # Intermediate size of one expert. d_ff / d_expert is the granularity (Krajewski et al. 2024, arXiv 2402.07871).
    d_expert: int = Field(gt=0, le=2**22)
    shared: int = Field(default=0, ge=0, le=2**16)  # shared experts; together they are one MLP of shared x d_expert
    dense_layers: int = Field(default=0, ge=0)  # number of first layers that have an MLP of size d_ff, not experts
    # How the router turns its logits into scores. softmax: over all experts (Mixtral, Qwen3, OLMoE); sigmoid: of each
    # expert by itself (DeepSeek-V3). The experts with the highest scores are chosen.
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # divide the chosen experts' scores by their sum (Mixtral, Qwen3, DeepSeek-V3; not OLMoE)
    weight_scale: float = Field(default=1.0, gt=0)  # factor on the weights of the chosen experts (DeepSeek-V3: 2.5)
    # How the load is balanced. loss: a loss that is small if each sequence uses all experts equally often. bias: each
    # expert has a bias, which is added to its score when experts are chosen, but not to its weight. After a step, the
    # bias rises if the expert had less than the mean load, and falls if not (Wang et al. 2024, arXiv 2408.15664).
    # both: the loss and the bias (DeepSeek-V3, with balance_loss = 1e-4). none: the load is not balanced.
    balance: Literal["loss", "bias", "both", "none"] = "loss"
    # Coefficient of the balance loss (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20); only with balance = "loss"
    # or "both". The loss of a sequence is 1 at an even load. It is averaged over sequences and summed over layers.
    # Scaling rules for depth multiply the coefficient by the same factor as the residual branches, so that the share
    # of this loss in the router's gradient does not change.
    balance_loss: float = Field(default=0.01, ge=0)
    bias_step: float = Field(default=0.001, gt=0)  # change of a bias in a step; only with balance = "bias" or "both"
    # Coefficient of the router's z-loss, (log of the sum of exp(logit) over experts)^2; scaled like balance_loss.
    router_z_loss: float = Field(default=0.0, ge=0)

    @property
    def balanced_by_loss(self) -> bool:
        return self.balance in {"loss", "both"}

    @property
    def balanced_by_bias(self) -> bool:
        return self.balance in {"bias", "both"}

    @model_validator(mode="after")
    def _validate(self) -> "Experts":
        if self.active > self.number:
            raise ValueError(f"active {self.active} is more than number {self.number}; lower active, or raise number")
        if self.active == 1 and self.normalise:
            raise ValueError(
                "with active = 1 and normalise, the weight of the expert is always 1, and the router does not learn "
                "which experts are good; set normalise = false"
            )
        if self.active == self.number and self.balance != "none":
            raise ValueError(
                f'all {self.number} experts are active, so their load is always balanced; set balance = "none", or '
                "lower active"
            )
        return self
