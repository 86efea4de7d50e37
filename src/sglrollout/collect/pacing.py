"""How far rollouts may run ahead of the trainer, so that nothing is too stale when it is used.

The trainer takes batches of ``B`` groups, and at most one between two weight syncs, or several where it does not sync.
Call the version of the weights now ``V``, a group's birth the version of its oldest token (of its admission, before it
has one), and ``h`` the bound. A group born at ``b`` is in time for batches that are used at versions up to ``b + h``:
its *deadline*. Up to version ``d`` at least ``slots(d) = (d - V + 1 - away) * B`` places in batches are still to come,
``away`` being 1 while the trainer holds a batch of this version, for it will take the next one at a later version.

The invariant is that of earliest-deadline-first scheduling: for each ``d``, no more than ``slots(d)`` groups that are
not yet delivered have a deadline up to ``d``. It is kept

- on admission, which waits until it would hold (:meth:`Pacer.admits`);
- on delivery, which waits for older groups to finish where it would break (:meth:`Pacer.waits`). So long samples
  are waited for, not thrown away;
- by a sync after each batch, which takes one version from ``d - V`` and gives back ``away``.

So a group that is due is always in the batch, and none is ever stale. Two syncs without a batch between them take
``B`` places away that were counted on: what is then too old starts over (:meth:`Pacer.overdue`).

Over-sampling puts ``spare`` groups beyond that where there are places at all, and as many may be left over at delivery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator


class Pacer:
    """The bound, and where the trainer is.

    Args:
        batch_size: groups per batch; ``None`` is one batch of all.
        max_staleness: ``None`` is no bound: then only ``ahead`` limits how far rollouts run ahead.
        spare: groups to start beyond those that are needed.
        ahead: without a bound: groups to have on their way, delivered or not, beyond the batch that is waited for.
        version: of the weights now.
    """

    def __init__(
        self, batch_size: int | None, max_staleness: int | None, spare: int, ahead: int, version: int = 0
    ) -> None:
        self.batch_size, self.max_staleness, self.spare, self.ahead = batch_size, max_staleness, spare, ahead
        self.version = version
        self.away = False
        """The trainer holds a batch of this version, and does not ask for another."""

    def advance(self, version: int) -> None:
        """A sync brought ``version``; the trainer has taken no batch of it yet."""
        self.version, self.away = version, False

    def overdue(self, birth: int) -> bool:
        """Whether a group would be too stale in a batch used now."""
        return self.max_staleness is not None and birth + self.max_staleness < self.version

    def admits(self, birth: int, births: Counter[int], num_running: int) -> bool:
        """Whether one more group may start.

        Args:
            birth: of the group.
            births: how many undelivered groups there are of each birth.
            num_running: how many of them are being sampled.
        """
        total = births.total()
        if self.batch_size is None:
            return num_running < self.ahead + self.spare
        if self.max_staleness is None:
            return total < (1 - self.away) * self.batch_size + self.ahead + self.spare
        with_it = births + Counter({birth: 1})
        return all(
            excess <= (self.spare if deadline - self.version + 1 > self.away else 0)
            for deadline, excess in self._excess(with_it, self.away)
            if deadline >= birth + self.max_staleness
        )

    def waits(self, chosen: Counter[int], left: Counter[int]) -> bool:
        """Whether a batch must wait: taken now, it would leave behind more of the older groups than there is time for.

        Args:
            chosen: births of the groups in the batch.
            left: births of the other undelivered groups.
        """
        if self.batch_size is None or self.max_staleness is None:
            return False
        latest = max(chosen) + self.max_staleness
        return any(excess > self.spare and deadline < latest for deadline, excess in self._excess(left, True))

    def surplus_born_by(self, left: Counter[int]) -> int | None:
        """After a batch was taken: a birth up to which there are now more groups than there is time for, if so.

        Without a bound there is time for all, and it is that of the youngest.
        """
        if self.batch_size is None or self.max_staleness is None:
            return max(left, default=None)
        found = next((deadline for deadline, excess in self._excess(left, True) if excess > 0), None)
        return None if found is None else found - self.max_staleness

    def _excess(self, births: Counter[int], away: bool) -> Iterator[tuple[int, int]]:
        """For each deadline, earliest first: groups due up to it, beyond the places in batches up to it."""
        assert self.batch_size is not None
        assert self.max_staleness is not None
        num_due = 0
        for birth in sorted(births):
            num_due += births[birth]
            deadline = birth + self.max_staleness
            slots = max(0, deadline - self.version + 1 - away) * self.batch_size
            yield deadline, num_due - slots
