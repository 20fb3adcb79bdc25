"""Runs one step with a time limit, and packs the output of all steps.

A step is a session of its own. When its time is over, all processes of that session are ended: stress-ng puts its workers into process
groups of their own, and a worker left running would disturb the next measurement.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import tarfile
import time

EVERY = 25  # seconds between two packings while a step runs


class Packer:
    """Packs a directory into an archive that is replaced atomically, so it is complete at any moment."""

    def __init__(self, directory, archive):
        self.directory, self.archive = directory, archive
        self.seen = None

    def state(self):
        files = [p for p in sorted(self.directory.rglob("*")) if p.is_file()]
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]

    def pack(self):
        try:
            state = self.state()
            if state == self.seen:
                return
            new = self.archive.with_name("." + self.archive.name)
            with tarfile.open(new, "w:gz") as tar:
                tar.add(self.directory, arcname=self.directory.name, filter=small)
            new.replace(self.archive)
            self.seen = state
        except OSError as e:  # a file that disappeared meanwhile: the next packing has the rest
            print(f"not packed: {e}", flush=True)


def small(info):
    """Filter: figures and logs, but no data files."""
    return None if info.size > 8 << 20 else info


def session(number):
    """PIDs of a session's processes, without zombies."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == number and words[0] != "Z":
            yield int(entry.name)


def end(number, patience=5):
    """Ends the remaining processes of a session: SIGTERM first, then SIGKILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in session(number):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                pass
        until = time.monotonic() + patience
        while time.monotonic() < until and any(True for _ in session(number)):
            time.sleep(0.05)


def clean_up_after_killed_run(place):
    """Ends the processes that a killed run left, and removes its directory: both would disturb the next measurement."""
    for left in place.glob("spinio-record.*"):
        try:
            words = pathlib.Path("/proc", (left / "pid").read_text(), "cmdline").read_bytes()
            if b"record.py" in words:
                continue  # this run is still active
        except OSError:
            pass
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and pathlib.Path(os.readlink(entry / "cwd")).is_relative_to(left):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass
        shutil.rmtree(left, ignore_errors=True)


def run(step, directory, limit, packer):
    """Runs a step; returns its exit status and a description of it. The output goes to `log.txt` in the directory."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")} | {"PYTHONUNBUFFERED": "1"} | step.env
    command = [str(word) for word in step.command(directory, limit)]
    with open(directory / "log.txt", "w") as log:
        print("$", *command, file=log, flush=True)
        try:
            child = subprocess.Popen(command, env=env, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as e:
            return 127, f"FAILED: {e}"
        until = time.monotonic() + limit
        try:
            while (left := until - time.monotonic()) > 0:
                try:
                    child.wait(min(EVERY, left))
                    break
                except subprocess.TimeoutExpired:
                    packer.pack()
        finally:
            end(child.pid)
            status = child.wait()
    if left <= 0:
        return 124, "FAILED: timed out, killed"
    if status == step.skip:
        return 0, "skipped"
    return status, "passed" if status == 0 else f"FAILED, status {status}"
