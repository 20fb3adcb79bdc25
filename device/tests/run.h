// run.h: for the test programs of the emulation: a kernel without a device.
#ifndef RUN_H
#define RUN_H

#include "check.h"

#include <spinio/emulation/atomics.h>
#include <spinio/emulation/grid.h>
#include <spinio/emulation/resident.h>
#include <spinio/emulation/shuffles.h>
#include <spinio/emulation/words.h>

#include <tuple>

template <typename... Parameters, typename... Arguments>
void run_by(void (*how)(const spinio::emulation::Body &, dim3, dim3), void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
        static void call(const void *self)
        {
            std::apply(static_cast<const Call *>(self)->kernel, static_cast<const Call *>(self)->arguments);
        }
    } call{kernel, {static_cast<Parameters>(arguments)...}};
    how({Call::call, &call}, grid, block);
}

// Runs a kernel immediately, without a device.
template <typename... Parameters, typename... Arguments>
void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    run_by(spinio::emulation::run_grid, kernel, grid, block, arguments...);
}

template <typename... Parameters, typename... Arguments>
void run_resident(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    run_by(spinio::emulation::run_resident, kernel, grid, block, arguments...);
}

#endif
