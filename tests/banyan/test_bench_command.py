"""`banyan bench` becomes the load generator; the API key never stands in its arguments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil

KEY = "key-that-nobody-may-read"


def test_the_key_goes_by_the_environment() -> None:
    with socket.socket() as silent:  # accepts, and never answers: the load waits for it
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "banyan", "bench", "--address", address, "--users", "1"]
        env = os.environ | {"BANYAN_HOME": "/nonexistent"}
        command += ["--api-key", KEY]
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as bench:
            try:
                process, deadline = psutil.Process(bench.pid), time.monotonic() + 60
                while "loadtest" not in process.cmdline():
                    assert time.monotonic() < deadline and bench.poll() is None
                    time.sleep(0.02)
                assert process.cmdline()[3:] == ["--address", address, "--users", "1"]
                assert process.environ()["BANYAN_API_KEY"] == KEY
            finally:
                bench.kill()


def test_the_load_generator_takes_it_from_there() -> None:
    code = "import sys, loadtest.__main__ as m; print(m.parser().parse_args(sys.argv[1:]).api_key)"
    command = [sys.executable, "-c", code, "--address", "x"]
    env = os.environ | {"BANYAN_API_KEY": KEY}
    for more, expected in (([], KEY), (["--api-key", "another"], "another")):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr
