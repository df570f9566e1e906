"""The share of the model that is loaded, as a progress bar reads it."""

from __future__ import annotations

from pathlib import Path

from worker.service.assemble import LoadProgress


def test_the_file_follows_the_load(tmp_path: Path) -> None:
    path = tmp_path / "loaded"
    progress = LoadProgress(str(path))
    seen = []
    for done in (0, 250, 251, 1000):
        progress(done, 1000)
        seen.append(float(path.read_text()))
    assert seen == [0.0, 0.25, 0.25, 1.0]


def test_no_file_and_a_file_that_cannot_be_written_are_no_failure(tmp_path: Path) -> None:
    LoadProgress("")(1, 2)
    progress = LoadProgress(str(tmp_path / "missing" / "loaded"))
    progress(1, 2)
    progress(2, 2)
    assert not (tmp_path / "missing").exists()
