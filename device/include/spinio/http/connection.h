// connection.h: connections that stay open between requests, without a block for each.
//
//   event set ── event of a connection ──> block: claim() ── receive, answer what is complete ── leave_idle() ──> waits for its next event
//                                                                                  └─ close, if the client or the answer says so
//
// What a connection has sent of its next request is kept in device memory, at the place of its socket, for the block that gets its
// next event. One word says whether the connection is idle; a block that serves it, or closes it since it has been silent for too
// long, takes that word first, so that it is one of both.
#ifndef SPINIO_HTTP_CONNECTION_H
#define SPINIO_HTTP_CONNECTION_H

#include <spinio/net.h>

namespace spinio::http {

// One for each of Handle::sockets, in device memory, zero at first. `room`: the longest request.
template <unsigned room>
struct Connection {
    uint64_t idle; // its descriptor while no block serves it, else 0
    uint64_t since;
    unsigned count; // bytes of a request that is not complete
    char bytes[room];
};

// The low 16 bits of a descriptor are the place of its socket.
template <unsigned room>
__device__ Connection<room> &connection_of(Connection<room> *connections, int s)
{
    return connections[s & 0xffff];
}

// Takes a connection that is idle; false: another block has it.
template <unsigned room>
__device__ bool claim(Connection<room> &connection, int s)
{
    return compare_exchange_device(&connection.idle, uint64_t(s), 0) == uint64_t(s);
}

// Gives a connection back, by all threads of a block; false: it is to be closed.
template <unsigned room>
__device__ bool leave_idle(const net::Handle &handle, Connection<room> &connection, int s)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        store_relaxed_device(&connection.since, nanoseconds());
        store_release_device(&connection.idle, uint64_t(s));
    }
    return net::rearm(net::block(), handle, s) == 0;
}

// Closes, by one block once a second, the connections that have sent nothing for so long. `last`: a word of device memory, when it was
// done last.
template <unsigned room>
__device__ void close_silent(const net::Handle &handle, Connection<room> *connections, uint64_t *last, uint64_t patience_ns)
{
    const uint64_t now = nanoseconds();
    bool mine = false;
    if (threadIdx.x == 0) {
        const uint64_t before = load_acquire_device(last);
        mine = now > before + 1000000000 && compare_exchange_device(last, before, now) == before;
    }
    if (!__syncthreads_or(mine))
        return;
    for (unsigned i = threadIdx.x; i < handle.sockets; i += blockDim.x) {
        Connection<room> &connection = connections[i];
        const int s = int(load_acquire_device(&connection.idle));
        if (s && now > load_relaxed_device(&connection.since) + patience_ns && claim(connection, s))
            net::close(net::thread(), handle, s);
    }
    __syncthreads();
}

} // namespace spinio::http

#endif
