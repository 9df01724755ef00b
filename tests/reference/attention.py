"""Slow, obvious attention in float64 numpy, one query and one key at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(q_TD: Array, k_SD: Array, v_SD: Array) -> Array:
    """Attn(Q, K, V) = softmax(Q K^T / sqrt(d)) V, the left side of Eq. 3."""
    out = np.zeros((len(q_TD), v_SD.shape[1]))
    for t, query in enumerate(q_TD):
        logits = np.array([query @ key / np.sqrt(len(query)) for key in k_SD])
        weights = np.exp(logits - logits.max())
        out[t] = sum(w * v for w, v in zip(weights / weights.sum(), v_SD, strict=True))
    return out


def favor(q_TD: Array, k_SD: Array, v_SD: Array, w_MD: Array, eps: float = 1e-6) -> Array:
    """FAVOR+: Eq. 3 with phi(x) = m^(-1/2) [exp(W x~ - |x~|^2/2 - s) + eps], x~ = x / d^(1/4).

    s: for a query the maximum over its features, for keys one maximum over all keys and features.
    """
    m, d = w_MD.shape

    def exponents(x: Array) -> Array:
        scaled = x / d**0.25
        return np.array([w @ scaled - scaled @ scaled / 2 for w in w_MD])

    key_exponents = np.array([exponents(k) for k in k_SD])
    phi_keys = (np.exp(key_exponents - key_exponents.max()) + eps) / np.sqrt(m)
    out = np.zeros((len(q_TD), v_SD.shape[1]))
    for t, query in enumerate(q_TD):
        u = exponents(query)
        phi_query = (np.exp(u - u.max()) + eps) / np.sqrt(m)
        weights = np.array([phi_query @ phi_key for phi_key in phi_keys])
        out[t] = weights @ v_SD / weights.sum()
    return out


def of_length(x_TD: Array, length: float, eps: float = 1e-6) -> Array:
    """Rows whose x~ = x / d^(1/4) has this length; eps is added to the squared length that it is divided by."""
    return np.array([x * length * len(x) ** 0.25 / np.sqrt(x @ x + eps) for x in x_TD])


def uniform(q_TD: Array, v_SD: Array) -> Array:
    """The control: every query gets the mean of the values."""
    return np.array([sum(v_SD) / len(v_SD) for _ in q_TD])


def effective_features(q_TD: Array, k_SD: Array, w_MD: Array) -> float:
    """(sum_m t_m)^2 / sum_m t_m^2 of t_m = phi_m(q) sum_s phi_m(k_s), the mean over queries; without FAVOR+'s eps."""
    scaled_q, scaled_k = (x / w_MD.shape[1] ** 0.25 for x in (q_TD, k_SD))
    found = []
    for query in scaled_q:
        terms = [np.exp(w @ query) * sum(np.exp(w @ key - key @ key / 2) for key in scaled_k) for w in w_MD]
        found.append(sum(terms) ** 2 / sum(t * t for t in terms))
    return float(np.mean(found))


def favor_paper(q_TD: Array, k_SD: Array, v_SD: Array, w_MD: Array, eps_a: float = 1e-6) -> Array:
    """Eq. 3 and Alg. 3 as printed, W ~ N(0, 1/sqrt(d)) read as a variance: W = w / d^(1/4)."""
    m, d = w_MD.shape
    projection = w_MD.T / d**0.25

    def features(x: Array) -> Array:
        u = x @ projection
        phi: Array = np.exp(u - u.max()) / np.sqrt(m)
        return phi

    phi_keys = np.array([features(k) for k in k_SD])
    s = phi_keys.T @ v_SD
    n = phi_keys.T @ np.ones(len(k_SD))
    return np.array([(features(q) @ s) / (features(q) @ n + eps_a) for q in q_TD])
