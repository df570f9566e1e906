"""KV waste: bytes allocated that attention can never read, and what fits in equal memory."""

from worker.waste import measure


def test_paged_memory_wastes_little_and_fits_more() -> None:
    waste = measure()
    assert waste.steps > 100
    assert 0 < waste.paged < 0.04
    assert waste.contiguous > 0.4 and waste.contiguous > 10 * waste.paged
    assert waste.fit_paged >= 2 * waste.fit_contiguous
