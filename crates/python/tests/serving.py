"""A daemon of leased files (`spinio gaia serve`), for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile

import pytest

# A hang becomes a failure.
SECONDS = 300


def command():
    """The command, or a skip with the reason."""
    found = os.environ.get("SPINIO_COMMAND") or shutil.which("spinio")
    if found is None or not os.path.exists(found):
        pytest.skip("no command spinio: SPINIO_COMMAND names none, and it is not in PATH")
    return found


class Daemon:
    """A daemon with a socket of its own, which ends with its standard input: also if the test process dies."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="spinio-serve-py-", dir="/tmp")
        self.socket = os.path.join(self.folder, "serve.sock")
        words = [command(), "gaia", "serve", "--foreground", "--until-stdin-ends", "--socket", self.socket]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        if "serving" not in self.process.stdout.readline():
            raise RuntimeError("the daemon has not started")

    def environment(self):
        """For programs that use it."""
        return {**os.environ, "SPINIO_GAIA_SOCKET": self.socket}

    def status(self):
        words = [command(), "gaia", "status", "--json", "--socket", self.socket]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
        return json.loads(done.stdout)[0]

    def close(self):
        self.process.stdin.close()
        self.process.wait(SECONDS)
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
