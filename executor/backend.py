"""The real world: a Backend of the decision core on a machine.

One driver thread (the caller: core and journal), one compute thread, and the reader's threads.  The
driver blocks on one queue where all others post; nobody polls.  An error on any thread reaches the
driver's next ``wait`` and ends the run: no token of a broken run is reported.

Takes no decision, and knows neither what lies in which slot nor how an expert is read.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from executor.experts import ExpertWeights
from executor.host import HostTimes
from executor.inbox import Inbox
from executor.live_predictor import LivePredictor
from executor.model import Decoder, Routing
from executor.pace import Instant
from executor.reader import Completions
from executor.sampling import Sampler
from policies.core.messages import Command, Compute, ComputeDone, Event, Fetch, FetchDone, Gate
from policies.core.protocols import RoutingSource
from policies.core.types import ExpertId, FetchKind, Phase, ProtocolError, RequestId

SWITCH_INTERVAL_S = 2e-4
"""How long a Python thread may hold the interpreter while another wants it; the default, 5 ms, is a job."""

T = TypeVar("T")


class Reader(Protocol):
    """Reads experts into slots and posts their completions on the queue it was made with."""

    def submit(self, fetch: Fetch) -> None:
        """Start one read; returns at once."""
        ...

    @property
    def alive(self) -> bool:
        """False if a thread of the reader has ended: some fetch would never complete."""
        ...


class Slots(Protocol):
    """The expert cache's memory."""

    def weights(self, slot: int) -> ExpertWeights:
        """The matrices of the expert that lies in ``slot``, in the decoder's dtype."""
        ...


class MachineBackend(ABC):
    """What the backends of a machine do alike: their clock, and reads that the core does not know of."""

    _reader: Reader
    _inbox: Inbox
    _instant: Instant
    _began: float

    def now(self) -> float:
        """Seconds since the run began."""
        return self._instant.now() - self._began

    def submit(self, command: Command) -> None:
        """Start a Compute or a Fetch."""
        if isinstance(command, Fetch):
            self._reader.submit(command)
        elif isinstance(command, Compute):
            self._launch(command)
        else:
            raise ProtocolError(f"{command!r} is nothing that a backend carries out")

    @abstractmethod
    def _launch(self, command: Compute) -> None:
        """Start a batch; its completion reaches the inbox or ``wait`` later."""

    def idle(self, until_s: float) -> None:
        """Sleep until ``until_s``; reads that are on their way go on."""
        time.sleep(max(0.0, until_s - self.now()))

    def read(self, experts: Mapping[ExpertId, int]) -> None:
        """Start reading experts into slots that the core does not own (expert -> slot), for ``landed``."""
        for expert, slot in experts.items():
            self._reader.submit(Fetch(-1 - expert, expert, slot, FetchKind.DEMAND))

    def landed(self, expert: ExpertId) -> None:
        """Block until a read of ``expert`` that ``read`` started has completed."""
        self._inbox.until(FetchDone(-1 - expert))


class TorchBackend(MachineBackend):
    """Runs batches on one compute thread and reads on ``reader``; use it as a context manager.

    After an error the run is over: leave the context.

    ``done``: the queue on which ``reader`` posts too.  ``routing``: where gates come from in replay
    (teacher-forced; mixing weights are recomputed for the imposed experts); None: the model's own
    gates.  ``first_step``: the number of the first step for ``routing``.  ``predictor``: what
    predicts from the model's own gates, if not the next gate (its time is the batch's).
    ``paced_s``: the least seconds a batch must take, so that this machine can stand in for another; they count from
    ``instant``, which the link shares.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots,
        reader: Reader,
        done: Completions,
        *,
        sampler: Sampler,
        routing: RoutingSource | None = None,
        first_step: int = 0,
        predictor: LivePredictor | None = None,
        paced_s: Callable[[Compute], float] | None = None,
        instant: Instant | None = None,
    ) -> None:
        self.decoder, self.tokens = decoder, dict[RequestId, int]()
        self.times = HostTimes()
        self._slots, self._reader, self._done, self._sampler = slots, reader, done, sampler
        self._routing, self._step, self._paced_s = routing, first_step - 1, paced_s
        self._predictor, self._instant = predictor, instant or Instant()
        decoder.shows_scores = predictor is not None and predictor.reads_scores
        self._work: queue.SimpleQueue[tuple[Compute, float, float] | Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        alive = {"compute": self._thread.is_alive, "reader": lambda: reader.alive}
        self._inbox = Inbox(done, self.times, alive, self._instant)
        self._began = time.perf_counter()
        self._switch_interval = sys.getswitchinterval()

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TorchBackend:
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        self._began = time.perf_counter()
        self._instant.saw(self._began)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the compute thread and wait for it.  The reader is closed by whoever made it."""
        self._work.put(None)
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)

    # ------------------------------------------------------------------ the core's backend

    def wait(self) -> list[Event]:
        """Block until something completes; that and all other completions at hand.

        Raises what went wrong on another thread.
        """
        return self._inbox.take()

    def _launch(self, command: Compute) -> None:
        due_s = 0.0 if self._paced_s is None else self._instant.now() + self._paced_s(command)
        self._work.put((command, time.perf_counter(), due_s))

    # ------------------------------------------------------------------ work between steps

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the compute thread, where the model lives, and return its result once it is complete."""
        answer: list[T] = []

        def run() -> None:
            answer.append(work())
            self.decoder.settle()
            self._done.put((_CALLED, time.perf_counter()))

        self._work.put(run)
        self._inbox.until(_CALLED)
        return answer[0]

    # ------------------------------------------------------------------ the compute thread

    def _serve(self) -> None:
        try:
            # Inference mode and the current stream belong to a thread: enter them here.
            with torch.inference_mode(), self._stream():
                while (item := self._work.get()) is not None:
                    if callable(item):
                        item()
                    else:
                        self._done.put(self._run(*item))
        except BaseException as error:
            self._done.put(error)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        if self.decoder.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.decoder.device)
        stream.wait_stream(torch.cuda.default_stream(self.decoder.device))  # weights were made there
        with torch.cuda.stream(stream):
            yield

    def _run(self, command: Compute, submitted_s: float, due_s: float) -> tuple[Event, float]:
        begun_s = time.perf_counter()
        gates: tuple[Gate, ...] = ()
        if command.phase is Phase.HEAD:
            tokens = self._sampler.choose(command.requests, self.decoder.head(command.requests))
            self.tokens.update(zip(command.requests, tokens, strict=True))
        else:
            gates = self._gates(command)
        done_s = time.perf_counter()
        times = self.times
        times.batches += 1
        times.start_s += begun_s - submitted_s
        times.compute_s += done_s - begun_s
        if self._paced_s is not None:
            times.late += done_s > due_s
            time.sleep(max(0.0, due_s - done_s))
        return ComputeDone(command.batch, gates), max(done_s, due_s)

    def _gates(self, command: Compute) -> tuple[Gate, ...]:
        decoder, requests, layer = self.decoder, command.requests, command.layer + 1  # ENTRY has layer -1
        spec = decoder.spec
        self._step += command.phase is Phase.ENTRY
        imposed: Sequence[Gate] | None = None
        if self._routing is not None and layer < spec.n_layers:
            imposed = self._routing.gates(self._step, requests, layer)
        given = None if imposed is None else [[spec.split(e)[1] for e in gate.experts] for gate in imposed]
        routing: Routing | None
        if command.phase is Phase.ENTRY:
            routing = decoder.entry(requests, given)
        else:
            low, weights = command.layer * spec.n_experts, self._slots.weights
            slot_of = {expert - low: slot for expert, slot in zip(command.experts, command.slots, strict=True)}
            routing = decoder.job(command.layer, requests, lambda number: weights(slot_of[number]), given)
        if routing is None:
            return ()
        self.times.foreign += routing.foreign
        if imposed is not None:
            return tuple(imposed)
        predictions = routing.predicted
        if self._predictor is not None:
            predictions = self._predictor.predict(layer, requests, routing.chosen, routing.scores)
        base = layer * spec.n_experts
        return tuple(
            Gate(tuple([base + e for e in chosen]), predicted)
            for chosen, predicted in zip(routing.chosen, predictions, strict=True)
        )


_CALLED = FetchDone(0)
"""Posted when ``call`` has run: the core's fetch ids begin at 1, and those of ``read`` are negative."""
