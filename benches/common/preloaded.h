/* Functions of the preloaded libspinio.so, by name: FIND(spinio_pread)(...). */
#ifndef PRELOADED_H
#define PRELOADED_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define FIND(name) ((__typeof__(&name))preloaded(#name))

static void *preloaded(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "%s not found: is the library preloaded?\n", name);
        exit(1);
    }
    return found;
}

#endif
