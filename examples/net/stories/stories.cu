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
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <spinio.h>
#include <spinio_net.h>

#include "../server.h"
#include "leader.h"
#include "load.h"

using namespace spinio;

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
    const sigset_t signals = block_signals_of_the_end();

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
    // Answers are small, and there may be many.
    net_options.ring_bytes = 16384;
    net_options.connections = 1024;
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
