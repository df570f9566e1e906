"""k-means++ over vectors of length 1: which segments belong together. It knows vectors only.

Source: Arthur and Vassilvitskii, "k-means++" (SODA 2007); the best of several starts. The same
vectors and seed give the same clusters, numbered by their first vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.episodes.base import Floats

STARTS = 100  # EpiCache has 10; these are cheap, and 10 still found another optimum per seed
ROUNDS_MAX = 100

_Doubles = npt.NDArray[np.float64]
_Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Clusters:
    """`labels` [n] of the vectors and the clusters' `centroids` [k, dimensions]: means, of length 1
    unless all zero. No cluster is empty."""

    labels: _Longs
    centroids: Floats
    inertia: float  # sum of squared distances to the means

    def nearest_members(self, vectors: Floats, cluster: int) -> _Longs:
        """The vectors of a cluster, those nearest to its centroid first; of equals the first."""
        members = np.nonzero(self.labels == cluster)[0]
        likeness = vectors[members].astype(np.float64) @ self.centroids[cluster].astype(np.float64)
        return members[np.argsort(-likeness, kind="stable")]


def cluster(vectors: Floats, count: int, seed: int) -> Clusters:
    """At most `count` clusters of vectors [n, dimensions]: fewer if there are fewer different ones.
    At least one vector. Pure."""
    assert len(vectors) > 0 and count > 0
    points = vectors.astype(np.float64)
    count = min(count, len(np.unique(vectors, axis=0)))
    found = [_once(points, count, np.random.default_rng([seed, start])) for start in range(STARTS)]
    labels, centres, inertia = min(found, key=lambda one: one[2])
    _, firsts = np.unique(labels, return_index=True)
    order = np.argsort(firsts)
    renumbered = np.empty(count, dtype=np.int64)
    renumbered[order] = np.arange(count)
    return Clusters(renumbered[labels], _of_length_one(centres[order]), inertia)


def _once(points: _Doubles, count: int, rng: np.random.Generator) -> tuple[_Longs, _Doubles, float]:
    """Labels, their means and inertia from one start."""
    centres = _start(points, count, rng)
    labels = np.full(len(points), -1)
    for _ in range(ROUNDS_MAX):
        distances = _distances(points, centres)
        fresh = _filled(distances.argmin(axis=1), distances, count)
        if np.array_equal(fresh, labels):
            break
        labels = fresh
        centres = _means(points, labels, count)
    own = ((points - centres[labels]) ** 2).sum(axis=1)
    return labels, centres, float(own.sum())


def _start(points: _Doubles, count: int, rng: np.random.Generator) -> _Doubles:
    """Different points, each drawn by its squared distance to those drawn before."""
    chosen = [int(rng.integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
        total = np.cumsum(nearest)
        drawn = int(np.searchsorted(total, rng.random() * total[-1], side="right"))
        chosen.append(min(drawn, int(np.nonzero(nearest)[0][-1])))
    return points[chosen].copy()


def _distances(points: _Doubles, centres: _Doubles) -> _Doubles:
    """[n, k], squared, but for the square of each point, which is the same for all centres."""
    found: _Doubles = (centres**2).sum(axis=1) - 2 * (points @ centres.T)
    return found


def _filled(labels: _Longs, distances: _Doubles, count: int) -> _Longs:
    """The same labels, but for clusters that would be empty: each gets the vector that is farthest
    from its mean, of a cluster that has another one."""
    sizes = np.bincount(labels, minlength=count)
    for empty in np.nonzero(sizes == 0)[0]:
        own = np.where(sizes[labels] > 1, distances[np.arange(len(labels)), labels], -np.inf)
        farthest = int(own.argmax())
        sizes[labels[farthest]] -= 1
        labels[farthest], sizes[empty] = empty, 1
    return labels


def means(vectors: Floats, labels: _Longs) -> Floats:
    """[k, dimensions]: of the vectors of each label from 0 on, of length 1 unless all zero."""
    points = vectors.astype(np.float64)
    return _of_length_one(_means(points, labels, int(labels.max()) + 1))


def _means(points: _Doubles, labels: _Longs, count: int) -> _Doubles:
    return np.stack([points[labels == one].mean(axis=0) for one in range(count)])


def _of_length_one(vectors: _Doubles) -> Floats:
    lengths = np.sqrt((vectors**2).sum(axis=1, keepdims=True))
    return (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
