"""Write banyan/v1/*_pb2* from proto/banyan/v1/*.proto; `--into DIR` writes elsewhere to compare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpc_tools import protoc

REPOSITORY = Path(__file__).resolve().parent.parent


def generate(into: Path) -> int:
    """Run protoc for messages, typed messages and services; returns its exit status."""
    source = REPOSITORY / "proto"
    protos = sorted(str(p) for p in source.glob("banyan/v1/*.proto"))
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    return int(protoc.main(["protoc", f"-I{source}", *outputs, *protos]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=REPOSITORY)
    sys.exit(generate(parser.parse_args().into))
