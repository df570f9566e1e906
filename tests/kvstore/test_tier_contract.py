"""The contract suite on the host tier, plain and verifying; other tiers run it beside their own."""

from collections.abc import Iterator

import pytest
from tier_contract import TierContract, TierFactory

from kvstore.tiers.base import BlockName
from kvstore.tiers.host import HostTier


class HostFactory(TierFactory):
    """A tier of this process: `fresh` only."""

    def __init__(self, verifies: bool) -> None:
        self.verifies = verifies
        self.tier: HostTier | None = None

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> HostTier:
        self.tier = HostTier(self.sizes, capacity_blocks * self.sizes[0], verify=self.verifies)
        return self.tier

    def damage(self, name: BlockName) -> None:
        assert self.tier is not None
        view = self.tier.pin(name)
        assert view is not None
        view[5] ^= 1
        self.tier.unpin(name)


@pytest.fixture(params=[False, True], ids=["plain", "verifying"])
def factory(request: pytest.FixtureRequest) -> Iterator[TierFactory]:
    made = HostFactory(request.param)
    yield made
    made.close()


class TestHostContract(TierContract):
    """Everything in tier_contract.py."""
