/* State of a twin node: one file, mapped by every process that uses it.
 *
 * Only doubles, 64-bit integers and character arrays, so that the mirror in ../layout.py needs no
 * padding rules; twin_layout() tells both sides' sizes apart. Times are seconds of the node's clock:
 * CLOCK_MONOTONIC, or the header's own `now_s` where time is virtual. */
#ifndef TWIN_STATE_H
#define TWIN_STATE_H

#include <stdint.h>

enum {
    TWIN_MAGIC = 0x4e495754,
    MAX_GPUS = 16,
    MAX_SLICES = 7,
    MAX_CLOCKS = 256,
    MAX_MEMORY_CLOCKS = 8,
    MAX_PROCESSES = 16,
    MAX_RANKS = 16,
    MAX_WORK = 64,
    KEPT_STEPS = 8,
    MAX_CPUS = 1024,
    MAX_FAULTS = 128,
    MAX_LOG = 1024,
    MAX_CLIENTS = 64,
    RING = 4096,
    MAX_ROWS = 6000,
    COLUMNS = 10
};

typedef struct {
    int64_t pid, bytes;
} process_t;

/* A training process, and when the device had done its last steps. */
typedef struct {
    int64_t pid;
    double done_s[KEPT_STEPS];
} rank_t;

/* A step that is submitted: what is left of it, seconds of the device at its highest clock. */
typedef struct {
    int64_t pid, step;
    double left_s;
} work_t;

typedef struct {
    char name[56];
    int64_t gpu; /* -1: any */
    int64_t code, first, times, calls;
} fault_t;

typedef struct {
    char name[56];
    double time_s;
    int64_t pid, gpu, a, b;
} log_t;

typedef struct {
    /* What the device is. */
    char uuid[80], name[96];
    int64_t memory_bytes, reserved_bytes, pci_bus, cores, bus_bits, compute_major, compute_minor;
    int64_t architecture, pcie_generation, pcie_width, nvlinks, c2c;
    int64_t mig; /* slices of an eighth of the memory; -1: on without any, 0: off */
    int64_t clocks, clock_MHz[MAX_CLOCKS]; /* ascending */
    int64_t memory_clocks, memory_MHz[MAX_MEMORY_CLOCKS];
    double idle_W, peak_W, leak_per_K, default_limit_W, min_limit_W, max_limit_W;
    double ambient_C, heat_K_per_W, heat_s, slowdown_C;
    double reach_MHz; /* listed clocks above it are never delivered under load; 0: all are */
    double switch_s;  /* latency of a change of clock */
    double filter_s;  /* time constant between true and sensed power */
    double sensor_period_s, sensor_window_s, averaged_s;
    double counter_period_s, counter_delay_s, phase_s;
    double module_W, memory_share;
    int64_t counter_start_mJ, counter_modulus_mJ;
    int64_t has_counter, counter_is_module, has_usage, usage_is_module, gpu_scope; /* 0, 1, 2 */
    int64_t lockable, ignores_lock, limit_settable, ignores_limit, idle_follows, application_free;
    int64_t default_application_MHz, has_ecc;
    int64_t tells_memory, tells_limit, lists_clocks;
    double enforced_limit_W; /* a lower limit of the board or the module; 0: none */
    int64_t smoothing; /* power smoothing: 0 off, 1 on; -1: not supported */
    double ramp_W_per_s, hold_s; /* power after work falls so fast, and so long after it; 0: at once */
    double counter_share, sensor_stuck_W; /* a counter's scale; a sensor that stands still; 0: none */
    int64_t recovery_action, fabric_state, link_recoveries; /* -1: not supported */
    int64_t power_profiles; /* mask of those in effect; -1: not supported */
    double start_s; /* of the first client's nvmlInit, when persistence mode is off */
    double start_busy_s; /* how long that start counts as work afterwards */
    int64_t fabric_status, compute_mode;
    /* Device time of a rank's work: if there is any, the load is the ranks' (physics.c). */
    double step_s, micro_batch_s, sample_s, clock_free_share;
    int64_t memory_node, cpus[MAX_CPUS / 64]; /* nearest to it; memory_node -1: not supported */
    int64_t numa_node; /* of the GPU's own memory, on a superchip; -1: not supported */

    /* What was asked of it. */
    double load, heat_MHz; /* heat_MHz: a forced thermal cap; 0: none */
    int64_t lost, stalled, open_error; /* open_error: NVML's code when the GPU is opened */
    int64_t lock_low, lock_high, memory_low, memory_high, application_memory, application_sm;
    double limit_W;
    double started_s; /* end of its last start */
    int64_t persistence, started, used_bytes; /* started: the driver holds it */
    int64_t compute_count, graphics_count;
    process_t compute[MAX_PROCESSES], graphics[MAX_PROCESSES];
    /* Of corrected and of uncorrected errors: counts, and pages retired or rows remapped. */
    int64_t ecc_volatile[2], ecc_aggregate[2], repaired[2], repair_pending;
    int64_t rank_count;
    rank_t rank[MAX_RANKS];
    int64_t work_count;
    work_t work[MAX_WORK];

    /* What it does. */
    double time_s, energy_J, clock_MHz_s, busy_s; /* the exact truth */
    double work_s, late_s, utilisation; /* work that is done, wait for ranks' cores; recent load */
    double power_W, temperature_C, clock, wanted, wanted_s, target, thermal_MHz, regulate_s;
    double filtered_W, filtered_J, counter_base_J, stalled_J;
    double counted_s, counted_J; /* the counter's last tick, and what it published */
    double ramped_W, worked_s; /* power that still falls, and when work last drew as much */
    int64_t reasons, asked, head, filled; /* asked: something may have changed since `target` */
    double ring_s[RING], ring_J[RING];

    /* A recording that is replayed in place of the physics: seconds and readings of each row, NaN
     * for one that failed, and the error of each column (../replay.py). */
    int64_t row_count, row_error[COLUMNS];
    double row[MAX_ROWS][1 + COLUMNS];
} gpu_t;

typedef struct {
    int64_t magic, gpus, is_virtual, root, driver, cuda_driver, calls, descriptor_losses;
    double epoch_s, now_s, call_s, init_s;
    char driver_version[80];
    int64_t fault_count, log_count, client_count, client[MAX_CLIENTS];
    int64_t cores; /* of the node's processor; 0: those of this machine (cores.c) */
    fault_t fault[MAX_FAULTS];
    log_t log[MAX_LOG];
    gpu_t gpu[MAX_GPUS];
} node_t;

double twin_now(const node_t *node);
double twin_device_s(const gpu_t *gpu, double clock);
int twin_trains(const gpu_t *gpu);
double twin_limit_W(const gpu_t *gpu);
double twin_power_W(const gpu_t *gpu, double clock, double load);
int twin_lives(int64_t pid);
void twin_sleep(node_t *node, double seconds);
void twin_release(node_t *node);
double twin_enter(node_t *node);
void twin_leave(node_t *node);
void twin_begin(gpu_t *gpu, double now_s);
void twin_advance(gpu_t *gpu, double now_s);
double twin_counter_J(gpu_t *gpu, double epoch_s, double now_s);
double twin_sensed_W(const gpu_t *gpu, double epoch_s, double now_s, int averaged);
int64_t twin_memory_MHz(const gpu_t *gpu);
int twin_replayed(const node_t *node, const gpu_t *gpu, int column, double *out);

#endif
