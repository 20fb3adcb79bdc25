// net.h: sockets that GPU kernels call. docs/gpunet.md is the manual, crates/capi/include/spinio_net.h the host's side.
//
//     #include <spinio/net.h>
//     using namespace spinio;
//
//     __global__ void echo(net::Handle handle, int listener)
//     {
//         __shared__ char buffer[4096];
//         int s = net::accept(net::block(), handle, listener);
//         while (s >= 0) {
//             int64_t got = net::recv(net::block(), handle, s, buffer, sizeof buffer);
//             if (got <= 0 || net::send(net::block(), handle, s, buffer, got) < 0)
//                 break;
//         }
//         net::close(net::block(), handle, s);
//     }
//
// All calls return a result >= 0, or -errno. -ESHUTDOWN: the host has stopped the net.
//
// Blocks that wait in a call must be resident: launch them with launch_resident() of kernel.h.
#ifndef SPINIO_NET_H_DEVICE
#define SPINIO_NET_H_DEVICE

#include <spinio/net/control.h>
#include <spinio/net/datagram.h>
#include <spinio/net/event.h>
#include <spinio/net/file.h>
#include <spinio/net/options.h>
#include <spinio/net/poll.h>
#include <spinio/net/span.h>

#endif
