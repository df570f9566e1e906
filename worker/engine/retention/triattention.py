"""TriAttention: which keys future queries will look at, from where queries lie on average before
they are rotated. It knows statistics and stored keys; no attention weights, no text.

Source: Mao et al., "TriAttention" (arXiv:2604.04921). Queries of a head lie around one centre in
each band of RoPE, so the logit of a key as a function of distance is a known sum of cosines; where
they do not, the key's size decides. Of keys as they are stored, rotated by their positions, both
are one product each: with m, the centre rotated to coming positions and averaged, and with the
sizes of the key's bands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.calibration.statistics import Statistics
from worker.engine.retention.base import Mask, PageView, Quota, newest
from worker.engine.retention.selection import choose, standardised, united

OFFSETS = tuple(1 << power for power in range(17))  # tokens ahead, 1 to 65,536


def mean_phases(frequencies: torch.Tensor, position: int) -> torch.Tensor:
    """complex128 [F]: how a band is turned at `position` + each of OFFSETS, averaged. In float64:
    in float32 a phase at 70,000 is off by a thousandth."""
    at = torch.tensor([position + offset for offset in OFFSETS], dtype=torch.float64)
    angles = at.unsqueeze(1) * frequencies.double()
    return torch.polar(torch.ones_like(angles), angles).mean(0)


@dataclass(frozen=True, eq=False)
class Centres:
    """What statistics come to: per layer and query head the weights of a key's numbers."""

    mean: torch.Tensor  # complex128 [L, Hq, F]
    spread: torch.Tensor  # float64 [L, Hq, F] mean size less size of the mean, at least 0
    frequencies: torch.Tensor  # float64 [F]

    @classmethod
    def of(cls, statistics: Statistics) -> Centres:
        """From a calibration."""
        real, imaginary = statistics.query_mean.double().unbind(2)
        mean = torch.complex(real, imaginary)
        spread = (statistics.query_size.double() - mean.abs()).clamp(min=0.0)
        return cls(mean, spread, statistics.frequencies)

    def scores(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """[L, Hq, n], of keys' dtype: how much queries after `position` will look at keys
        [L, Hkv, n, dim], rotated as stored. One layer at a time, to need little memory."""
        phases = mean_phases(self.frequencies, position)
        turned = self.mean * phases
        centre = torch.cat([turned.real, turned.imag], 2).to(keys.device, keys.dtype)
        spread = self.spread.to(keys.device, keys.dtype)
        return torch.stack([self._layer(keys[i], centre[i], spread[i]) for i in range(len(keys))])

    def _layer(
        self, keys: torch.Tensor, centre: torch.Tensor, spread: torch.Tensor
    ) -> torch.Tensor:
        """[Hq, n] from keys [Hkv, n, dim], centre [Hq, dim], spread [Hq, F]."""
        heads, count, dim = keys.shape
        sizes = keys.view(heads, count, 2, dim // 2).pow(2).sum(2).sqrt()  # [Hkv, n, F]
        trig = centre.view(heads, -1, dim) @ keys.transpose(1, 2)  # [Hkv, group, n]
        norm = spread.view(heads, -1, dim // 2) @ sizes.transpose(1, 2)
        return torch.add(trig, norm).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class TriAttention:
    """Keeps the newest `window_tokens`, and of the others those with the best scores.

    Scores are standardised per query head, and the largest of the heads that share a KV head
    counts. `per_head`: every layer and KV head keeps its own; else one set for all of them: each
    nominates its best, and the best of the nominated stay. Within `band` of the score at which the
    choice falls, whatever lies on fuller pages stays: less moves for the same blocks.
    """

    quota: Quota
    centres: Centres
    calibration: str
    window_tokens: int
    per_head: bool = False
    band: float = 0.0  # deviations
    reads_keys: bool = True
    resume: bool = False

    @property
    def state_hash(self) -> str:
        """See RetentionPolicy."""
        how = (self.quota, self.window_tokens, self.per_head, self.band)
        return f"triattention/1 {self.calibration} {how}"

    def select(self, view: PageView) -> Mask:
        """See RetentionPolicy."""
        keys = view.keys()
        layers, kv_heads, count, _ = keys.shape
        found = self.centres.scores(keys, view.computed).double().cpu().numpy()
        forced = newest(view, self.window_tokens)
        by_head = found.reshape(layers * kv_heads, -1, count)
        by_head = standardised(by_head, ~forced[:, view.fixed :])
        scores = np.full((layers * kv_heads, view.stored), -np.inf)
        scores[:, view.fixed :] = by_head.max(axis=1)
        left = view.kept - int(forced[0].sum())
        if not self.per_head:
            scores = united(scores, left)
        return choose(scores, forced, left, view.block_tokens, self.band)
