"""A Hugging Face Llama under a rule, for `leaven check`, from this folder:

    leaven check coordinates llama:complete_d_p
    leaven check coordinates llama:standard        # fails, and should

The model is built from a configuration; nothing is downloaded.
"""

from functools import partial
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import leaven

BASE_WIDTH, BASE_DEPTH, HEAD = 64, 2, 16


def llama(width: int, depth: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            num_key_value_heads=width // HEAD,
            vocab_size=256,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )


def factory(width: int, depth: int, rule: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model of a width and depth, and its AdamW groups under the rule."""
    model = llama(width, depth)
    std = BASE_WIDTH**-0.5
    groups = leaven.parametrize(
        model,
        base=llama(BASE_WIDTH, BASE_DEPTH),
        hyperparameters={
            "lr": 0.01,
            "init_std": std,
            # A residual stream of size 1 and logits that start at 0: where large models are, and slopes show at once.
            "modules": {"embedding": {"init_std": 1 / std}, "unembedding": {"init_std": 0.0}},
        },
        rule=rule,
        initialise=True,
    )
    return model, groups


complete_d_p = partial(factory, rule="complete-d-p")
standard = partial(factory, rule="standard")
