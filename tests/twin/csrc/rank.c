/* Library of a training process on a twin node (LD_PRELOAD): the process computes on a core, and its
 * GPU takes the time that the law of speed (physics.c) gives for each optimizer step.
 *
 * A process becomes a rank when joulefront's hook greets its agent ("hello RANK PID"), and the lines
 * "step N T" and "at N T M" tell where its steps end. As on a real device, the work of the next
 * steps is submitted before the present one is done, so that a process which waits for a core delays
 * nothing as long as it is less than AHEAD steps late; at each step's end the process waits for its
 * device, and the line gets the time at which the device was done. How long the process computed
 * does not matter.
 *
 * The work of a step follows from what the process does: the micro-batches that its lines report,
 * the size of a micro-batch in the DeepSpeed configuration that it opens, and the number of ranks
 * that share a replica. */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { AHEAD = 4 }; /* below KEPT_STEPS */
static const double LOOK_S = 0.02; /* between two looks at a device that is not done */

static pid_t owner; /* the process that is a rank; a forked child is none */
static int hook = -1, descriptor = -1;
static node_t *node;
static gpu_t *gpu;
static int64_t done, until = 1, submitted; /* optimizer steps */
static double began_s, began_device_s; /* of the present step, on the host and on the device */
static double samples = 1, accumulation = 1, batch; /* of the configuration; 0: unknown */

static int is_rank(int file) { return file >= 0 && file == hook && owner == getpid(); }
static double host_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
static void lock(void) {
    flock(descriptor, LOCK_EX);
    twin_advance(gpu, twin_now(node));
}
static void unlock(void) { flock(descriptor, LOCK_UN); }

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
    if (!strncmp(visible, "MIG-", 4)) { /* MIG-N- and the rest of the GPU's UUID */
        const char *rest = visible + 6;
        for (int64_t i = 0; i < node->gpus; i++)
            if (!strncmp(node->gpu[i].uuid + 4, rest, length - 6)) return i;
    }
    for (int64_t i = 0; i < node->gpus; i++)
        if (!strncmp(node->gpu[i].uuid, visible, length)) return i;
    return -1;
}

/* Enter this process in the list of its GPU, if it has one here. */
static void join(int file) {
    const char *path = getenv("JOULEFRONT_TWIN");
    struct stat found;
    owner = 0;
    descriptor = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0 || fstat(descriptor, &found) || found.st_size < (off_t)sizeof(node_t)) return;
    node = mmap(NULL, sizeof(node_t), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (node == MAP_FAILED) return;
    int64_t index = own_gpu(), at = 0;
    if (index < 0 || index >= node->gpus || !twin_trains(&node->gpu[index])) return;
    gpu = &node->gpu[index];
    lock();
    while (at < gpu->rank_count && gpu->rank[at].pid != getpid()) at++;
    if (at < MAX_RANKS) {
        gpu->rank[at] = (rank_t){.pid = getpid()};
        if (at == gpu->rank_count) gpu->rank_count++;
        owner = getpid();
        hook = file;
    }
    unlock();
    done = submitted = 0;
    until = 1;
    began_s = host_now();
    began_device_s = twin_now(node);
}

/* Work of a step, seconds of the device at its highest clock. */
static double work_s(void) {
    const char *world = getenv("WORLD_SIZE");
    double ranks = world && atoi(world) > 0 ? atoi(world) : 1, replicas = ranks;
    if (batch > 0) replicas = batch / (samples * accumulation);
    return gpu->step_s + accumulation * (gpu->micro_batch_s + gpu->sample_s * samples * replicas / ranks);
}

static void submit(int64_t last) {
    while (submitted < last && gpu->work_count < MAX_WORK)
        gpu->work[gpu->work_count++] = (work_t){getpid(), ++submitted, work_s()};
}

/* Wait until the device has done a step; return when it had. */
static double wait_for(int64_t step) {
    for (;;) {
        double left_s = 0, done_s = 0;
        int waits = 0;
        lock();
        for (int64_t i = 0; i < gpu->work_count && !waits; i++) {
            left_s += gpu->work[i].left_s * twin_device_s(gpu, gpu->clock);
            waits = gpu->work[i].pid == getpid() && gpu->work[i].step == step;
        }
        for (int64_t i = 0; i < gpu->rank_count; i++)
            if (gpu->rank[i].pid == getpid()) done_s = gpu->rank[i].done_s[step % KEPT_STEPS];
        if (left_s > LOOK_S) left_s = LOOK_S;
        if (waits && node->is_virtual) twin_sleep(node, left_s);
        unlock();
        if (!waits) return done_s;
        if (!node->is_virtual) twin_sleep(node, left_s);
    }
}

/* Take in the end of a step on the host; return its end on the device. */
static double step_ends(int64_t step, int is_boundary) {
    int64_t last = step + AHEAD < until ? step + AHEAD : until;
    lock();
    if (submitted < until && submitted >= step && !gpu->work_count)
        for (int64_t i = 0; i < gpu->rank_count; i++)
            if (gpu->rank[i].pid == getpid())
                gpu->late_s += twin_now(node) - gpu->rank[i].done_s[submitted % KEPT_STEPS];
    submit(is_boundary || last < step ? step : last);
    unlock();
    done = step;
    return wait_for(step);
}

/* Copy lines of the hook with the device's times: that of the step's end, and those of the phases in
 * it at their share of the step. Returns the length; -1 if there is no room. */
static int64_t with_device_times(const char *text, char *out, size_t room) {
    double host_s = 0, device_s = 0;
    long long step;
    size_t used = 0;
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        int boundary = sscanf(line, "at %lld %lf", &step, &host_s) == 2;
        if (boundary || sscanf(line, "step %lld %lf", &step, &host_s) == 2)
            device_s = step_ends(step, boundary);
    }
    double scale = host_s > began_s ? (device_s - began_device_s) / (host_s - began_s) : 0;
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        char kind[32], name[128], rest[64] = "";
        double at_s;
        if (used + strcspn(line, "\n") + 32 > room) return -1;
        if (device_s > 0 && sscanf(line, "%31s %127s %lf%63[^\n]", kind, name, &at_s, rest) >= 3)
            used += (size_t)sprintf(out + used, "%s %s %.7f%s\n", kind, name,
                                    device_s - scale * (host_s - at_s), rest);
        else
            used += (size_t)sprintf(out + used, "%.*s\n", (int)strcspn(line, "\n"), line);
    }
    began_s = host_now();
    began_device_s = device_s;
    return (int64_t)used;
}

EXPORT ssize_t send(int file, const void *data, size_t length, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    char text[16384], out[16384];
    if (!real) real = (ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
    if (length > 6 && !memcmp(data, "hello ", 6)) join(file);
    if (!is_rank(file) || length >= sizeof text || ((const char *)data)[length - 1] != '\n')
        return real(file, data, length, flags);
    memcpy(text, data, length);
    text[length] = 0;
    if (strncmp(text, "step ", 5) && strncmp(text, "at ", 3) && strncmp(text, "phase ", 6) &&
        strncmp(text, "ready ", 6))
        return real(file, data, length, flags);
    int64_t left = with_device_times(text, out, sizeof out);
    if (left < 0) return real(file, data, length, flags);
    for (const char *next = out; left > 0;) {
        ssize_t sent = real(file, next, (size_t)left, flags);
        if (sent < 0 && errno != EINTR) return sent;
        if (sent > 0) next += sent, left -= sent;
    }
    return (ssize_t)length;
}

/* The agent's command "run N" begins the next steps. */
EXPORT ssize_t recv(int file, void *data, size_t length, int flags) {
    static ssize_t (*real)(int, void *, size_t, int);
    char text[4096];
    if (!real) real = (ssize_t (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
    ssize_t got = real(file, data, length, flags);
    if (!is_rank(file) || got <= 0 || got >= (ssize_t)sizeof text) return got;
    memcpy(text, data, (size_t)got);
    text[got] = 0;
    if (!strncmp(text, "run ", 4)) {
        until = atoll(text + 4);
        lock();
        submit(done + AHEAD < until ? done + AHEAD : until);
        unlock();
        began_s = host_now();
        began_device_s = twin_now(node);
    }
    return got;
}

static void read_number(const char *text, const char *key, double *out) {
    const char *found = strstr(text, key);
    if (found && atof(found + strlen(key)) > 0) *out = atof(found + strlen(key));
}

/* The configuration that this rank opens: sizes of its batches. */
static void look_into(const char *path, int file) {
    char text[65536];
    size_t length = strlen(path);
    if (owner != getpid() || length < 5 || strcmp(path + length - 5, ".json")) return;
    ssize_t got = pread(file, text, sizeof text - 1, 0);
    if (got <= 0) return;
    text[got] = 0;
    read_number(text, "\"train_micro_batch_size_per_gpu\": ", &samples);
    read_number(text, "\"gradient_accumulation_steps\": ", &accumulation);
    read_number(text, "\"global_batch\": ", &batch);
}

EXPORT int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    int file = real(path, flags, mode);
    if (file >= 0 && (flags & O_ACCMODE) == O_RDONLY) {
        int before = errno;
        look_into(path, file);
        errno = before;
    }
    return file;
}
