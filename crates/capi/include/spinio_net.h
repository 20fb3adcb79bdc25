/* spinio_net.h: sockets that GPU kernels call, the host's side (libspinio.so). docs/gpunet.md is the manual, and
 * device/include/spinio/net.h has the calls of kernels.
 *
 *     spinio_net *net = spinio_net_open(NULL, NULL);
 *     struct spinio_net_handle handle;
 *     int listener = net ? spinio_net_listen(net, "tcp://127.0.0.1:8080", 16) : -1;
 *     if (listener < 0 || spinio_net_handle(net, &handle))
 *         return fprintf(stderr, "%s\n", spinio_last_error()), 1;
 *     ... launch a kernel with handle and listener, and wait for it ...
 *     spinio_net_close(net);
 *
 * A net belongs to one device of one process. Its memory (with the defaults 37 MiB pinned, of which 4 are for others that
 * share memory, 2 MiB more with files_root, and 18 MiB of the device) is made by spinio_net_open() and given back by
 * spinio_net_close(): a driver gives memory back only when no kernel runs. While kernels of a net wait for the network,
 * calls of the program that wait for all kernels (cudaDeviceSynchronize, cudaFree, cudaFreeHost, work on the default stream)
 * wait for them: launch them on a stream made with cudaStreamNonBlocking. Load the module of every kernel before
 * (cudaFuncGetAttributes): loading one waits too.
 *
 * A thread of the library makes the system calls. It has a descriptor table of its own, so the program's table has no
 * descriptor of a net. Addresses are tcp://ADDRESS:PORT (IPv6 as tcp://[::1]:80), unix:///PATH and unix:@NAME (abstract), in UTF-8. Sockets are numbers
 * for kernels, no descriptors of the program. A forked child does not have the nets of its parent.
 *
 * Any thread may call these functions at any time, but none during or after spinio_net_close() of its net. A function that
 * fails returns -1 or NULL and sets errno, and spinio_last_error() of spinio.h returns a sentence about the cause.
 * ENODEV: a forked child, or a kernel has failed and with it the device. ESHUTDOWN: the net is stopped. */
#ifndef SPINIO_NET_H
#define SPINIO_NET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spinio_net spinio_net;

/* 0 is the default everywhere. The struct only grows at its end: set `size` to sizeof(struct spinio_net_options). */
struct spinio_net_options {
    size_t size;
    uint32_t sockets;        /* descriptors at a time, at most 65536; default 1024 */
    uint32_t connections;    /* connections at a time: pairs of rings; default 256 */
    uint32_t ring_bytes;     /* of each direction: a power of two from 4096 to 4 MiB; default 65536, and 1 MiB, the most there, in
                                device memory of kernels of other nets */
    uint32_t idle_us;        /* longest sleep of the proxy, and so the latest answer after a pause; default 5000 */
    uint64_t first_position; /* where streams begin, a multiple of 8; for tests */
    uint32_t fault_seed;     /* faults of the network, from this seed; for tests */
    uint32_t no_upgrade;     /* 1: all connections go through Linux, as with SPINIO_NET_UPGRADE=off */
    const char *files_root;  /* kernels may open the files below this directory; "/": all that the process may open;
                                default NULL: none */
    uint32_t files_write;    /* 1: they may also write, create and cut them */
    uint32_t files;          /* at a time, at most 256; default 64 */
    uint32_t shared_connections; /* connections at a time that programs and kernels of other nets make to this one, and whose bytes do
                                    not go through Linux: two rings of pinned memory and six descriptors each, and between kernels
                                    2 MiB of device memory on either side, from the first use until the net is closed; at most
                                    512; default a quarter of connections, at most 32, or 16 MiB */
    uint32_t reserved;       /* 0 */
    uint32_t threads;        /* that make the system calls of streams, at most 64; default SPINIO_NET_THREADS, or by processors */
    uint32_t reserved2;      /* 0 */
    uint32_t linger_ms;      /* a closed socket whose peer has taken nothing for so long, or not all for ten times as long, is given up if
                                another socket needs its rings or its descriptor; default 30000 */
    uint32_t last_linger_ms; /* the same of all sockets, once the net is closed; default 1000 */
    uint32_t reserved3;      /* 0 */
};

/* The argument of kernels, by value: spinio::net::Handle on the device. */
struct spinio_net_handle {
    uint64_t opaque[8];
};

/* What a net has done. The struct only grows at its end. */
struct spinio_net_stats {
    uint64_t open;           /* descriptors now */
    uint64_t accepted, connected;
    uint64_t bytes_received, bytes_sent; /* through Linux: the library does not see others */
    uint64_t doorbells;      /* of kernels */
    uint64_t calls;          /* that needed an answer: accept, connect ... */
    uint64_t violations;     /* words of kernels that were refused: their connections were reset */
    uint64_t proxy_ns;       /* processor time of the library's threads */
    uint64_t upgraded;       /* connections inside the net, whose bytes go through device memory */
    /* Connections inside the net that go through Linux, by reason: */
    uint64_t kept_by_setting; /* no_upgrade, or SPINIO_NET_UPGRADE=off */
    uint64_t kept_by_memory;  /* no rings left in device memory */
    uint64_t kept_by_backlog; /* the listening socket's backlog is full */
    uint64_t kept_by_name;    /* another socket took it, its address was translated, or the client is bound to a path */
    uint64_t shared;          /* connections to programs of this machine, and to kernels of other nets, over memory that both map */
    uint64_t kept_by_granules; /* a program or a net asked for such memory, and none was left */
    /* Connections of kernels to other nets that go through Linux, beside those above: */
    uint64_t kept_by_user;    /* the other net is of another user */
    uint64_t kept_by_time;    /* it did not answer in time or broke off, or another socket took the connection */
    uint64_t peer;            /* connections to kernels of other nets, whose bytes go into device memory of the reader */
    uint64_t helped;         /* how often another thread than the net's own made the system calls of a socket (SPINIO_NET_THREADS) */
    uint64_t kept_by_descriptors; /* connections that could have left Linux: no descriptor was left, at one of the ends */
};

/* Opens a net for a device: "emulated", or NULL for the device of the CUDA context that is current on this thread: a program for
 * CUDA makes it before, with cudaFree(0) or any allocation. Without a context NULL is the emulated GPU, if SPINIO_EMULATED is set
 * or the process has no GPU (which the CUDA driver, if there is one, is loaded and asked for), and ENODEV if it has one. options: NULL for the
 * defaults. EINVAL: options. ENODEV: no such device. ENOMEM. ENOTSUP: the device has no virtual memory management. EAGAIN: no
 * thread. With files_root the errno of open(2). */
spinio_net *spinio_net_open(const char *device, const struct spinio_net_options *options);

/* Stores the argument of kernels. */
int spinio_net_handle(spinio_net *net, struct spinio_net_handle *handle);

/* Makes a listening socket for kernels and returns its number. EINVAL: no address. ENAMETOOLONG. The errno of bind(2) and
 * listen(2). */
int spinio_net_listen(spinio_net *net, const char *address, int backlog);

/* Makes a connected socket for kernels and returns its number. EINVAL, ENAMETOOLONG, and the errno of connect(2). */
int spinio_net_connect(spinio_net *net, const char *address);

/* Stores the address of a socket as text, with its NUL, as "tcp://127.0.0.1:40123" after a port 0. ENAMETOOLONG: size. */
int spinio_net_address(spinio_net *net, int socket, char *text, size_t size);

/* Moves a socket of the program to the kernels, and returns its number there: a connected TCP or UNIX socket, a UDP or UNIX
 * datagram socket, or one that listens, such as one of systemd's LISTEN_FDS. On success the descriptor `fd` is closed, as if it
 * had been given away; descriptors of other programs and duplicates stay, and share O_NONBLOCK, which is set. Bytes that the
 * program has not read are for the kernels. No thread may use the descriptor meanwhile.
 * EBADF. ENOTSOCK. ENOTCONN: neither connected nor listening. EAFNOSUPPORT, EPROTONOSUPPORT: another kind of socket. ENOBUFS: all
 * rings are in use. EPERM, ENOSYS: a sandbox refuses pidfd_getfd(2). */
int spinio_net_adopt(spinio_net *net, int fd);

/* Takes a socket from the kernels, and returns a descriptor of it, which blocks and is closed on exec. Bytes that arrived and
 * were not received by a kernel are stored at `unread`, and their number at `count`: they come before what the program
 * receives from the descriptor. A ring's size is room enough. What kernels have sent leaves before; if the peer does not take
 * it within a second, or datagrams were not received by a kernel, the call fails with EBUSY and the socket stays as it is.
 * No kernel may use the socket any more: a kernel that calls net::release() has ended its use.
 * EBADF: no such socket. EMSGSIZE: more unread bytes than `size`. EBUSY: also a listening socket of which
 * connections wait that were accepted already. EALREADY: it is connecting. EOPNOTSUPP: its bytes do not go through Linux. The
 * errno of its error. */
int spinio_net_release(spinio_net *net, int socket, void *unread, size_t size, size_t *count);

/* Makes an event set, for kernels to wait on, and returns its number. A net has at most 16, which live as long as the net.
 * ENOBUFS: there are 16. */
int spinio_net_set(spinio_net *net);

/* Puts a socket into an event set and arms it; a socket is in one set at most. events: POLLIN, POLLOUT, POLLRDHUP of
 * poll(2); 0 takes it out. A listening socket gives its connections to the set, which are then watched for the same events.
 * EBADF: no such set or socket. EINVAL: other events. */
int spinio_net_add(spinio_net *net, int set, int socket, int events);

/* Ends the net for kernels: all their calls return -ESHUTDOWN, those that wait as well. Bytes that arrived before can be
 * received, and what was sent before is sent. */
int spinio_net_stop(spinio_net *net);

/* Stops the net, sends what is left, closes the sockets and frees the memory. A peer that takes nothing for a second (last_linger_ms)
 * does not get the rest, nor does one that takes too little in 30 seconds (linger_ms): its connection is reset, if it is one of TCP. All kernels that use the
 * net must have ended: stop it and synchronize with their stream before. EBUSY: a file system does not answer a kernel's read for
 * a second; the net is closed, and its memory is kept until the process ends. */
int spinio_net_close(spinio_net *net);

/* Stores what the net has done; size: sizeof *stats. */
int spinio_net_stats(spinio_net *net, struct spinio_net_stats *stats, size_t size);

/* Stream sockets of CPU programs. A program that connects to a listening socket of a net of its own user on the same machine
 * shares memory with the kernels: neither Linux nor the net's thread is on the way of a byte. Otherwise the socket is a plain
 * one; the results of the calls are the same. docs/gpunet.md, "Programs that share memory".
 *
 *     spinio_socket *s = spinio_socket_connect("tcp://127.0.0.1:7007", NULL);
 *     if (!s || spinio_socket_send(s, "hello", 5, 0) != 5)
 *         return perror("send"), 1;
 *     ssize_t got = spinio_socket_recv(s, buffer, sizeof buffer, 0);
 *     spinio_socket_close(s);
 *
 * One thread may send and another one receive at the same time; others wait for them. No thread may use a socket during or
 * after its close. A forked child does not have the sockets of its parent (ENODEV). No call raises SIGPIPE, and a signal does
 * not end a call that waits, but for spinio_socket_poll(). An error of the connection of a socket that shares memory stays: each later
 * call has it, once what had arrived is received. */
typedef struct spinio_socket spinio_socket;

/* 0 is the default everywhere. The struct only grows at its end: set `size` to sizeof(struct spinio_socket_options). */
struct spinio_socket_options {
    size_t size;
    uint32_t no_upgrade;         /* 1: no shared memory, as with SPINIO_NET_UPGRADE=off */
    uint32_t receive_timeout_ms; /* spinio_socket_recv() waits so long and then fails with EAGAIN; 0: without a limit */
    uint32_t send_timeout_ms;    /* the same of spinio_socket_send(), and of the connection that spinio_socket_connect() makes, which
                                  * then fails with EINPROGRESS (TCP) or EAGAIN (UNIX) */
};

/* Connects, and agrees with the net on memory; that takes up to some seconds if the net does not answer, and then goes on
 * without. options: NULL for the defaults. NULL: EINVAL, ENAMETOOLONG, and the errno of connect(2). */
spinio_socket *spinio_socket_connect(const char *address, const struct spinio_socket_options *options);

/* As send(2): returns the bytes that are in the ring, fewer than asked for only with MSG_DONTWAIT, the timeout or an error, or
 * -1. flags: MSG_DONTWAIT. EAGAIN, EPIPE, ECONNRESET. EPROTO: the other end broke the rules of the memory. */
ssize_t spinio_socket_send(spinio_socket *socket, const void *from, size_t bytes, int flags);

/* As recv(2): bytes, 0 at the end of the stream, or -1. flags: MSG_DONTWAIT, MSG_WAITALL, MSG_PEEK (which looks at what is
 * there, also with MSG_WAITALL). EAGAIN, ECONNRESET, EPROTO. */
ssize_t spinio_socket_recv(spinio_socket *socket, void *to, size_t bytes, int flags);

/* Bytes in place: what is sent is written, and what was received is read, in the memory that the program shares with the kernel.
 *
 *     void *bytes;
 *     ssize_t room = spinio_socket_reserve(s, &bytes, 4096, 0);
 *     if (room < 0 || spinio_socket_commit(s, fill(bytes, room)))
 *         return perror("send"), 1;
 *
 * Returned: how many bytes are at *bytes, at least 1 and at most `most`; borrow: 0 at the end of the stream, and then there is nothing to
 * give back; or -1, as of send and recv. flags: MSG_DONTWAIT. Until commit or give_back other calls of this direction wait for
 * it (with MSG_DONTWAIT: EAGAIN); any thread may make the second call, and close takes the bytes away. A span ends where the ring does;
 * one to send has at most half a ring. The other end could change bytes that are read in place: copy first what is checked. On a
 * socket that is not shared the results are the same, and the bytes are copied. */
ssize_t spinio_socket_reserve(spinio_socket *socket, void **bytes, size_t most, int flags);

/* Sends the first `bytes` of what was reserved; the rest is room again. -1: EINVAL: nothing is reserved, or less. A socket that is
 * not shared may wait here, and learn here of EPIPE and ECONNRESET; EAGAIN: send_timeout_ms has passed, and some of them may be sent. */
int spinio_socket_commit(spinio_socket *socket, size_t bytes);

ssize_t spinio_socket_borrow(spinio_socket *socket, void **bytes, size_t most, int flags);

/* Has received the first `bytes` of what was borrowed; the rest comes again. -1: EINVAL: nothing is borrowed, or less. ENODATA: on a
 * socket that is not shared, another call received some of them meanwhile, through spinio_socket_fd(). */
int spinio_socket_give_back(spinio_socket *socket, size_t bytes);

/* As shutdown(2): SHUT_RD, SHUT_WR, SHUT_RDWR. */
int spinio_socket_shutdown(spinio_socket *socket, int how);

/* Stores "shared: REASON" or "kernel: REASON": how bytes travel, and why. 1 if they go through shared memory, 0 if not.
 * ENAMETOOLONG: 128 bytes are enough. */
int spinio_socket_transport(spinio_socket *socket, char *text, size_t size);

/* What spinio_socket_poll() looks at. */
struct spinio_socket_poll_entry {
    spinio_socket *socket;  /* or NULL: */
    int fd;                 /* any descriptor; less than 0: none */
    unsigned short events;  /* of a socket: POLLIN, POLLOUT, POLLRDHUP of poll(2) */
    unsigned short revents; /* those that are true, and POLLERR, POLLHUP, POLLNVAL */
};

/* As poll(2), for sockets and descriptors together: waits until some are ready, at most timeout_ms milliseconds, or without an end if
 * that is less than 0, and returns how many are. POLLOUT: half of the ring is free. A GPU cannot wake a thread: while a socket shares
 * memory, the call looks up to each millisecond. No other thread may close a socket meanwhile. -1: EINTR: a signal handler has run, and
 * nothing is ready; ENODEV, ENOMEM, EINVAL: as of poll(2). */
int spinio_socket_poll(struct spinio_socket_poll_entry *entries, size_t count, int timeout_ms);

/* The descriptor of the TCP or UNIX connection, for its names. It tells of no bytes that travel through shared memory. */
int spinio_socket_fd(spinio_socket *socket);

/* Closes it. What was sent before can still be received. */
int spinio_socket_close(spinio_socket *socket);

#ifdef __cplusplus
}
#endif

#endif
