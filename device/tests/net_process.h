// net_process.h: other processes of a test, and whether a test leaves something.
//
// They are this program again, with what they do as their first argument. Lines and bytes through two pipes say that one is
// ready, and that it may go on.
#ifndef NET_PROCESS_H
#define NET_PROCESS_H

#include "net_echo.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/prctl.h>

static const int from_parent = 30, to_parent = 31;

// Another process.
struct Child {
    pid_t pid = -1;
    int to = -1, from = -1;

    explicit Child(std::vector<std::string> arguments, const char *variable = nullptr)
    {
        int in[2], out[2];
        CHECK(!pipe2(in, O_CLOEXEC) && !pipe2(out, O_CLOEXEC));
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, in[0], from_parent);
        posix_spawn_file_actions_adddup2(&actions, out[1], to_parent);
        std::vector<char *> argument{const_cast<char *>("net_test")}, variables;
        for (std::string &each : arguments)
            argument.push_back(each.data());
        argument.push_back(nullptr);
        for (char **each = environ; *each; each++)
            variables.push_back(*each);
        if (variable)
            variables.insert(variables.begin(), const_cast<char *>(variable));
        variables.push_back(nullptr);
        std::fflush(stdout);
        CHECK(!posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argument.data(), variables.data()));
        posix_spawn_file_actions_destroy(&actions);
        close(in[0]);
        close(out[1]);
        to = in[1];
        from = out[0];
    }
    Child(const Child &) = delete;

    // A line that it says; empty if it has ended.
    std::string hear() const
    {
        std::string line;
        for (char byte; read(from, &byte, 1) == 1 && byte != '\n';)
            line += byte;
        return line;
    }
    void tell() const { CHECK(write(to, "\n", 1) == 1); }

    int ends()
    {
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid);
        close(to);
        close(from);
        return status;
    }
};

[[maybe_unused]] static void say(const std::string &line) { CHECK(write(to_parent, (line + "\n").data(), line.size() + 1) == ssize_t(line.size() + 1)); }
[[maybe_unused]] static void await_parent()
{
    char byte;
    if (read(from_parent, &byte, 1) != 1)
        _exit(1);
}

static size_t entries(const std::string &folder, const char *text)
{
    size_t count = 0;
    DIR *directory = opendir(folder.c_str());
    while (dirent *entry = directory ? readdir(directory) : nullptr) {
        char link[128] = {};
        std::string path = folder + "/" + entry->d_name;
        int file = text[0] == '/' ? open((path + text).c_str(), O_RDONLY | O_CLOEXEC) : -1;
        if (file >= 0) {
            // The name of a thread.
            count += read(file, link, sizeof link - 1) > 0 && !std::strcmp(link, "spinio-net\n");
            close(file);
        } else if (text[0] != '/') {
            count += readlink(path.c_str(), link, sizeof link - 1) > 0 && std::strstr(link, text);
        }
    }
    if (directory)
        closedir(directory);
    return count;
}

// Compares descriptors, proxies and memory at the end of a section with those at its beginning.
struct NothingLeft {
    const char *section;
    size_t descriptors;
    long resident;

    explicit NothingLeft(const char *section) : section(section)
    {
        { Net first; }
        descriptors = entries("/proc/self/fd", "");
        resident = resident_kib();
    }
    ~NothingLeft()
    {
        // A thread that has ended may still be listed for a moment.
        for (int i = 0; i < 60000 && entries("/proc/self/task", "/comm"); i++)
            usleep(1000);
        size_t now = entries("/proc/self/fd", ""), proxies = entries("/proc/self/task", "/comm");
        if (now != descriptors || proxies)
            std::printf("%s: %zu descriptors, before %zu; %zu proxies\n", section, now, descriptors, proxies);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
        // A section grows by 2 MiB where it starts threads.
        const long grown = resident_kib() - resident;
        if (grown > 16 * 1024) {
            std::printf("%s: %ld KiB more than before\n", section, grown);
            failures++;
        }
#endif
        failures += now != descriptors || proxies;
    }
};

#endif
