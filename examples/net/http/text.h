// text.h: text in a buffer of fixed size, written by one thread of a kernel. What has no room is left out.
#ifndef TEXT_H
#define TEXT_H

#include <cstddef>

#include <spinio/kernel.h>

struct Text {
    char *bytes;
    size_t room, length;

    __device__ Text &add(const char *text)
    {
        while (*text && length < room)
            bytes[length++] = *text++;
        return *this;
    }

    __device__ Text &add(const char *text, size_t count)
    {
        for (size_t i = 0; i < count && length < room; i++)
            bytes[length++] = text[i];
        return *this;
    }

    __device__ Text &add(unsigned long long number)
    {
        char digits[20];
        int count = 0;
        do
            digits[count++] = char('0' + number % 10);
        while (number /= 10);
        while (count && length < room)
            bytes[length++] = digits[--count];
        return *this;
    }
};

#endif
