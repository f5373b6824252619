/* Clients of the driver: processes that hold NVML open, and those that use a GPU.
 *
 * When the last one is gone, the driver leaves each GPU without persistence mode: its clocks and
 * power limit return to their defaults, its volatile error counters to zero, and the next nvmlInit
 * starts it again (NVIDIA, Driver Persistence). */
#include "state.h"

#include <unistd.h>

static int in_use(const gpu_t *gpu) {
    for (int64_t i = 0; i < gpu->rank_count; i++)
        if (twin_lives(gpu->rank[i].pid)) return 1;
    return gpu->compute_count || gpu->graphics_count;
}

static void stop(gpu_t *gpu, double now_s) {
    twin_advance(gpu, now_s);
    gpu->lock_low = gpu->lock_high = gpu->memory_low = gpu->memory_high = 0;
    gpu->application_memory = gpu->application_sm = 0;
    gpu->limit_W = gpu->default_limit_W;
    gpu->ecc_volatile[0] = gpu->ecc_volatile[1] = 0;
    gpu->started = 0;
    gpu->asked = 1;
}

/* Forget clients that are gone, and leave the GPUs that nothing holds. */
void twin_release(node_t *node) {
    int64_t kept = 0;
    for (int64_t i = 0; i < node->client_count; i++)
        if (twin_lives(node->client[i])) node->client[kept++] = node->client[i];
    node->client_count = kept;
    for (int64_t i = 0; i < node->gpus && !kept; i++) {
        gpu_t *gpu = &node->gpu[i];
        if (gpu->started && !gpu->persistence && !in_use(gpu)) stop(gpu, twin_now(node));
    }
}

/* Enter this process; return the seconds that the start of its GPUs takes. */
double twin_enter(node_t *node) {
    double seconds = 0;
    twin_release(node);
    for (int64_t i = 0; i < node->gpus; i++) {
        gpu_t *gpu = &node->gpu[i];
        if (!gpu->started) {
            seconds += gpu->start_s;
            gpu->started_s = twin_now(node) + seconds;
        }
        gpu->started = 1;
    }
    twin_leave(node);
    if (node->client_count < MAX_CLIENTS) node->client[node->client_count++] = getpid();
    return seconds;
}

void twin_leave(node_t *node) {
    for (int64_t i = 0; i < node->client_count; i++)
        if (node->client[i] == getpid()) node->client[i--] = node->client[--node->client_count];
}
