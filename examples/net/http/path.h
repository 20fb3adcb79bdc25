// path.h: the name of a file in the path of a request, by one thread.
//
//   /pictures/a%20b.png ── decoded ──> pictures/a b.png, relative to the directory that the program has named
//
// No name: a path with an empty part, "." or "..", a control character, a malformed escape or an escaped slash. The Linux
// kernel refuses names that lead out of the directory, also by symbolic links.
#ifndef PATH_H
#define PATH_H

#include <spinio/kernel.h>

#include "request.h"

__device__ inline int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return lower(c) >= 'a' && lower(c) <= 'f' ? lower(c) - 'a' + 10 : -1;
}

// Whether the last part of a name is one that a file may have.
__device__ inline bool is_good_part(const char *name, unsigned length)
{
    unsigned start = length;
    while (start > 0 && name[start - 1] != '/')
        start--;
    const unsigned part = length - start;
    return part > 0 && !(part == 1 && name[start] == '.') && !(part == 2 && name[start] == '.' && name[start + 1] == '.');
}

// Stores the name of a path with its NUL; false if there is none, or no room for it.
__device__ inline bool file_name(const char *path, unsigned count, char *name, unsigned room)
{
    unsigned length = 0;
    for (unsigned i = 1; i < count; i++) {
        int c = (unsigned char)path[i];
        if (c == '%') {
            const int high = i + 1 < count ? hex(path[i + 1]) : -1, low = i + 2 < count ? hex(path[i + 2]) : -1;
            if (high < 0 || low < 0)
                return false;
            c = high * 16 + low;
            i += 2;
            if (c == '/')
                return false;
        } else if (c == '/' && !is_good_part(name, length)) {
            return false;
        }
        if (c < ' ' || c == 127 || length + 1 >= room)
            return false;
        name[length++] = char(c);
    }
    name[length] = 0;
    return is_good_part(name, length);
}

// The media type of a name, by its end.
__device__ inline const char *media_type(const char *name)
{
    unsigned length = 0, dot = 0;
    for (; name[length]; length++)
        dot = name[length] == '.' ? length : dot;
    const char *const types[][2] = {{".html", "text/html"}, {".txt", "text/plain"}, {".css", "text/css"}, {".js", "text/javascript"},
                                    {".json", "application/json"}, {".png", "image/png"}, {".jpg", "image/jpeg"}, {".svg", "image/svg+xml"}};
    for (auto &type : types)
        if (is(name + dot, length - dot, type[0]))
            return type[1];
    return "application/octet-stream";
}

#endif
