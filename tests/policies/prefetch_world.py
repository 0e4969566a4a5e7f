"""Tokens, requests and routes for the predictors' tests."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """Decode tokens of one request with their columns: an ``Example`` of policies.prefetch.learning."""

    experts: np.ndarray  # [tokens, layers, k]
    columns: dict = field(default_factory=dict)
    request: int = 0

    def column(self, name):
        return self.columns[name]

    def at(self, position, layer):
        return Token(self, position, layer)

    def tokens(self):
        """Observations in the order in which a run makes them."""
        for position in range(len(self.experts)):
            for layer in range(self.experts.shape[1]):
                yield self.at(position, layer)


@dataclass
class Token:
    """An ``Observation``.  Later layers of ``experts`` are the future."""

    source: Request
    position: int
    layer: int

    @property
    def request(self):
        return self.source.request

    @property
    def experts(self):
        return self.source.experts[self.position]

    def column(self, name):
        return self.source.columns[name][self.position]


def choose(scores, top_k):
    """Experts [..., k], the best first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.uint16)


def random_request(rng, tokens, layers, experts, top_k, number=0, **columns):
    """Independent uniform routing."""
    return Request(choose(rng.random((tokens, layers, experts)), top_k), columns, number)


def recall(predictor, requests, top_k, skip=1):
    """Share of the chosen experts among the best k of the scores, over target layers and all but ``skip`` tokens."""
    found = total = 0
    for request in requests:
        for token in request.tokens():
            target = token.layer + predictor.distance
            if target < request.experts.shape[1]:
                scores = predictor.scores(token, target)
                if token.position >= skip:
                    top = np.argsort(-scores, kind="stable")[:top_k]
                    found += len(np.intersect1d(top, token.experts[target]))
                    total += top_k
    return found / total
