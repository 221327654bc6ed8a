"""Generate text from a model, one token at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.model.transformer import Transformer
from leaven.recipe.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token (Holtzman et al. 2020, arXiv 1904.09751).

    The logits are divided by ``temperature`` first. The most likely token is always kept.

    Raises:
        InputError: if a value is out of range.
    """

    temperature: float = 1.0  # at 0, the most likely token is chosen
    top_k: int = 0  # keep only so many tokens; 0 keeps all
    top_p: float = 1.0  # then keep the fewest tokens with this total probability

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # also refuses NaN
            raise InputError(f"temperature {self.temperature:g}: give a finite number of at least 0")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k}: give a count, or 0 for all tokens")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top-p {self.top_p:g}: give a share from 0 to 1")

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the probabilities of all tokens, (V) -> (V), in float64."""
        logits_V = logits_V.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
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
    """Yield the tokens that follow ``tokens``, until ``end`` (not included) or ``max_tokens``.

    Token ids from ``vocabulary`` on have no text and are never drawn. The model sees the last ``seq_len`` tokens.
    There is no key-value cache, so each token costs a forward pass over its whole context.
    """
    device, context = model.embedding.weight.device, list(tokens)
    for _ in range(max_tokens):
        window_BT = torch.tensor([context[-model.shape.seq_len :]], device=device)
        last_D = model.hidden(window_BT)[0, -1]  # the logits of the others are not needed
        logits_V = model.logit_multiplier * (model.readout @ last_D)
        likely_V = sampling.probabilities(logits_V[:vocabulary].cpu())
        token = int(torch.multinomial(likely_V, 1, generator=generator))
        if token == end:
            return
        yield token
        context.append(token)
