"""One run of the table: makes the files, runs the programs and peers, and collects their output."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from figures import GIB, MIB, verdict

HERE = pathlib.Path(__file__).resolve().parent


class Bench:
    def __init__(self, args):
        self.args = args
        self.began = time.monotonic()
        self.raw = []
        self.table = []
        self.notes = []
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="spinio-bench.", dir=args.scratch))
        self.scratch.chmod(0o755)
        for name in ("reads", "writes", "batch", "gather.ptx", "libspinio.so"):  # in a directory where any user may run them
            shutil.copy(pathlib.Path(args.bin) / name, self.scratch / name)
            (self.scratch / name).chmod(0o755)
        self.file = self.scratch / "data"
        self.size = max(1, int(args.gib * GIB) // (16 * MIB)) * 16 * MIB
        self.current = ""  # the row being measured
        self.stretch = 0  # offset of the next range of the file that no run has used

    def left(self):
        return self.args.budget - (time.monotonic() - self.began)

    def most(self, size):
        """size, but at most the size of the file."""
        return min(size, self.size)

    def note(self, text):
        print("note:", text, flush=True)
        self.notes.append(text)

    # ---- running

    def run(self, row, mode, *, user=None, env=None, times=1, file=None, label=None, program="reads", **values):
        """Runs `reads` (or another program) `times` times; returns the measurements and appends each to the raw list."""
        got = []
        for _ in range(times):
            if self.left() < 5:
                self.note(f"{row} {mode}: no time left")
                break
            full = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")} | (env or {})
            if mode.startswith(("us", "held")) or (program == "batch" and mode in ("stream", "random")):
                full["LD_PRELOAD"] = str(self.scratch / "libspinio.so")
            command = [str(self.scratch / program), row, mode, str(file or self.file)] + [f"{k}={v}" for k, v in values.items()]
            as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
            try:
                done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=max(5, min(120, self.left())), **as_user)
            except subprocess.TimeoutExpired:
                self.note(f"{row} {mode} {values}: timed out, killed")
                continue
            if done.stderr.strip():
                self.note(f"{row} {mode} {values}: " + " / ".join(done.stderr.strip().splitlines()[-3:]))
            if done.returncode:
                self.note(f"{row} {mode} {values}: exit status {done.returncode}")
                continue
            for line in done.stdout.splitlines():
                try:
                    one = json.loads(line)
                except ValueError:
                    self.note(f"{row} {mode}: cannot parse: {line}")
                    continue
                one |= {"label": label or mode, "env": env or {}, "values": values}
                if one.get("right") is False:
                    self.note(f"WRONG BYTES in {row} {mode} {values}")
                self.raw.append(one)
                got.append(one)
        return got

    def peer(self, name, **values):
        """Runs one peer; see peers.py."""
        if self.left() < 10:
            self.note(f"{name}: no time left")
            return []
        env = os.environ | values.pop("env", {})
        if self.site:
            env["PYTHONPATH"] = str(self.site) + os.pathsep + env.get("PYTHONPATH", "")
        command = [sys.executable, str(HERE / "peers.py"), name, str(self.file)] + [f"{k}={v}" for k, v in values.items()]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(5, min(90, self.left())))
        except subprocess.TimeoutExpired:
            self.note(f"{name}: timed out, killed")
            return []
        if done.returncode:
            self.note(f"{name}: status {done.returncode}: " + " / ".join(done.stderr.strip().splitlines()[-2:]))
            return []
        got = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for one in got:
            one |= {"label": name, "values": values}
        self.raw += got
        return got

    def fio(self, block):
        """fio's throughput with the same number of reads in flight, as text; not every machine has fio."""
        if not shutil.which("fio") or self.left() < 20:
            return ""
        self.drop()
        command = ["fio", "--name=cold", f"--filename={self.file}", "--readonly", "--rw=randread", f"--bs={block}", "--iodepth=128", "--ioengine=io_uring", "--direct=1", "--runtime=5", "--time_based", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            self.note("fio: " + done.stderr.strip()[-200:])
            return ""
        return f"fio {json.loads(done.stdout)['jobs'][0]['read']['bw_bytes'] / 1e9:.2f} GB/s"

    # ---- preparing

    def prepare(self):
        began = time.monotonic()
        block = os.urandom(16 * MIB)
        with open(self.file, "wb") as f:
            for i in range(self.size // len(block)):
                f.write(i.to_bytes(8, "little") + block[8:])
            os.fsync(f.fileno())
        with open(str(self.file) + ".warm", "wb") as f:
            f.write(os.urandom(64 * MIB))
            os.fsync(f.fileno())
        for path in (self.file, str(self.file) + ".warm"):
            os.chmod(path, 0o644)
        self.drop()
        self.warm()
        print(f"{self.size / GIB:g} GiB of data written and read back in {time.monotonic() - began:.1f} s", flush=True)
        self.site = None
        if self.args.wheels:
            wheels = sorted(map(str, pathlib.Path(self.args.wheels).glob("*.whl")))
            if wheels:
                self.site = self.scratch / "site"
                pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(self.site)]
                done = subprocess.run(pip + wheels, capture_output=True, text=True)
                if done.returncode:
                    self.note("wheels: " + done.stderr.strip()[-300:])

    def drop(self):
        with open(self.file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def warm(self):
        """Reads the whole file into the page cache; called after every row that drops parts of it."""
        for path in (self.file, str(self.file) + ".warm"):
            self.touch(path)

    def touch(self, path):
        """Reads a file into the page cache, in sequence."""
        with open(path, "rb", buffering=0) as f:
            buffer = bytearray(16 * MIB)
            while f.readinto(buffer):
                pass

    # ---- reporting

    def row(self, work, goal, met, **cells):
        """One line of the table. goal: text; met: True, False or None (not measured)."""
        line = {"row": self.current, "work": work, "goal": goal, "met": met} | {k: cells.get(k, "") for k in ("limit", "peer", "us", "ratio")}
        self.table.append(line)
        print(f"{work:<58.58} | limit {line['limit']:<14} | peer {line['peer']:<34} | us {line['us']:<34} | {line['ratio']:<18} | {goal:<30} | {verdict(met)}", flush=True)
