// connection.h: connections that stay open between requests, without a block for each.
//
//   event set ── event of a connection ──> block: claim() ── receive, answer as far as its client takes it ── leave_idle() ──> waits
//                                                                                          └─ close           for its next event
//
// What a connection has sent of its next request is kept in device memory, at the place of its socket, for the block that gets its
// next event; a server that keeps more, as the rest of an answer, derives its own type from Connection. One word says whether the
// connection is idle; a block that serves it, or closes it since its time is over, takes that word first, so that it is one of both.
#ifndef SPINIO_HTTP_CONNECTION_H
#define SPINIO_HTTP_CONNECTION_H

#include <spinio/net.h>

namespace spinio::http {

// One for each of Handle::sockets, in device memory, zero at first. `room`: the longest request.
template <unsigned room>
struct Connection {
    uint64_t idle;     // its descriptor while no block serves it, else 0
    uint64_t deadline; // it is closed then, if no block serves it
    int events;        // those that it waits for
    unsigned count;    // bytes of a request that is not complete
    char bytes[room];
};

// The low 16 bits of a descriptor are the place of its socket.
template <typename Connection>
__device__ Connection &connection_of(Connection *connections, int s)
{
    return connections[s & 0xffff];
}

// By one thread, of a new connection: the set has it for net::IN.
template <typename Connection>
__device__ void begin(Connection &connection)
{
    connection.events = net::IN;
    connection.count = 0;
}

// By one thread: so much time from now on. Not at each byte: a client that sends one now and then would stay for ever.
template <typename Connection>
__device__ void give_time(Connection &connection, uint64_t ns)
{
    store_relaxed_device(&connection.deadline, nanoseconds() + ns);
}

// Takes a connection that is idle; false: another block has it.
template <typename Connection>
__device__ bool claim(Connection &connection, int s)
{
    return compare_exchange_device(&connection.idle, uint64_t(s), 0) == uint64_t(s);
}

// Gives a connection back until one of the events, by all threads of a block; false: it is to be closed, and may belong to another
// block already.
template <typename Connection>
__device__ bool leave_idle(const net::Handle &handle, Connection &connection, int s, int set, int events)
{
    __syncthreads();
    const bool same = connection.events == events;
    __syncthreads();
    if (threadIdx.x == 0) {
        connection.events = events;
        store_release_device(&connection.idle, uint64_t(s));
    }
    return (same ? net::rearm(net::block(), handle, s) : net::add(net::block(), handle, set, s, events)) == 0;
}

// Closes, by one block once a second, the connections whose time is over. `last`: a word of device memory, when it was done last.
// `before_close`: called by one thread, with the connection.
template <typename Connection, typename Function>
__device__ void close_late(const net::Handle &handle, Connection *connections, uint64_t *last, Function before_close)
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
        Connection &connection = connections[i];
        const int s = int(load_acquire_device(&connection.idle));
        if (!s || now <= load_relaxed_device(&connection.deadline) || !claim(connection, s))
            continue;
        if (now > load_relaxed_device(&connection.deadline)) {
            before_close(connection);
            net::close(net::thread(), handle, s);
        } else {
            // Another block has served it meanwhile. An event that this one has missed comes again.
            store_release_device(&connection.idle, uint64_t(s));
            net::rearm(net::thread(), handle, s);
        }
    }
    __syncthreads();
}

} // namespace spinio::http

#endif
