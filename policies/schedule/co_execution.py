"""Co-execution: which missing experts the host's CPU computes instead of fetching them (the paper's future work)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.core.types import ExpertId, UserError


class EarlierEnd:
    """A missing expert is computed on the CPU if that is expected to end earlier than its fetch.

    ``fetch_s``: one expert on the link.  ``expert_s``: one expert for one token on the CPU; each further token adds
    ``token_share`` of that.  ``move_s``: activations there and back, which keep neither busy.  Both resources are
    expected to serve in order.  A computed expert does not enter the cache, a fetched one does; ``patience`` is how
    many times later a fetch may end for that.
    """

    def __init__(
        self, fetch_s: float, expert_s: float, move_s: float, token_share: float = 0.27, patience: float = 1.0
    ) -> None:
        if min(fetch_s, expert_s) <= 0 or min(move_s, token_share) < 0 or patience <= 0:
            raise UserError(
                f"EarlierEnd: fetch_s {fetch_s}, expert_s {expert_s}, move_s {move_s}, token_share {token_share}, "
                f"patience {patience}; expected times and patience above 0, move_s and token_share from 0"
            )
        self._fetch_s, self._expert_s, self._move_s = fetch_s, expert_s, move_s
        self._token_share, self._patience = token_share, patience

    def choose(self, absent: Mapping[ExpertId, int], fetches: int, computed: Sequence[int]) -> Sequence[ExpertId]:
        """Those of ``absent`` (expert -> tokens) that the CPU computes.

        ``fetches``: experts that are queued or in flight; ``computed``: tokens of each expert that the CPU has yet to
        compute, the running one included.
        """
        link_s = fetches * self._fetch_s
        host_s = sum(map(self._seconds, computed))
        chosen: list[ExpertId] = []
        for expert, tokens in absent.items():
            ends_s = host_s + self._seconds(tokens)
            if (ends_s + self._move_s) * self._patience < link_s + self._fetch_s:
                chosen.append(expert)
                host_s = ends_s
            else:
                link_s += self._fetch_s
        return chosen

    def _seconds(self, tokens: int) -> float:
        return self._expert_s * (1.0 + self._token_share * (tokens - 1))
