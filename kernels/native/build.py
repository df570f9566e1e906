"""Builds and loads the compiled CPU path for this machine's instruction set; knows no model.

One shared library per instruction set, kept under a name that holds a hash of sources and flags, so
a newer version never meets an older build. It takes seconds; who comes second, in another process,
waits for the first. `python kernels/native/build.py FOLDER` builds them all, for an image without a
compiler ($BANYAN_NATIVE = FOLDER there).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
ABI_VERSION = 4
BUILD_S_MAX = 300.0
COMPILERS = ("g++", "c++", "clang++")
# No contraction: which products and sums are fused is written in the sources, for every compiler.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=off",
    "-Wno-psabi",
)  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstructionSet:
    """One build. `needs` are /proc/cpuinfo's flags; `flags` the compiler's."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_BF16 = (*_AVX512, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_bf16")


def _flags(needs: Sequence[str]) -> tuple[str, ...]:
    names = {"avx512_bf16": "avx512bf16", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
    return tuple(f"-m{names.get(name, name)}" for name in needs)


# Best first.
INSTRUCTION_SETS = (
    InstructionSet("amx", frozenset(_AMX), _flags(_AMX)),
    InstructionSet("avx512_bf16", frozenset(_BF16), _flags(_BF16)),
    InstructionSet("avx512", frozenset(_AVX512), _flags(_AVX512)),
    InstructionSet("avx2", frozenset(_AVX2), _flags(_AVX2)),
    InstructionSet("portable", frozenset(), ()),
)


class NativeUnavailable(Exception):
    """There is no compiled path here; one sentence why."""


@cache
def cpu_flags() -> frozenset[str]:
    """What the kernel says this CPU can do; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((v for k, _, v in lines if k.strip() == "flags"), "").split())


def supported() -> list[InstructionSet]:
    """The builds this CPU can run, best first."""
    return [one for one in INSTRUCTION_SETS if one.needs <= cpu_flags()]


def cache_folder() -> Path:
    """Where builds are kept: $BANYAN_HOME/native, or ~/.cache/banyan/native."""
    given = os.environ.get("BANYAN_HOME")
    home = Path(given).expanduser() if given else Path.home() / ".cache" / "banyan"
    return home / "native"


def compiler() -> str:
    """$CXX, or the first C++ compiler found; NativeUnavailable if there is none."""
    given = os.environ.get("CXX", "")
    for name in (given,) if given else COMPILERS:
        if (found := shutil.which(name)) is not None:
            return found
    raise NativeUnavailable("There is no C++ compiler on this machine.")


_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}


def load_library(isa: str = "") -> tuple[ctypes.CDLL, str]:
    """The loaded library and its instruction set's name: the best that runs here, or the one named.

    Builds it if it is not in the cache. Raises NativeUnavailable.
    """
    wanted = [one for one in supported() if isa in ("", one.name)]
    reason = NativeUnavailable(f"This CPU cannot run the build {isa!r}.")
    for one in wanted:
        with _lock:
            try:
                if one.name not in _loaded:
                    _loaded[one.name] = _load(one)
                return _loaded[one.name], one.name
            except NativeUnavailable as error:
                reason = error
    raise reason


def built_library() -> ctypes.CDLL | None:
    """The best library that is there and can be loaded; None if that takes a build."""
    for one in supported():
        try:
            if one.name in _loaded or _built(one) is not None:
                return load_library(one.name)[0]
        except (NativeUnavailable, OSError):
            continue
    return None


def _load(isa: InstructionSet) -> ctypes.CDLL:
    path = _build(isa)
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.banyan_version.restype = ctypes.c_int32
        loaded.banyan_allowed.restype = ctypes.c_int32
        version, allowed = loaded.banyan_version(), loaded.banyan_allowed()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"The build {path.name} cannot be loaded: {error}.") from None
    if version != ABI_VERSION:
        raise NativeUnavailable(f"The build {path.name} is of version {version}.")
    if not allowed:
        raise NativeUnavailable(f"The kernel does not let this process use {isa.name}.")
    return loaded


def file_name(isa: InstructionSet) -> str:
    """Of its library: the same wherever the same sources are built with the same flags."""
    digest = hashlib.sha256("\0".join([platform.machine(), *FLAGS, *isa.flags]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return f"banyan-{isa.name}-{digest.hexdigest()[:16]}.so"


def _built(isa: InstructionSet) -> Path | None:
    """The library's path if it is there."""
    name, given = file_name(isa), os.environ.get("BANYAN_NATIVE")
    paths = [Path(given) / name] if given else []
    return next((path for path in (*paths, cache_folder() / name) if path.is_file()), None)


def _build(isa: InstructionSet) -> Path:
    """The library's path; built unless it is there."""
    name, folder = file_name(isa), cache_folder()
    try:
        if (found := _built(isa)) is not None:
            return found
        compiler()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{isa.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).is_file():
                _compile(isa, folder / name)
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be written: {error.strerror}.") from None
    return folder / name


def _compile(isa: InstructionSet, target: Path) -> None:
    """Compile to a name of our own and rename: a killed build leaves nothing that looks whole."""
    cxx = compiler()
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    _log.info("building the compiled CPU path: %s", target.name)
    command = [cxx, *FLAGS, *isa.flags, str(SOURCES / "decoder.cpp"), "-o", str(fresh)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S_MAX)
    except subprocess.TimeoutExpired:
        raise NativeUnavailable("The build of the compiled CPU path took too long.") from None
    except OSError as error:
        raise NativeUnavailable(f"{Path(cxx).name} cannot be run: {error.strerror}.") from None
    else:
        if ran.returncode != 0 or not fresh.is_file():
            _log.warning("the build failed:\n%s", ran.stderr[-4000:])
            raise NativeUnavailable(f"{Path(cxx).name} could not build the compiled CPU path.")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def main() -> None:
    """Build every library of this machine's architecture into the folder given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python kernels/native/build.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine() in ("x86_64", "AMD64")
    try:
        for isa in INSTRUCTION_SETS:
            if x86 or not isa.needs:
                _compile(isa, folder / file_name(isa))
                print(folder / file_name(isa))
    except NativeUnavailable as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
