"""A GAIA mount of the command `spinio`, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

# A hang becomes a failure.
SECONDS = 300


def command():
    """The command, or a skip with the reason."""
    found = os.environ.get("SPINIO_COMMAND") or shutil.which("spinio")
    if found is None or not os.path.exists(found):
        pytest.skip("no command spinio: SPINIO_COMMAND names none, and it is not in PATH")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        pytest.skip("not root, and no fusermount3")
    return found


def _is_stopped(process, task):
    try:
        with open(f"/proc/{process}/task/{task}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(") ")[2].startswith("T")
    except FileNotFoundError:  # a thread that has ended
        return True


class Mount:
    """A mount, which ends with its standard input: also if the test process dies."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="spinio-gaia-py-", dir="/tmp")
        self.path = os.path.join(self.folder, "mount")
        os.mkdir(self.path)
        words = ["timeout", "1300", command(), "gaia", "mount", "--foreground", "--until-stdin-ends", self.path]
        pipe = subprocess.PIPE
        self.supervisor = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.servers = [self._next_server()]

    def _next_server(self):
        for line in self.supervisor.stdout:
            if line.startswith("server "):
                return int(line.split()[1])
        raise RuntimeError("the supervisor ended without a server")

    def server(self):
        """The PID of the server that serves now, for tests that kill or stop it."""
        return self.servers[-1]

    def stop_server(self):
        """Stops the server, and waits until all its threads are stopped: another one may go on until then."""
        server = self.server()
        os.kill(server, signal.SIGSTOP)
        while not all(_is_stopped(server, task) for task in os.listdir(f"/proc/{server}/task")):
            time.sleep(0.001)

    def continue_server(self):
        """Lets it go on."""
        os.kill(self.server(), signal.SIGCONT)

    def wait_for_next_server(self):
        """Waits until the supervisor has started another."""
        self.servers.append(self._next_server())

    def file(self, name, data):
        """Makes a file; returns its path."""
        path = os.path.join(self.path, name)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def close(self):
        """Unmounts, lazily if it is busy."""
        self.supervisor.stdin.close()
        try:
            self.supervisor.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.terminate()
        lazily = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        subprocess.run([*lazily, self.path], stderr=subprocess.DEVNULL, timeout=SECONDS, check=False)
        self.supervisor.stdout.close()
        if not os.path.ismount(self.path):
            shutil.rmtree(self.folder, ignore_errors=True)
