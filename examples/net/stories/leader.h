// leader.h: the part of a team between two steps, by the block that leads it: it ends completions, takes requests from the event set,
// answers what needs no model, and chooses the places of the next step.
//
//   event ── claim ── recv ── head and body complete? ──┬─ no: leave it idle, for its next event
//                                                       ├─ page, models, what is refused: answered at once, next request
//                                                       └─ completion: a free slot ── steps ── all is sent: next request
//
// Nothing here waits for a client: bytes that a socket does not take at once end the connection, and of each connection a few requests
// are answered between two steps.
#ifndef STORIES_LEADER_H
#define STORIES_LEADER_H

#include <cerrno>

#include <spinio/file.h>
#include <spinio/http.h>
#include <spinio/http/connection.h>
#include <spinio/net.h>

#include "decode.h"
#include "slot.h"

namespace file = spinio::file;
namespace http = spinio::http;
namespace net = spinio::net;
namespace text = spinio::text;

constexpr unsigned most_slots = 64, request_bytes = 16384, events_at_once = 4, requests_at_once = 4;
constexpr uint64_t patience_ns = 5000000000, silence_ns = 60000000000;

using Connection = http::Connection<request_bytes>;

// In device memory: what all blocks count together.
struct Counts {
    unsigned long long requests, completions, refused, tokens, steps;
};

// What the blocks of a team share, in device memory.
struct TeamState {
    uint64_t arrived;
    bool stopped;
    unsigned count;   // places of the next step
    unsigned waiting; // connections with requests that are not answered yet
    int waiting_sockets[most_slots];
    Place places[most_slots * tile];
    Slot slots[most_slots];
    int *prompts; // [slot][context]
    Activations activations;
};

struct Server {
    net::Handle handle;
    int set;
    unsigned blocks_of_a_team, slots;
    Model model;
    TeamState *teams;
    Connection *connections;
    uint64_t *last_closing, *idle_teams;
    Counts *counts;
};

// The leader of a team, by all threads of its block.
class Leader {
public:
    __device__ Leader(const Server &server, TeamState &team) : server(server), handle(server.handle), team(team) {}

    // Ends completions, takes requests, and chooses the sequences of the next step.
    __device__ void prepare()
    {
        look();
        if (count(DONE)) {
            end_completions();
            look();
        }
        http::close_late(handle, server.connections, server.last_closing, [](Connection &) {});
        if (team.waiting)
            go_on_waiting();
        take_events();
        look();
        choose();
    }

private:
    const Server &server;
    const net::Handle &handle;
    TeamState &team;

    enum Next { IDLE, BUSY, MORE, CLOSE };
    enum Status : unsigned char { WAITING, FREE, ABLE, DONE };

    // What each slot is, in shared memory, since all threads ask for all of them.
    __device__ static Status *statuses()
    {
        __shared__ Status all[most_slots];
        return all;
    }

    __device__ void look() const
    {
        __syncthreads();
        for (unsigned i = threadIdx.x; i < server.slots; i += blockDim.x) {
            const Slot &slot = team.slots[i];
            statuses()[i] = !slot.socket ? FREE : slot.is_done() ? DONE : slot.takes_part() ? ABLE : WAITING;
        }
        __syncthreads();
    }

    __device__ unsigned count(Status status) const
    {
        unsigned found = 0;
        for (unsigned i = 0; i < server.slots; i++)
            found += statuses()[i] == status;
        return found;
    }

    __device__ void end_completions()
    {
        for (unsigned i = 0; i < server.slots; i++) {
            if (statuses()[i] != DONE)
                continue;
            Slot &slot = team.slots[i];
            const bool closes = slot.failed || slot.closes;
            const int s = slot.socket;
            __syncthreads();
            if (threadIdx.x == 0) {
                slot.socket = 0;
                http::give_time(http::connection_of(server.connections, s), silence_ns);
            }
            __syncthreads();
            // Its next request may have come already.
            if (closes)
                net::close(net::block(), handle, s);
            else
                go_on(s);
        }
    }

    // An event may be a request: so as many as there are free slots. A team without sequences takes one at a time, and leaves the others
    // to the next idle team; one with sequences takes none while another team is idle.
    __device__ void take_events()
    {
        __shared__ net::Ready ready[events_at_once];
        __shared__ bool leaves;
        const unsigned free = count(FREE), able = count(ABLE), limit = server.blocks_of_a_team == gridDim.x ? events_at_once : 1;
        const unsigned most = free < limit ? free : limit;
        const bool idle = free == server.slots;
        if (threadIdx.x == 0) {
            leaves = able && spinio::load_acquire_device(server.idle_teams);
            if (idle)
                spinio::add_release_device(server.idle_teams, 1);
        }
        // No call looks for the end of the net.
        if (most == 0 && threadIdx.x == 0 && net::detail::stopped(handle))
            team.stopped = true;
        __syncthreads();
        if (most == 0 || leaves)
            return;
        const int64_t wait_ns = able || team.waiting ? 0 : idle ? 500000000 : 100000;
        const int events = net::wait(net::block(), handle, server.set, ready, int(most), wait_ns);
        if (threadIdx.x == 0) {
            if (idle)
                spinio::add_release_device(server.idle_teams, ~uint64_t(0));
            if (events < 0)
                team.stopped = true;
        }
        for (int i = 0; i < events; i++)
            take(ready[i]);
    }

    // Connections whose next request has come already: a few requests of each, while there are free slots for them.
    __device__ void go_on_waiting()
    {
        const unsigned there = team.waiting, free = count(FREE), now = there < free ? there : free;
        __shared__ int taken[most_slots];
        for (unsigned i = threadIdx.x; i < now; i += blockDim.x)
            taken[i] = team.waiting_sockets[i];
        __syncthreads();
        if (threadIdx.x == 0) {
            for (unsigned i = now; i < there; i++)
                team.waiting_sockets[i - now] = team.waiting_sockets[i];
            team.waiting = there - now;
        }
        __syncthreads();
        for (unsigned i = 0; i < now; i++)
            go_on(taken[i]);
        look();
    }

    // Keeps a connection for the next step; false: there are too many.
    __device__ bool keep_waiting(int s)
    {
        const bool fits = team.waiting < most_slots;
        __syncthreads();
        if (fits && threadIdx.x == 0)
            team.waiting_sockets[team.waiting++] = s;
        __syncthreads();
        return fits;
    }

    __device__ void take(const net::Ready &ready)
    {
        __shared__ bool mine;
        Connection &connection = http::connection_of(server.connections, ready.s);
        if (threadIdx.x == 0) {
            mine = ready.events & net::NEW || http::claim(connection, ready.s);
            if (ready.events & net::NEW)
                http::begin(connection);
        }
        __syncthreads();
        const bool goes_on = mine;
        __syncthreads();
        if (!goes_on)
            return;
        if (ready.events & net::NEW)
            net::set_timeout(net::block(), handle, ready.s, patience_ns, patience_ns);
        go_on(ready.s);
    }

    __device__ void go_on(int s)
    {
        switch (serve(s)) {
        case BUSY: return;
        case IDLE:
            if (http::leave_idle(handle, http::connection_of(server.connections, s), s, server.set, net::IN))
                return;
            break;
        case MORE:
            if (keep_waiting(s))
                return;
            break;
        case CLOSE: break;
        }
        net::close(net::block(), handle, s);
    }

    // Reads and answers requests, until one needs the model or there is no more; a few at a time, since a step waits for it.
    __device__ Next serve(int s)
    {
        __shared__ http::Request request;
        Connection &connection = http::connection_of(server.connections, s);
        unsigned count = connection.count, answered = 0;
        // For the whole request, not for each of its bytes.
        if (count == 0 && threadIdx.x == 0)
            http::give_time(connection, silence_ns);
        for (;;) {
            __syncthreads();
            if (answered == requests_at_once)
                return MORE;
            const unsigned head = http::head_length(connection.bytes, count);
            if (head || count == request_bytes) {
                if (threadIdx.x == 0)
                    request = http::parse(connection.bytes, head, request_bytes - head);
                __syncthreads();
                const uint64_t whole = head + request.body_length;
                if (request.status != 200)
                    return refuse(s, request.status, http::reason(request.status));
                if (count >= whole) {
                    const Next next = answer(s, request, {connection.bytes + head, size_t(request.body_length)});
                    __syncthreads();
                    count -= unsigned(whole);
                    if (threadIdx.x == 0) {
                        for (unsigned i = 0; i < count; i++)
                            connection.bytes[i] = connection.bytes[whole + i];
                        connection.count = count;
                        http::give_time(connection, silence_ns);
                    }
                    if (next != IDLE)
                        return next;
                    answered++;
                    continue;
                }
            }
            const int64_t got = net::recv(net::block(), handle, s, connection.bytes + count, request_bytes - count, net::DONTWAIT);
            if (got == -EAGAIN)
                break;
            if (got <= 0)
                return CLOSE;
            count += unsigned(got);
        }
        if (threadIdx.x == 0)
            connection.count = count;
        return IDLE;
    }

    __device__ Next answer(int s, const http::Request &request, json::View body)
    {
        const bool reads = request.method == http::GET || request.method == http::HEAD;
        if (threadIdx.x == 0)
            atomicAdd(&server.counts->requests, 1ull);
        if (text::equals(request.path, "/v1/completions"))
            return request.method != http::POST ? refuse(s, 405, "POST a completion.") : request.minor == 0 ? refuse(s, 505, "Answers are in chunks: HTTP/1.1.") : begin(s, request, body);
        if (!reads)
            return refuse(s, 405, "GET it.");
        if (text::equals(request.path, "/v1/models"))
            return reply(s, 200, request, "{\"object\":\"list\",\"data\":[{\"id\":\"stories\",\"object\":\"model\",\"created\":0,\"owned_by\":\"spinio\"}]}\n");
        if (text::equals(request.path, "/"))
            return send_page(s, request);
        return refuse(s, 404, "There is /, /v1/models and /v1/completions.");
    }

    // Takes a free slot: there is one, since events were only taken for as many.
    __device__ Next begin(int s, const http::Request &request, json::View body)
    {
        __shared__ Completion asked;
        unsigned free = 0;
        while (free < server.slots && team.slots[free].socket)
            free++;
        if (free == server.slots)
            return refuse(s, 503, "All slots are in use.");
        Slot &slot = team.slots[free];
        if (threadIdx.x == 0)
            asked = CompletionReader(server.model.shape, team.prompts + size_t(free) * server.model.shape.context, spinio::nanoseconds()).read(body.bytes, body.length);
        __syncthreads();
        if (asked.refusal)
            return refuse(s, 400, asked.refusal);
        if (threadIdx.x == 0) {
            slot.closes = request.close;
            slot.finished = slot.failed = false;
            slot.asked = asked;
            slot.number = atomicAdd(&server.counts->completions, 1ull) + 1;
            slot.position = slot.made = 0;
            slot.token = team.prompts[size_t(free) * server.model.shape.context];
            slot.taken_at = spinio::nanoseconds();
            slot.length = slot.sent = 0;
            slot.socket = s;
            SlotWriter(slot).begin();
        }
        __syncthreads();
        return BUSY;
    }

    // Sends it whole at once, or gives the client up: others must not wait for one that does not read.
    __device__ Next reply(int s, int status, const http::Request &request, const char *content, bool close = false)
    {
        __shared__ char bytes[1024];
        __shared__ size_t length;
        __syncthreads();
        if (threadIdx.x == 0) {
            text::Buffer out(bytes, sizeof bytes);
            size_t size = 0;
            while (content[size])
                size++;
            http::begin_head(out, status);
            http::add_field(out, "Content-Type", "application/json");
            http::add_number_field(out, "Content-Length", size);
            http::end_head(out, close || request.close);
            length = (request.method == http::HEAD ? out : out.add(content)).length;
        }
        __syncthreads();
        const bool sent = net::send(net::block(), handle, s, bytes, length, net::DONTWAIT) == int64_t(length);
        return sent && !close && !request.close ? IDLE : CLOSE;
    }

    // The connection ends, since what follows a request that was not understood is not known.
    __device__ Next refuse(int s, int status, const char *sentence)
    {
        __shared__ char content[256];
        __shared__ char dropped[256];
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(&server.counts->refused, 1ull);
            text::Buffer out(content, sizeof content - 1);
            out.add("{\"error\":{\"message\":\"").add(sentence).add("\",\"type\":\"invalid_request_error\"}}\n");
            content[out.length] = 0;
        }
        __syncthreads();
        reply(s, status, {}, content, true);
        // A connection that is closed with unread bytes is reset, and the client may lose the answer.
        net::shutdown(net::block(), handle, s, net::SHUT_SEND);
        for (int i = 0; i < 256 && net::recv(net::block(), handle, s, dropped, sizeof dropped, net::DONTWAIT) > 0; i++) {
        }
        return CLOSE;
    }

    __device__ Next send_page(int s, const http::Request &request)
    {
        __shared__ char head[256];
        __shared__ size_t length;
        __shared__ file::Stat stat;
        const int f = file::open(net::block(), handle, "page.html", file::RDONLY);
        if (f < 0)
            return refuse(s, 404, "page.html is missing.");
        bool sent = file::fstat(net::block(), handle, f, &stat) == 0;
        __syncthreads();
        const size_t size = size_t(stat.size);
        if (threadIdx.x == 0) {
            text::Buffer out(head, sizeof head);
            http::begin_head(out, 200);
            http::add_field(out, "Content-Type", "text/html; charset=utf-8");
            http::add_number_field(out, "Content-Length", size);
            http::end_head(out, request.close);
            length = out.length;
        }
        __syncthreads();
        const bool body = request.method != http::HEAD;
        sent = sent && net::send(net::block(), handle, s, head, length, net::DONTWAIT | (body ? net::MORE : 0)) == int64_t(length);
        sent = sent && (!body || net::sendfile(net::block(), handle, s, f, 0, size, net::DONTWAIT) == int64_t(size));
        file::close(net::block(), handle, f);
        __syncthreads();
        return sent && !request.close ? IDLE : CLOSE;
    }

    // A place for each sequence, and for more of a prompt.
    __device__ void choose() const
    {
        __shared__ unsigned wanted[most_slots];
        for (unsigned i = threadIdx.x; i < server.slots; i += blockDim.x) {
            const Slot &slot = team.slots[i];
            const unsigned left = slot.asked.prompt > slot.position ? slot.asked.prompt - slot.position : 1;
            wanted[i] = statuses()[i] != ABLE ? 0 : left < tile ? left : tile;
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < server.slots; i += blockDim.x) {
            unsigned begin = 0;
            for (unsigned other = 0; other < i; other++)
                begin += wanted[other];
            const Slot &slot = team.slots[i];
            const int *prompt = team.prompts + size_t(i) * server.model.shape.context + slot.position;
            for (unsigned k = 0; k < wanted[i]; k++)
                team.places[begin + k] = {i, slot.position + k, k ? prompt[k] : slot.token};
            if (i + 1 == server.slots)
                team.count = begin + wanted[i];
        }
        __syncthreads();
        if (threadIdx.x == 0 && team.count)
            atomicAdd(&server.counts->steps, 1ull);
    }
};

#endif
