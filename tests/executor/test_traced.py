"""Requests of a trace: slots are taken and given back, pasts begin where the trace says."""

import queue

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memory_world import MemoryReader, MemorySlots, Recorder, make_core  # noqa: E402
from tiny_models import make_decoder, random_model, tiny_config  # noqa: E402

from executor.backend import TorchBackend  # noqa: E402
from executor.traced import TracedRequests  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.messages import Gate, StepBegin  # noqa: E402

STEPS = [(4, 7), (4, 7), (7,), (7, 9), (9, 2), (2, 9)]


class Steps:
    """The steps above, the fourth after a pause in which nobody is there."""

    def __init__(self):
        self._left = [StepBegin(i, requests) for i, requests in enumerate(STEPS)]
        self._left.insert(3, 0.0)

    def begin(self, now_s):
        return self._left.pop(0) if self._left else None


class Routes:
    """Always the same experts."""

    def gates(self, step, requests, layer):
        assert set(requests) <= set(STEPS[step])
        return tuple(Gate(tuple(layer * 16 + e for e in (3, 1, 8, r))) for r in requests)


@pytest.mark.parametrize("token", [None, lambda request: 40 + request])
def test_requests_come_and_go_as_the_trace_says(token):
    torch.set_num_threads(1)
    decoder, experts = make_decoder(random_model(tiny_config("gemma4")), max_requests=2)
    done, sampler = queue.SimpleQueue(), Recorder()
    slots = MemorySlots(experts[0][0], 16)
    reader = MemoryReader(experts, slots, done)
    core = make_core("bevy", decoder.spec, 16)
    places = []
    with TorchBackend(decoder, slots, reader, done, sampler=sampler, routing=Routes()) as backend:
        workload = TracedRequests(Steps(), backend, lambda request: 10 * request, token)

        def look(begin, now_s):
            places.append({r: decoder.requests[r].position for r in begin.requests})
            assert decoder.requests.keys() == set(begin.requests)
            if token is not None:
                assert all(decoder.requests[r].token == 40 + r for r in begin.requests)

        drive(core, workload, backend, check=True, on_step=look)
    reader.close()
    assert places == [
        {4: 40, 7: 70},
        {4: 41, 7: 71},
        {7: 72},
        {7: 73, 9: 90},
        {9: 91, 2: 20},
        {2: 21, 9: 92},
    ]
    assert {r: len(rows) for r, rows in sampler.logits.items()} == {4: 2, 7: 4, 9: 3, 2: 2}
    assert backend.times.foreign > 0
