// print.h: what an emulated kernel prints on the program's standard error.
//
// The threads of the library that run kernels have a table of descriptors of their own, in which 2 is not the standard error. /proc/self
// has the table of the process.
//
// Known flaw: a standard error that is a socket cannot be opened like this, and gets nothing.
#ifndef SPINIO_EMULATION_PRINT_H
#define SPINIO_EMULATION_PRINT_H

#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

namespace spinio::emulation {

template <typename... Values>
void print(const char *format, Values... values)
{
    char text[256];
    std::snprintf(text, sizeof text, format, values...);
    const int error = open("/proc/self/fd/2", O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY);
    if (error < 0)
        return;
    // A line that does not arrive changes nothing.
    (void)!write(error, text, std::strlen(text));
    close(error);
}

} // namespace spinio::emulation

#endif
