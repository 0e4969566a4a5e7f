"""Keys, values and recurrent states by slot."""

import pytest

torch = pytest.importorskip("torch")

from executor.cache import DeltaState, KvCache  # noqa: E402

CPU = torch.device("cpu")


def token(position):
    """A key whose value is its position."""
    return torch.full((1, 1, 2), float(position))


def append(cache, slot, position):
    cache.append([slot], torch.tensor([slot]), [position], token(position), token(position) + 0.5)


def seen(cache, slot, position):
    k, v = cache.seen(slot, position)
    assert torch.equal(k + 0.5, v)
    return k[0, 0, :, 0].tolist()


def test_full_attention_sees_all():
    cache = KvCache(2, 1, 2, 16, window=None, dtype=torch.float32, device=CPU)
    for position in range(16):
        append(cache, 1, position)
        assert seen(cache, 1, position) == list(range(position + 1))


@pytest.mark.parametrize("room", [7, 40])
def test_a_window_sees_the_last_positions(room):
    """With room 7 all positions fit and only the view is cut; with 40 the buffer is moved down."""
    cache = KvCache(2, 1, 2, room, window=5, dtype=torch.float32, device=CPU)
    assert cache.k.shape[2] == min(room, 10)
    for position in range(room):
        append(cache, 0, position)
        assert seen(cache, 0, position) == list(range(max(0, position - 4), position + 1))


@pytest.mark.parametrize("tokens", [3, 5, 9, 23])
def test_a_prompt_and_then_tokens(tokens):
    cache = KvCache(2, 1, 2, 40, window=5, dtype=torch.float32, device=CPU)
    k = torch.arange(float(tokens)).view(1, tokens, 1).expand(1, tokens, 2)
    cache.fill(1, k, k + 0.5)
    for position in range(tokens, 40):
        append(cache, 1, position)
        assert seen(cache, 1, position) == list(range(max(0, position - 4), position + 1))


def test_slots_at_different_positions_share_a_call():
    cache = KvCache(3, 1, 2, 30, window=4, dtype=torch.float32, device=CPU)
    positions = {0: 0, 2: 0}
    for position in range(9):
        append(cache, 2, position)
        positions[2] = position + 1
    for _ in range(12):
        slots = [0, 2]
        at = [positions[s] for s in slots]
        k = torch.cat([token(p) for p in at])
        cache.append(slots, torch.tensor(slots), at, k, k + 0.5)
        for s in slots:
            assert seen(cache, s, positions[s]) == list(range(max(0, positions[s] - 3), positions[s] + 1))
            positions[s] += 1


def test_nothing_of_a_request_is_left_for_the_next():
    cache = KvCache(1, 1, 2, 30, window=4, dtype=torch.float32, device=CPU)
    for position in range(20):
        append(cache, 0, position)
    cache.reset(0)
    append(cache, 0, 0)
    assert seen(cache, 0, 0) == [0.0]
    cache.reset(0, 12)
    k, _ = cache.seen(0, 11)
    assert k.shape[2] == 4
    assert not k.any()
    delta = DeltaState(2, 3, 4, (2, 4, 4), dtype=torch.float32, device=CPU)
    delta.conv.fill_(1)
    delta.recurrent.fill_(1)
    delta.reset(1)
    assert not delta.conv[1].any()
    assert not delta.recurrent[1].any()
    assert delta.recurrent[0].all()
