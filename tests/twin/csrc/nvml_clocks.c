/* Clocks and limits of the twin's NVML: what is offered, what stands, and the setters. */
#include "nvml.h"

GET(nvmlDeviceGetClockInfo, int kind, unsigned int *out) {
    BEGIN("nvmlDeviceGetClockInfo");
    REPLAY(kind == CLOCK_MEM ? MEMORY : SM, unsigned int);
    *out = (unsigned int)(kind == CLOCK_MEM ? twin_memory_MHz(gpu) : (int64_t)gpu->clock);
    return leave(SUCCESS);
}
GET(nvmlDeviceGetMaxClockInfo, int kind, unsigned int *out) {
    BEGIN("nvmlDeviceGetMaxClockInfo");
    *out = (unsigned int)(kind == CLOCK_MEM ? gpu->memory_MHz[gpu->memory_clocks - 1]
                                            : gpu->clock_MHz[gpu->clocks - 1]);
    return leave(SUCCESS);
}
/* NVML lists the highest first. */
static int list(const int64_t *values, int64_t held, unsigned int *count, unsigned int *out) {
    int fits = *count >= held;
    *count = (unsigned int)held;
    if (!fits) return leave(INSUFFICIENT_SIZE);
    for (int64_t i = 0; i < held; i++) out[i] = (unsigned int)values[held - 1 - i];
    return leave(SUCCESS);
}
GET(nvmlDeviceGetSupportedMemoryClocks, unsigned int *count, unsigned int *out) {
    BEGIN("nvmlDeviceGetSupportedMemoryClocks");
    REQUIRE(gpu->lists_clocks);
    return list(gpu->memory_MHz, gpu->memory_clocks, count, out);
}
static int offers_memory(const gpu_t *gpu, int64_t clock) {
    for (int64_t i = 0; i < gpu->memory_clocks; i++)
        if (gpu->memory_MHz[i] == clock) return 1;
    return 0;
}
GET(nvmlDeviceGetSupportedGraphicsClocks, unsigned int memory, unsigned int *count,
    unsigned int *out) {
    BEGIN("nvmlDeviceGetSupportedGraphicsClocks");
    REQUIRE(gpu->lists_clocks);
    if (!offers_memory(gpu, memory)) return leave(NOT_FOUND);
    return list(gpu->clock_MHz, gpu->clocks, count, out);
}

GET(nvmlDeviceSetGpuLockedClocks, unsigned int low, unsigned int high) {
    BEGIN("nvmlDeviceSetGpuLockedClocks");
    PERMITTED(0);
    REQUIRE(gpu->lockable);
    if (!low || low > high) return leave(INVALID_ARGUMENT);
    gpu->lock_low = low;
    gpu->lock_high = high;
    log_setter("nvmlDeviceSetGpuLockedClocks", gpu, low, high);
    return leave(SUCCESS);
}
GET(nvmlDeviceResetGpuLockedClocks) {
    BEGIN("nvmlDeviceResetGpuLockedClocks");
    PERMITTED(0);
    REQUIRE(gpu->lockable);
    gpu->lock_low = gpu->lock_high = 0;
    log_setter("nvmlDeviceResetGpuLockedClocks", gpu, 0, 0);
    return leave(SUCCESS);
}
GET(nvmlDeviceSetMemoryLockedClocks, unsigned int low, unsigned int high) {
    BEGIN("nvmlDeviceSetMemoryLockedClocks");
    PERMITTED(0);
    REQUIRE(gpu->lockable);
    if (!low || low > high) return leave(INVALID_ARGUMENT);
    gpu->memory_low = low;
    gpu->memory_high = high;
    log_setter("nvmlDeviceSetMemoryLockedClocks", gpu, low, high);
    return leave(SUCCESS);
}
GET(nvmlDeviceResetMemoryLockedClocks) {
    BEGIN("nvmlDeviceResetMemoryLockedClocks");
    PERMITTED(0);
    REQUIRE(gpu->lockable);
    gpu->memory_low = gpu->memory_high = 0;
    log_setter("nvmlDeviceResetMemoryLockedClocks", gpu, 0, 0);
    return leave(SUCCESS);
}

GET(nvmlDeviceGetAPIRestriction, int api, unsigned int *out) {
    BEGIN("nvmlDeviceGetAPIRestriction");
    *out = !(api == 0 && gpu->application_free);
    return leave(SUCCESS);
}
static int application(const gpu_t *gpu, int kind, int64_t memory, int64_t sm, unsigned int *out) {
    if (!memory) memory = gpu->memory_MHz[gpu->memory_clocks - 1];
    if (!sm) sm = gpu->default_application_MHz;
    if (!sm) sm = gpu->clock_MHz[gpu->clocks - 1];
    *out = (unsigned int)(kind == CLOCK_MEM ? memory : sm);
    return leave(SUCCESS);
}
GET(nvmlDeviceGetApplicationsClock, int kind, unsigned int *out) {
    BEGIN("nvmlDeviceGetApplicationsClock");
    return application(gpu, kind, gpu->application_memory, gpu->application_sm, out);
}
GET(nvmlDeviceGetDefaultApplicationsClock, int kind, unsigned int *out) {
    BEGIN("nvmlDeviceGetDefaultApplicationsClock");
    REQUIRE(gpu->default_application_MHz);
    return application(gpu, kind, 0, 0, out);
}
GET(nvmlDeviceSetApplicationsClocks, unsigned int memory, unsigned int sm) {
    BEGIN("nvmlDeviceSetApplicationsClocks");
    PERMITTED(gpu->application_free);
    for (int64_t i = 0; i < gpu->clocks; i++) {
        if (gpu->clock_MHz[i] != sm || !offers_memory(gpu, memory)) continue;
        gpu->application_memory = memory;
        gpu->application_sm = sm;
        log_setter("nvmlDeviceSetApplicationsClocks", gpu, memory, sm);
        return leave(SUCCESS);
    }
    return leave(INVALID_ARGUMENT);
}

GET(nvmlDeviceGetPowerManagementLimitConstraints, unsigned int *low, unsigned int *high) {
    BEGIN("nvmlDeviceGetPowerManagementLimitConstraints");
    REQUIRE(gpu->tells_limit);
    *low = (unsigned int)(1000 * gpu->min_limit_W + 0.5);
    *high = (unsigned int)(1000 * gpu->max_limit_W + 0.5);
    return leave(SUCCESS);
}
GET(nvmlDeviceSetPowerManagementLimit, unsigned int limit_mW) {
    BEGIN("nvmlDeviceSetPowerManagementLimit");
    double limit_W = limit_mW / 1000.0;
    PERMITTED(0);
    REQUIRE(gpu->limit_settable);
    if (limit_W < gpu->min_limit_W || limit_W > gpu->max_limit_W) return leave(INVALID_ARGUMENT);
    gpu->limit_W = limit_W;
    log_setter("nvmlDeviceSetPowerManagementLimit", gpu, limit_mW, 0);
    return leave(SUCCESS);
}
GET(nvmlDeviceSetPersistenceMode, unsigned int mode) {
    BEGIN("nvmlDeviceSetPersistenceMode");
    PERMITTED(0);
    gpu->persistence = mode;
    log_setter("nvmlDeviceSetPersistenceMode", gpu, mode, 0);
    return leave(SUCCESS);
}
