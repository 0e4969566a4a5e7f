"""A Backend of the decision core whose driver launches jobs itself: no thread lies between a decision and the GPU.

A launch takes the driver some microseconds, and the GPU runs while the driver waits for it or decides on.  The driver
waits for the oldest job in flight by synchronising with its stream, which lets readers and copier run; completions of
reads that come meanwhile are taken up when it wakes.  Without a job in flight it blocks on the queue, as
``executor.backend`` does.  Where it follows the reads itself (``poll``) there is no thread that could be kept waiting,
and it asks jobs and reads in turns for the first that has ended.

Takes no decision, and knows neither what lies in which slot nor how an expert is read.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from executor.backend import SWITCH_INTERVAL_S, MachineBackend, Reader
from executor.fast.decoder import FastDecoder, Gates, JobSlot
from executor.host import HostTimes
from executor.inbox import Inbox, Poll
from executor.live_predictor import LivePredictor
from executor.pace import Instant
from executor.reader import Completions
from executor.sampling import Sampler
from policies.core.messages import Compute, ComputeDone, Event, Gate
from policies.core.protocols import RoutingSource
from policies.core.types import Phase, ProtocolError, RequestId

T = TypeVar("T")


@dataclass(slots=True)
class _Running:
    """A batch in flight; ``due_s``: when it may be over at the earliest, if batches are paced."""

    command: Compute
    slot: JobSlot
    imposed: Sequence[Gate] | None
    launched_s: float
    due_s: float


class StreamBackend(MachineBackend):
    """Runs batches on the job slots of ``fast`` and reads on ``reader``; use it as a context manager.

    Everything happens on the thread that enters it.  Arguments as for ``TorchBackend``; batches that are paced run one
    after the other, however many are in flight.  ``predictor``: one that reads no scores.
    """

    def __init__(
        self,
        fast: FastDecoder,
        reader: Reader,
        done: Completions,
        *,
        sampler: Sampler,
        routing: RoutingSource | None = None,
        first_step: int = 0,
        predictor: LivePredictor | None = None,
        paced_s: Callable[[Compute], float] | None = None,
        instant: Instant | None = None,
        poll: Poll | None = None,
    ) -> None:
        self.decoder, self.fast, self.tokens = fast.decoder, fast, dict[RequestId, int]()
        self.times = HostTimes()
        self._reader, self._sampler, self._routing, self._step = reader, sampler, routing, first_step - 1
        self._predictor, self._paced_s, self._busy_until_s = predictor, paced_s, 0.0
        self._instant = instant or Instant()
        self._inbox = Inbox(done, self.times, {"reader": lambda: reader.alive}, self._instant, poll)
        self._polls = poll is not None
        self._running: deque[_Running] = deque()
        self._free = deque(fast.slots)
        self._began = time.perf_counter()
        self._exit = ExitStack()

    # ------------------------------------------------------------------ life

    def __enter__(self) -> StreamBackend:
        self._exit.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._exit.enter_context(torch.inference_mode())
        if self.decoder.device.type == "cuda":
            self._exit.callback(torch.cuda.set_stream, torch.cuda.current_stream(self.decoder.device))
        self.fast.slots[0].enter()
        self._began = time.perf_counter()
        self._instant.saw(self._began)
        return self

    def __exit__(self, *_: object) -> None:
        """Let what is in flight run out.  The reader is closed by whoever made it."""
        for running in self._running:
            running.slot.wait()
        self._exit.close()

    # ------------------------------------------------------------------ the core's backend

    def wait(self) -> list[Event]:
        """Block until something completes; that and all other completions at hand.

        Raises what went wrong on another thread.
        """
        inbox = self._inbox
        began_s = now_s = time.perf_counter()
        if not self._running:
            events = inbox.take()
            self.times.blocked_s += time.perf_counter() - began_s
            return events
        while True:
            inbox.receive(0.0)
            events = inbox.at_hand()
            over = [running for running in self._running if running.due_s <= now_s and running.slot.done]
            if events or over:
                self.times.blocked_s += now_s - began_s
                return events + [self._collect(running) for running in over]
            self._rest()
            now_s = time.perf_counter()

    def _rest(self) -> None:
        """Until the oldest batch has run or something else has come; with a reader that is polled, for a moment."""
        if self._polls:
            os.sched_yield()
            return
        running = self._running[0]
        running.slot.wait()
        if (left_s := running.due_s - time.perf_counter()) > 0:
            self._inbox.receive(left_s)

    # ------------------------------------------------------------------ work between steps

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first slot's stream; its result, once it is complete.  Nothing may be in flight."""
        self.fast.slots[0].enter()
        answer = work()
        self.decoder.settle()
        return answer

    # ------------------------------------------------------------------ batches

    def _launch(self, command: Compute) -> None:
        begun_s = time.perf_counter()
        if not self._free:
            raise ProtocolError(f"batch {command.batch} is one more in flight than there are job slots")
        self._step += command.phase is Phase.ENTRY
        imposed = given = None
        if self._routing is not None and -1 <= command.layer < self.decoder.spec.n_layers - 1:
            imposed = self._routing.gates(self._step, command.requests, command.layer + 1)
            given = [gate.experts for gate in imposed]
        slot_of = dict(zip(command.experts, command.slots, strict=True))
        slot = self._free.popleft()
        self.fast.launch(slot, command.phase, command.layer, command.requests, slot_of, given=given)
        launched_s = time.perf_counter()
        due_s = 0.0
        if self._paced_s is not None:
            due_s = self._busy_until_s = max(self._instant.now(), self._busy_until_s) + self._paced_s(command)
        self._running.append(_Running(command, slot, imposed, launched_s, due_s))
        self.times.start_s += launched_s - begun_s

    def _collect(self, running: _Running) -> Event:
        command, slot, times = running.command, running.slot, self.times
        done_s = time.perf_counter()
        self._instant.saw(running.due_s or done_s)
        gates: tuple[Gate, ...] = ()
        if command.phase is Phase.HEAD:
            slot.enter()
            tokens = self._sampler.choose(command.requests, self.fast.logits(slot))
            self.tokens.update(zip(command.requests, tokens, strict=True))
        chosen = self.fast.collect(slot)
        if chosen is not None:
            times.foreign += chosen.foreign
            gates = tuple(running.imposed) if running.imposed is not None else self._gates(command, chosen)
        self._running.remove(running)
        self._free.append(slot)
        times.batches += 1
        times.compute_s += done_s - running.launched_s
        times.notice_s += time.perf_counter() - done_s
        return ComputeDone(command.batch, gates)

    def _gates(self, command: Compute, chosen: Gates) -> tuple[Gate, ...]:
        predictions = chosen.predicted
        if self._predictor is not None:
            layer, low = command.layer + 1, (command.layer + 1) * self.decoder.spec.n_experts
            numbers = [[expert - low for expert in one] for one in chosen.experts]
            predictions = self._predictor.predict(layer, command.requests, numbers)
        return tuple([Gate(experts, ahead) for experts, ahead in zip(chosen.experts, predictions, strict=True)])
