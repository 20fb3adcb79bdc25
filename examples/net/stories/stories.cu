// A server of a language model in one kernel, launched once: it accepts connections, reads requests, decodes a model for all its
// clients at once, and sends each token when it is made. No code of the CPU stands between a request and a token.
//
//   curl, browser, openai ── TCP ── proxy (a thread of libspinio.so) ── event set
//                                                                          │ any leader
//                              ┌───────────────────────────────────────────┘
//      team: leader: requests ──> slots ──┐
//      all its blocks:                    └──> one step of the model for all slots ── a token each ──> sockets ──┐
//                    ^                                                                                           │
//                    └────────────── requests come and go between two steps ─────────────────────────────────────┘
//
// A team is one block where the model is small: each block then reads its weights from the L2 cache, and blocks never wait for each
// other; where it is large, all blocks are one team. The page is a file, sent by sendfile. README.md has the line that starts it.
//
// Known flaws: a request is read by one thread; HTTP/1.0 clients get 505 for completions, since they know no chunks.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <spinio.h>
#include <spinio/file.h>
#include <spinio/http.h>
#include <spinio/http/connection.h>
#include <spinio/net.h>
#include <spinio_net.h>

#include "decode.h"
#include "load.h"
#include "slot.h"

using namespace spinio;

constexpr unsigned most_slots = 64, request_bytes = 16384, events_at_once = 4;
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
    unsigned count; // places of the next step
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
        take_events();
        look();
        choose();
    }

private:
    const Server &server;
    const net::Handle &handle;
    TeamState &team;

    enum Next { IDLE, BUSY, CLOSE };
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
            if (threadIdx.x == 0)
                slot.socket = 0;
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
            leaves = able && load_acquire_device(server.idle_teams);
            if (idle)
                add_release_device(server.idle_teams, 1);
        }
        __syncthreads();
        if (most == 0 || leaves)
            return;
        const int64_t wait_ns = able ? 0 : idle ? 500000000 : 100000;
        const int events = net::wait(net::block(), handle, server.set, ready, int(most), wait_ns);
        if (threadIdx.x == 0) {
            if (idle)
                add_release_device(server.idle_teams, ~uint64_t(0));
            if (events < 0)
                team.stopped = true;
        }
        for (int i = 0; i < events; i++)
            take(ready[i]);
        if (!able)
            http::close_silent(handle, server.connections, server.last_closing, silence_ns);
    }

    __device__ void take(const net::Ready &ready)
    {
        __shared__ bool mine;
        Connection &connection = http::connection_of(server.connections, ready.s);
        if (threadIdx.x == 0) {
            mine = ready.events & net::NEW || http::claim(connection, ready.s);
            if (ready.events & net::NEW)
                connection.count = 0;
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
            if (http::leave_idle(handle, http::connection_of(server.connections, s), s))
                return;
            [[fallthrough]];
        case CLOSE: net::close(net::block(), handle, s);
        }
    }

    // Reads and answers requests, until one needs the model or there is no more.
    __device__ Next serve(int s)
    {
        __shared__ http::Request request;
        Connection &connection = http::connection_of(server.connections, s);
        unsigned count = connection.count;
        for (;;) {
            __syncthreads();
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
                    }
                    if (next != IDLE)
                        return next;
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
            asked = CompletionReader(server.model.shape, team.prompts + size_t(free) * server.model.shape.context, nanoseconds()).read(body.bytes, body.length);
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
            slot.taken_at = nanoseconds();
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
        sent = sent && (!body || net::sendfile(net::block(), handle, s, f, 0, size) == int64_t(size));
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

// After a step, by a warp: the next token of a sequence, of the prompt or a new one.
__device__ void advance(const Server &server, TeamState &team, Slot &slot, unsigned i, unsigned place)
{
    const Shape &shape = server.model.shape;
    const unsigned next = team.places[place].position + 1;
    const bool known = next < slot.asked.prompt;
    const int token = known ? team.prompts[size_t(i) * shape.context + next]
                            : sample(team.activations.scores + size_t(place) * shape.vocabulary, shape.vocabulary, slot.asked.temperature, slot.asked.seed, next);
    __syncwarp();
    const bool ends = token == shape.end;
    if (threadIdx.x % lanes == 0) {
        slot.position = next;
        slot.token = token;
        slot.made += !known;
        if (!known)
            atomicAdd(&server.counts->tokens, 1ull);
    }
    __syncwarp();
    if (known)
        return;
    if (!ends)
        write_token(slot, token, shape.is_of_bytes());
    if (threadIdx.x % lanes == 0 && (ends || slot.made >= slot.asked.most || next + 1 >= shape.context))
        SlotWriter(slot).finish(ends ? "stop" : "length");
    __syncwarp();
}

// Each block has the slots whose number is its rank modulo the blocks of the team, each warp one at a time.
__device__ SPINIO_OUTLINE void deliver(const Server *at, TeamState *team_state, unsigned rank, unsigned size, const int *last_place)
{
    const Server &server = *at;
    TeamState &state = *team_state;
    const unsigned warps = blockDim.x / lanes, warp = threadIdx.x / lanes;
    for (unsigned i = rank + warp * size; i < server.slots; i += warps * size) {
        Slot &slot = state.slots[i];
        if (last_place[i] >= 0)
            advance(server, state, slot, i, unsigned(last_place[i]));
        if (slot.socket && slot.length && !slot.failed)
            send_out(server.handle, slot, patience_ns);
    }
}

// Called, not inlined: what requests need takes no registers of the decoder.
__device__ SPINIO_OUTLINE void prepare(const Server *server, TeamState *state)
{
    Leader(*server, *state).prepare();
}

// The server is in device memory, since a parameter that is referred to would be copied to the memory of each thread.
__global__ void __launch_bounds__(most_warps *lanes) serve(const Server *at)
{
    const Server &server = *at;
    __shared__ Scratch scratch;
    __shared__ Place places[most_slots * tile];
    __shared__ int last_place[most_slots];
    TeamState &state = server.teams[blockIdx.x / server.blocks_of_a_team];
    Team team(blockIdx.x % server.blocks_of_a_team, server.blocks_of_a_team, &state.arrived);
    for (;;) {
        if (team.leads())
            prepare(&server, &state);
        team.sync();
        const unsigned count = state.count;
        if (state.stopped)
            break;
        for (unsigned i = threadIdx.x; i < server.slots; i += blockDim.x)
            last_place[i] = -1;
        __syncthreads();
        for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
            places[i] = state.places[i];
            if (i + 1 == count || state.places[i + 1].slot != places[i].slot)
                last_place[places[i].slot] = int(i);
        }
        __syncthreads();
        if (count)
            Decoder(team, server.model, state.activations, scratch, places, count).step();
        deliver(&server, &state, team.rank, team.size, last_place);
        team.sync();
    }
}

static int fail(const char *what)
{
    std::fprintf(stderr, "stories: %s: %s\n", what, spinio_last_error());
    return 1;
}

struct Options {
    const char *address = "tcp://127.0.0.1:8090", *model = nullptr;
    unsigned blocks = 0, team = 0;
    bool until_input_ends = false;
};

static bool parse_options(int count, char **arguments, Options &options)
{
    for (int i = 1; i < count; i++) {
        const char *value = i + 1 < count ? arguments[i + 1] : nullptr;
        if (!std::strcmp(arguments[i], "--until-stdin-ends"))
            options.until_input_ends = true;
        else if (!std::strcmp(arguments[i], "--model") && value)
            options.model = value, i++;
        else if (!std::strcmp(arguments[i], "--blocks") && value)
            options.blocks = unsigned(std::atoi(value)), i++;
        else if (!std::strcmp(arguments[i], "--team") && value)
            options.team = unsigned(std::atoi(value)), i++;
        else if (arguments[i][0] != '-')
            options.address = arguments[i];
        else
            return false;
    }
    return options.model;
}

// Until Ctrl-C, or the end of standard input.
static void wait_for_the_end(const sigset_t &signals, bool input)
{
    pollfd ends[2] = {{signalfd(-1, &signals, SFD_CLOEXEC), POLLIN, 0}, {input ? 0 : -1, POLLIN, 0}};
    for (char byte;;) {
        if (poll(ends, 2, -1) < 0)
            continue;
        if (ends[0].revents || (ends[1].revents && read(0, &byte, 1) <= 0))
            break;
    }
    close(ends[0].fd);
}

// The memory of all teams; false if there is not enough.
static bool make_teams(Server &server, unsigned teams)
{
    const Shape &shape = server.model.shape;
    const size_t slots = server.slots, places = slots * tile, cached = size_t(shape.layers) * shape.keys() * shape.positions();
    std::vector<TeamState> states(teams);
    std::memset(static_cast<void *>(states.data()), 0, teams * sizeof(TeamState));
    for (TeamState &state : states) {
        Activations &all = state.activations;
        state.prompts = zeros<int>(slots * shape.context);
        all.hidden = zeros<float>(places * shape.hidden);
        all.mix = zeros<float>(places * (shape.queries() + shape.keys()));
        all.attended = zeros<float>(places * shape.queries());
        all.inner = zeros<float>(places * 2 * shape.inner);
        all.scores = zeros<float>(places * shape.vocabulary);
        all.keys = zeros<float>(slots * cached);
        all.values = zeros<float>(slots * cached);
        if (!state.prompts || !all.hidden || !all.mix || !all.attended || !all.inner || !all.scores || !all.keys || !all.values)
            return false;
    }
    server.teams = zeros<TeamState>(teams);
    return server.teams && cudaMemcpy(server.teams, states.data(), teams * sizeof(TeamState), cudaMemcpyHostToDevice) == cudaSuccess;
}

int main(int count, char **arguments)
{
    Options options;
    if (!parse_options(count, arguments, options)) {
        std::fprintf(stderr, "usage: stories [tcp://HOST:PORT] --model DIR [--blocks N] [--team BLOCKS]\n"
                             "  DIR has config.json, model.safetensors and page.html\n");
        return 2;
    }
    // Blocked in all threads, those of the library too, and read from a descriptor.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, nullptr);

    Server server = {};
    std::string why;
    size_t weights = 0;
    if (!load_model(options.model, server.model, weights, why)) {
        std::fprintf(stderr, "stories: %s\n", why.c_str());
        return 1;
    }
    // Emulated threads are no faster if they are many.
    const unsigned threads = emulated ? 2 * lanes : most_warps * lanes, resident = largest_resident_grid(serve, threads);
    unsigned blocks = options.blocks ? options.blocks : emulated ? 2 : resident;
    server.blocks_of_a_team = options.team ? options.team : weights > 16 << 20 ? blocks : 1;
    blocks -= blocks % server.blocks_of_a_team;
    server.slots = server.blocks_of_a_team == 1 ? (emulated ? 16 : 2 * tile) : most_slots;
    server.counts = zeros<Counts>(1);
    server.last_closing = zeros<uint64_t>(1);
    server.idle_teams = zeros<uint64_t>(1);
    cudaStream_t stream;
    if (!blocks || !make_teams(server, blocks / server.blocks_of_a_team) || !server.counts || !server.last_closing || !server.idle_teams || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        return fail("no memory for the sequences, or blocks are fewer than a team");
    struct spinio_net_options net_options = {};
    net_options.size = sizeof net_options;
    net_options.files_root = options.model;
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, &net_options);
    char name[128];
    const int listener = net ? spinio_net_listen(net, options.address, 512) : -1;
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&server.handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(options.address);
    server.set = spinio_net_set(net);
    if (server.set < 0 || spinio_net_add(net, server.set, listener, net::IN))
        return fail("no event set");
    server.connections = zeros<Connection>(server.handle.sockets);
    if (!server.connections)
        return fail("no memory for connections");
    Server *there = zeros<Server>(1);
    if (!there || cudaMemcpy(there, &server, sizeof server, cudaMemcpyHostToDevice) != cudaSuccess)
        return fail("no memory for the server");
    launch_resident_on(stream, serve, blocks, threads, there);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "stories: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), resident);
        return 1;
    }
    std::printf("listening on %s, %u blocks on the %s, %u layers, %.1f MiB of weights\n", name, blocks, emulated ? "emulated GPU" : "GPU", server.model.shape.layers, double(weights) / (1 << 20));
    std::fflush(stdout);

    wait_for_the_end(signals, options.until_input_ends);
    if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess)
        return fail("cannot stop");
    Counts seen;
    struct spinio_net_stats stats;
    if (cudaMemcpy(&seen, server.counts, sizeof seen, cudaMemcpyDeviceToHost) != cudaSuccess || spinio_net_stats(net, &stats, sizeof stats))
        return fail("cannot read the counters");
    std::printf("connections %llu\nrequests %llu\ncompletions %llu\nrefused %llu\ntokens %llu\nsteps %llu\nproxy_us %llu\n", (unsigned long long)stats.accepted, seen.requests, seen.completions, seen.refused, seen.tokens, seen.steps,
                (unsigned long long)stats.proxy_ns / 1000);
    return spinio_net_close(net) ? fail("cannot close the net") : 0;
}
