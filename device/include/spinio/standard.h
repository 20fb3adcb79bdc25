// standard.h: what device code needs of the C++ library: errno numbers, integers of known size.
//
// NVRTC has no files of the host's C library, so this defines them there: the integers in namespace spinio, since a program
// may include other headers that define them, as other types of the same size.
#ifndef SPINIO_STANDARD_H
#define SPINIO_STANDARD_H

#if defined(__CUDACC_RTC__)

namespace spinio {

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;
using intptr_t = long long;
using uintptr_t = unsigned long long;

} // namespace spinio

#ifndef INT64_MAX
#define INT64_MAX 9223372036854775807ll
#define INT64_MIN (-INT64_MAX - 1)
#endif

// Linux's numbers, those of a program that compares results with them.
#ifndef ESHUTDOWN
#define EPERM 1
#define ENOENT 2
#define EINTR 4
#define EIO 5
#define EBADF 9
#define EAGAIN 11
#define ENOMEM 12
#define EACCES 13
#define EFAULT 14
#define EBUSY 16
#define EEXIST 17
#define EXDEV 18
#define ENODEV 19
#define EISDIR 21
#define EINVAL 22
#define EMFILE 24
#define ENOSPC 28
#define EROFS 30
#define EPIPE 32
#define EDOM 33
#define ENAMETOOLONG 36
#define EPROTO 71
#define EDESTADDRREQ 89
#define EMSGSIZE 90
#define ENOPROTOOPT 92
#define EPROTONOSUPPORT 93
#define ESOCKTNOSUPPORT 94
#define EOPNOTSUPP 95
#define EAFNOSUPPORT 97
#define EADDRINUSE 98
#define ECONNRESET 104
#define ENOBUFS 105
#define EISCONN 106
#define ENOTCONN 107
#define ESHUTDOWN 108
#define ETIMEDOUT 110
#define ECONNREFUSED 111
#define EALREADY 114
#define EINPROGRESS 115
#endif

#else

#include <cerrno>
#include <cstddef>
#include <cstdint>

#endif

#endif
