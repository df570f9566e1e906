"""What every test may use: the real small model, found or fetched once per session."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from kernels.native import build

# The same examples in every run, and no verdict on how fast this machine is.
settings.register_profile(
    "banyan", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("banyan")

# Threads of a matrix product sleep while they wait: spinning beside any busy neighbour makes a step
# ten times slower. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """What one process runs when tests are spread over several: a file; clusters one after the
    other, since each test of one looks whether anything of it is left on the machine."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "tests/e2e" if file.startswith("tests/e2e/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    """With -n."""
    return _ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _compiled_path_is_built_once() -> None:
    """Many tests, and the clusters they start, have a home of their own: without this each of them
    would build the compiled path again."""
    folder = build.cache_folder()
    with suppress(build.NativeUnavailable):
        build.load_library()
    os.environ.setdefault("BANYAN_NATIVE", str(folder))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct: $BANYAN_TEST_MODEL, else the cache, else fetched into it.

    Never skips: without the model the tests that need it fail with the reason.
    """
    given = os.environ.get("BANYAN_TEST_MODEL")
    if given:
        folder = Path(given)
        assert (folder / "config.json").is_file(), "BANYAN_TEST_MODEL holds no model"
        return folder
    from banyan.models import fetch_demo

    return fetch_demo()
