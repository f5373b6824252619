/* libnvidia-ml.so.1 of a twin node: NVML's ABI over the shared state (NVML API reference;
 * symbols and structs as nvidia-ml-py declares them).
 *
 * As the driver's library does, it forgets its state in a forked child, where every call returns
 * UNINITIALIZED until nvmlInit is called again, and it works through a descriptor of its own: when
 * somebody closes that, or puts another file in its place, calls fail and the node counts it. */
#define _GNU_SOURCE
#include "nvml.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
node_t *node;
static int descriptor = -1, references;
static pid_t owner;
static struct stat identity;
/* A handle is the address of its GPU's entry, or of its slice's. */
char handles[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
int slice;

static int open_node(void) {
    const char *path = getenv("JOULEFRONT_TWIN");
    if (!path || !*path) return LIBRARY_NOT_FOUND;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || fstat(file, &identity) || identity.st_size < (off_t)sizeof(node_t)) {
        if (file >= 0) close(file);
        return LIBRARY_NOT_FOUND;
    }
    void *mapped = mmap(NULL, sizeof(node_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED || ((node_t *)mapped)->magic != TWIN_MAGIC) {
        close(file);
        return LIBRARY_NOT_FOUND;
    }
    node = mapped;
    descriptor = file;
    return SUCCESS;
}

static int descriptor_lost(void) {
    struct stat now;
    return fstat(descriptor, &now) || now.st_dev != identity.st_dev ||
           now.st_ino != identity.st_ino;
}

int leave(int result) {
    flock(descriptor, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    return result;
}

int injected(const char *name, int64_t gpu) {
    int result = SUCCESS;
    for (int64_t i = 0; i < node->fault_count; i++) {
        fault_t *fault = &node->fault[i];
        if (strcmp(fault->name, name) || (fault->gpu >= 0 && fault->gpu != gpu)) continue;
        fault->calls++;
        if (fault->calls >= fault->first && fault->calls < fault->first + fault->times)
            result = (int)fault->code;
    }
    return result;
}

/* What NVML answers of a MIG slice; power, energy and clocks are the whole GPU's. */
static int of_slices(const char *name) {
    static const char *const names[] = {
        "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetCudaComputeCapability"};
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return 1;
    return 0;
}

/* Begin a call; without a name, errors are injected by the caller. On SUCCESS the node is locked and up to date, and leave() must follow. */
int enter(const char *name, const void *device, gpu_t **gpu) {
    int64_t index = device ? (const char *)device - handles : -1, part = -1;
    if (device && (const char *)device >= slices[0] &&
        (const char *)device < slices[0] + sizeof slices) {
        part = (const char *)device - slices[0];
        index = part / MAX_SLICES;
        part %= MAX_SLICES;
    }
    if (references <= 0 || owner != getpid()) return UNINITIALIZED;
    if (gpu && (!device || index < 0 || index >= node->gpus)) return INVALID_ARGUMENT;
    pthread_mutex_lock(&mutex);
    if (descriptor_lost()) {
        node->descriptor_losses++;
        pthread_mutex_unlock(&mutex);
        return UNKNOWN;
    }
    if (!node->is_virtual) twin_sleep(node, node->call_s); /* other processes do not wait */
    flock(descriptor, LOCK_EX);
    node->calls++;
    if (node->is_virtual) twin_sleep(node, node->call_s);
    int result = name ? injected(name, index) : SUCCESS;
    if (result) return leave(result);
    if (gpu) {
        *gpu = &node->gpu[index];
        if ((*gpu)->lost) return leave(GPU_IS_LOST);
        twin_advance(*gpu, twin_now(node));
        (*gpu)->asked = 1;
    }
    slice = (int)part;
    return slice < 0 || of_slices(name) ? SUCCESS : leave(NOT_SUPPORTED);
}

void log_setter(const char *name, const gpu_t *gpu, int64_t a, int64_t b) {
    log_t *entry = &node->log[node->log_count % MAX_LOG];
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->time_s = twin_now(node);
    entry->pid = getpid();
    entry->gpu = gpu - node->gpu;
    entry->a = a;
    entry->b = b;
    node->log_count++;
}

EXPORT int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    int result = SUCCESS;
    if (owner != getpid()) { /* a forked child starts anew, and leaves its parent's file alone */
        pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
        mutex = fresh;
        references = 0;
        owner = getpid();
    }
    pthread_mutex_lock(&mutex);
    if (!references) result = open_node();
    if (!result) {
        flock(descriptor, LOCK_EX);
        result = injected("nvmlInit", -1);
        if (!result && !references) twin_sleep(node, node->init_s + twin_enter(node));
        flock(descriptor, LOCK_UN);
        if (result && !references) close(descriptor);
    }
    if (!result) references++;
    pthread_mutex_unlock(&mutex);
    return result;
}
EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    if (references <= 0 || owner != getpid()) return UNINITIALIZED;
    pthread_mutex_lock(&mutex);
    if (!--references) {
        twin_leave(node);
        if (!descriptor_lost()) {
            flock(descriptor, LOCK_EX);
            twin_release(node);
            close(descriptor); /* which unlocks */
        }
        munmap(node, sizeof(node_t));
        node = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

