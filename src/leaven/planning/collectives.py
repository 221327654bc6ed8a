"""Compute the time of communication between accelerators: reduce-scatter, all-gather, all-reduce, all-to-all.

A group is the set of ranks that communicate. ``stride`` is the distance from one rank of the group to the next: for
example, with tp = 8 a data-parallel group has the ranks 0, 8, 16, ... and stride 8.
"""

from math import ceil, comb, log2

from leaven.planning.accelerators import Accelerator

# Share of a link's bandwidth that a collective reaches.
LINK_SHARE = 0.65
# Latency of one step of a ring in seconds, inside a node and between nodes.
LINK_LATENCY, NETWORK_LATENCY = 3e-6, 25e-6


def bandwidth(ranks: int, stride: int, accelerator: Accelerator) -> float:
    """Return the bandwidth that a collective reaches on one rank of a group, in bytes/s.

    Between nodes, a group uses one NIC for each of its ranks in a node, up to the bandwidth of a link in the node.
    """
    gb_s = accelerator.link_gb_s
    if ranks * stride > accelerator.node_size:
        members = max(1, accelerator.node_size // stride)
        gb_s = min(gb_s, members * accelerator.network_gb_s)
    return gb_s * 1e9 * LINK_SHARE


def ring(size: float, ranks: int, stride: int, accelerator: Accelerator, messages: int = 1) -> float:
    """Return the seconds of a reduce-scatter or an all-gather of ``size`` bytes, split into ``messages`` messages."""
    if ranks == 1:
        return 0.0
    nodes = _nodes(ranks, stride, accelerator)
    between = nodes if nodes > 1 else 0
    latency = between * NETWORK_LATENCY + (ranks - 1 - between) * LINK_LATENCY
    return (ranks - 1) / ranks * size / bandwidth(ranks, stride, accelerator) + messages * max(0.0, latency)


def all_reduce(size: float, ranks: int, stride: int, accelerator: Accelerator, messages: int = 1) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes, which sends twice the bytes of a reduce-scatter.

    NCCL can use a ring or a tree of nodes, so the lower of their latencies counts.
    """
    if ranks == 1:
        return 0.0
    nodes = _nodes(ranks, stride, accelerator)
    tree = 2 * ceil(log2(nodes)) * NETWORK_LATENCY + 2 * (ceil(ranks / nodes) - 1) * LINK_LATENCY
    rings = 2 * ring(0.0, ranks, stride, accelerator)
    moved = 2 * (ranks - 1) / ranks * size / bandwidth(ranks, stride, accelerator)
    return moved + messages * min(tree, rings)


def _nodes(ranks: int, stride: int, accelerator: Accelerator) -> int:
    """Return the number of nodes over which a group is spread."""
    size = accelerator.node_size
    return 1 if ranks * stride <= size else ceil(ranks / max(1, size // stride))


def all_to_all(size: float, ranks: int, stride: int, accelerator: Accelerator) -> float:
    """Return the seconds of an all-to-all of ``size`` bytes per rank, among ranks whose numbers are ``stride`` apart.

    Links and network send at the same time, so the longer time counts.
    """
    if ranks == 1:
        return 0.0
    near = min(ranks, max(1, accelerator.node_size // stride))  # ranks of the group in a node
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
) -> float:
    """Return the seconds in which a rank sends its tokens to their experts, without sending a token twice to a rank.

    A token crosses the network once for each other node with at least one of the token's experts. The links of that
    node pass the token on. Links and network send at the same time, so the longer time counts.

    Args:
        size: bytes of the rank's tokens.
        experts: the number of experts in a layer, and how many of them a token uses.
        network_share: share of the network's bandwidth that the exchange reaches.
    """
    if ranks == 1:
        return 0.0
    near = min(ranks, max(1, accelerator.node_size // stride))  # ranks of the group in a node
    nodes = ceil(ranks / near)
    number, used = experts

    def reached(groups: int) -> float:
        """Return how many of ``groups`` equal groups of experts have, on average, at least one of a token's
        experts."""
        each = max(1, number // groups)
        return number // each * (1 - comb(number - each, used) / comb(number, used))

    inside = reached(nodes * near) * (near - 1) / near
    across = reached(nodes) * (nodes - 1) / nodes
    return max(
        hop(inside * size, near * stride, accelerator) if near > 1 else 0.0,
        hop(across * size, ranks * stride, accelerator, network_share) if nodes > 1 else 0.0,
    )


def hop(size: float, span: int, accelerator: Accelerator, share: float = LINK_SHARE) -> float:
    """Return the seconds that a rank needs to send ``size`` bytes to other ranks.

    ``span`` is the number of neighbouring ranks that include the sender and all receivers. If it is above the size of
    a node, the bytes go over the network. ``share`` is the share of the bandwidth that is reached.
    """
    across = span > accelerator.node_size
    gb_s = accelerator.network_gb_s if across else accelerator.link_gb_s
    return size / (gb_s * 1e9 * share) + (NETWORK_LATENCY if across else LINK_LATENCY)
