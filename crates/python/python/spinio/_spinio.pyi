from typing import Any, Sequence, TypedDict, final

__all__ = [
    "DeviceMapping",
    "GaiaMap",
    "Memory",
    "Net",
    "NvmmuSession",
    "NvmmuTicket",
    "SafetensorsError",
    "Stream",
    "__version__",
    "configure",
    "describe",
    "header_len",
    "is_pinned",
    "parse",
    "pause",
    "pin_file",
    "read",
    "read_full",
    "read_many",
    "resume",
    "set_stream",
    "stats",
    "stream",
    "unpin_file",
    "write",
    "write_full",
]

__version__: str

class SafetensorsError(ValueError):
    """The file is not a valid safetensors file."""

class _Described(TypedDict):
    device: str
    address: int
    bytes: int
    stream: int | None

class _Latency(TypedDict):
    p50_nanoseconds: int | None
    p99_nanoseconds: int | None

class _Calls(_Latency):
    calls: int
    failed: int
    bytes: int
    nanoseconds: int

class _Route(_Latency):
    direction: str
    route: str
    reason: str
    pieces: int
    bytes: int
    nanoseconds: int

class _Refused(TypedDict):
    reason: str
    times: int
    bytes: int

class _Stats(TypedDict):
    read: _Calls
    write: _Calls
    batch: _Calls
    routes: list[_Route]
    refused: list[_Refused]
    gauges: dict[str, tuple[int, int]]
    kept: dict[str, tuple[int, int]]  # deprecated

class _Report(TypedDict):
    uploaded: int
    downloaded: int
    mode: str
    full_stripe: int
    filler: int
    unaligned: int
    read_ahead: int
    # Deprecated:
    promise: str
    whole: int
    neighbours: int
    loose: int

class _GaiaInfo(TypedDict):
    file_size: int
    acquires: int
    releases: int
    bytes_from_file: int
    bytes_from_snapshots: int
    pages_patched: int
    bytes_published: int
    pages_committed: int
    pages_merged: int
    reattached: int
    releases_recovered: int
    bytes_shared: int
    acquires_unchanged: int
    device_bytes: int
    chunks_evicted: int
    bytes_registered: int
    bytes_from_peer: int
    peer_refused: str | None
    releases_handed_over: int
    peer_bytes_refused: int
    flush_ns: int
    plan_ns: int
    read_ns: int
    copy_ns: int
    confirm_ns: int
    scan_ns: int
    release_scan_ns: int
    release_copy_ns: int
    release_commit_ns: int
    in_place: int

@final
class GaiaMap:
    def __new__(
        cls, fd: int, offset: int, bytes: int, write: bool, in_place: bool, device: str | None = None
    ) -> GaiaMap: ...
    @property
    def place(self) -> tuple[int, int]: ...
    @property
    def device(self) -> str: ...
    def memory(self) -> Memory: ...
    def acquire(self, offset: int, bytes: int, write: bool, overwrite: bool) -> int: ...
    def release(self, offset: int, bytes: int, handoff: bool) -> int: ...
    def acquire_async(self, offset: int, bytes: int, write: bool, overwrite: bool, stream: int) -> None: ...
    def release_async(self, offset: int, bytes: int, stream: int) -> None: ...
    def discard(self, offset: int, bytes: int) -> None: ...
    def begin_block(self, offset: int, bytes: int) -> None: ...
    def end_block(self, offset: int, bytes: int) -> None: ...
    def sync(self, offset: int, bytes: int) -> None: ...
    def info(self) -> _GaiaInfo: ...
    def unmap(self) -> None: ...

class _NetStats(TypedDict):
    open: int
    accepted: int
    connected: int
    bytes_received: int
    bytes_sent: int
    doorbells: int
    calls: int
    violations: int
    proxy_ns: int
    upgraded: int
    kept_by_setting: int
    kept_by_memory: int
    kept_by_backlog: int
    kept_by_name: int
    shared: int
    kept_by_granules: int
    kept_by_user: int
    kept_by_time: int
    peer: int
    helped: int
    kept_by_descriptors: int

@final
class Net:
    def __new__(
        cls,
        device: str | None,
        sockets: int,
        connections: int,
        ring_bytes: int,
        idle_us: int,
        upgrade: bool,
        files_root: Any,
        files_write: bool,
        files: int,
        shared_connections: int,
        threads: int,
    ) -> Net: ...
    def handle(self) -> bytes: ...
    def listen(self, address: str, backlog: int) -> int: ...
    def connect(self, address: str) -> int: ...
    def adopt(self, fd: int) -> int: ...
    def release(self, socket: int, room: int) -> tuple[int, bytes]: ...
    def set(self) -> int: ...
    def add(self, set: int, socket: int, events: int) -> None: ...
    def address(self, socket: int) -> str: ...
    def stats(self) -> _NetStats: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...

@final
class Memory:
    def __new__(cls, bytes: int, host_mapped: bool = False, device: int = 0) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def get(self, at: int, bytes: int) -> bytes: ...
    def put(self, at: int, from_: Any, /) -> None: ...
    def dlpack(
        self,
        at: int,
        shape: Sequence[int],
        strides: Sequence[int],
        code: int,
        bits: int,
        readonly: bool,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class Stream:
    def __new__(cls, device: int = 0) -> Stream: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...

@final
class DeviceMapping:
    def __new__(cls, fd: int, offset: int, bytes: int, like: Any = None) -> DeviceMapping: ...
    @property
    def place(self) -> tuple[int, int]: ...
    @property
    def revoke_requested(self) -> bool: ...
    def unmap(self) -> None: ...

@final
class NvmmuTicket:
    def wait(self) -> int: ...
    def done(self) -> bool: ...

@final
class NvmmuSession:
    def __new__(cls, output: Any = None) -> NvmmuSession: ...
    def hint_range(self, offset: int, bytes: int) -> None: ...
    def upload(self, path: Any, into: Any, offset: int) -> int: ...
    def download(self, from_: Any, path: Any, offset: int, /) -> int: ...
    def upload_async(self, path: Any, into: Any, offset: int) -> NvmmuTicket: ...
    def download_async(self, from_: Any, path: Any, offset: int, /) -> NvmmuTicket: ...
    def flush(self) -> None: ...
    def sync(self) -> None: ...
    def report(self) -> _Report: ...
    def end(self) -> _Report | None: ...

def read(fd: int, into: Any, offset: int | None = None, *, wait: bool = False) -> int | None: ...
def read_full(fd: int, into: Any, offset: int, *, wait: bool = False) -> int: ...
def write(fd: int, from_: Any, offset: int | None = None, /) -> int | None: ...
def write_full(fd: int, from_: Any, offset: int | None = None, /) -> int | None: ...
def read_many(fd: int, offsets: Any, lengths: Any, out: Any, results: Any) -> int: ...
def pin_file(fd: int, like: Any = None) -> int: ...
def unpin_file(fd: int, generation: int) -> None: ...
def is_pinned(fd: int) -> bool: ...
def describe(object: Any) -> _Described:
    """How `spinio` classifies an object's memory."""
def set_stream(handle: int) -> None: ...
def stream() -> int: ...
def stats() -> _Stats:
    """SPIN's counters of this process since its start."""
def configure(text: str) -> None: ...
def pause() -> None: ...
def resume() -> None: ...
def header_len(prefix: bytes, file: int) -> int: ...
def parse(
    text: bytes, data: int
) -> tuple[list[tuple[str, str]] | None, list[tuple[str, str, list[int], int, int]]]: ...
