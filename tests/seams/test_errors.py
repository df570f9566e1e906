"""The exception tree: it is what its drawing says, and statuses map back to it."""

import re

import pytest

from seams import errors


def leaves() -> list[type[errors.BanyanError]]:
    """Of the leaf package: a room may refine one for itself, under the same status."""
    found: list[type[errors.BanyanError]] = []
    stack = list(errors.BanyanError.__subclasses__())
    while stack:
        cls = stack.pop()
        if cls.__module__ == errors.__name__:
            found.append(cls)
        stack += cls.__subclasses__()
    return found


def test_the_drawing_is_true() -> None:
    drawn = dict(re.findall(r"── (\w+)\s+([A-Z_]+)\s", errors.__doc__ or ""))
    assert drawn == {cls.__name__: cls.status.name for cls in leaves()}


@pytest.mark.parametrize("cls", leaves(), ids=lambda cls: cls.__name__)
def test_a_status_comes_back_as_an_error_of_that_status(cls: type[errors.BanyanError]) -> None:
    error = errors.from_status(int(cls.status), "One sentence.", retry_after_s=0.5)
    assert error.status == cls.status
    assert (error.message, error.retry_after_s) == ("One sentence.", 0.5)


@pytest.mark.parametrize("cls", leaves(), ids=lambda cls: cls.__name__)
def test_a_name_picks_among_classes_of_one_status(cls: type[errors.BanyanError]) -> None:
    assert type(errors.from_status(int(cls.status), "x", name=cls.__name__)) is cls


def test_a_name_of_another_status_is_ignored() -> None:
    found = errors.from_status(int(errors.StatusCode.NOT_FOUND), "x", name="Overloaded")
    assert found.status == errors.StatusCode.NOT_FOUND


def test_a_status_we_never_send_is_internal() -> None:
    assert type(errors.from_status(2, "?")) is errors.InternalError
