"""Compute the time of communication in a group of ranks: reduce-scatter, all-gather, all-reduce, all-to-all.

``stride`` is the distance from one rank of the group to the next. With tp = 8, a data-parallel group has the ranks 0,
8, 16, ... and stride 8.
"""

from functools import cache
from math import ceil, comb, gcd, log2

from leaven.planning.accelerators import Accelerator

LINK_SHARE = 0.65  # of a link's bandwidth that a collective reaches
LINK_LATENCY, NETWORK_LATENCY = 3e-6, 25e-6  # seconds of one step of a ring, inside a node and between nodes


def bandwidth(ranks: int, stride: int, accelerator: Accelerator) -> float:
    """Return the bytes/s that each rank of a group sends in a collective: ``LINK_SHARE`` of a peak bandwidth.

    Inside a node, the peak is the bandwidth of the link, such as NVLink. Between nodes, it is the summed bandwidth of
    the NICs of the group's ranks in one node, but at most the bandwidth of the link.
    """
    gb_s = accelerator.link_gb_s
    if ranks * stride > accelerator.node_size:
        gb_s = min(gb_s, _in_a_node(ranks, stride, accelerator) * accelerator.network_gb_s)
    return gb_s * 1e9 * LINK_SHARE


def _in_a_node(ranks: int, stride: int, accelerator: Accelerator) -> int:
    return min(ranks, max(1, accelerator.node_size // stride))


def ring(size: float, ranks: int, stride: int, accelerator: Accelerator, messages: int = 1) -> float:
    """Return the seconds to reduce-scatter or all-gather a tensor of ``size`` bytes in ``messages`` messages."""
    if ranks == 1:
        return 0.0
    nodes = ceil(ranks / _in_a_node(ranks, stride, accelerator))
    between = nodes if nodes > 1 else 0
    latency = between * NETWORK_LATENCY + (ranks - 1 - between) * LINK_LATENCY
    return (ranks - 1) / ranks * size / bandwidth(ranks, stride, accelerator) + messages * max(0.0, latency)


def all_reduce(size: float, ranks: int, stride: int, accelerator: Accelerator, messages: int = 1) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes in ``messages`` messages, over a ring or a tree."""
    if ranks == 1:
        return 0.0
    nodes = ceil(ranks / _in_a_node(ranks, stride, accelerator))
    tree = 2 * ceil(log2(nodes)) * NETWORK_LATENCY + 2 * (ceil(ranks / nodes) - 1) * LINK_LATENCY
    rings = 2 * ring(0.0, ranks, stride, accelerator)
    moved = 2 * (ranks - 1) / ranks * size / bandwidth(ranks, stride, accelerator)
    return moved + messages * min(tree, rings)


def all_to_all(size: float, ranks: int, stride: int, accelerator: Accelerator) -> float:
    """Return the seconds of an all-to-all of ``size`` bytes per rank. Links and network work in parallel."""
    if ranks == 1:
        return 0.0
    near = _in_a_node(ranks, stride, accelerator)
    inside = hop((near - 1) / ranks * size, near * stride, accelerator) if near > 1 else 0.0
    across = hop((ranks - near) / ranks * size, ranks * stride, accelerator) if ranks > near else 0.0
    return max(inside, across)


def send_once(
    size: float,
    ranks: int,
    stride: int,
    accelerator: Accelerator,
    *,
    experts: tuple[int, int],
    network_share: float = LINK_SHARE,
    consecutive: bool = False,
) -> float:
    """Return the seconds in which a rank sends ``size`` bytes of tokens to the ranks of their experts.

    A token is sent to a rank only once, even if several of its experts are there. It crosses the network
    once for each other node with any of its experts. ``experts`` and ``consecutive``: see :func:`reached`.
    """
    if ranks == 1:
        return 0.0
    near = _in_a_node(ranks, stride, accelerator)
    nodes = ceil(ranks / near)
    inside = reached(nodes * near, experts, consecutive) * (near - 1) / near
    across = reached(nodes, experts, consecutive) * (nodes - 1) / nodes
    return max(
        hop(inside * size, near * stride, accelerator) if near > 1 else 0.0,
        hop(across * size, ranks * stride, accelerator, network_share) if nodes > 1 else 0.0,
    )


@cache
def reached(groups: int, experts: tuple[int, int], consecutive: bool = False) -> float:
    """Return the mean number of groups, such as ranks, that a token is sent to, out of ``groups``.

    Each group has the same number of experts. ``experts`` is (experts in total, experts per token). A token uses
    random experts. With ``consecutive``, token i instead uses consecutive experts, from number
    i x (experts per token) on, modulo the experts in total.
    """
    number, used = experts
    each = max(1, number // groups)
    if not consecutive:
        return number // each * (1 - comb(number - each, used) / comb(number, used))
    firsts = range(0, number, gcd(number, used))
    return sum(len({(first + other) % number // each for other in range(used)}) for first in firsts) / len(firsts)


def hop(size: float, span: int, accelerator: Accelerator, share: float = LINK_SHARE) -> float:
    """Return the seconds that sending ``size`` bytes takes: the latency, and the time at ``share`` x bandwidth.

    The sender and all receivers are within ``span`` consecutive ranks. If ``span`` is above the size of a node, they
    use the network, otherwise the links within a node.
    """
    across = span > accelerator.node_size
    gb_s = accelerator.network_gb_s if across else accelerator.link_gb_s
    return size / (gb_s * 1e9 * share) + (NETWORK_LATENCY if across else LINK_LATENCY)
