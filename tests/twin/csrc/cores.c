/* The cores of a twin node (LD_PRELOAD): a process on a node that states a number of cores is told
 * these, and may be bound to some of them. The kernel still runs it on the cores of this machine. A
 * forked process inherits the binding, and a program that is executed finds it in its environment. */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
static const char *const BOUND = "JOULEFRONT_TWIN_CORES";

/* The number of cores that the node states; 0: it has those of this machine. */
static int64_t stated(void) {
    const char *path = getenv("JOULEFRONT_TWIN");
    int64_t cores = 0;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (pread(file, &cores, sizeof cores, offsetof(node_t, cores)) != sizeof cores) cores = 0;
    close(file);
    return cores < CPU_SETSIZE ? cores : CPU_SETSIZE;
}

EXPORT int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *mask) {
    static int (*real)(pid_t, size_t, cpu_set_t *);
    int64_t cores = stated();
    if (!real) real = (int (*)(pid_t, size_t, cpu_set_t *))dlsym(RTLD_NEXT, "sched_getaffinity");
    if (!cores || (pid && pid != getpid())) return real(pid, size, mask);
    const char *bound = getenv(BOUND);
    CPU_ZERO_S(size, mask);
    for (int64_t core = 0; core < cores; core++)
        if (!bound || (core < (int64_t)strlen(bound) && bound[core] == '1'))
            CPU_SET_S((size_t)core, size, mask);
    return 0;
}

EXPORT int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *mask) {
    static int (*real)(pid_t, size_t, const cpu_set_t *);
    char bound[CPU_SETSIZE + 1] = "";
    int64_t cores = stated(), count = 0;
    if (!real)
        real = (int (*)(pid_t, size_t, const cpu_set_t *))dlsym(RTLD_NEXT, "sched_setaffinity");
    if (!cores || (pid && pid != getpid())) return real(pid, size, mask);
    for (int64_t core = 0; core < cores; core++) {
        bound[core] = CPU_ISSET_S((size_t)core, size, mask) ? '1' : '0';
        count += bound[core] == '1';
    }
    if (!count) {
        errno = EINVAL;
        return -1;
    }
    return setenv(BOUND, bound, 1);
}
