"""Device memory of maps that is short: what is evicted, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap



def test_file_larger_than_its_memory_is_processed_in_parts(mount):
    # In a process of its own, which has a limit.
    chunk = 2 << 20
    path = mount.file("large", bytes(8 * chunk))
    script = f"""
from spinio import gaia
with gaia.open({str(path)!r}, "r+") as f, f.map(device="emulated") as m:
    for n in range(8):
        with m.writing(n * {chunk}, 4096) as array:
            array.fill(n)
    for n in range(8):
        with m.reading(n * {chunk}, 4096) as array:
            assert array.tobytes() == bytes([n]) * 4096
    info = m.info()
    assert info["device_bytes"] == 2 * {chunk} and info["chunks_evicted"] == 14, info
"""
    environment = dict(os.environ, SPINIO_GAIA_MEMORY="4M")
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def in_two_chunks_of_memory(path, body):
    """Runs statements in a process whose maps have memory for two of the chunks of the file."""
    script = f"""
import threading
from spinio import gaia
CHUNK = {2 << 20}
with gaia.open({str(path)!r}, "r+") as f, f.map(device="emulated") as m:
    def read_others():
        for n in range(1, 5):
            with m.reading(n * CHUNK, 4096) as array:
                assert array.tobytes() == bytes([n]) * 4096
{textwrap.indent(textwrap.dedent(body), "    ")}
"""
    subprocess.run([sys.executable, "-c", script], env=dict(os.environ, SPINIO_GAIA_MEMORY="4M"), check=True)


def chunks(mount, name):
    return mount.file(name, b"".join(bytes([n]) * (2 << 20) for n in range(5)))


def test_reading_block_keeps_its_memory_after_a_writing_block_inside(mount):
    in_two_chunks_of_memory(
        chunks(mount, "nested"),
        """
        with m.reading(0, CHUNK) as outer:
            for handoff in (False, True):
                with m.writing(0, CHUNK, overwrite=True, handoff=handoff) as array:
                    array.fill(9)
                read_others()
                assert outer[0:1].tobytes() == bytes([9])
        """,
    )


def test_reading_block_keeps_its_memory_while_that_of_another_thread_ends(mount):
    in_two_chunks_of_memory(
        chunks(mount, "threads"),
        """
        acquired, ended, seen = threading.Event(), threading.Event(), []
        real = m.acquire

        def acquire(*arguments, **options):
            result = real(*arguments, **options)
            if threading.current_thread() is second and not acquired.is_set():
                acquired.set()
                ended.wait()
            return result

        def read():
            with m.reading(0, CHUNK) as array:
                read_others()
                seen.append(array[0:1].tobytes())

        m.acquire = acquire
        second = threading.Thread(target=read)
        with m.reading(0, CHUNK):
            second.start()
            acquired.wait()
        ended.set()
        second.join()
        assert seen == [bytes([0])], seen
        """,
    )
