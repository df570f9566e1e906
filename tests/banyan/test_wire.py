"""The client's options become the request message, or one InvalidRequest."""

import pytest

from banyan.wire import generate_request
from seams.errors import InvalidRequest


def test_bias_and_allowed_tokens_are_sent() -> None:
    request = generate_request("hi", logit_bias={7: -2.5, 3: 100}, allowed_token_ids=[3, 7])
    sampling = request.sampling
    assert [(b.token_id, b.bias) for b in sampling.logit_bias] == [(7, -2.5), (3, 100.0)]
    assert list(sampling.allowed_token_ids) == [3, 7]
    assert not generate_request("hi").sampling.logit_bias


@pytest.mark.parametrize("bias", [[7, 8], {"seven": 1.0}, {7: "much"}, {-1: 1.0}, {1 << 40: 1.0}])
def test_a_bias_of_a_wrong_kind_is_refused(bias: object) -> None:
    with pytest.raises(InvalidRequest, match="wrong kind"):
        generate_request("hi", logit_bias=bias)  # type: ignore[typeddict-item]
