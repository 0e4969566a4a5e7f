"""How what is in flight shares a device: reads on the link, batches on the GPU, answers on the driver.

Owns the constants and their meaning.  Knows no clock and nothing that is in flight.

Three published readings of "N readers on one drive" are one model with other numbers:

fair share      every reader gets an equal part of the rate, up to a cap of its own
one at a time   one reader at the full rate, the others wait behind it
fixed slots     every reader gets 1/N of the rate, whether the others read or not
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class FairShare:
    """``readers`` readers share ``bytes_per_s`` equally, each up to ``per_reader_bytes_per_s``.

    A read waits ``latency_s`` on its reader before its bytes move.  ``read_splits``: one expert is striped over
    so many readers.
    """

    bytes_per_s: float
    readers: int
    per_reader_bytes_per_s: float = inf
    latency_s: float = 0.0
    read_splits: int = 1

    @property
    def slots(self) -> int:
        """Reads that move at one time."""
        return self.readers // self.read_splits

    def rate(self, reads: int) -> float:
        """Bytes per second that each of ``reads`` simultaneous reads gets."""
        return min(self.bytes_per_s / reads, self.read_splits * self.per_reader_bytes_per_s)


def one_at_a_time(bytes_per_s: float, latency_s: float = 0.0) -> FairShare:
    """A drive that serves one read at the full rate; the others wait in order."""
    return FairShare(bytes_per_s, readers=1, latency_s=latency_s)


def fixed_slots(bytes_per_s: float, readers: int, latency_s: float = 0.0, read_splits: int = 1) -> FairShare:
    """Each reader has 1/``readers`` of the rate for itself."""
    return FairShare(bytes_per_s, readers, bytes_per_s / readers, latency_s, read_splits)


@dataclass(frozen=True, slots=True)
class GpuSharing:
    """How batches in flight share the GPU.

    ``host_s``: launch and notice of one batch, during which the GPU does not run it; with a second batch in flight
    this time is hidden.  ``streams``: batches that run at one time, the others queue behind them.
    ``overlap_speedup``: work done in a second by two or more running batches over that of one.  ``contention``: how
    many times longer work takes while the link is busy.
    """

    host_s: float = 0.0
    streams: int = 1
    overlap_speedup: float = 1.0
    contention: float = 1.0


@dataclass(frozen=True, slots=True)
class DriverSharing:
    """The one thread that decides, launches batches and starts reads, for which all that completes waits in turn.

    ``batch_s``: a completed batch and what is launched after it; ``job_s``: each of its jobs, of which requests that
    move as one unit have one together; ``request_s``: each of its requests; ``prediction_s``: each of them whose gate
    comes with predictions; ``fetch_s``: a read, from its start to its end.
    """

    batch_s: float = 0.0
    job_s: float = 0.0
    request_s: float = 0.0
    prediction_s: float = 0.0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostSharing:
    """The host's CPU, which computes one expert at a time on all cores.

    ``expert_s``: one expert for one token; each further token adds ``token_share`` of that.  ``move_s``: activations
    there and back.
    """

    expert_s: float
    token_share: float
    move_s: float

    def seconds(self, tokens: int) -> float:
        """One expert for so many tokens."""
        return self.expert_s * (1.0 + self.token_share * (tokens - 1))
