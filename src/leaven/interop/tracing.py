"""Run a model to find the norms after its residual branches, and run a norm to see if it multiplies by 1 + weight."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leaven.errors import InputError

TOKENS = 4  # number of tokens in the sequence on which a model is run


@torch.no_grad()
def output_norms(model: nn.Module, ends: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, str]:
    """Return the paths of modules that normalise the output of a residual branch, each with the name of the branch.

    A copy of the model with random weights is run twice for each branch. The outputs of the branch's last matrices
    are replaced by random values, and in the second run by four times these values. A norm on the branch's output
    then gets four times the input, and returns the same output. The input of other norms also contains the embedding,
    so it is not four times as large.

    Args:
        model: a small model of the family.
        ends: by branch and block, the path of the branch's last matrix, or the paths for all experts.

    Raises:
        InputError: if a norm cancels the multiplier of a branch, but is not a module, or is also used elsewhere.
        Exception: of any type, if the model cannot be copied, or cannot be called with only token ids.
    """
    copied = copy.deepcopy(model).eval()
    if any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers())):
        copied.to_empty(device="cpu")
        for buffer in copied.buffers():
            buffer.zero_()
    for parameter in copied.parameters():
        parameter.copy_(0.1 * _random(parameter))
    found: dict[str, str] = {}
    for branch, blocks in ends.items():
        paths = [path for block in blocks for path in block]
        once, fourfold = (_run(copied, paths, scale) for scale in (1.0, 4.0))
        norms = [
            path
            for path, (before, after) in once.items()
            if path in fourfold
            and torch.equal(fourfold[path][0], 4 * before)
            and after.any()
            and torch.allclose(fourfold[path][1], after, rtol=1e-2)
        ]
        # A module that only calls a norm also matches; keep the norm inside it.
        found |= {path: branch for path in norms if not any(other.startswith(f"{path}.") for other in norms)}
    for branches in [*((branch,) for branch in ends), tuple(ends)]:
        first = [path for branch in branches for path in ends[branch][0]]
        once, fourfold = (_run(copied, first, scale) for scale in (1.0, 4.0))
        missing = set(branches) - set(found.values())
        if missing and all(any(path in once for path in ends[branch][0]) for branch in branches):
            last = next(reversed(once))  # the readout, or the final norm
            after = once[last][1].double()
            if (fourfold[last][1].double() - after).norm() <= 1e-3 * after.norm():
                raise InputError(
                    f"a multiplier of {' and '.join(branches)} ({first[0]}) would have no effect: a norm "
                    "after the branch cancels it, and leaven cannot put the multiplier after this norm, which is "
                    "not a module; normalise the output of each branch with a module, such as nn.RMSNorm"
                )
    return found


def _run(model: nn.Module, ends: Sequence[str], scale: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Run a model. Return (first input, output) of each module with floating-point input, by path.

    The modules at the paths ``ends`` return random values of RMS ``scale`` instead.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def replaced(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return scale * _random(output, seed=1)  # not the seed of the weights

    def record(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
            tensors = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor)]
            if tensors and isinstance(output, Tensor) and tensors[0].is_floating_point():
                seen[path] = tensors[0], output

        return hook

    handles = [model.get_submodule(path).register_forward_hook(replaced) for path in ends]
    handles += [
        module.register_forward_hook(record(path), with_kwargs=True) for path, module in model.named_modules()
    ]
    try:
        model(torch.arange(TOKENS, device=next(model.parameters()).device)[None])
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _random(like: Tensor, seed: int = 0) -> Tensor:
    """Return standard normal values in a tensor's shape, without using torch's global generators."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


@torch.no_grad()
def is_offset(norm: nn.Module) -> bool:
    """Return whether a norm multiplies by 1 + its weight, tested on a copy. Return False if the test fails."""
    try:
        copied = copy.deepcopy(norm)
        copied._forward_hooks.clear()
        if any(parameter.is_meta for parameter in copied.parameters()):
            copied.to_empty(device="cpu")
        weight = next(copied.parameters())
        x = _random(weight)[None]
        for parameter in copied.parameters():
            parameter.zero_()
        at_zero = copied(x)
        weight.fill_(1.0)
        return bool(at_zero.any()) and torch.allclose(copied(x), 2 * at_zero)
    except Exception:  # from the user's own code
        return False
