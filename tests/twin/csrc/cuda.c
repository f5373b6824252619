/* libcuda.so.1 of a twin node: it computes nothing, and logs every call that would start the driver
 * in a process ("PID FUNCTION" a line, in the state file's name with ".cuda").
 *
 * Error codes are the CUDA driver API's: a process that has not called cuInit, and a child forked
 * after its parent did, are answered NOT_INITIALIZED. */
#define _GNU_SOURCE
#include "state.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100 };

static pid_t owner;

/* The first words of the state; no GPUs where there is none. */
typedef struct {
    int64_t magic, gpus, is_virtual, root, driver, cuda_driver;
} header_t;

static header_t header(void) {
    header_t copy = {0};
    const char *path = getenv("JOULEFRONT_TWIN");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        if (read(file, &copy, sizeof copy) != sizeof copy || copy.magic != TWIN_MAGIC) copy.gpus = 0;
        close(file);
    }
    return copy;
}

static void touch(const char *function) {
    char path[4096], line[128];
    const char *state = getenv("JOULEFRONT_TWIN");
    if (!state) return;
    snprintf(path, sizeof path, "%s.cuda", state);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) return;
    int length = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), function);
    if (write(file, line, (size_t)length) != length) perror("twin libcuda");
    close(file);
}

EXPORT int cuInit(unsigned int flags) {
    touch("cuInit");
    if (flags) return INVALID_VALUE;
    if (owner && owner != getpid()) return NOT_INITIALIZED;
    if (!header().gpus) return NO_DEVICE;
    owner = getpid();
    return SUCCESS;
}
static int ready(void) { return owner == getpid() ? SUCCESS : NOT_INITIALIZED; }

EXPORT int cuDriverGetVersion(int *out) {
    *out = (int)header().cuda_driver;
    return SUCCESS;
}
EXPORT int cuDeviceGetCount(int *out) {
    if (!ready()) *out = (int)header().gpus;
    return ready();
}
EXPORT int cuDeviceGet(int *out, int ordinal) {
    if (!ready()) *out = ordinal;
    return ready();
}
EXPORT int cuCtxGetCurrent(void **out) {
    if (!ready()) *out = NULL;
    return ready();
}
EXPORT int cuCtxCreate_v2(void **out, unsigned int flags, int device) {
    (void)flags, (void)device;
    touch("cuCtxCreate");
    if (!ready()) *out = &owner;
    return ready();
}
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    (void)device;
    touch("cuDevicePrimaryCtxRetain");
    if (!ready()) *out = &owner;
    return ready();
}
