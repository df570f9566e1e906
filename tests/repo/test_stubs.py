"""The committed stubs are what the .proto files generate."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_committed_stubs_equal_generated_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "stubs.py"), "--into", str(tmp_path)]
    subprocess.run(command, check=True)
    generated = {p.name: p.read_bytes() for p in (tmp_path / "banyan" / "v1").iterdir()}
    committed = {
        p.name: p.read_bytes() for p in (REPOSITORY / "banyan" / "v1").glob("*_pb2*") if p.is_file()
    }
    assert len(committed) == 9
    assert generated == committed, "run `make stubs` and commit the result"
