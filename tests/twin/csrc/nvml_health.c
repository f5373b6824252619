/* Errors of the hardware as the twin's NVML counts and reports them, and power profiles. */
#include "nvml.h"

#include <stdlib.h>
#include <string.h>

static int repairs_rows(const gpu_t *gpu) { return gpu->architecture >= AMPERE; }

GET(nvmlDeviceGetEccMode, int *current, int *pending) {
    BEGIN("nvmlDeviceGetEccMode");
    REQUIRE(gpu->has_ecc);
    *current = *pending = 1;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetTotalEccErrors, unsigned int kind, unsigned int counter, unsigned long long *out) {
    BEGIN("nvmlDeviceGetTotalEccErrors");
    REQUIRE(gpu->has_ecc);
    if (kind > 1 || counter > 1) return leave(INVALID_ARGUMENT);
    *out = (unsigned long long)(counter ? gpu->ecc_aggregate : gpu->ecc_volatile)[kind];
    return leave(SUCCESS);
}
GET(nvmlDeviceGetRemappedRows, unsigned int *corrected, unsigned int *uncorrected,
    unsigned int *pending, unsigned int *failed) {
    BEGIN("nvmlDeviceGetRemappedRows");
    REQUIRE(gpu->has_ecc && repairs_rows(gpu));
    *corrected = (unsigned int)gpu->repaired[0];
    *uncorrected = (unsigned int)gpu->repaired[1];
    *pending = (unsigned int)gpu->repair_pending;
    *failed = 0;
    return leave(SUCCESS);
}
GET(nvmlDeviceGetRetiredPages, unsigned int cause, unsigned int *count, unsigned long long *out) {
    BEGIN("nvmlDeviceGetRetiredPages");
    REQUIRE(gpu->has_ecc && !repairs_rows(gpu));
    if (cause > 1) return leave(INVALID_ARGUMENT);
    int fits = *count >= gpu->repaired[cause];
    *count = (unsigned int)gpu->repaired[cause];
    if (!fits) return leave(INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < *count; i++) out[i] = 4096ULL * (2 * i + cause);
    return leave(SUCCESS);
}
GET(nvmlDeviceGetRetiredPagesPendingStatus, int *out) {
    BEGIN("nvmlDeviceGetRetiredPagesPendingStatus");
    REQUIRE(gpu->has_ecc && !repairs_rows(gpu));
    *out = (int)gpu->repair_pending;
    return leave(SUCCESS);
}
int field_health(const gpu_t *gpu, field_t *field) {
    int rows = repairs_rows(gpu);
    int64_t value;
    int ecc = field->field <= 6 || (field->field >= 29 && field->field <= 31) ||
              (field->field >= 142 && field->field <= 144);
    if (ecc && !gpu->has_ecc) return NOT_SUPPORTED;
    switch (field->field) {
    case 3: value = gpu->ecc_volatile[0]; break; /* NVML_FI_DEV_ECC_SBE_VOL_TOTAL */
    case 4: value = gpu->ecc_volatile[1]; break;
    case 5: value = gpu->ecc_aggregate[0]; break;
    case 6: value = gpu->ecc_aggregate[1]; break;
    case 29: case 30: /* NVML_FI_DEV_RETIRED_SBE, _DBE */
        if (rows) return NOT_SUPPORTED;
        value = gpu->repaired[field->field - 29];
        break;
    case 142: case 143: /* NVML_FI_DEV_REMAPPED_COR, _UNC */
        if (!rows) return NOT_SUPPORTED;
        value = gpu->repaired[field->field - 142];
        break;
    case 31: case 144:
        if (rows != (field->field == 144)) return NOT_SUPPORTED;
        value = gpu->repair_pending;
        break;
    case 59: value = gpu->link_recoveries; break; /* NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL */
    case 230: value = gpu->recovery_action; break; /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
    case 251: value = gpu->smoothing; break; /* NVML_FI_PWR_SMOOTHING_ENABLED */
    default: return NOT_SUPPORTED;
    }
    if (value < 0) return NOT_SUPPORTED;
    field->type = 3; /* unsigned long long */
    field->value.ull = (unsigned long long)value;
    return SUCCESS;
}

/* The NVLink fabric of a node with a switch: nvmlGpuFabricInfo_v2. */
typedef struct {
    unsigned int version;
    unsigned char cluster[16];
    int status;
    unsigned int clique;
    unsigned char state;
    unsigned int health;
} fabric_t;
GET(nvmlDeviceGetGpuFabricInfoV, fabric_t *out) {
    BEGIN("nvmlDeviceGetGpuFabricInfo");
    if (out->version != FABRIC_V2) return leave(VERSION_MISMATCH);
    if (gpu->fabric_state < 0) return leave(NOT_SUPPORTED);
    memset(out->cluster, 0, sizeof out->cluster);
    out->status = (int)gpu->fabric_status;
    out->clique = out->health = 0;
    out->state = (unsigned char)gpu->fabric_state;
    return leave(SUCCESS);
}

typedef struct {
    unsigned int version, effective[8], requested[8], enforced[8];
} profiles_t;
GET(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles, profiles_t *out) {
    BEGIN("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles");
    REQUIRE(gpu->power_profiles >= 0);
    if (out->version != PROFILES_V1) return leave(VERSION_MISMATCH);
    memset(out->effective, 0, sizeof *out - sizeof out->version);
    out->effective[0] = out->requested[0] = out->enforced[0] = (unsigned int)gpu->power_profiles;
    return leave(SUCCESS);
}
