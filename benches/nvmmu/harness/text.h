// text.h: text for the two programs that read text. The text at an offset depends only on the offset.
#ifndef TEXT_H
#define TEXT_H

#include "program.h"

// Fills the buffer with pieces of at most 64 bytes from piece(number, out), padded with spaces and a newline.
template <typename Piece>
void fill_text(char *bytes, size_t size, Piece piece)
{
    parallel((size + 63) / 64, [=](size_t begin, size_t end) {
        for (size_t number = begin; number < end; number++) {
            char line[65];
            std::memset(line, ' ', sizeof line);
            size_t length = piece(number, line);
            if (length < 65)
                line[length] = ' ';
            line[63] = '\n';
            std::memcpy(bytes + number * 64, line, std::min<size_t>(64, size - number * 64));
        }
    });
}

inline const char *word(uint64_t number)
{
    static const char *const words[] = {"device", "memory", "kernel", "the", "of", "storage", "page", "cache", "file",
                                        "moves", "direct", "a", "stream", "order", "block", "thread", "read", "write"};
    return words[number % (sizeof words / sizeof *words)];
}

#endif
