/* Queries of the twin's NVML. Unsuffixed names are those under which errors are injected. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int text(char *out, unsigned int length, const char *value) {
    if (strlen(value) >= length) return leave(INSUFFICIENT_SIZE);
    strcpy(out, value);
    return leave(SUCCESS);
}

static int version(const char *name, char *out, unsigned int length) {
    int result = enter(name, NULL, NULL);
    return result ? result : text(out, length, node->driver_version);
}
EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    return version("nvmlSystemGetDriverVersion", out, length);
}
EXPORT int nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
    return version("nvmlSystemGetNVMLVersion", out, length);
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    int result = enter("nvmlSystemGetCudaDriverVersion", NULL, NULL);
    if (result) return result;
    *out = (int)node->cuda_driver;
    return leave(SUCCESS);
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *out) {
    return nvmlSystemGetCudaDriverVersion_v2(out);
}
EXPORT int nvmlSystemGetProcessName(unsigned int pid, char *out, unsigned int length) {
    char path[64], name[256] = "";
    int result = enter("nvmlSystemGetProcessName", NULL, NULL);
    if (result) return result;
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return leave(NOT_FOUND);
    if (fgets(name, sizeof name, file)) name[strcspn(name, "\n")] = 0;
    fclose(file);
    return text(out, length, name);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned int *out) {
    int result = enter("nvmlDeviceGetCount", NULL, NULL);
    if (result) return result;
    *out = (unsigned int)node->gpus;
    return leave(SUCCESS);
}
EXPORT int nvmlDeviceGetCount(unsigned int *out) { return nvmlDeviceGetCount_v2(out); }
/* Open a GPU: one that is lost, or may not be used, is counted and answers with its error. */
static int open_gpu(const char *name, int64_t index, void **out) {
    const gpu_t *gpu = &node->gpu[index];
    int result = injected(name, index);
    if (!result) result = gpu->lost ? GPU_IS_LOST : (int)gpu->open_error;
    if (!result) *out = &handles[index];
    return leave(result);
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) {
    int result = enter(NULL, NULL, NULL);
    if (result) return result;
    if (index >= node->gpus) return leave(INVALID_ARGUMENT);
    return open_gpu("nvmlDeviceGetHandleByIndex", index, out);
}
EXPORT int nvmlDeviceGetHandleByIndex(unsigned int index, void **out) {
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}
static void bus_id(const gpu_t *gpu, char *out) {
    snprintf(out, 32, "%08X:%02X:00.0", 0U, (unsigned int)gpu->pci_bus);
}
/* The bus of an address: DOMAIN:BUS:DEVICE.FUNCTION, or without domain, function or both. */
static int64_t bus_of(const char *address) {
    unsigned int parts[3] = {0};
    int count = sscanf(address, "%x:%x:%x", &parts[0], &parts[1], &parts[2]);
    return count == 3 ? parts[1] : count == 2 ? parts[0] : 0;
}
static int find(const char *name, const char *wanted, int by_bus, void **out) {
    int result = enter(NULL, NULL, NULL);
    if (result) return result;
    for (int64_t i = 0; i < node->gpus; i++)
        if (by_bus ? node->gpu[i].pci_bus == bus_of(wanted) : !strcmp(wanted, node->gpu[i].uuid))
            return open_gpu(name, i, out);
    return leave(NOT_FOUND);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    return find("nvmlDeviceGetHandleByUUID", uuid, 0, out);
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
    return find("nvmlDeviceGetHandleByPciBusId", bus, 1, out);
}

GET(nvmlDeviceGetUUID, char *out, unsigned int length) {
    char named[96];
    BEGIN("nvmlDeviceGetUUID");
    if (slice < 0) return text(out, length, gpu->uuid);
    snprintf(named, sizeof named, "MIG-%d-%s", slice, gpu->uuid + strlen("GPU-"));
    return text(out, length, named);
}
GET(nvmlDeviceGetName, char *out, unsigned int length) {
    char named[160];
    BEGIN("nvmlDeviceGetName");
    if (slice < 0) return text(out, length, gpu->name);
    snprintf(named, sizeof named, "%s MIG 1g.%dgb", gpu->name, (int)(gpu->memory_bytes >> 33));
    return text(out, length, named);
}
/* A set of cores or memory nodes, in words of a long. */
static int bits(unsigned int words, unsigned long *out, const int64_t *from, unsigned int have) {
    memset(out, 0, words * sizeof *out);
    for (unsigned int i = 0; i < words && i < have; i++) out[i] = (unsigned long)from[i];
    return leave(SUCCESS);
}
GET(nvmlDeviceGetCpuAffinity, unsigned int words, unsigned long *out) {
    BEGIN("nvmlDeviceGetCpuAffinity");
    REQUIRE(gpu->memory_node >= 0);
    return bits(words, out, gpu->cpus, MAX_CPUS / 64);
}
GET(nvmlDeviceGetMemoryAffinity, unsigned int words, unsigned long *out, unsigned int scope) {
    BEGIN("nvmlDeviceGetMemoryAffinity");
    REQUIRE(gpu->memory_node >= 0 && scope <= 1);
    int64_t node_bit = (int64_t)1 << gpu->memory_node;
    return bits(words, out, &node_bit, 1);
}
/* A getter of one number. */
#define NUMBER(NAME, FAULT, TYPE, OFFERED, VALUE) \
    EXPORT int NAME(void *device, TYPE *out) {    \
        BEGIN(FAULT);                             \
        REQUIRE(OFFERED);                         \
        *out = (TYPE)(VALUE);                     \
        return leave(SUCCESS);                    \
    }
#define PLAIN(NAME, TYPE, OFFERED, VALUE) NUMBER(NAME, #NAME, TYPE, OFFERED, VALUE)

PLAIN(nvmlDeviceGetIndex, unsigned int, 1, gpu - node->gpu)
PLAIN(nvmlDeviceGetMinorNumber, unsigned int, 1, gpu - node->gpu)
PLAIN(nvmlDeviceGetNumGpuCores, unsigned int, gpu->cores, gpu->cores)
PLAIN(nvmlDeviceGetMemoryBusWidth, unsigned int, gpu->bus_bits, gpu->bus_bits)
PLAIN(nvmlDeviceGetArchitecture, unsigned int, 1, gpu->architecture)
PLAIN(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, gpu->pcie_generation, gpu->pcie_generation)
PLAIN(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, gpu->pcie_width, gpu->pcie_width)
PLAIN(nvmlDeviceGetNumaNodeId, int, gpu->numa_node >= 0, gpu->numa_node)
PLAIN(nvmlDeviceGetComputeMode, int, 1, gpu->compute_mode)
PLAIN(nvmlDeviceGetPersistenceMode, unsigned int, 1, gpu->persistence)
/* A getter of one number that a recording holds. */
#define RECORDED(NAME, TYPE, COLUMN, OFFERED, VALUE) \
    EXPORT int NAME(void *device, TYPE *out) {       \
        BEGIN(#NAME);                                \
        REPLAY(COLUMN, TYPE);                        \
        REQUIRE(OFFERED);                            \
        *out = (TYPE)(VALUE);                        \
        return leave(SUCCESS);                       \
    }
RECORDED(nvmlDeviceGetPowerManagementLimit, unsigned int, LIMIT, gpu->tells_limit,
         gpu->limit_W * 1000 + 0.5)
PLAIN(nvmlDeviceGetEnforcedPowerLimit, unsigned int, gpu->tells_limit || gpu->enforced_limit_W > 0,
      twin_limit_W(gpu) * 1000 + 0.5)
PLAIN(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, gpu->tells_limit,
      gpu->default_limit_W * 1000 + 0.5)
RECORDED(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, REASONS, 1, gpu->reasons)
RECORDED(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, REASONS, 1, gpu->reasons)
PLAIN(nvmlDeviceGetC2cModeInfoV, unsigned int, gpu->c2c, 1)

static unsigned long long counter_mJ(gpu_t *gpu) {
    double joules = twin_counter_J(gpu, node->epoch_s, twin_now(node));
    /* The part: a sum that is a whole number must not differ between two calls by its rounding. */
    int64_t value = gpu->counter_start_mJ + (int64_t)(1000 * joules + 1e-3);
    return (unsigned long long)(gpu->counter_modulus_mJ ? value % gpu->counter_modulus_mJ : value);
}
static double watts(const gpu_t *gpu, int averaged, int module) {
    double sensed = twin_sensed_W(gpu, node->epoch_s, twin_now(node), averaged);
    return 1000 * (sensed + (module ? gpu->module_W : 0)) + 0.5;
}
RECORDED(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, ENERGY, gpu->has_counter,
         counter_mJ(gpu))
RECORDED(nvmlDeviceGetPowerUsage, unsigned int, AVERAGED, gpu->has_usage,
         watts(gpu, 1, (int)gpu->usage_is_module))

static int field_power(const gpu_t *gpu, field_t *field) {
    int averaged = field->field == POWER_AVERAGE;
    double value;
    if (gpu->row_count) {
        int column = field->scope == SCOPE_MODULE ? MODULE : averaged ? AVERAGED : INSTANT;
        if (field->scope == SCOPE_MEMORY) return NOT_SUPPORTED;
        field->type = 1;
        int code = twin_replayed(node, gpu, column, &value);
        if (!code) field->value.u = (unsigned int)value;
        return code;
    }
    if (field->scope == SCOPE_GPU && gpu->gpu_scope)
        value = watts(gpu, averaged, gpu->gpu_scope == 2);
    else if (field->scope == SCOPE_MODULE && gpu->module_W > 0)
        value = watts(gpu, averaged, 1);
    else if (field->scope == SCOPE_MEMORY && gpu->memory_share > 0)
        value = gpu->memory_share * watts(gpu, averaged, 0);
    else
        return NOT_SUPPORTED;
    field->type = 1; /* unsigned int */
    field->value.u = (unsigned int)value;
    return SUCCESS;
}
GET(nvmlDeviceGetFieldValues, int count, field_t *fields) {
    BEGIN("nvmlDeviceGetFieldValues");
    for (int i = 0; i < count; i++) {
        field_t *field = &fields[i];
        field->timestamp = (int64_t)(1e6 * twin_now(node));
        if (field->field == POWER_AVERAGE || field->field == POWER_INSTANT) {
            field->result = field_power(gpu, field);
        } else if (field->field == TOTAL_ENERGY && gpu->has_counter) {
            field->type = 3; /* unsigned long long */
            field->value.ull = counter_mJ(gpu);
            field->result = SUCCESS;
        } else {
            field->result = field_health(gpu, field);
        }
    }
    return leave(SUCCESS);
}

/* A slice has an eighth of the GPU's memory, and of the driver's reserve. */
static unsigned long long part(int64_t bytes) {
    return (unsigned long long)(slice < 0 ? bytes : bytes / 8);
}
GET(nvmlDeviceGetMemoryInfo, memory_t *out) {
    BEGIN("nvmlDeviceGetMemoryInfo");
    REQUIRE(gpu->tells_memory); /* this version counts the driver's reserve as used */
    out->total = part(gpu->memory_bytes);
    out->used = part(gpu->used_bytes + gpu->reserved_bytes);
    out->free = out->total - out->used;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetMemoryInfo_v2, memory_v2_t *out) {
    BEGIN("nvmlDeviceGetMemoryInfo");
    REQUIRE(gpu->tells_memory);
    if (out->version != MEMORY_V2) return leave(VERSION_MISMATCH);
    out->total = part(gpu->memory_bytes);
    out->reserved = part(gpu->reserved_bytes);
    out->used = part(gpu->used_bytes);
    out->free = out->total - out->reserved - out->used;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetMigMode, unsigned int *current, unsigned int *pending) {
    BEGIN("nvmlDeviceGetMigMode");
    *current = *pending = gpu->mig != 0;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetMaxMigDeviceCount, unsigned int *out) {
    BEGIN("nvmlDeviceGetMaxMigDeviceCount");
    *out = MAX_SLICES;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetMigDeviceHandleByIndex, unsigned int number, void **out) {
    BEGIN("nvmlDeviceGetMigDeviceHandleByIndex");
    if ((int64_t)number >= gpu->mig) return leave(NOT_FOUND);
    *out = &slices[gpu - node->gpu][number];
    return leave(SUCCESS);
}
GET(nvmlDeviceGetPciInfo_v3, pci_t *out) {
    BEGIN("nvmlDeviceGetPciInfo");
    memset(out, 0, sizeof *out);
    bus_id(gpu, out->bus_id);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:00.0", 0U, (unsigned int)gpu->pci_bus);
    out->bus = (unsigned int)gpu->pci_bus;
    return leave(SUCCESS);
}
static int processes(int64_t held, const process_t *list, unsigned int *count, process_info_t *out) {
    if (*count < held) {
        *count = (unsigned int)held;
        return leave(INSUFFICIENT_SIZE);
    }
    for (int64_t i = 0; i < held; i++) {
        memset(&out[i], 0, sizeof out[i]);
        out[i].pid = (unsigned int)list[i].pid;
        out[i].used = (unsigned long long)list[i].bytes;
        out[i].gpu_instance = out[i].compute_instance = 0xffffffffU;
    }
    *count = (unsigned int)held;
    return leave(SUCCESS);
}
/* What a rank holds of the host stands for what it would hold of the device. */
static int64_t resident_bytes(int64_t pid) {
    char path[64];
    long long size, resident = 0;
    snprintf(path, sizeof path, "/proc/%lld/statm", (long long)pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%lld %lld", &size, &resident) != 2) resident = 0;
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
}
GET(nvmlDeviceGetComputeRunningProcesses_v3, unsigned int *count, process_info_t *out) {
    BEGIN("nvmlDeviceGetComputeRunningProcesses");
    process_t all[MAX_PROCESSES + MAX_RANKS];
    int64_t held = gpu->compute_count;
    memcpy(all, gpu->compute, (size_t)held * sizeof *all);
    for (int64_t i = 0; i < gpu->rank_count; i++)
        if (twin_lives(gpu->rank[i].pid))
            all[held++] = (process_t){gpu->rank[i].pid, resident_bytes(gpu->rank[i].pid)};
    return processes(held, all, count, out);
}
GET(nvmlDeviceGetGraphicsRunningProcesses_v3, unsigned int *count, process_info_t *out) {
    BEGIN("nvmlDeviceGetGraphicsRunningProcesses");
    return processes(gpu->graphics_count, gpu->graphics, count, out);
}
GET(nvmlDeviceGetCudaComputeCapability, int *major, int *minor) {
    BEGIN("nvmlDeviceGetCudaComputeCapability");
    *major = (int)gpu->compute_major;
    *minor = (int)gpu->compute_minor;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetNvLinkState, unsigned int link, unsigned int *out) {
    BEGIN("nvmlDeviceGetNvLinkState");
    REQUIRE(link < gpu->nvlinks);
    *out = 1;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetTemperature, int sensor, unsigned int *out) {
    BEGIN("nvmlDeviceGetTemperature");
    REQUIRE(sensor == 0);
    REPLAY(TEMPERATURE, unsigned int);
    *out = (unsigned int)(gpu->temperature_C + 0.5);
    return leave(SUCCESS);
}
GET(nvmlDeviceGetTemperatureV, temperature_t *out) {
    unsigned int celsius;
    if (out->version != TEMPERATURE_V1) return VERSION_MISMATCH;
    int result = nvmlDeviceGetTemperature(device, out->sensor, &celsius);
    if (!result) out->celsius = (int)celsius;
    return result;
}
GET(nvmlDeviceGetUtilizationRates, utilization_t *out) {
    BEGIN("nvmlDeviceGetUtilizationRates");
    if (gpu->row_count) {
        double value;
        int code = twin_replayed(node, gpu, UTILISATION, &value);
        out->gpu = out->memory = code ? 0 : (unsigned int)value;
        return leave(code);
    }
    double load = twin_trains(gpu) ? gpu->utilisation : gpu->load;
    if (twin_now(node) < gpu->started_s + gpu->start_busy_s) load = 1;
    out->gpu = (unsigned int)(100 * load + 0.5);
    out->memory = out->gpu / 2;
    return leave(SUCCESS);
}
