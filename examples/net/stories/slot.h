// slot.h: a place in a team for one completion: the sequence so far, and the part of the answer that the socket has not taken yet.
//
//   free ── begin() ──> prompt, a token each step ──> tokens, each an event ──> finish() ── all is sent ──> free
//
// A client that does not read keeps its bytes here: its sequence takes no part in steps until they are sent, and others go on.
#ifndef STORIES_SLOT_H
#define STORIES_SLOT_H

#include <spinio/http.h>
#include <spinio/net.h>

#include "completion.h"

struct Slot {
    int socket; // 0: free
    bool closes, finished, failed;
    Completion asked;
    uint64_t number; // of the request
    unsigned position, made;
    int token;         // at that position, for the next step
    uint64_t taken_at; // when the socket last took bytes
    unsigned length, sent, prefix_length;
    char prefix[160]; // of each event, up to its text
    char out[1536];   // the head, an event and the end of the answer fit

    // While its prompt is read there is no output.
    __device__ bool takes_part() const { return socket && !finished && !failed && (length == 0 || made == 0); }
    __device__ bool is_done() const { return socket && (failed || (finished && length == 0)); }
};

// Writes into `out` of a slot, by one thread.
class SlotWriter {
public:
    __device__ explicit SlotWriter(Slot &slot) : slot(slot), out(slot.out + slot.length, sizeof slot.out - slot.length) {}

    __device__ void begin()
    {
        using namespace spinio::http;
        begin_head(out, 200);
        add_field(out, "Content-Type", slot.asked.stream ? "text/event-stream" : "application/json");
        add_field(out, "Cache-Control", "no-store");
        add_field(out, "Access-Control-Allow-Origin", "*");
        add_field(out, "Transfer-Encoding", "chunked");
        end_head(out, slot.closes);
        spinio::text::Buffer prefix(slot.prefix, sizeof slot.prefix);
        if (slot.asked.stream) {
            prefix.add("data: ");
            add_object(prefix, nullptr);
        } else {
            spinio::http::Chunk chunk(out);
            add_object(out, nullptr);
            chunk.end();
        }
        slot.prefix_length = unsigned(prefix.length);
        keep();
    }

    // After other threads have copied the prefix to its place in the chunk.
    __device__ void add_token(int token, bool is_byte)
    {
        spinio::http::Chunk chunk(out);
        out.length += slot.prefix_length;
        if (is_byte)
            add_byte((unsigned char)token);
        if (slot.asked.stream)
            out.add("\",\"token\":").add_signed(token).add("}]}\n\n");
        else if (!is_byte)
            out.add(slot.made > 1 ? " " : "").add_signed(token);
        chunk.end();
        keep();
    }

    __device__ void finish(const char *reason)
    {
        spinio::http::Chunk chunk(out);
        if (slot.asked.stream) {
            out.add("data: ");
            add_object(out, reason);
            out.add("\"}]");
        } else {
            out.add("\",\"finish_reason\":\"").add(reason).add("\"}]");
        }
        out.add(",\"usage\":{\"prompt_tokens\":").add_number(slot.asked.prompt).add(",\"completion_tokens\":").add_number(slot.made);
        out.add(",\"total_tokens\":").add_number(slot.asked.prompt + slot.made).add("}}");
        out.add(slot.asked.stream ? "\n\ndata: [DONE]\n\n" : "\n");
        chunk.end();
        spinio::http::add_last_chunk(out);
        slot.finished = true;
        keep();
    }

private:
    Slot &slot;
    spinio::text::Buffer out;

    __device__ void keep()
    {
        slot.failed = slot.failed || out.cut;
        slot.length = unsigned(out.bytes + out.length - slot.out);
    }

    // A completion, up to its text.
    __device__ void add_object(spinio::text::Buffer &to, const char *reason) const
    {
        to.add("{\"id\":\"cmpl-").add_number(slot.number).add("\",\"object\":\"text_completion\",\"created\":0,\"model\":\"stories\",\"choices\":[{\"index\":0,\"logprobs\":null,");
        if (reason)
            to.add("\"finish_reason\":\"").add(reason).add("\",");
        else if (slot.asked.stream)
            to.add("\"finish_reason\":null,");
        to.add("\"text\":\"");
    }

    // As a character of JSON: bytes that are not ASCII as Latin-1, since one alone is no UTF-8.
    __device__ void add_byte(unsigned char byte)
    {
        const char c = char(byte);
        if (byte == '"' || byte == '\\')
            out.add("\\").add(&c, 1);
        else if (byte < ' ' || byte >= 127)
            out.add("\\u").add_hex(byte, 4);
        else
            out.add(&c, 1);
    }
};

// The event of a token, by a warp.
__device__ inline void write_token(Slot &slot, int token, bool is_byte)
{
    const unsigned lane = threadIdx.x % lanes;
    char *place = slot.out + slot.length + spinio::http::Chunk::head_bytes;
    if (slot.length + spinio::http::Chunk::head_bytes + slot.prefix_length <= sizeof slot.out)
        for (unsigned i = lane; i < slot.prefix_length; i += lanes)
            place[i] = slot.prefix[i];
    __syncwarp();
    if (lane == 0)
        SlotWriter(slot).add_token(token, is_byte);
    __syncwarp();
}

// Sends what the socket takes, by a warp.
__device__ inline void send_out(const spinio::net::Handle &handle, Slot &slot, uint64_t patience_ns)
{
    using namespace spinio;
    const unsigned length = slot.length, sent = slot.sent;
    __syncwarp();
    const int64_t done = net::send(net::warp(), handle, slot.socket, slot.out + sent, length - sent, net::DONTWAIT);
    if (threadIdx.x % lanes == 0) {
        if (done > 0) {
            slot.sent = sent + unsigned(done);
            slot.taken_at = nanoseconds();
            if (slot.sent == length)
                slot.length = slot.sent = 0;
        } else if (done != -EAGAIN || nanoseconds() > slot.taken_at + patience_ns) {
            slot.failed = true;
        }
    }
    __syncwarp();
}

#endif
