"""Moves ranges of named files to and from a device: NVMMU.

    from spinio import nvmmu

    with nvmmu.session("result.bin") as s:
        s.upload("input.bin", array)
        result = kernel(array)
        s.download(result)

The output is named before the GPU kernel runs, so that its storage can be prepared meanwhile; docs/nvmmu.md describes the
gain for each kind of storage. A move is not a POSIX call: it may reach the file in several writes and in any order, and
small downloads may be gathered. When the session has ended, all bytes are in the files.

`upload` and `download` return when the move is complete. `upload_async` and `download_async` only queue the move, on the
stream of the array, so that moves and GPU kernels of several streams overlap:

    for i, (stream, array) in enumerate(zip(itertools.cycle(streams), arrays)):
        with torch.cuda.stream(stream):
            s.upload_async("input.bin", array, i * array.nbytes)
            kernel(array)
            s.download_async(array, i * array.nbytes)

`pipeline` is the loop for data larger than the device's memory:

    with nvmmu.pipeline("input.f32", "output.f32", "float32") as pieces:
        for x, y in pieces:
            torch.sqrt(x, out=y)
"""

from __future__ import annotations

from spinio._pipeline import Pipeline, Step, pipeline
from spinio._session import Session, Ticket, session

__all__ = ["Pipeline", "Session", "Step", "Ticket", "pipeline", "session"]
