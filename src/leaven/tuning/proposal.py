"""What an objective is asked: a point, and for those who want to know, which run of it."""

from collections.abc import Mapping

from leaven.training.outcome import Rival


class Proposal(dict[str, float]):
    """Log2 multipliers by name: to an objective it is a dict like any other.

    ``seed`` is 0 throughout the search, so that trials are compared with one init and one order of data, and 1, 2
    and so on in the runs that measure the noise or judge the best few. ``origin`` is the trial that a retry repeats
    (its own ``number`` otherwise): the name under which to look for a checkpoint. ``rival`` is the best trial so far
    that has a curve, for an objective that gives up on hopeless runs; None in runs that must end. ``worker`` says which
    thread of this command calls, from 0: no two do so at once with the same one.
    """

    def __init__(
        self,
        point: Mapping[str, float],
        number: int,
        seed: int = 0,
        origin: int | None = None,
        rival: Rival | None = None,
        *,
        worker: int = 0,
    ) -> None:
        super().__init__(point)
        self.number, self.seed, self.rival, self.worker = number, seed, rival, worker
        self.origin = number if origin is None else origin
