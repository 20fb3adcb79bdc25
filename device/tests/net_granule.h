// net_granule.h: for tests of connections over shared memory: packets, doors and offers as crates/ring/src/granule.rs has them, and
// whether a test leaves something.
#ifndef NET_GRANULE_H
#define NET_GRANULE_H

#include "net_test.h"

#include <fcntl.h>
#include <sys/mman.h>

// A packet of crates/ring/src/granule.rs.
[[maybe_unused]] static std::string packet(unsigned char kind, uint64_t one = 0, uint64_t two = 0, std::string name = "")
{
    uint64_t words[3];
    std::memcpy(words, "spnshr\1", 8);
    words[0] |= uint64_t(kind) << 56;
    words[1] = one;
    words[2] = two;
    return std::string(reinterpret_cast<char *>(words), sizeof words) + name;
}

[[maybe_unused]] static int door_socket(const std::string &address, bool listens, int s = socket(AF_UNIX, SOCK_SEQPACKET, 0))
{
    std::string name = "spinio-net-2/" + address;
    sockaddr_un at = {};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, name.data(), name.size());
    auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (listens)
        CHECK(!bind(s, reinterpret_cast<sockaddr *>(&at), length) && !listen(s, 8));
    else
        CHECK(!connect(s, reinterpret_cast<sockaddr *>(&at), length));
    return s;
}

// Receives a packet, and the descriptor that comes with it.
[[maybe_unused]] static std::string take_packet(int channel, int *fd = nullptr)
{
    char bytes[256], control[64];
    iovec part = {bytes, sizeof bytes};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got = recvmsg(channel, &message, 0);
    if (cmsghdr *header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr) {
        int there;
        std::memcpy(&there, CMSG_DATA(header), sizeof there);
        if (fd)
            *fd = there;
        else
            close(there);
    }
    return std::string(bytes, got > 0 ? size_t(got) : 0);
}

[[maybe_unused]] static void give_packet(int channel, const std::string &bytes) { CHECK(send(channel, bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size())); }

// The same with a descriptor, if there is one.
[[maybe_unused]] static void give_packet(int channel, const std::string &bytes, int file)
{
    iovec part = {const_cast<char *>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (file >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof file);
        std::memcpy(CMSG_DATA(header), &file, sizeof file);
    }
    CHECK(sendmsg(channel, &message, MSG_NOSIGNAL) > 0);
}

// The TCP socket of a program that says that it is a net: bound, since the door reads its name. `to`: what it connects to.
[[maybe_unused]] static int bound_anchor(const std::string &address, sockaddr_in &to)
{
    sockaddr_in own = {};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to = own;
    to.sin_port = htons(port_of(address));
    const int anchor = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!bind(anchor, reinterpret_cast<sockaddr *>(&own), sizeof own));
    return anchor;
}

// What a program's socket goes through, and why.
[[maybe_unused]] static std::string transport_of(spinio_socket *s)
{
    char text[128] = "";
    CHECK(spinio_socket_transport(s, text, sizeof text) >= 0);
    return text;
}

[[maybe_unused]] static bool is_shared(spinio_socket *s) { return transport_of(s).rfind("shared: ", 0) == 0; }

[[maybe_unused]] static int open_descriptors()
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

[[maybe_unused]] static int granules_mapped()
{
    int count = 0;
    char line[512];
    FILE *maps = std::fopen("/proc/self/maps", "r");
    while (std::fgets(line, sizeof line, maps))
        count += std::strstr(line, "memfd:spinio-net") != nullptr;
    std::fclose(maps);
    return count;
}

#endif
