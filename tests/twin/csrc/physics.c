/* Physics of one twin GPU, integrated lazily up to the time of the call that asks.
 *
 * True power is idle (with leakage that grows by temperature) plus k V(f)^2 f u: the clock f by
 * locks, limit, heat and reach, the load u as the test sets it, or as the device's ranks make it: it
 * is 1 while there is work, of which a second takes twin_device_s seconds at the device's clock, and
 * ranks wait until their steps are done (rank.c). Sensors see the true power through a
 * first-order filter; the counter publishes the filtered energy of some time ago, the power sensor
 * the mean over a short span, both at their own ticks. */
#include "state.h"

#include <math.h>
#include <string.h>
#include <time.h>

enum { IDLE = 1, APPLICATION = 2, POWER_CAP = 4, THERMAL = 0x20 };
static const double STEP_S = 0.001, REGULATE_S = 0.01, REST_C = 30.0, HYSTERESIS_K = 2.0;
static const double UTILISATION_S = 0.15; /* time constant of the utilisation that NVML reports */

double twin_now(const node_t *node) {
    struct timespec now;
    if (node->is_virtual) return node->now_s;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Let time pass: the node's own, where it is virtual. */
void twin_sleep(node_t *node, double seconds) {
    struct timespec rest = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    if (node->is_virtual)
        node->now_s += seconds;
    else if (seconds > 0)
        nanosleep(&rest, NULL);
}

static double top_MHz(const gpu_t *gpu) { return (double)gpu->clock_MHz[gpu->clocks - 1]; }

int64_t twin_memory_MHz(const gpu_t *gpu) {
    int64_t best = gpu->memory_MHz[0];
    if (!gpu->memory_high || gpu->ignores_lock) return gpu->memory_MHz[gpu->memory_clocks - 1];
    for (int64_t i = 0; i < gpu->memory_clocks; i++)
        if (gpu->memory_MHz[i] <= gpu->memory_high) best = gpu->memory_MHz[i];
    return best;
}

/* Relative voltage at a share of the top clock: flat below a knee, then rising. */
static double voltage(double share) { return fmax(0.7, 0.4 + 0.6 * share); }

/* The limit that holds: a board or a module may enforce a lower one than was set. */
double twin_limit_W(const gpu_t *gpu) {
    return gpu->enforced_limit_W > 0 ? fmin(gpu->limit_W, gpu->enforced_limit_W) : gpu->limit_W;
}

int twin_trains(const gpu_t *gpu) { return gpu->step_s + gpu->micro_batch_s + gpu->sample_s > 0; }

/* The law of speed: seconds for a second of work at the highest clock. A share of the work is bound
 * by memory and does not follow the clock. */
double twin_device_s(const gpu_t *gpu, double clock) {
    double bound = gpu->clock_free_share;
    return bound + (1.0 - bound) * top_MHz(gpu) / clock;
}

/* The law of power. */
double twin_power_W(const gpu_t *gpu, double clock, double load) {
    double share = clock / top_MHz(gpu), v = voltage(share);
    double memory =
        (double)twin_memory_MHz(gpu) / (double)gpu->memory_MHz[gpu->memory_clocks - 1];
    double dynamic = (gpu->peak_W - gpu->idle_W) * v * v * share * (0.75 + 0.25 * memory);
    double leak = 1.0 + gpu->leak_per_K * (gpu->temperature_C - REST_C);
    return gpu->idle_W * leak + dynamic * load;
}
static double power_W(const gpu_t *gpu, double clock) {
    return twin_power_W(gpu, clock, gpu->load);
}

/* A process that is gone, or a zombie, has no CPU clock (its number is clock_getcpuclockid's). */
int twin_lives(int64_t pid) {
    struct timespec used;
    return !clock_gettime((clockid_t)(~(unsigned int)pid << 3 | 2), &used);
}

/* Forget ranks that are gone, and their work. */
static void forget_dead_ranks(gpu_t *gpu) {
    for (int64_t i = 0; i < gpu->rank_count; i++) {
        int64_t kept = 0, pid = gpu->rank[i].pid;
        if (twin_lives(pid)) continue;
        for (int64_t at = 0; at < gpu->work_count; at++)
            if (gpu->work[at].pid != pid) gpu->work[kept++] = gpu->work[at];
        gpu->work_count = kept;
        gpu->rank[i--] = gpu->rank[--gpu->rank_count];
    }
}

/* Count what was done of the oldest step, and take it off the queue once it is done. */
static void execute(gpu_t *gpu, double done_s) {
    work_t *first = &gpu->work[0];
    gpu->work_s += done_s;
    first->left_s -= done_s;
    if (first->left_s > 1e-9) return;
    for (int64_t i = 0; i < gpu->rank_count; i++)
        if (gpu->rank[i].pid == first->pid)
            gpu->rank[i].done_s[first->step % KEPT_STEPS] = gpu->time_s;
    memmove(first, first + 1, (size_t)--gpu->work_count * sizeof *first);
}

/* The highest listed clock of at most `clock`; the lowest listed if none is. */
static double listed(const gpu_t *gpu, double clock) {
    double best = (double)gpu->clock_MHz[0];
    for (int64_t i = 0; i < gpu->clocks && (double)gpu->clock_MHz[i] <= clock; i++)
        best = (double)gpu->clock_MHz[i];
    return best;
}

/* Adapt the thermal cap by one step a call, as long as the device is too hot, and back. */
static void regulate_heat(gpu_t *gpu) {
    double step = top_MHz(gpu) / 64;
    if (gpu->temperature_C >= gpu->slowdown_C)
        gpu->thermal_MHz = fmax((double)gpu->clock_MHz[0], gpu->thermal_MHz - step);
    else if (gpu->temperature_C < gpu->slowdown_C - HYSTERESIS_K)
        gpu->thermal_MHz = fmin(top_MHz(gpu), gpu->thermal_MHz + step);
}

/* The clock that the device would run at now, and why not a higher one. */
static double target_MHz(gpu_t *gpu) {
    int64_t reasons = 0;
    /* A device in use stays at its clock between two kernels. */
    int active = gpu->load > 0 || gpu->rank_count;
    double clock = active ? top_MHz(gpu) : (double)gpu->clock_MHz[0];
    double heat = gpu->heat_MHz > 0 ? gpu->heat_MHz : gpu->thermal_MHz;
    int follows = !gpu->ignores_lock && (active || gpu->idle_follows);
    if (!active) reasons |= IDLE;
    if (follows && gpu->application_sm && (double)gpu->application_sm < clock) {
        clock = (double)gpu->application_sm;
        reasons |= APPLICATION;
    }
    if (follows && gpu->lock_high) {
        clock = fmin(fmax(clock, (double)gpu->lock_low), (double)gpu->lock_high);
        if ((double)gpu->lock_high < top_MHz(gpu)) reasons |= APPLICATION;
    }
    /* The voltage limiter of a consumer card is no reason that NVML reports. */
    if (gpu->reach_MHz > 0 && active) clock = fmin(clock, gpu->reach_MHz);
    if (heat < clock) {
        clock = heat;
        reasons |= THERMAL;
    }
    clock = listed(gpu, clock);
    if (!gpu->ignores_limit && power_W(gpu, clock) > twin_limit_W(gpu)) {
        while (clock > (double)gpu->clock_MHz[0] && power_W(gpu, clock) > twin_limit_W(gpu))
            clock = listed(gpu, clock - 1);
        reasons |= POWER_CAP;
    }
    gpu->reasons = reasons;
    return clock;
}

static void remember(gpu_t *gpu) {
    if (gpu->filled && gpu->time_s - gpu->ring_s[gpu->head] < STEP_S / 2) return;
    gpu->head = (gpu->head + 1) % RING;
    gpu->ring_s[gpu->head] = gpu->time_s;
    gpu->ring_J[gpu->head] = gpu->filtered_J;
    if (gpu->filled < RING) gpu->filled++;
}

void twin_begin(gpu_t *gpu, double now_s) {
    gpu->temperature_C = gpu->ambient_C + gpu->heat_K_per_W * gpu->idle_W;
    gpu->thermal_MHz = top_MHz(gpu);
    gpu->time_s = now_s;
    gpu->clock = gpu->wanted = gpu->target = target_MHz(gpu);
    gpu->power_W = gpu->filtered_W = power_W(gpu, gpu->clock);
    remember(gpu);
}

/* Power smoothing: what the device draws for `span_s` at most follows the law down at a set rate. */
static double smoothed_W(gpu_t *gpu, double law_W, double span_s) {
    double before_W = gpu->ramped_W, held_s = gpu->time_s - gpu->worked_s;
    if (gpu->ramp_W_per_s <= 0 || law_W >= before_W) {
        gpu->ramped_W = law_W;
        gpu->worked_s = gpu->time_s + span_s;
        return law_W;
    }
    if (held_s >= gpu->hold_s - 1e-9)
        gpu->ramped_W = fmax(law_W, before_W - gpu->ramp_W_per_s * span_s);
    return (before_W + gpu->ramped_W) / 2;
}

static void step(gpu_t *gpu, double to_s) {
    double left_s = to_s - gpu->time_s, decay;
    int works = gpu->work_count > 0;
    if (twin_trains(gpu) && works != (gpu->load > 0)) {
        gpu->load = works;
        gpu->asked = 1;
    }
    if (gpu->time_s >= gpu->regulate_s) {
        regulate_heat(gpu);
        gpu->regulate_s = gpu->time_s + REGULATE_S;
        gpu->asked = 1;
    }
    if (gpu->asked) gpu->target = target_MHz(gpu);
    gpu->asked = 0;
    if (gpu->target != gpu->wanted) {
        gpu->wanted = gpu->target;
        gpu->wanted_s = gpu->time_s;
    }
    if (gpu->wanted != gpu->clock) {
        double due_s = gpu->wanted_s + gpu->switch_s - gpu->time_s;
        if (due_s <= 1e-9)
            gpu->clock = gpu->wanted;
        else
            left_s = fmin(left_s, due_s);
    }
    if (works) left_s = fmin(left_s, gpu->work[0].left_s * twin_device_s(gpu, gpu->clock));
    double watts = smoothed_W(gpu, power_W(gpu, gpu->clock), left_s), before_W = gpu->filtered_W;
    gpu->power_W = watts;
    gpu->energy_J += watts * left_s;
    gpu->clock_MHz_s += gpu->clock * left_s;
    if (gpu->load > 0) gpu->busy_s += left_s;
    gpu->utilisation += (gpu->load - gpu->utilisation) * (1.0 - exp(-left_s / UTILISATION_S));
    decay = gpu->filter_s > 0 ? exp(-left_s / gpu->filter_s) : 0.0;
    gpu->filtered_W = watts + (before_W - watts) * decay;
    /* The filter's own integral: what went in, less what it still holds. */
    gpu->filtered_J += watts * left_s - gpu->filter_s * (gpu->filtered_W - before_W);
    double rest_C = gpu->ambient_C + gpu->heat_K_per_W * watts;
    gpu->temperature_C = rest_C + (gpu->temperature_C - rest_C) * exp(-left_s / gpu->heat_s);
    gpu->time_s += left_s;
    if (works) execute(gpu, left_s / twin_device_s(gpu, gpu->clock));
    remember(gpu);
}

void twin_advance(gpu_t *gpu, double now_s) {
    /* A gap that nobody asked about is integrated in coarser steps. */
    double span_s = now_s - gpu->time_s, step_s = fmax(STEP_S, span_s / 20000);
    while (gpu->time_s < now_s - 1e-9) step(gpu, fmin(gpu->time_s + step_s, now_s));
    forget_dead_ranks(gpu);
}

/* Filtered energy at a time of the recent past, interpolated in the ring. */
static double energy_at(const gpu_t *gpu, double time_s) {
    double late_s = gpu->time_s, late_J = gpu->filtered_J;
    for (int64_t i = 0; i < gpu->filled; i++) {
        int64_t at = (gpu->head - i + RING) % RING;
        if (gpu->ring_s[at] <= time_s) {
            double span_s = late_s - gpu->ring_s[at];
            double share = span_s > 0 ? fmin(1.0, (time_s - gpu->ring_s[at]) / span_s) : 0.0;
            return gpu->ring_J[at] + share * (late_J - gpu->ring_J[at]);
        }
        late_s = gpu->ring_s[at];
        late_J = gpu->ring_J[at];
    }
    return late_J;
}

static double last_tick(const gpu_t *gpu, double epoch_s, double now_s, double period_s) {
    if (period_s <= 0) return now_s;
    double first_s = epoch_s + gpu->phase_s * period_s;
    return first_s + period_s * floor((now_s - first_s) / period_s + 1e-6);
}

/* A counter is a register: what a tick has published stays until the next one. (The ring has no mark
 * at each change of power, so that the same time, read again later, may lie on another line.) */
double twin_counter_J(gpu_t *gpu, double epoch_s, double now_s) {
    double tick_s = last_tick(gpu, epoch_s, now_s, gpu->counter_period_s) - gpu->counter_delay_s;
    if (tick_s > gpu->counted_s) {
        gpu->counted_s = tick_s;
        gpu->counted_J = fmax(gpu->counted_J, energy_at(gpu, fmin(tick_s, now_s)));
    }
    double joules = gpu->counted_J - gpu->counter_base_J;
    if (gpu->stalled) return gpu->stalled_J;
    if (gpu->counter_is_module) joules += gpu->module_W * fmax(0.0, tick_s - epoch_s);
    return fmax(joules * gpu->counter_share, 0.0);
}

double twin_sensed_W(const gpu_t *gpu, double epoch_s, double now_s, int averaged) {
    if (gpu->sensor_stuck_W > 0) return gpu->sensor_stuck_W;
    double tick_s = fmin(last_tick(gpu, epoch_s, now_s, gpu->sensor_period_s), now_s);
    double span_s = averaged ? gpu->averaged_s : gpu->sensor_window_s;
    if (tick_s - span_s < epoch_s) span_s = tick_s - epoch_s;
    if (span_s <= 0) return gpu->filtered_W;
    return (energy_at(gpu, tick_s) - energy_at(gpu, tick_s - span_s)) / span_s;
}
