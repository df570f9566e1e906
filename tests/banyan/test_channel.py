"""What gRPC says about a transport never reaches the user."""

from __future__ import annotations

import pytest

from banyan import Client
from seams.errors import NoReplica


@pytest.mark.parametrize("address", ["nowhere.invalid:1", "127.0.0.1:1", "nonsense"])
def test_an_address_that_leads_nowhere_is_one_sentence(address: str) -> None:
    with Client(address, timeout_s=5) as client, pytest.raises(NoReplica) as raised:
        client.list_models()
    assert raised.value.message == "The router cannot be reached."
