/* What the parts of the twin's NVML share: error codes, structs of the ABI, the frame of a call. */
#ifndef TWIN_NVML_H
#define TWIN_NVML_H

#include <stdlib.h>

#include "state.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    LIBRARY_NOT_FOUND = 12,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999
};
enum { POWER_AVERAGE = 185, POWER_INSTANT = 186, TOTAL_ENERGY = 83 };
enum { AMPERE = 7 };
enum { SCOPE_GPU = 0, SCOPE_MODULE = 1, SCOPE_MEMORY = 2, CLOCK_MEM = 2 };

typedef struct {
    unsigned int field, scope;
    int64_t timestamp, latency_us;
    unsigned int type;
    int result;
    union {
        double d;
        unsigned int u;
        unsigned long long ull;
    } value;
} field_t;
typedef struct {
    unsigned long long total, free, used;
} memory_t;
/* Versions of structs: the number of the version and the size. */
enum { MEMORY_V2 = 0x2000028, TEMPERATURE_V1 = 0x100000c, PROFILES_V1 = 0x1000064,
       FABRIC_V2 = 0x2000024 };
typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} memory_v2_t;
typedef struct {
    unsigned int version;
    int sensor, celsius;
} temperature_t;
typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} process_info_t;
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_t;
typedef struct {
    unsigned int gpu, memory;
} utilization_t;

extern node_t *node;
extern char handles[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
extern int slice; /* number of the MIG slice of the current call's handle; -1: a whole GPU */
int enter(const char *name, const void *device, gpu_t **gpu);
int leave(int result);
int injected(const char *name, int64_t gpu);
int field_health(const gpu_t *gpu, field_t *field);
void log_setter(const char *name, const gpu_t *gpu, int64_t a, int64_t b);

/* Columns of a recording. */
enum { ENERGY, INSTANT, AVERAGED, MODULE, SM, MEMORY, TEMPERATURE, UTILISATION, REASONS, LIMIT };
/* Answer from the recording, where there is one. */
#define REPLAY(COLUMN, TYPE)                                             \
    if (gpu->row_count) {                                                \
        double value_;                                                   \
        int code_ = twin_replayed(node, gpu, COLUMN, &value_);           \
        if (!code_) *out = (TYPE)value_;                                 \
        return leave(code_);                                             \
    }                                                                    \
    do {                                                                 \
    } while (0)

#define GET(NAME, ...)                                    \
    EXPORT int NAME(void *device, ##__VA_ARGS__)
#define BEGIN(NAME)                                       \
    gpu_t *gpu;                                           \
    int result = enter(NAME, device, &gpu);               \
    if (result) return result
#define PERMITTED(FREE) \
    if (!node->root && !(FREE) && !getenv("JOULEFRONT_TWIN_ROOT")) return leave(NO_PERMISSION)
#define REQUIRE(OFFERED) \
    if (!(OFFERED)) return leave(NOT_SUPPORTED)


#endif
