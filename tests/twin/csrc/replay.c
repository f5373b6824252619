/* Readings of a recording, over and over: the row of the present time, held until the next one. */
#include "state.h"

#include <math.h>

enum { UNKNOWN = 999 };

int twin_replayed(const node_t *node, const gpu_t *gpu, int column, double *out) {
    int64_t low = 0, high = gpu->row_count - 1;
    double first_s = gpu->row[0][0], length_s = gpu->row[high][0] - first_s;
    double past_s = twin_now(node) - node->epoch_s, rounds = 0.0;
    if (length_s > 0) rounds = floor(past_s / length_s);
    past_s += first_s - rounds * length_s;
    while (low < high) { /* the last row that is not later */
        int64_t middle = (low + high + 1) / 2;
        if (gpu->row[middle][0] <= past_s)
            low = middle;
        else
            high = middle - 1;
    }
    *out = gpu->row[low][1 + column];
    if (isnan(*out)) return gpu->row_error[column] ? (int)gpu->row_error[column] : UNKNOWN;
    if (column == 0) /* the counter goes on counting */
        *out += rounds * (gpu->row[gpu->row_count - 1][1] - gpu->row[0][1]);
    return 0;
}
