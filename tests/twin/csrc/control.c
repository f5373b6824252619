/* The test's side of a twin node: what the code under test cannot see. */
#include "state.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t twin_layout(int64_t which) {
    return which == 0 ? (int64_t)sizeof(node_t) : (int64_t)sizeof(gpu_t);
}

EXPORT void twin_start(node_t *node) {
    node->epoch_s = twin_now(node);
    for (int64_t i = 0; i < node->gpus; i++) twin_begin(&node->gpu[i], node->epoch_s);
}

EXPORT void twin_update(node_t *node) {
    double now_s = twin_now(node);
    twin_release(node);
    for (int64_t i = 0; i < node->gpus; i++) {
        twin_advance(&node->gpu[i], now_s);
        node->gpu[i].asked = 1;
    }
}

EXPORT void twin_stall(node_t *node, int64_t gpu, int64_t on) {
    twin_update(node);
    node->gpu[gpu].stalled = 0;
    node->gpu[gpu].stalled_J = twin_counter_J(&node->gpu[gpu], node->epoch_s, twin_now(node));
    node->gpu[gpu].stalled = on;
}

EXPORT void twin_reset_counter(node_t *node, int64_t gpu) {
    twin_update(node);
    node->gpu[gpu].counter_base_J = node->gpu[gpu].filtered_J;
    node->gpu[gpu].counter_start_mJ = 0;
}

/* The law, for the truth of a test. */
EXPORT double twin_law_device_s(const node_t *node, int64_t gpu, double clock) {
    return twin_device_s(&node->gpu[gpu], clock);
}
EXPORT double twin_law_W(const node_t *node, int64_t gpu, double clock, double load) {
    return twin_power_W(&node->gpu[gpu], clock, load);
}
