// answer.h: reads the answer to a request for a streamed completion, however its bytes are cut into pieces.
//
//   head ── body: chunks, Content-Length bytes, or all up to the end of the connection ── lines ── events: tokens, finish_reason, [DONE]
#ifndef STORIES_ANSWER_H
#define STORIES_ANSWER_H

#include <strings.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

class Answer {
public:
    unsigned tokens = 0;
    // The connection, after this answer.
    bool closes = false;

    void take(const char *bytes, size_t count)
    {
        std::string_view rest(bytes, count);
        while (!rest.empty() && !problem) {
            switch (state) {
            case State::head:
            case State::size:
            case State::after_chunk:
            case State::trailer:
                control_line(rest);
                break;
            case State::body:
            case State::chunk: {
                const std::string_view part = rest.substr(0, size_t(std::min<uint64_t>(left, rest.size())));
                rest.remove_prefix(part.size());
                left -= part.size();
                body(part);
                if (!left)
                    state = state == State::chunk ? State::after_chunk : State::complete;
                break;
            }
            case State::complete:
                problem = "bytes after the answer";
            }
        }
    }

    // The connection has ended.
    void end()
    {
        closes = true;
        if (state == State::body && unbounded)
            state = State::complete;
        else if (state != State::complete)
            problem = "the connection ended within an answer";
    }

    // Not a byte of it has come.
    bool is_untouched() const { return !has_status && line.empty(); }

    bool is_complete() const { return state == State::complete; }

    // What is wrong with it as far as it is known; null: nothing.
    const char *wrong(unsigned max_tokens) const
    {
        if (problem)
            return problem;
        if (tokens > max_tokens)
            return "more tokens than max_tokens";
        if (state != State::complete)
            return nullptr;
        if (!done)
            return "an answer without [DONE]";
        if (finish == Finish::none)
            return "a completion without finish_reason";
        if (finish == Finish::length && tokens != max_tokens)
            return "fewer tokens than max_tokens with finish_reason length";
        return nullptr;
    }

private:
    enum class State { head, size, chunk, after_chunk, trailer, body, complete };
    enum class Finish { none, stop, length };

    // Takes a line of HTTP, of the head or between chunks, from the rest.
    void control_line(std::string_view &rest)
    {
        const size_t end = rest.find('\n');
        line.append(rest.substr(0, end));
        rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
        if (line.size() > 16384)
            problem = "a line of HTTP of more than 16 KiB";
        if (end == rest.npos)
            return;
        if (!line.empty() && line.back() == '\r')
            line.pop_back();
        switch (state) {
        case State::head:
            head_line();
            break;
        case State::size: {
            char *after;
            left = std::strtoull(line.c_str(), &after, 16);
            if (after == line.c_str() || (*after && *after != ';' && *after != ' '))
                problem = "a chunk without a size";
            state = left ? State::chunk : State::trailer;
            break;
        }
        case State::after_chunk:
            if (!line.empty())
                problem = "a chunk that is longer than its size";
            state = State::size;
            break;
        default: // trailer
            if (line.empty())
                state = State::complete;
        }
        line.clear();
    }

    void head_line()
    {
        if (!has_status) {
            has_status = true;
            // HTTP/1.1 200 OK
            if (line.compare(0, 7, "HTTP/1.") || line.size() < 12 || line.compare(8, 4, " 200"))
                problem = line.compare(0, 7, "HTTP/1.") ? "not an answer of HTTP/1" : "a status that is not 200";
            closes = line.size() > 7 && line[7] == '0';
            return;
        }
        auto is = [&](const char *name, const char *value) {
            const size_t length = std::strlen(name);
            return strncasecmp(line.c_str(), name, length) == 0 && (!value || strcasestr(line.c_str() + length, value));
        };
        if (is("content-length:", nullptr)) {
            left = std::strtoull(line.c_str() + 15, nullptr, 10);
            unbounded = false;
        } else if (is("transfer-encoding:", "chunked")) {
            chunked = true;
        } else if (is("connection:", "close")) {
            closes = true;
        } else if (line.empty()) {
            if (!chunked && unbounded) {
                left = UINT64_MAX;
                closes = true;
            }
            state = chunked ? State::size : left ? State::body : State::complete;
        }
    }

    // Finds the events in the bytes of the body.
    void body(std::string_view part)
    {
        for (size_t end; (end = part.find('\n')) != part.npos; part.remove_prefix(end + 1)) {
            if (begun_line.empty()) {
                event(part.substr(0, end));
            } else {
                begun_line.append(part.substr(0, end));
                event(begun_line);
                begun_line.clear();
            }
        }
        begun_line.append(part);
    }

    void event(std::string_view text)
    {
        if (text.substr(0, 5) != "data:")
            return;
        text.remove_prefix(5);
        if (text.substr(0, 7) == " [DONE]" || text.substr(0, 6) == "[DONE]") {
            done = true;
            return;
        }
        // A token may come with the finish_reason, or an event of its own may have that.
        const std::string_view piece = value_of(text, "\"text\":"), reason = value_of(text, "\"finish_reason\":");
        if (piece.size() < 2 || piece[0] != '"')
            problem = "an event without a text";
        else if (piece[1] != '"')
            tokens++;
        if (reason.substr(0, 6) == "\"stop\"")
            finish = Finish::stop;
        else if (reason.substr(0, 8) == "\"length\"")
            finish = Finish::length;
        else if (reason.substr(0, 4) != "null")
            problem = "an event without a finish_reason";
    }

    // What comes after a name in JSON. Text cannot be taken for a name: quotes in it have a \ before them.
    static std::string_view value_of(std::string_view json, std::string_view name)
    {
        size_t at = json.find(name);
        if (at == json.npos)
            return {};
        at += name.size();
        while (at < json.size() && json[at] == ' ')
            at++;
        return json.substr(at);
    }

    State state = State::head;
    Finish finish = Finish::none;
    const char *problem = nullptr;
    bool has_status = false, chunked = false, unbounded = true, done = false;
    uint64_t left = 0;
    // The line of HTTP that is being read, and that of the body of which the end has not come.
    std::string line, begun_line;
};

#endif
