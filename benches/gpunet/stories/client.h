// client.h: a client of load.cpp: a connection on which it asks for one completion after the other, and what has been measured of all.
#ifndef STORIES_CLIENT_H
#define STORIES_CLIENT_H

#include <netdb.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "../result.h"
#include "answer.h"

// Of one thread's clients. Times in seconds.
struct Figures {
    // What is measured has arrived between these.
    double from = 0, to = 0;
    uint64_t tokens = 0, streams = 0, receives = 0, errors = 0;
    std::vector<float> first, gaps;
    std::string first_error;

    void add(const Figures &other)
    {
        tokens += other.tokens, streams += other.streams, receives += other.receives, errors += other.errors;
        first.insert(first.end(), other.first.begin(), other.first.end());
        gaps.insert(gaps.end(), other.gaps.begin(), other.gaps.end());
        if (first_error.empty())
            first_error = other.first_error;
    }
};

struct Address {
    sockaddr_storage bytes{};
    socklen_t length = 0;

    bool find(const std::string &text)
    {
        if (text.compare(0, 7, "unix://") == 0) {
            auto local = reinterpret_cast<sockaddr_un *>(&bytes);
            local->sun_family = AF_UNIX;
            length = sizeof *local;
            if (text.size() - 7 >= sizeof local->sun_path)
                return false;
            std::strcpy(local->sun_path, text.c_str() + 7);
            return true;
        }
        const size_t colon = text.rfind(':');
        if (text.compare(0, 6, "tcp://") || colon <= 6)
            return false;
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(text.substr(6, colon - 6).c_str(), text.c_str() + colon + 1, &hints, &found))
            return false;
        length = found->ai_addrlen;
        std::memcpy(&bytes, found->ai_addr, length);
        freeaddrinfo(found);
        return true;
    }
};

struct Request {
    unsigned max_tokens = 200;
    double temperature = 0.8;

    std::string text(uint64_t number) const
    {
        static const char *const prompts[] = {
            "Once upon a time",
            "Once upon a time there was a little fox named Mira.",
            "There once was a bear called Oscar who lived",
            "Long ago, a clever owl named Hazel lived near a quiet lake in the valley.",
            "Lily was a shy rabbit. She lived",
            "This is the story of Leo, a brave mouse who lived",
            "Otto the turtle lived on an island in the middle of a lake.",
            "T",
        };
        char body[512], head[256];
        const int length = std::snprintf(body, sizeof body,
                                         "{\"model\": \"stories\", \"prompt\": \"%s\", \"max_tokens\": %u, \"stream\": true, "
                                         "\"temperature\": %g, \"seed\": %llu}",
                                         prompts[number % (sizeof prompts / sizeof *prompts)], max_tokens, temperature,
                                         static_cast<unsigned long long>(number));
        std::snprintf(head, sizeof head,
                      "POST /v1/completions HTTP/1.1\r\nHost: stories\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", length);
        return std::string(head) + body;
    }
};

class Client {
public:
    Client(const Request &request, const Address &address, int events, unsigned number, Figures &figures)
        : request(request), address(address), events(events), number(number), figures(figures)
    {
    }

    ~Client() { disconnect(); }

    // Begins the next completion.
    void ask()
    {
        // Of different seeds: the numbers of two clients do not meet.
        out = request.text((uint64_t(asked++) << 16) + number);
        sent = 0;
        answer = Answer();
        tokens = 0;
        begun = heard = now();
        again = 0;
        reuses = socket >= 0;
        if (reuses) {
            send();
            return;
        }
        socket = ::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        epoll_event event{};
        event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
        event.data.ptr = this;
        // A UNIX socket whose backlog is full says EAGAIN: an error, after which it tries again.
        const auto to = reinterpret_cast<const sockaddr *>(&address.bytes);
        const bool connects = socket >= 0 && (connect(socket, to, address.length) == 0 || errno == EINPROGRESS);
        if (!connects || epoll_ctl(events, EPOLL_CTL_ADD, socket, &event))
            error(std::string("connect: ") + std::strerror(errno));
    }

    // epoll has news.
    void proceed(uint32_t what)
    {
        if (socket >= 0 && what & EPOLLOUT && sent < out.size())
            send();
        if (what & (EPOLLIN | EPOLLERR | EPOLLHUP))
            receive(what & (EPOLLRDHUP | EPOLLERR | EPOLLHUP));
    }

    // Now and then.
    void look(double time)
    {
        if (again && time >= again)
            ask();
        else if (!again && time > heard + 10)
            error("silence of 10 s");
    }

private:
    void send()
    {
        while (sent < out.size()) {
            const ssize_t count = ::send(socket, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
            if (count < 0 && (errno == EAGAIN || errno == ENOTCONN))
                return;
            if (count < 0 && errno == EINTR)
                continue;
            // receive() finds out.
            if (count < 0 && reuses && (errno == EPIPE || errno == ECONNRESET))
                return;
            if (count < 0) {
                error(std::string("send: ") + std::strerror(errno));
                return;
            }
            sent += size_t(count);
        }
    }

    void receive(bool to_the_end)
    {
        static thread_local char buffer[256 << 10];
        while (socket >= 0) {
            const ssize_t count = recv(socket, buffer, sizeof buffer, 0);
            if (count < 0 && errno == EINTR)
                continue;
            if (count < 0 && (errno == EAGAIN || errno == ENOTCONN))
                return;
            if (reuses && answer.is_untouched() && (count == 0 || (count < 0 && errno == ECONNRESET))) {
                // The server has closed a connection that had no request, while this one was on its way: as HTTP clients do, once more.
                disconnect();
                ask();
                return;
            }
            if (count < 0) {
                error(std::string("recv: ") + std::strerror(errno));
                return;
            }
            heard = now();
            take(buffer, size_t(count));
            // Fewer than there was room for: epoll says when there is more. It does not say the end again, if that came with these bytes.
            if (count > 0 && size_t(count) < sizeof buffer && !to_the_end)
                return;
        }
    }

    void take(const char *bytes, size_t count)
    {
        const bool measured = heard >= figures.from && heard < figures.to;
        if (count)
            answer.take(bytes, count);
        else
            answer.end();
        const unsigned fresh = answer.tokens - tokens;
        if (measured) {
            figures.receives++;
            figures.tokens += fresh;
            if (fresh && !tokens)
                figures.first.push_back(float(heard - begun));
            else if (fresh)
                figures.gaps.push_back(float(heard - last));
            figures.gaps.insert(figures.gaps.end(), fresh ? fresh - 1 : 0, 0.0f);
        }
        if (fresh)
            last = heard;
        tokens = answer.tokens;
        if (const char *what = answer.wrong(request.max_tokens)) {
            error(what);
        } else if (answer.is_complete()) {
            figures.streams += measured;
            if (answer.closes)
                disconnect();
            ask();
        }
    }

    void disconnect()
    {
        // This takes it out of the epoll set too.
        if (socket >= 0)
            ::close(socket);
        socket = -1;
    }

    void error(const std::string &what)
    {
        figures.errors++;
        if (figures.first_error.empty())
            figures.first_error = what;
        disconnect();
        again = now() + 0.02;
    }

    const Request &request;
    const Address &address;
    const int events;
    const unsigned number;
    Figures &figures;
    int socket = -1;
    unsigned asked = 0, tokens = 0;
    std::string out;
    size_t sent = 0;
    Answer answer;
    // When the request was begun, the last bytes and the last token came, and when it tries again after an error.
    bool reuses = false;
    double begun = 0, heard = 0, last = 0, again = 0;
};

#endif
