"""Building the compiled path: once, by whoever comes first; whatever goes wrong is one sentence.

The library built here is a few lines that answer what build.py asks of any: the real compiler and
loader, without the seconds of the real sources.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.build import (
    INSTRUCTION_SETS,
    InstructionSet,
    NativeUnavailable,
    file_name,
    load_library,
)

REPOSITORY = Path(__file__).resolve().parents[2]
PORTABLE = INSTRUCTION_SETS[-1]
BETTER = InstructionSet("better", frozenset(), ("-ffp-contract=off", "-O2"))  # runs anywhere too
SOURCE = """
#include <stdint.h>
extern "C" int32_t banyan_version(void) {{ return {version}; }}
extern "C" int32_t banyan_allowed(void) {{ return {allowed}; }}
extern "C" int32_t answer(void) {{ return {answer}; }}
"""
DRIVER = """
import sys
from pathlib import Path
from kernels.native import build
build.SOURCES = Path(sys.argv[1])
loaded, name = build.load_library("portable")
print(name, loaded.answer())
"""


class Workshop:
    """A folder of sources, an empty cache, and a compiler that keeps count of its runs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.home = folder / "home"
        self.sources = folder / "src"
        self.sources.mkdir()
        self.write()
        self._runs = folder / "runs"
        self.real = build.compiler()
        patch.setattr(build, "SOURCES", self.sources)
        patch.setattr(build, "_loaded", {})
        patch.delenv("BANYAN_NATIVE", raising=False)
        patch.setenv("BANYAN_HOME", str(self.home))
        self.compiler(f'exec {self.real} "$@"')

    def write(self, version: int = build.ABI_VERSION, allowed: int = 1, answer: int = 42) -> None:
        text = SOURCE.format(version=version, allowed=allowed, answer=answer)
        (self.sources / "decoder.cpp").write_text(text)

    def compiler(self, script: str) -> None:
        """The compiler from now on; `$target` is what it shall write."""
        path = self.folder / "cxx"
        find = 'target=""; for word; do target="$word"; done'  # -o and its value come last
        path.write_text(f"#!/bin/sh\necho run >> {self._runs}\n{find}\n{script}\n")
        path.chmod(0o755)
        self.patch.setenv("CXX", str(path))

    @property
    def runs(self) -> int:
        return len(self._runs.read_text().splitlines()) if self._runs.exists() else 0

    @property
    def target(self) -> Path:
        return self.home / "native" / file_name(PORTABLE)

    def kept(self) -> list[str]:
        """What the cache holds, locks aside."""
        names = (path.name for path in (self.home / "native").iterdir())
        return sorted(name for name in names if not name.endswith(".lock"))

    def start(self) -> subprocess.Popen[str]:
        """Another process that loads the library and prints its answer."""
        command = [sys.executable, "-c", DRIVER, str(self.sources)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=REPOSITORY, text=True, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def fails(self, match: str) -> None:
        self.patch.setattr(build, "_loaded", {})
        with pytest.raises(NativeUnavailable, match=match) as caught:
            load_library("portable")
        text = str(caught.value)
        assert text.endswith(".") and "\n" not in text and ". " not in text


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def test_a_build_in_the_cache_is_not_built_again(shop: Workshop) -> None:
    loaded, name = load_library("portable")
    assert (loaded.answer(), name, shop.runs) == (42, "portable", 1)
    assert load_library("portable")[0] is loaded
    assert shop.kept() == [shop.target.name]
    out, _ = shop.start().communicate(timeout=60)
    assert (out, shop.runs) == ("portable 42\n", 1)
    shop.patch.setattr(build, "_loaded", {})
    shop.patch.setenv("CXX", "no-such-compiler")  # what is there needs none
    assert load_library("portable")[0].answer() == 42


def test_what_is_built_is_found_and_nothing_is_built_for_it(shop: Workshop) -> None:
    shop.patch.setattr(build, "INSTRUCTION_SETS", (BETTER, PORTABLE))
    assert build.built_library() is None and shop.runs == 0
    load_library("portable")
    assert build.built_library() is load_library("portable")[0], "the better one is not built"
    shop.patch.setattr(build, "_loaded", {})
    found = build.built_library()
    assert found is not None and found.answer() == 42 and shop.runs == 1
    (shop.target.parent / file_name(BETTER)).write_bytes(b"no library")
    assert build.built_library() is load_library("portable")[0] and shop.runs == 1


def test_names_tell_sources_and_flags_apart(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {file_name(one) for one in INSTRUCTION_SETS}
    assert len(names) == len(INSTRUCTION_SETS)
    assert names == {file_name(one) for one in INSTRUCTION_SETS}
    load_library("portable")
    shop.write(answer=43)
    shop.patch.setattr(build, "_loaded", {})
    assert load_library("portable")[0].answer() == 43
    assert len(shop.kept()) == shop.runs == 2
    (shop.sources / "more.h").write_text("// a header counts too\n")
    assert shop.target.name not in shop.kept()
    before = file_name(PORTABLE)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert file_name(PORTABLE) != before


def test_two_processes_at_once_build_once(shop: Workshop) -> None:
    shop.compiler(f'sleep 1; exec {shop.real} "$@"')
    processes = [shop.start() for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in results] == ["portable 42\n"] * 3, results
    assert (shop.runs, shop.kept()) == (1, [shop.target.name])


def test_a_killed_build_leaves_nothing_that_is_loaded(shop: Workshop) -> None:
    """Killed with half a library written: no later process takes it, or waits for it."""
    written = shop.folder / "written"
    shop.compiler(f'head -c 5000 {sys.executable} > "$target"; touch {written}; exec sleep 600')
    process = shop.start()
    deadline = time.monotonic() + 60
    while not written.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert shop.kept() and not shop.target.exists()
    shop.compiler(f'exec {shop.real} "$@"')
    assert load_library("portable")[0].answer() == 42
    assert shop.runs == 2


@pytest.mark.parametrize(
    "script", ["exit 1", 'echo "no such header" >&2; touch "$target"; exit 1', "exit 0"]
)
def test_a_failing_compiler(shop: Workshop, script: str) -> None:
    shop.compiler(script)
    shop.fails("cxx could not build")
    assert shop.kept() == []


def test_a_compiler_that_never_ends(shop: Workshop) -> None:
    shop.patch.setattr(build, "BUILD_S_MAX", 0.3)
    shop.compiler('touch "$target"; exec sleep 600')
    shop.fails("took too long")
    assert shop.kept() == []


def test_a_compiler_that_is_none(shop: Workshop) -> None:
    (shop.folder / "cxx").write_bytes(b"\x7fELF, but nothing of the kind")
    shop.fails("cxx cannot be run")
    assert shop.kept() == []


def test_no_compiler(shop: Workshop) -> None:
    shop.patch.setenv("CXX", "no-such-compiler")
    shop.fails("There is no C\\+\\+ compiler")
    shop.patch.delenv("CXX")
    shop.patch.setenv("PATH", str(shop.folder))
    shop.fails("There is no C\\+\\+ compiler")
    assert not shop.home.exists()


def test_the_first_compiler_of_the_path_is_found(shop: Workshop) -> None:
    path = os.environ["PATH"]
    shop.patch.delenv("CXX")
    shop.patch.setenv("PATH", str(shop.folder))
    for name in build.COMPILERS[::-1]:
        shutil.copy(shop.folder / "cxx", shop.folder / name)
        assert Path(build.compiler()) == shop.folder / name
    shop.patch.setenv("PATH", f"{shop.folder}:{path}")  # compilers call assemblers and linkers
    assert load_library("portable")[0].answer() == 42
    assert shop.runs == 1


def test_a_cache_that_cannot_be_written(shop: Workshop) -> None:
    shop.home.write_text("a file where the folder should be")
    shop.fails("cannot be written")
    assert shop.runs == 0


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x7fELF" + bytes(60)])
def test_garbage_in_the_cache(shop: Workshop, content: bytes) -> None:
    shop.target.parent.mkdir(parents=True)
    shop.target.write_bytes(content)
    shop.fails("cannot be loaded")
    assert shop.runs == 0


def test_the_next_best_build_stands_in(shop: Workshop) -> None:
    """Whoever names no instruction set gets the best that can be had."""
    shop.patch.setattr(build, "INSTRUCTION_SETS", (BETTER, PORTABLE))
    broken = shop.target.with_name(file_name(BETTER))
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"garbage")
    assert load_library()[1] == "portable"
    broken.unlink()
    assert load_library()[1] == "better"


def test_a_library_of_another_version(shop: Workshop) -> None:
    shop.write(version=build.ABI_VERSION + 1)
    shop.fails(f"of version {build.ABI_VERSION + 1}")


def test_a_library_that_lacks_its_functions(shop: Workshop) -> None:
    (shop.sources / "decoder.cpp").write_text("int nothing;\n")
    shop.fails("cannot be loaded")


def test_instructions_that_the_kernel_does_not_allow(shop: Workshop) -> None:
    shop.write(allowed=0)
    shop.fails("does not let this process use portable")


def test_a_build_that_this_cpu_cannot_run(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeUnavailable, match="cannot run the build 'nonesuch'"):
        load_library("nonesuch")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "sse2"}))
    assert [one.name for one in build.supported()] == ["avx2", "portable"]
    with pytest.raises(NativeUnavailable, match="cannot run the build 'amx'"):
        load_library("amx")
    monkeypatch.setattr(build, "cpu_flags", frozenset)  # a kernel without /proc/cpuinfo
    assert [one.name for one in build.supported()] == ["portable"]


def test_the_cache_is_in_banyan_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BANYAN_HOME", "~/elsewhere")
    assert build.cache_folder() == tmp_path / "elsewhere" / "native"
    monkeypatch.delenv("BANYAN_HOME")
    assert build.cache_folder() == tmp_path / ".cache" / "banyan" / "native"


def test_prebuilt_libraries_need_no_compiler(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shop.folder / "image"
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (BETTER, PORTABLE))
    monkeypatch.setattr(sys, "argv", ["build.py", str(folder)])
    build.main()
    names = [file_name(one) for one in build.INSTRUCTION_SETS]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    monkeypatch.setenv("BANYAN_NATIVE", str(folder))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library("portable")[0].answer() == 42
    assert not shop.home.exists()
    shop.write(answer=43)  # of other sources: not what is asked for
    shop.fails("no C\\+\\+ compiler")


def test_prebuilding_says_why_it_failed(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.compiler("exit 1")
    monkeypatch.setattr(sys, "argv", ["build.py", str(shop.folder / "image")])
    with pytest.raises(SystemExit, match=r"error: cxx could not build .*\."):
        build.main()
    monkeypatch.setattr(sys, "argv", ["build.py"])
    with pytest.raises(SystemExit, match="usage"):
        build.main()
