"""Generate text from a model, one token at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.errors import InputError
from leaven.model.kernels import widened
from leaven.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing the next token, used in this order (Holtzman et al. 2020, arXiv 1904.09751). The
    most likely token always remains possible. A value out of range raises InputError."""

    temperature: float = 1.0  # at 0, the most likely token is chosen
    top_k: int = 0  # keep only this number of most likely tokens; 0 keeps all
    top_p: float = 1.0  # after top_k, keep the fewest most likely tokens with at least this total probability

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # also refuses NaN
            raise InputError(f"temperature {self.temperature:g} is out of range; give 0 or a finite positive number")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k} is negative; give a number of tokens, or 0 for all tokens")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top-p {self.top_p:g} is out of range; give a number from 0 to 1")

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return each token's probability, (V,), in float64. On mps, the dtype is float32."""
        logits_V = widened(logits_V)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).to(logits_V)
        # Subtract the maximum first, so that a tiny temperature gives -inf and not NaN.
        below_V = (logits_V - logits_V.max()) / self.temperature
        ordered_V, places_V = torch.sort(below_V, descending=True, stable=True)
        if self.top_k:
            ordered_V[self.top_k :] = -torch.inf
        likely_V = ordered_V.softmax(0)
        before_V = likely_V.cumsum(0) - likely_V
        before_V[0] = -1.0  # keep the most likely token even if top_p is 0
        likely_V = torch.where(before_V < self.top_p, likely_V, 0.0)
        return torch.zeros_like(likely_V).scatter(0, places_V, likely_V / likely_V.sum())


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Sequence[int],
    *,
    sampling: Sampling,
    generator: torch.Generator,
    vocabulary: int,
    end: int,
    max_tokens: int,
) -> Iterator[int]:
    """Yield up to ``max_tokens`` tokens that continue ``tokens``. Stop before the token ``end``. Draw only ids
    below ``vocabulary``. There is no key-value cache, so each token needs a forward pass over its context."""
    device, context = model.embedding.weight.device, list(tokens)
    for _ in range(max_tokens):
        window_BT = torch.tensor([context[-model.shape.seq_len :]], device=device)
        last_D = model.hidden(window_BT)[0, -1]  # the logits of other positions are not needed
        logits_V = model.capped(model.logit_multiplier * (model.readout @ last_D))
        likely_V = sampling.probabilities(logits_V[:vocabulary].cpu())
        token = int(torch.multinomial(likely_V, 1, generator=generator))
        if token == end:
            return
        yield token
        context.append(token)
