/* Library of a training process on a twin node (LD_PRELOAD): the process computes on a core, and is
 * held back so that its work takes as long as the law of speed (physics.c) says.
 *
 * A process becomes a rank when LOCAL_RANK is set: in its environment at the start, or later by
 * setenv, as a fork server's child does. From then on a timer of its main thread's CPU time
 * interrupts it every few milliseconds, and the handler sleeps for what the device would still
 * compute. Other threads are not counted: one that spins while the main thread sleeps would add to
 * the sleep without end. Time that the main thread waited for a core is taken off that sleep:
 * neighbours on the machine do not slow the device, as long as they leave the rank the share of a
 * core that the law asks for. */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define sigev_notify_thread_id _sigev_un._tid

static const int64_t TICK_NS = 4000000;
/* Lateness that is made up for later, seconds: more of it is lost, as on a busy machine. */
static const double LATE_S = 0.05;

static pid_t owner; /* the process that is held back: a forked child has its own timers */
static timer_t timer;
static node_t *node;
static gpu_t *gpu;
static int64_t counted_ns, waited_ns;
static double owed_s;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* CPU time of the calling thread: the main one, which alone is interrupted. */
static int64_t spent_ns(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}

/* Tell the device what was computed. Entries move up when an earlier rank ends. */
static void tell(int64_t now_ns) {
    for (int64_t at = 0; at < gpu->rank_count; at++)
        if (gpu->rank[at].pid == getpid())
            __atomic_store_n(&gpu->rank[at].told_ns, now_ns, __ATOMIC_RELAXED);
}

/* Time that the main thread was ready and had no core (Documentation/scheduler/sched-stats). */
static int64_t run_delay_ns(void) {
    char text[96] = "";
    long long ran, waited = 0;
    int file = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) <= 0 || sscanf(text, "%lld %lld", &ran, &waited) != 2)
        waited = 0;
    close(file);
    return waited;
}

/* The number of this rank's GPU: its entry of CUDA_VISIBLE_DEVICES, an index or a UUID. */
static int64_t own_gpu(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *local = getenv("LOCAL_RANK");
    int64_t rank = local ? atoi(local) : -1;
    if (!visible || rank < 0) return rank;
    for (; rank > 0 && visible; rank--)
        visible = strchr(visible, ',') ? strchr(visible, ',') + 1 : NULL;
    if (!visible || !*visible) return -1;
    if (*visible >= '0' && *visible <= '9') return atoi(visible);
    size_t length = strcspn(visible, ",");
    for (int64_t i = 0; i < node->gpus; i++)
        if (!strncmp(node->gpu[i].uuid, visible, length)) return i;
    return -1;
}

/* A rank's own helpers (compilers, lscpu) inherit its environment, and are no ranks. */
static int of_a_rank(void) {
    for (int64_t i = 0; i < node->gpus; i++)
        for (int64_t at = 0; at < node->gpu[i].rank_count; at++)
            if (node->gpu[i].rank[at].pid == getppid()) return 1;
    return 0;
}

/* Enter this process in the list of its GPU; 0 if it has none here, or not yet. */
static int join(void) {
    const char *path = getenv("JOULEFRONT_TWIN");
    struct stat found;
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1, joined = 0;
    if (file < 0) return 0;
    if (!fstat(file, &found) && found.st_size >= (off_t)sizeof(node_t) &&
        !flock(file, LOCK_EX | LOCK_NB)) { /* NB: NVML in this very process may hold the lock */
        void *mapped = mmap(NULL, sizeof(node_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) {
            node = mapped;
            int64_t index = own_gpu(), at = 0;
            gpu_t *own = index >= 0 && index < node->gpus ? &node->gpu[index] : NULL;
            if (of_a_rank()) {
                timer_delete(timer);
                owner = 0;
            } else if (own && own->pace > 0 && 1e-9 * (double)spent_ns() >= own->host_s) {
                while (at < own->rank_count && own->rank[at].pid != getpid()) at++;
                if (at < own->rank_count)
                    joined = 1; /* a rank that has replaced its program */
                else if (at < MAX_RANKS) {
                    twin_advance(own, twin_now(node));
                    own->rank[at].pid = getpid();
                    own->rank[at].told_ns = own->rank[at].counted_ns = spent_ns();
                    own->rank_count++;
                    joined = 1;
                }
            }
            if (joined) {
                gpu = own;
                counted_ns = spent_ns();
                waited_ns = run_delay_ns();
            } else {
                munmap(mapped, sizeof(node_t));
                node = NULL;
            }
        }
        flock(file, LOCK_UN);
    }
    close(file);
    return joined;
}

static void hold_back(int number) {
    int before = errno;
    (void)number;
    if (owner == getpid() && (gpu || join())) {
        int64_t now_ns = spent_ns(), delay_ns = run_delay_ns();
        double factor = twin_device_s(gpu, gpu->clock);
        owed_s += 1e-9 * ((double)(now_ns - counted_ns) * (factor - 1) -
                          (double)(delay_ns - waited_ns));
        if (owed_s < -LATE_S) owed_s = -LATE_S;
        counted_ns = now_ns;
        tell(now_ns);
        if (owed_s > 0) {
            double began_s = seconds();
            struct timespec rest = {(time_t)owed_s, (long)(1e9 * (owed_s - (double)(time_t)owed_s))};
            nanosleep(&rest, NULL);
            owed_s -= seconds() - began_s;
            delay_ns = run_delay_ns(); /* a late end of the sleep is in its length already */
        }
        waited_ns = delay_ns;
    }
    errno = before;
}

static void become_rank(void) {
    struct sigaction action = {0};
    struct sigevent event = {0};
    struct itimerspec every = {{0, TICK_NS}, {0, TICK_NS}};
    if (owner == getpid() || !getenv("JOULEFRONT_TWIN")) return;
    action.sa_handler = hold_back;
    action.sa_flags = SA_RESTART;
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMAX - 3;
    event.sigev_notify_thread_id = getpid(); /* the main thread, which computes */
    if (sigaction(event.sigev_signo, &action, NULL)) return;
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return;
    owner = getpid();
    gpu = NULL;
    owed_s = 0.0;
    timer_settime(timer, 0, &every, NULL);
}

__attribute__((constructor)) static void start(void) {
    if (getenv("LOCAL_RANK")) become_rank();
}

EXPORT int setenv(const char *name, const char *value, int overwrite) {
    static int (*real)(const char *, const char *, int);
    if (!real) real = (int (*)(const char *, const char *, int))dlsym(RTLD_NEXT, "setenv");
    int result = real(name, value, overwrite);
    if (!result && !strcmp(name, "LOCAL_RANK")) become_rank();
    return result;
}
