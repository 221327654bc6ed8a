"""Text from a model, a token at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaven.model.transformer import Transformer
from leaven.recipe.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the ``top_k`` likeliest (0: all), of these from the fewest that hold
    ``top_p`` of the probability (Holtzman et al. 2020, arXiv 1904.09751), both after the logits are divided by
    ``temperature``. At temperature 0 it is the likeliest, and the likeliest is always among them.

    Raises:
        InputError: if one of them is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # nor what is no number
            raise InputError(f"temperature {self.temperature:g}: give a number from 0 on")
        if self.top_k < 0:
            raise InputError(f"top-k {self.top_k}: give a count, or 0 for all tokens")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top-p {self.top_p:g}: give a share from 0 to 1")

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """(V) -> (V), in float64."""
        logits_V = logits_V.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
        # Below the largest, which is 0: what is divided by next to nothing is -inf, and no difference of infinities.
        below_V = (logits_V - logits_V.max()) / self.temperature
        ordered_V, places_V = torch.sort(below_V, descending=True, stable=True)
        if self.top_k:
            ordered_V[self.top_k :] = -torch.inf
        likely_V = ordered_V.softmax(0)
        before_V = likely_V.cumsum(0) - likely_V
        before_V[0] = -1.0  # it stays, also where top_p is 0
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
    """The tokens that follow ``tokens``, until ``end`` (which is not given) or ``max_tokens`` of them.

    Tokens from ``vocabulary`` on have no text and are not drawn. The model sees the last ``seq_len`` tokens, all of
    them anew for each token: nothing is cached, so a token costs a forward pass over its context.
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
