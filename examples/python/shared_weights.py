"""Several processes load one model, of which the device keeps one copy.

    python3 shared_weights.py [--processes N] [--mib N]

Makes a safetensors file, starts processes that load it with `load_file(..., shared=True)`, and lets each of them
compare every tensor. The first one reads the file; the others map what it has read. `spinio gaia serve` keeps the copy:
if no such daemon runs, the example starts one for itself and stops it. The device is the GPU that PyTorch finds, else
the emulated one, a GPU in software. Needs numpy and the command `spinio`, which SPINIO_COMMAND may name; no root.
"""
import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

try:
    import numpy
    from spinio.safetensors import load_file
except ImportError as error:
    sys.exit(f"shared_weights: {error}: pip install numpy, and the wheel of spinio (README.md)")


def model(mib):
    """The tensors of the model: the same in each process, and different from each other."""
    layers, random = 8, numpy.random.default_rng(mib)
    width = int((mib * (1 << 20) / layers / 4) ** 0.5)
    for layer in range(layers):
        yield f"layer.{layer}.weight", random.random((width, width), dtype=numpy.float32)
        yield f"layer.{layer}.bias", random.integers(0, 1 << 15, width, dtype=numpy.int16)


def save(path, mib):
    """Writes the model as a safetensors file: the header's length, the header, and all bytes."""
    header, end = {}, 0
    for name, tensor in model(mib):
        kind = {"float32": "F32", "int16": "I16"}[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in model(mib):
            f.write(tensor.tobytes())


def load(path, device, mib):
    """What each process does: loads, compares, and keeps the tensors until its stdin ends."""
    begun = time.perf_counter()
    tensors = load_file(path, device=device, shared=True, library="torch" if device == "cuda" else None)
    seconds = time.perf_counter() - begun
    names = set()
    for name, expected in model(mib):
        seen = tensors[name].numpy() if device == "emulated" else tensors[name].cpu().numpy()
        if seen.dtype != expected.dtype or not numpy.array_equal(seen, expected):
            sys.exit(f"{name} is not the tensor that was saved")
        names.add(name)
    if names != set(tensors):
        sys.exit(f"the file has {len(names)} tensors, {len(tensors)} were loaded")
    print(json.dumps({"seconds": seconds, "tensors": len(names)}), flush=True)
    sys.stdin.read()


class Loader:
    """A process that loads the model, and ends when this is closed."""

    def __init__(self, *arguments):
        pipe = subprocess.PIPE
        words = [sys.executable, __file__, "--load", *map(str, arguments)]
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        # Its message is on stderr already.
        return json.loads(line) if line else sys.exit("shared_weights: a process could not load the model")

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def daemons(command):
    """The daemons that programs of this user ask, in their order."""
    done = subprocess.run([command, "gaia", "status", "--json"], capture_output=True, text=True, check=False)
    return [one for one in json.loads(done.stdout or "[]") if "serve" in one]


@contextlib.contextmanager
def serving(command):
    """While a daemon serves: one that runs already, or one of this example."""
    if daemons(command):
        yield "which ran already"
        return
    # Not below $TMPDIR, which may be long: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="spinio-", dir="/tmp") as folder:
        socket = os.path.join(folder, "serve.sock")
        os.environ["SPINIO_GAIA_SOCKET"] = socket  # for the processes too
        try:
            subprocess.run([command, "gaia", "serve", "--socket", socket], check=True)
        except subprocess.CalledProcessError:
            sys.exit("shared_weights: the daemon has not started")
        try:
            yield "started by this example"
        finally:
            subprocess.run([command, "gaia", "serve", "--stop", "--socket", socket], check=False)


def gpu():
    """The device: the first GPU if PyTorch finds one."""
    try:
        import torch
    except ImportError:
        return "emulated"
    return "cuda" if torch.cuda.is_available() else "emulated"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="how many load the model (default: 4)")
    parser.add_argument("--mib", type=int, default=48, metavar="N", help="size of the model (default: 48)")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        path, device, mib = options.load
        return load(path, device, int(mib))
    if options.processes < 1 or options.mib < 1:
        parser.error("--processes and --mib take numbers from 1 on")
    command = os.environ.get("SPINIO_COMMAND") or shutil.which("spinio")
    if command is None or shutil.which(command) is None:
        sys.exit("shared_weights: there is no command spinio: put it into PATH, or name it in SPINIO_COMMAND")
    device = gpu()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spinio-shared-"))
        path = os.path.join(folder, "model.safetensors")
        save(path, options.mib)
        size = os.path.getsize(path)
        whose = stack.enter_context(serving(command))
        print(f"model    {size / (1 << 20):.1f} MiB, in {path}")
        print(f"daemon   spinio gaia serve, {whose}")
        print(f"device   {device}")

        def start():
            return stack.enter_context(contextlib.closing(Loader(path, device, options.mib)))

        first = start().answer()
        print(f"first    {first['seconds'] * 1e3:.0f} ms: it has read the file")
        further = [start() for _ in range(options.processes - 1)]
        times = [loader.answer()["seconds"] * 1e3 for loader in further]
        if times:
            print(f"further  {', '.join(f'{ms:.0f}' for ms in times)} ms: they have mapped what was read")

        # While all of them have it mapped.
        here = [file for one in daemons(command) for file in one["files"] if file["path"] == path]
        maps, held = sum(file["maps"] for file in here), sum(file["held_bytes"] for file in here)
        print(f"copies   {held / (1 << 20):.1f} MiB are held for {maps} processes")
        # The unit is 2 MiB of files up to 128 MiB, and 64 MiB of larger ones.
        chunk = (2 if size <= 128 << 20 else 64) << 20
        if maps != options.processes or not size <= held < size + chunk:
            sys.exit("shared_weights: that is not one copy for all processes")
    print(f"✓ each of {first['tensors']} tensors is right in each of {options.processes} processes")
    return None


# So that the daemon is stopped, and the file removed.
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
try:
    main()
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
