"""A device a tenth of the working set, over real tiers, hits what an endless one would."""

from pathlib import Path

import pytest

from kvstore.fetch import Level
from loadtest.mooncake import TRACE, Sizes, endless, read_trace, replay, scaled_down, working_set

SHARE_MIN = 0.95


def test_the_trace_is_scaled_block_by_block() -> None:
    requests = read_trace(TRACE, 1000)
    assert len(requests) == 1000
    assert working_set(requests) == 21514  # the trace's different ids: no two became one block
    first, second = requests[:2]
    assert len(first.prompt) == 53 and first.output_tokens == 3  # 6,758 and 500
    assert first.prompt[:4] == second.prompt[:4] and first.prompt[4] != second.prompt[4]


@pytest.mark.parametrize("count", [700, pytest.param(1000, marks=pytest.mark.soak)])
def test_tiers_hit_what_an_endless_device_would(count: int, tmp_path: Path) -> None:
    """Every tier takes part: host memory has a fifth, the disk half, the shared tier the rest."""
    requests = read_trace(TRACE, count)
    most = replay(requests, endless(requests), tmp_path)
    sizes = scaled_down(requests)
    found = replay(requests, sizes, tmp_path)
    print(f"{working_set(requests)} blocks, {sizes}\n{most}\n{found}")
    assert found.failed == found.wrong == most.wrong == 0
    assert found.prompt_tokens == most.prompt_tokens
    assert found.hit_tokens >= SHARE_MIN * most.hit_tokens > 0
    assert all(found.came_tokens[level] > 0 for level in Level)
    assert not list(tmp_path.iterdir())


def test_the_device_alone_would_not(tmp_path: Path) -> None:
    """So that the assertion above says something."""
    requests = read_trace(TRACE, 700)
    most = replay(requests, endless(requests), tmp_path)
    alone = replay(requests, Sizes(scaled_down(requests).device), tmp_path)
    assert alone.hit_tokens < 0.5 * most.hit_tokens
