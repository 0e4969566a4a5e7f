"""The simulated world: a Backend of the decision core on a SimPy clock.

Owns the clock and what is in flight.  Takes no decision: which expert, which job and when to ask is the core's.

A step's number for the source of routing is counted here, one up at each ENTRY batch, because a step begins with
exactly one ENTRY and the core does not hand StepBegin to a backend.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.core import EmptySchedule

from conf.devices import DeviceConfig
from conf.models import ModelConfig
from policies.core.messages import (
    Command,
    Compute,
    ComputeDone,
    Event,
    Fetch,
    FetchDone,
    Gate,
    HostCompute,
    HostDone,
)
from policies.core.protocols import RoutingSource
from policies.core.types import DeadlockError, Phase, ProtocolError, RequestId
from sim.alarm import end_of_instant_s
from sim.gpu import Gpu
from sim.host import Host
from sim.link import Link


class SimBackend:
    """One link, one GPU and one driver, and the host's CPU if the device has one.

    ``contexts(request)``: its context in tokens, asked once a step.  ``first_step``: the number of the first step.
    ``jobs_in(batch)``: the core's count of a batch's jobs, for the driver's time.
    No process and no SimPy event for each command: link and GPU keep one alarm each.
    The driver is busy with completions before the core hears of them; what completes meanwhile waits for the next turn.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: DeviceConfig,
        routing: RoutingSource,
        contexts: Callable[[RequestId], int],
        first_step: int = 0,
        *,
        jobs_in: Callable[[int], int] = lambda batch: 1,
    ) -> None:
        self._env = simpy.Environment()
        self._gpu = Gpu(self._env, device.gpu, self._computed)
        contended = device.gpu.contention != 1.0
        self.link = Link(self._env, device.link, self._landed, self._gpu.link_busy if contended else None)
        self._host = Host(self._env, device.cpu, self._hosted) if device.cpu else None
        self._driver = device.driver
        self._jobs_in = jobs_in
        self._owed_s = 0.0  # the driver's time for what has completed and was not handed on
        self._n_layers = model.n_layers
        self._expert_bytes = float(model.expert_bytes)
        self._seconds = device.times.seconds
        self._request_s = device.times.request_s
        self._routing = routing
        self._contexts = contexts
        self._step = first_step - 1
        self._requests_s: dict[RequestId, float] = {}
        self._running: dict[int, Compute] = {}
        self._done: list[Event] = []

    def now(self) -> float:
        """Simulated seconds since the run began."""
        return float(self._env.now)

    def submit(self, command: Command) -> None:
        """Start a Compute or a Fetch."""
        if type(command) is Fetch:
            self.link.start(command.fetch, self._expert_bytes)
        elif type(command) is Compute:
            self._compute(command)
        elif type(command) is HostCompute and self._host is not None:
            self._host.start(command.task, len(command.requests))
        else:
            raise ProtocolError(f"{command!r} is nothing that a backend carries out")

    def wait(self) -> list[Event]:
        """Let time pass until something completes, and the driver has taken up all that completed at that instant.

        In the order of completion.

        Raises:
            DeadlockError: nothing is in flight, so nothing can complete.
        """
        env, link, gpu, host = self._env, self.link, self._gpu, self._host
        try:
            while not self._done:
                if host is not None and host.changed:
                    host.arm()
                if link.changed:
                    link.arm()
                if gpu.changed:
                    gpu.arm()
                env.step()
        except EmptySchedule:
            raise DeadlockError(
                f"at {self.now():.6f} s the core waits and nothing is in flight; it must issue a batch or a fetch first"
            ) from None
        instant_s = end_of_instant_s(env.now)
        while env.peek() <= instant_s:  # alarms that were set before; what starts now ends later
            env.step()
        done, self._done = self._done, []
        if self._owed_s:
            until_s, self._owed_s = env.now + self._owed_s, 0.0
            self.idle(until_s)
        return done

    def idle(self, until_s: float) -> None:
        """Let time pass to ``until_s``; what is on its way goes on, and the next ``wait`` reports it."""
        env, link, gpu, host = self._env, self.link, self._gpu, self._host
        while True:
            link.arm()
            gpu.arm()
            if host is not None:
                host.arm()
            if env.peek() > until_s:
                break
            env.step()
        if until_s > env.now:
            env.run(until=until_s)

    def _compute(self, command: Compute) -> None:
        requests = command.requests
        if command.phase is Phase.ENTRY:
            self._step += 1
            request_s, contexts = self._request_s, self._contexts
            self._requests_s = {request: request_s(contexts(request)) for request in requests}
        if len(requests) == 1:
            requests_s = self._requests_s[requests[0]]
        else:
            requests_s = sum(map(self._requests_s.__getitem__, requests))
        work_s = self._seconds(command.phase, command.layer, len(requests), len(command.experts), requests_s)
        self._running[command.batch] = command
        self._gpu.start(command.batch, work_s)

    def _landed(self, fetch: int) -> None:
        self._owed_s += self._driver.fetch_s
        self._done.append(FetchDone(fetch))

    def _hosted(self, task: int) -> None:
        self._done.append(HostDone(task))

    def _computed(self, batch: int) -> None:
        command, driver = self._running.pop(batch), self._driver
        self._owed_s += driver.batch_s + driver.job_s * self._jobs_in(batch) + driver.request_s * len(command.requests)
        layer = command.layer + 1  # ENTRY has layer -1
        gates: tuple[Gate, ...] = ()
        if layer < self._n_layers:
            gates = self._routing.gates(self._step, command.requests, layer)
            if gates[0].predicted:
                self._owed_s += driver.prediction_s * len(gates)
        self._done.append(ComputeDone(batch, gates))
