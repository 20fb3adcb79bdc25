// meter.h: wall time, CPU time and energy.
#ifndef METER_H
#define METER_H

#include <dlfcn.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

struct Moment {
    double seconds, cpu; // cpu: user + system of the whole process, including worker threads

    static Moment now()
    {
        rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        auto of = [](timeval t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
        auto since = std::chrono::steady_clock::now().time_since_epoch();
        return {std::chrono::duration<double>(since).count(), of(usage.ru_utime) + of(usage.ru_stime)};
    }

    Moment operator-(const Moment &before) const
    {
        return {seconds - before.seconds, cpu - before.cpu};
    }

    void operator+=(const Moment &more)
    {
        seconds += more.seconds;
        cpu += more.cpu;
    }
};

// Joules used by the GPU and the processors, where they report it.
class Energy {
public:
    Energy()
    {
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!library)
            return;
        auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
        auto handle = reinterpret_cast<int (*)(unsigned, void **)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
        total = reinterpret_cast<int (*)(void *, unsigned long long *)>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
        if (!init || !handle || !total || init() || handle(0, &device))
            total = nullptr;
    }

    std::optional<double> gpu() const
    {
        unsigned long long millijoules = 0;
        if (!total || total(device, &millijoules))
            return {};
        return double(millijoules) * 1e-3;
    }

    static std::optional<double> processors()
    {
        std::optional<double> sum;
        for (int package = 0; package < 16; package++) {
            std::string path = "/sys/class/powercap/intel-rapl:" + std::to_string(package) + "/energy_uj";
            std::FILE *file = std::fopen(path.c_str(), "r");
            double microjoules;
            if (file && std::fscanf(file, "%lf", &microjoules) == 1)
                sum = sum.value_or(0) + microjoules * 1e-6;
            if (file)
                std::fclose(file);
        }
        return sum;
    }

private:
    void *device = nullptr;
    int (*total)(void *, unsigned long long *) = nullptr;
};

#endif
