"""What a sync did and how long each part of it took; what a verification compared."""

from __future__ import annotations

from dataclasses import dataclass

from sglrollout import notebook


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync. Seconds are wall time on the leader, or the longest of any rank. Where engines died in it, they and
    ``written_bytes`` are of the last attempt, but for ``plan_s`` and ``total_s``.

    Attributes:
        version: of the weights that engines have now.
        method: ``fast`` (mapped memory and recorded copies) or ``portable`` (SGLang's flattened buckets), and
            ``broadcast``, ``disk`` or ``delta`` for remote engines; joined by a plus sign where there are both.
        why_portable: why it was not ``fast``; empty when it was, or when it was asked for.
        mode: how running requests were treated.
        num_bytes: of all weights, once, in the engines' dtypes.
        num_tensors: weights, those that share memory counted once.
        num_buckets: in how many parts they travelled.
        num_engines: that have them now.
        plan_s: making the plan and attaching engines; 0 when those of the last sync still held.
        wake_s: waking the engines' weights, and after loading the rest; 0 when they were awake.
        pause_s: until every engine had stopped.
        gather_s: packing and gathering, the sum over buckets. Part of ``transfer_s``, beside ``load_s``.
        load_s: engines' copying into their parameters, the sum over buckets. Part of ``transfer_s``.
        transfer_s: from the first bucket to the last acknowledgement.
        flush_s: emptying prefix caches.
        resume_s: until every engine ran again, under the new version.
        total_s: the whole call.
        copy_bytes_per_s: how fast the device copies its own memory, the floor of ``transfer_s``.
        written_bytes: what this rank wrote to a disk for engines: weights, or what changed of them.
        lost_engines: that died in it, upon which it began again. With their ranks, where several have engines.
    """

    version: int
    method: str
    why_portable: str
    mode: str
    num_bytes: int
    num_tensors: int
    num_buckets: int
    num_engines: int
    plan_s: float
    wake_s: float
    pause_s: float
    gather_s: float
    load_s: float
    transfer_s: float
    flush_s: float
    resume_s: float
    total_s: float
    copy_bytes_per_s: float
    written_bytes: int = 0
    lost_engines: tuple[str, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9) of weights per second of transfer."""
        return self.num_bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0

    @property
    def floor_ratio(self) -> float:
        """Transfer time over that of one copy of the weights within the device; 1 would be perfect."""
        floor_s = self.num_bytes / self.copy_bytes_per_s if self.copy_bytes_per_s else 0.0
        return self.transfer_s / floor_s if floor_s else 0.0

    @property
    def _speed(self) -> str:
        ratio = f", {self.floor_ratio:.2g} times one device copy" if self.floor_ratio else ""
        return f"{self.gb_per_s:.3g} GB/s{ratio}"

    @property
    def _lost(self) -> str:
        return f" (lost: {', '.join(self.lost_engines)})" if self.lost_engines else ""

    @property
    def _phases(self) -> dict[str, float]:
        """Those that took time, in order."""
        names = ("plan", "wake", "pause", "transfer", "flush", "resume")
        return {name: seconds for name in names if (seconds := getattr(self, f"{name}_s"))}

    def _repr_html_(self) -> str:
        """For notebooks: what was sent, and a bar for each phase."""
        facts = {
            "version": self.version,
            "weights": f"{self.num_bytes / 1e9:.3g} GB in {self.num_tensors} tensors and {self.num_buckets} buckets",
            "engines": f"{self.num_engines}{self._lost}",
            "method": f"{self.method}, {self.mode}" + (f", because {self.why_portable}" if self.why_portable else ""),
            "transfer": f"{self._speed}; gather {_ms(self.gather_s)}, load {_ms(self.load_s)}",
        }
        seconds = {**self._phases, "total": self.total_s}
        rows = [(notebook.text(name), _ms(spent), notebook.bar(spent, self.total_s)) for name, spent in seconds.items()]
        return notebook.frame(notebook.facts(facts), notebook.table(("phase", "time", ""), rows))

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in self._phases.items())
        why = f" because {self.why_portable}" if self.why_portable else ""
        return (
            f"version {self.version}: {self.num_bytes / 1e9:.3g} GB in {self.num_tensors} tensors and "
            f"{self.num_buckets} buckets to {self.num_engines} engines{self._lost} in {_ms(self.total_s)} ({shown}; "
            f"gather {_ms(self.gather_s)}, load {_ms(self.load_s)}), {self._speed}, {self.method}{why}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared, and found equal.

    Attributes:
        version: of the weights.
        num_engines: that answered alike. ``num_remote`` of them are remote ones, whose weights cannot be compared.
        num_weights: that were compared. 0 for a model whose engines hold its weights in another form (quantized, fused
            experts), and where all engines are remote: then the canary alone speaks.
        num_bytes: of engine memory that was summed, over all TP ranks.
        canary_tokens: what every engine answers, greedily, to one fixed prompt.
        canary_logprobs: the logprobs of these tokens, of the first engine.
        seconds: the whole call.
    """

    version: int
    num_engines: int
    num_weights: int
    num_bytes: int
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    seconds: float
    num_remote: int = 0

    def __str__(self) -> str:
        if not self.num_weights:
            return f"version {self.version}: {self.num_engines} engines answer alike; their weights cannot be compared"
        num_compared = self.num_engines - self.num_remote
        return (
            f"version {self.version}: {self.num_weights} weights are bitwise equal in {num_compared} engines "
            f"({self.num_bytes / 1e9:.3g} GB summed in {self.seconds:.2f} s), and all {self.num_engines} answer alike"
        )


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
