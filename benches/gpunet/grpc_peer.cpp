// gRPC for C++ as a peer, for the row `grpc` of gpunet.cu: a library that grpc.h opens, so that gpunet.cu needs no gRPC to be built.
//
//     g++ -O2 -std=c++17 -shared -fPIC benches/gpunet/grpc_peer.cpp -lgrpc++ -lgrpc -o libgrpc_peer.so
//
//   client: the caller's thread ── TCP or UNIX ── server: one thread, with its completion queue
//     unary    a call for each message
//     stream   one call, a message there and back at a time
//     take     one call, messages one way, then the number of their bytes
//
// Generic calls of bytes, without protocol buffers, and both sides on completion queues: the way of gRPC with the fewest threads. With
// `process` each message of unary and stream goes through it at the server: what a program with gRPC does with a GPU.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using Process = int (*)(void *context, void *bytes, size_t count);

static grpc::ByteBuffer pack(const void *bytes, size_t count)
{
    grpc::Slice slice(bytes, count);
    return grpc::ByteBuffer(&slice, 1);
}

// Copies up to `room` bytes; how many there are.
static size_t unpack(const grpc::ByteBuffer &from, void *to, size_t room)
{
    std::vector<grpc::Slice> slices;
    if (!from.Dump(&slices).ok())
        return 0;
    size_t at = 0;
    for (const grpc::Slice &slice : slices) {
        if (at + slice.size() <= room)
            std::memcpy(static_cast<char *>(to) + at, slice.begin(), slice.size());
        at += slice.size();
    }
    return at;
}

// One call at the server, from its request to its end.
class Served {
public:
    Served(grpc::AsyncGenericService &service, grpc::ServerCompletionQueue &queue, Process process, void *context)
        : service(service), queue(queue), process(process), context(context), stream(&server_context)
    {
        service.RequestCall(&server_context, &stream, &queue, &queue, this);
    }

    // One of its operations is done.
    void proceed(bool good)
    {
        switch (next) {
        case Step::begin:
            if (!good) { // the server ends
                delete this;
                return;
            }
            new Served(service, queue, process, context);
            read();
            return;
        case Step::read:
            if (good)
                answer();
            else if (server_context.method() == "/take")
                finish(pack(&taken, sizeof taken));
            else {
                next = Step::end;
                stream.Finish(grpc::Status::OK, this);
            }
            return;
        case Step::write:
            read();
            return;
        case Step::end:
            delete this;
        }
    }

private:
    enum class Step { begin, read, write, end };

    void read()
    {
        next = Step::read;
        stream.Read(&message, this);
    }

    void finish(const grpc::ByteBuffer &last)
    {
        next = Step::end;
        stream.WriteAndFinish(last, grpc::WriteOptions(), grpc::Status::OK, this);
    }

    void answer()
    {
        const std::string &method = server_context.method();
        if (method == "/take") {
            taken += message.Length();
            read();
            return;
        }
        if (process) {
            std::vector<char> bytes(message.Length());
            unpack(message, bytes.data(), bytes.size());
            // A wrong answer makes the client fail.
            message = process(context, bytes.data(), bytes.size()) ? pack(bytes.data(), bytes.size()) : pack("", 0);
        }
        if (method == "/stream") {
            next = Step::write;
            stream.Write(message, this);
        } else
            finish(message);
    }

    grpc::AsyncGenericService &service;
    grpc::ServerCompletionQueue &queue;
    Process process;
    void *context;
    grpc::GenericServerContext server_context;
    grpc::GenericServerAsyncReaderWriter stream;
    grpc::ByteBuffer message;
    uint64_t taken = 0;
    Step next = Step::begin;
};

// A server and a client of it, in this process.
struct Peer {
    grpc::AsyncGenericService service;
    std::unique_ptr<grpc::ServerCompletionQueue> serving;
    std::unique_ptr<grpc::Server> server;
    std::thread thread;
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<grpc::GenericStub> stub;
    grpc::CompletionQueue queue;
    // The call of stream or take.
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;

    // The end of the one operation that the client waits for.
    bool done()
    {
        void *tag;
        bool good = false;
        return queue.Next(&tag, &good) && good;
    }
};

static void limit(grpc::ClientContext &context)
{
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

extern "C" {

const char *grpc_peer_version() { return GRPC_CPP_VERSION_STRING; }

// A server at the address, with port 0 for any, and a client; null after an error.
void *grpc_peer_open(const char *address, Process process, void *context)
{
    auto peer = std::make_unique<Peer>();
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterAsyncGenericService(&peer->service);
    peer->serving = builder.AddCompletionQueue();
    peer->server = builder.BuildAndStart();
    if (!peer->server)
        return nullptr;
    new Served(peer->service, *peer->serving, process, context);
    peer->thread = std::thread([queue = peer->serving.get()] {
        void *tag;
        for (bool good; queue->Next(&tag, &good);)
            static_cast<Served *>(tag)->proceed(good);
    });
    std::string target = address;
    if (target.compare(0, 5, "unix-") != 0)
        target = target.substr(0, target.rfind(':') + 1) + std::to_string(port);
    peer->channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    peer->stub = std::make_unique<grpc::GenericStub>(peer->channel);
    if (!peer->channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)))
        return nullptr;
    return peer.release();
}

// The bytes of the answer, or -1.
long grpc_peer_unary(void *at, const void *out, void *in, size_t count)
{
    auto peer = static_cast<Peer *>(at);
    grpc::ClientContext context;
    limit(context);
    grpc::ByteBuffer answer;
    grpc::Status status;
    auto call = peer->stub->PrepareUnaryCall(&context, "/unary", pack(out, count), &peer->queue);
    call->StartCall();
    call->Finish(&answer, &status, peer);
    return peer->done() && status.ok() ? long(unpack(answer, in, count)) : -1;
}

// Begins a call of "/stream" or "/take"; whether that went well.
bool grpc_peer_begin(void *at, const char *method)
{
    auto peer = static_cast<Peer *>(at);
    peer->context = std::make_unique<grpc::ClientContext>();
    limit(*peer->context);
    peer->call = peer->stub->PrepareCall(peer->context.get(), method, &peer->queue);
    peer->call->StartCall(peer);
    return peer->done();
}

bool grpc_peer_write(void *at, const void *out, size_t count)
{
    auto peer = static_cast<Peer *>(at);
    peer->call->Write(pack(out, count), peer);
    return peer->done();
}

long grpc_peer_read(void *at, void *in, size_t count)
{
    auto peer = static_cast<Peer *>(at);
    grpc::ByteBuffer answer;
    peer->call->Read(&answer, peer);
    return peer->done() ? long(unpack(answer, in, count)) : -1;
}

// No more messages from here; for take, `in` gets the number.
bool grpc_peer_end(void *at, void *in, size_t count)
{
    auto peer = static_cast<Peer *>(at);
    peer->call->WritesDone(peer);
    if (!peer->done() || (count && grpc_peer_read(at, in, count) != long(count)))
        return false;
    grpc::Status status;
    peer->call->Finish(&status, peer);
    return peer->done() && status.ok();
}

void grpc_peer_close(void *at)
{
    std::unique_ptr<Peer> peer(static_cast<Peer *>(at));
    peer->call.reset();
    peer->server->Shutdown(std::chrono::system_clock::now());
    peer->serving->Shutdown();
    peer->thread.join();
}
}
